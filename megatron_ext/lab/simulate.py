"""Simulates training steps on other hardware: how long they take with each strategy on a trace.

The loads are planned as in `replay`; the equations of UltraEP (section 4.3) turn each plan into
seconds, with the costs of a model (`shape.py`) on a machine (`hardware.py`). `LayerCosts`, which
also chooses plans in training, gives the parts that depend on the plan. Plans and replicas cost
what the plug-in's layer does not hide. Legend: B loads, R ranks of the EP group, E logical experts,
N local tokens, K choices of a token.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_ext.balance.costs import LayerCosts
from megatron_ext.balance.metrics import home_loads, imbalances
from megatron_ext.balance.plan import BalancePlan
from megatron_ext.balance.plan_metrics import home_ranks, rank_sends
from megatron_ext.balance.strategies import get_strategy
from megatron_ext.config import BalanceConfig
from megatron_ext.files.loads import Loads
from megatron_ext.files.tables import fill, markdown_table
from megatron_ext.files.whole import write_whole
from megatron_ext.lab.hardware import FIXED_SOLVE, SOLVED_RANKS, Hardware, constants
from megatron_ext.lab.planning import Asked, Planned, in_two, make_planners, plan_loads
from megatron_ext.trainer.model.shape import ModelShape
from megatron_ext.transport import Transfers
from megatron_ext.transport.relay import compile_copies
from megatron_ext.words import counted

IDEAL = "ideal"
NONE = "none"

LEFT_OUT = (
    "experts have one rate and dense parts another, for any number and size of products",
    "kernel launches, latency of messages and waiting for the host, but for what is in a rate",
    "contention between transfers and computation beside them",
    "that a stage's first layer in backward has no layer above, beside which its replicas move",
    "Megatron's own overlap of shared experts, which then hide no replicas",
    "that quantized replicas move once more behind a recomputed forward",
    "how uneven the traffic is inside an all-to-all: the busiest rank's bytes go at the full rate",
    "which tokens leave a domain: remote ones are spread evenly over the other ranks",
    "transfers between pipeline stages; stages that differ (each counts as the slowest)",
    "other EP groups: all have the loads of this trace, at the same time",
    "embeddings, and balancing on the host beside planning: gathering loads, splitting quotas, "
    "predicting loads and placing by that",
    "how an allocator fares with the sizes of one load: a rate has what it costs on average",
    "memory, which `train --dry-run` counts",
)
"""What the simulation leaves out; part of every report."""

LEGEND = (
    "Imbalance: busiest rank / mean. Layer: forward and backward of an MoE layer. Vs none: more "
    "tokens/s.\nVs ideal: share of its tokens/s. Times are means over the loads."
)
"""Explains the columns of `overall_table`."""

_GRADIENT_BYTES = 4


@dataclass(frozen=True)
class Machine:
    """A model on a machine: everything that does not depend on the loads.

    Raises:
        ValueError: The sizes do not fit each other.
    """

    shape: ModelShape
    hardware: Hardware
    ep_size: int
    num_gpus: int
    """Ranks of the whole training."""
    tokens: float
    """Tokens of a rank in a microbatch (N)."""

    def __post_init__(self) -> None:
        """Check the sizes."""
        stage = self.ep_size * self.shape.pp_size
        if self.num_gpus < 1 or self.num_gpus % stage:
            raise ValueError(
                f"gpus ({self.num_gpus}) must be a multiple of EP x PP "
                f"({self.ep_size} x {self.shape.pp_size})"
            )

    @property
    def costs(self) -> LayerCosts:
        """Costs of one MoE layer's forward, for the parts that depend on the plan."""
        hardware, ranks = self.hardware, self.ep_size
        # The share of the EP group's other ranks that are outside the domain of a rank: of the
        # ranks in the last domain, which has fewest of the group.
        last = ranks % hardware.domain_ranks or min(ranks, hardware.domain_ranks)
        outside = (ranks - last) / max(ranks - 1, 1)
        slowest = max((1 - outside) / hardware.token_bandwidth, outside / hardware.outer_bandwidth)
        expert_flops_per_s = hardware.peak_flops_per_s * hardware.expert_efficiency
        return LayerCosts(
            expert_bytes=self.shape.replica_bytes,
            link_bandwidth=hardware.weight_bandwidth,
            assignment_time=self.shape.expert_flops / expert_flops_per_s,
            token_bytes=self.shape.token_bytes,
            token_bandwidth=1 / slowest,
        )

    def dense_s(self, flops: float) -> float:
        """Seconds of so many FLOPs for each token, in the parts that all ranks have."""
        hardware = self.hardware
        return self.tokens * flops / (hardware.peak_flops_per_s * hardware.dense_efficiency)

    def reroute_s(self, slots: int) -> float:
        """Seconds of rewriting probabilities (float32) and choices (bytes), [N, E] to [N, P]."""
        physical = self.shape.num_experts + self.ep_size * slots
        num_bytes = 5 * self.tokens * (self.shape.num_experts + physical)
        return num_bytes / self.hardware.memory_bandwidth

    def outside_layers_s(self) -> float:
        """Seconds of a microbatch outside MoE layers on the slowest stage: forward and backward."""
        shape = self.shape
        logits = self.dense_s(shape.logits_flops)
        dense = self.dense_s(shape.dense_flops(shape.dense_layer_params))
        passes = 4 if shape.recompute == "full" else 3
        dense_layers = shape.num_dense_layers / shape.pp_size
        return passes * dense * dense_layers + 3 * logits

    def slot_bytes(self, slots: int) -> int:
        """Memory of a rank's slots: weights, and gradients in float32."""
        gradients = _GRADIENT_BYTES * self.shape.expert_params
        return slots * (self.shape.replica_bytes + gradients)

    def params(self) -> tuple[float, float]:
        """Weights of a rank: in its experts, and in the parts that all ranks of its stage have."""
        shape = self.shape
        experts = shape.num_experts // self.ep_size * shape.expert_params * shape.num_moe_layers
        dense = (
            shape.num_moe_layers * shape.moe_dense_params
            + shape.num_dense_layers * shape.dense_layer_params
        )
        embeddings = shape.vocab_size * shape.hidden_size * (2 if shape.pp_size == 1 else 1)
        return experts / shape.pp_size, dense / shape.pp_size + embeddings

    def after_backward_s(self, backward_s: float) -> float:
        """Seconds of a step after its microbatches: gradients over data parallelism, optimizer."""
        hardware, shape = self.hardware, self.shape
        crosses = self.num_gpus > hardware.domain_ranks
        bandwidth = hardware.outer_bandwidth if crosses else hardware.weight_bandwidth
        dp_size = self.num_gpus // shape.pp_size
        # Ranks that share a gradient: an expert's gradient, and any other gradient.
        shared = list(zip(self.params(), (dp_size // self.ep_size, dp_size), strict=True))
        num_bytes = sum(
            params * (ranks - 1) / ranks * (_GRADIENT_BYTES + shape.element_bytes)
            for params, ranks in shared
        )
        reduction = max(0.0, num_bytes / bandwidth - hardware.overlap * backward_s)
        optimized = sum(
            params / (ranks if shape.distributed_optimizer else 1) for params, ranks in shared
        )
        return reduction + optimized * shape.optimizer_bytes / hardware.optimizer_bandwidth


def relayed_sends(plan: BalancePlan, relay_threshold: int) -> Tensor:
    """Experts that each rank sends when busy ranks have relays: int64 [R].

    Source: UltraEP, section 6.2; `transport/relay.py`.
    """
    if int(rank_sends(plan).max()) <= relay_threshold:
        return rank_sends(plan)
    transfers = Transfers(plan.experts_in_slots, plan.layout.mains_per_rank)
    copies = compile_copies(transfers, plan.layout.ep_size, relay_threshold)
    return torch.tensor([sum(len(copy.destinations) for copy in of_rank) for of_rank in copies])


def timed_sends(plan: BalancePlan, hardware: Hardware) -> Tensor:
    """The sends of each rank, int64 [R], in units of the time of one send within the domain.

    Replicas outside the home rank's domain go over the outer link, without relays, while the others
    go over the inner link; receivers have the same links.
    """
    domain, layout = hardware.domain_ranks, plan.layout
    held = plan.experts_in_slots
    home = home_ranks(plan)
    host = torch.arange(layout.ep_size)[:, None].expand_as(home)
    outside = (home >= 0) & (home // domain != host // domain)
    if not outside.any():
        return torch.maximum(relayed_sends(plan, hardware.relay_threshold), (held >= 0).sum(-1))
    inner = dataclasses.replace(plan, experts_in_slots=torch.where(outside, -1, held))
    sent = torch.bincount(home[outside], minlength=layout.ep_size)
    slower = hardware.weight_bandwidth / hardware.outer_bandwidth
    outer = torch.maximum(sent, outside.sum(-1)) * slower
    return torch.maximum(timed_sends(inner, hardware), outer.ceil().long())


def even_load(load: Tensor) -> Tensor:
    """Deal every rank's assignments, int64 [..., R, E], in turn, as strategy `ideal` does.

    >>> even_load(torch.tensor([[6, 1, 1, 1], [4, 3, 1, 1]])).tolist()
    [[3, 2, 2, 2], [2, 3, 2, 2]]
    """
    experts = load.shape[-1]
    total = load.sum(-1, keepdim=True)
    dealt_before = total.cumsum(-2) - total
    place = (torch.arange(experts) - dealt_before) % experts
    return total // experts + (place < total % experts)


@dataclass(frozen=True, kw_only=True)
class Setting(Asked):
    """What planners are asked for on a machine: a simulation, without loads and strategies."""

    shape: ModelShape
    hardware: Hardware
    num_gpus: int | None
    """Ranks of the whole training; None is one EP group in each pipeline stage."""

    @classmethod
    def of(cls, asked: Asked, loads: Loads, **known: Any) -> Setting:
        """Return the setting; without `nvlink_domain`, with that of a run on the machine.

        These are as many ranks as reach each other, or all if none do (`choose_transport`).

        Raises:
            ValueError: The tokens of the loads have fewer choices than those of the model.
        """
        setting, ranks = cls(**vars(asked), **known), loads.load.shape[1]
        of_ranks, topk = loads.load[loads.load.any(-1)], setting.shape.topk
        # A token chooses an expert once at most.
        choices = of_ranks.sum(-1).double() / of_ranks.amax(-1)
        if len(choices) and (most := float(choices.min())) < topk:
            raise ValueError(
                f"the tokens of the loads choose at most {most:.3g} experts each, those of the "
                f"model {setting.shape.name} {topk}: --set topk, or model.topk of a recipe"
            )
        reach = setting.hardware.domain_ranks
        near = math.gcd(ranks, reach) if reach < ranks else ranks
        domain = asked.nvlink_domain or (near if near > 1 else ranks)
        return dataclasses.replace(setting, nvlink_domain=domain)

    def machine(self, loads: Loads) -> Machine:
        """Return the model on its machine, with the ranks and tokens of a trace.

        Raises:
            ValueError: Sizes do not fit each other, or the loads are all zero.
        """
        _, ranks, experts = loads.load.shape
        if experts != self.shape.num_experts:
            raise ValueError(
                f"the loads have {experts} experts, the model {self.shape.name} has "
                f"{self.shape.num_experts}"
            )
        tokens = float(loads.load.sum(-1).double().mean()) / self.shape.topk
        if not tokens:
            raise ValueError("the loads are all zero")
        num_gpus = ranks * self.shape.pp_size if self.num_gpus is None else self.num_gpus
        return Machine(self.shape, self.hardware, ranks, num_gpus, tokens)


def as_measured(hardware: Hardware, shape: ModelShape, balance: BalanceConfig) -> Hardware:
    """Return the machine with the two rates that a run of the model on it has measured.

    Costs of `balance` that are not `auto` replace the machine's: `link_bandwidth` its
    `weight_bandwidth`, `assignment_time` its `expert_efficiency`.

    Raises:
        ValueError: Experts would be faster than the machine's peak.
    """
    bandwidth, efficiency = hardware.weight_bandwidth, hardware.expert_efficiency
    sources = dict(hardware.sources)
    given = "given, as a run with balance.objective=time measures it"
    if balance.link_bandwidth != "auto":
        bandwidth, sources["weight_bandwidth"] = float(balance.link_bandwidth), given
    if balance.assignment_time != "auto":
        flops_per_s = shape.expert_flops / float(balance.assignment_time)
        efficiency, sources["expert_efficiency"] = flops_per_s / hardware.peak_flops_per_s, given
    return dataclasses.replace(
        hardware, sources=sources, weight_bandwidth=bandwidth, expert_efficiency=efficiency
    )


def simulate(
    loads: Loads,
    strategies: Sequence[str],
    setting: Setting,
    *,
    on_load: Callable[[int], object] = lambda count: None,
) -> dict[str, Any]:
    """Return the numbers of each strategy, for JSON; `none` and `ideal` are always among them.

    Strategies are named as in `replay`. Loads are in the order of time, and a microbatch's loads
    stand for all its layers. `on_load` is called with 1 after every plan.
    """
    machine = setting.machine(loads)
    costs = machine.costs  # Refuses what no machine can take before anything is planned.
    if setting.planning.costs is None:
        setting = dataclasses.replace(
            setting, planning=dataclasses.replace(setting.planning, costs=costs)
        )
    results = {
        name: _result_of(name, loads, setting, machine, on_load)
        for name in dict.fromkeys([NONE, *strategies, IDEAL])
    }
    for result in results.values():
        result["share_of_ideal"] = results[IDEAL]["step_ms"] / result["step_ms"]
        result["gain_over_none"] = results[NONE]["step_ms"] / result["step_ms"] - 1
    return _report(loads, setting, machine, results)


def _result_of(
    name: str, loads: Loads, setting: Setting, machine: Machine, on_load: Callable[[int], object]
) -> dict[str, Any]:
    strategy, asked = setting.by_name(name)
    planner = NONE if name == IDEAL else strategy
    if name == IDEAL:
        loads = dataclasses.replace(loads, load=even_load(loads.load))
    planners = make_planners(loads, planner, asked)
    planned = list(plan_loads(loads, planners, on_load=on_load))
    if planner == NONE:
        return _summarize(machine, loads, planned, solve_s=0.0, slots=0)
    ranks, experts = machine.ep_size, machine.shape.num_experts
    slots = get_strategy(strategy).num_slots(setting.slots, experts // ranks)
    # Planning takes the hardware file's time, for as many ranks; else the time it took here.
    if name in setting.hardware.solve_us:
        solve_from, solve_us = "hardware", setting.hardware.solve_us[name]
        solve_s = solve_us * 1e-6 * (FIXED_SOLVE + (1 - FIXED_SOLVE) * ranks / SOLVED_RANKS)
    else:
        solve_from = "here"
        solve_s = float(np.median([one.solve_us for one in planned])) * 1e-6
    numbers = _summarize(machine, loads, planned, solve_s=solve_s, slots=slots)
    return numbers | {"solve_from": solve_from}


def _report(
    loads: Loads, setting: Setting, machine: Machine, results: Mapping[str, Any]
) -> dict[str, Any]:
    shape, hardware, slots = setting.shape, setting.hardware, setting.slots
    ranks, num_gpus, tokens = machine.ep_size, machine.num_gpus, machine.tokens
    return {
        "title": f"{shape.name} on {num_gpus} x {hardware.name}: EP {ranks}, PP {shape.pp_size}, "
        f"{tokens:.0f} tokens a rank in a microbatch, "
        f"{counted(shape.num_microbatches, 'microbatch')}, {counted(len(loads), 'load')}, "
        f"{counted(slots, 'slot')}",
        "model": dataclasses.asdict(shape),
        "hardware": {
            "name": hardware.name,
            "summary": hardware.summary,
            "constants": {
                name: {"value": getattr(hardware, name), "source": hardware.sources[name]}
                for name in constants()
            },
        },
        "parallel": {"ep_size": ranks, "pp_size": shape.pp_size, "num_gpus": num_gpus},
        "tokens_per_rank": tokens,
        "slots": slots,
        "strategies": dict(results),
        "left_out": list(LEFT_OUT),
    }


def _summarize(
    machine: Machine, loads: Loads, planned: Sequence[Planned], *, solve_s: float, slots: int
) -> dict[str, Any]:
    """Return the numbers of one strategy; times are means over the loads."""
    shape = machine.shape
    forward, backward = _layer_times(machine, loads.load, planned, solve_s=solve_s, slots=slots)
    layers = shape.num_moe_layers / shape.pp_size
    layer_s = sum(float(part.mean()) for times in (forward, backward) for part in times.values())
    microbatch_s = layers * layer_s + machine.outside_layers_s()
    backward_s = layers * sum(float(part.mean()) for part in backward.values())
    # 1F1B; with several model chunks on a stage the pipeline fills in smaller steps.
    turns = shape.num_microbatches + (shape.pp_size - 1) / shape.vpp_size
    step_s = turns * microbatch_s + machine.after_backward_s(backward_s)
    rank_loads = torch.stack([one.plan.rank_loads() for one in planned])
    dp_size = machine.num_gpus // shape.pp_size
    tokens = machine.tokens * shape.num_microbatches * dp_size
    return {
        "imbalance_mean": float(imbalances(rank_loads).mean()),
        "imbalance_before": float(imbalances(home_loads(loads.load)).mean()),
        "layer_ms": {
            f"{direction}_{part}": 1e3 * float(values.mean())
            for direction, times in (("forward", forward), ("backward", backward))
            for part, values in times.items()
        }
        | {"total": 1e3 * layer_s},
        "step_ms": 1e3 * step_s,
        "tokens_per_s_per_gpu": tokens / step_s / machine.num_gpus,
    }


def _layer_times(
    machine: Machine, load: Tensor, planned: Sequence[Planned], *, solve_s: float, slots: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the exposed seconds of one MoE layer, float64 [B] by part: forward and backward.

        solve    planning
        weights  moving replicas' weights, or reroute, whichever is longer
        tokens   dispatch and combine
        experts  the experts
        dense    attention, router and shared expert
        reduce   reducing replicas' gradients

    What moves beside computation costs the time by which it is longer. Transfers take turns on the
    links, so the tokens' hide nothing. Forward is UltraEP's Eq. 1, and runs beside the shared
    expert. Replicas placed by a prediction, used or not, have moved before, beside the experts of
    the layer below and what is dense between the two. In backward, the layer above's gradients and
    then this layer's weights move beside the layer above's dense part, and weights beside what is
    recomputed in front of this layer's experts. The second forward uses the same plan and the same
    replicas.
    """
    costs, shape, hardware = machine.costs, machine.shape, machine.hardware
    picoseconds = torch.stack(
        [
            torch.stack(costs.layer_parts(one, each.plan, timed_sends(each.plan, hardware)))
            for one, each in zip(load, planned, strict=True)
        ]
    )
    weights, tokens, experts = (picoseconds.double() * 1e-12).unbind(-1)
    ahead, behind = torch.zeros_like(weights), weights
    if pairs := [in_two(one.plan, one.placed) for one in planned if one.placed is not None]:
        sends = torch.tensor(
            [[int(timed_sends(part, hardware).max()) for part in pair] for pair in pairs]
        )
        ahead, behind = ((sends * costs.picoseconds[0]).double() * 1e-12).unbind(-1)
    reroute = machine.reroute_s(slots) if slots else 0.0
    dense = torch.full_like(weights, machine.dense_s(shape.dense_flops(shape.moe_dense_params)))
    beside = hardware.overlap * machine.dense_s(2.0 * shape.shared_expert_params)
    late = (ahead - hardware.overlap * (experts + dense) + beside).clamp(min=0.0)
    forward = {
        "solve": torch.full_like(weights, max(solve_s - beside, 0.0)),
        "weights": (late + behind - max(beside - solve_s, 0.0)).clamp(min=reroute),
        "tokens": tokens,
        "experts": experts,
        "dense": dense,
    }
    gradients = weights * _GRADIENT_BYTES * shape.expert_params / shape.replica_bytes
    window = 2 * hardware.overlap * dense
    again = {
        "none": torch.zeros_like(dense),
        "selective": torch.full_like(
            dense, machine.dense_s(2.0 * (shape.moe_dense_params - shape.attention_params))
        ),
        "full": dense,
    }[shape.recompute]
    hidden = (window - gradients).clamp(min=0.0) + hardware.overlap * again
    backward = {
        "weights": (weights - hidden).clamp(min=0.0),
        "tokens": tokens,
        "experts": 2 * experts,
        "dense": 2 * dense + again,
        "reduce": (gradients - window).clamp(min=0.0),
    }
    if shape.recompute != "none":
        backward["weights"] = backward["weights"].clamp(min=reroute)
        backward["tokens"] = 2 * tokens
        backward["experts"] = 3 * experts
    return forward, backward


def overall_table(report: Mapping[str, Any]) -> str:
    """Return the strategies as a Markdown table."""
    columns = {
        "strategy": "{name}",
        "imbalance": "{imbalance_mean:.3f}",
        "layer ms": "{layer_ms[total]:.3f}",
        "step ms": "{step_ms:.1f}",
        "tokens/s/GPU": "{tokens_per_s_per_gpu:.0f}",
        "vs none": "{percent:+.1f} %",
        "vs ideal": "{share_of_ideal:.3f}",
    }
    rows = [
        of | {"name": name, "percent": 100 * of["gain_over_none"]}
        for name, of in report["strategies"].items()
    ]
    return markdown_table(*fill(columns, rows))


def layer_table(report: Mapping[str, Any]) -> str:
    """Return where an MoE layer's time goes, as a Markdown table, in milliseconds.

    A line below names the strategies whose planning was timed on this machine, because the hardware
    file does not give it.
    """
    strategies = report["strategies"]
    parts = [name for name in next(iter(strategies.values()))["layer_ms"] if name != "total"]
    rows = [
        (name, *(f"{of['layer_ms'][part]:.3f}" for part in parts))
        for name, of in strategies.items()
    ]
    table = markdown_table(("strategy", *(part.replace("_", " ") for part in parts)), rows)
    here = [name for name, of in strategies.items() if of.get("solve_from") == "here"]
    if here:
        table += (
            f"\n\nSolving of {', '.join(here)} as it took on this machine: "
            f"{report['hardware']['name']} does not say."
        )
    return table


def _constant(value: float | Mapping[str, float]) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{strategy} {_constant(one)}" for strategy, one in value.items())
    return f"{value:.6g}"


def write_report(folder: Path, report: Mapping[str, Any]) -> None:
    """Write `simulate.json` and `simulate.md` into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "simulate.json", [json.dumps(report, indent=2), "\n"])
    rows = [
        (name, _constant(constant["value"]), constant["source"])
        for name, constant in report["hardware"]["constants"].items()
    ]
    left_out = "\n".join(f"- {what}" for what in report["left_out"])
    text = (
        f"# Simulation\n\n{report['title']}.\n\n{overall_table(report)}\n\n{LEGEND}\n\n"
        f"## An MoE layer, ms\n\n{layer_table(report)}\n\n"
        f"## Constants of {report['hardware']['name']}\n\n"
        "In bytes, seconds and FLOPs, rates per second and rank; `solve_us` in microseconds.\n\n"
        f"{markdown_table(('constant', 'value', 'source'), rows)}\n\n"
        f"## Left out\n\n{left_out}\n"
    )
    write_whole(folder / "simulate.md", [text])
