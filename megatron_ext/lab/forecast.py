"""What balancing would move in a run, and choose, on the machine that its recipe names.

Loads are drawn at a given imbalance and planned as the run would plan them; the simulator's model
(`simulate.py`) turns plans into seconds. Nothing is measured.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from megatron_ext.balance.costs import LayerCosts
from megatron_ext.balance.metrics import home_loads, imbalances
from megatron_ext.balance.solve import PlannerInOrder
from megatron_ext.balance.strategies import PlanSettings, get_strategy
from megatron_ext.balance.strategies.strategy import Solves
from megatron_ext.files.loads import Loads
from megatron_ext.lab.hardware import Hardware
from megatron_ext.lab.planning import Asked
from megatron_ext.lab.simulate import NONE, Setting, as_measured, simulate, timed_sends
from megatron_ext.lab.synthetic import generate, make_spec
from megatron_ext.trainer.config import TrainConfig
from megatron_ext.trainer.model.shape import shape_of
from megatron_ext.trainer.validate import expert_shards
from megatron_ext.transport import Choice, TransportKind, choose_transport

if TYPE_CHECKING:
    from megatron_ext.trainer.model.dry_run import DryRun, Stage

_LOADS = 8


@dataclass(frozen=True, kw_only=True)
class Replication:
    """What replicas move in one layer and microbatch: means over a few loads."""

    imbalance_before: float
    imbalance_after: float
    replicas: float
    """Of all ranks of the EP group together."""
    sends: float
    """Experts that the busiest rank sends or receives; one that leaves the NVLink domain counts for
    as many as take its time inside."""
    weight_bytes: float
    """Weights that so many sends move: in forward, and again in backward."""
    weight_ms: float
    grad_bytes: float
    """Gradients that they move in backward."""
    grad_ms: float
    experts_ms: float
    """The busiest rank's experts in forward."""
    experts_before_ms: float
    """The same without balancing."""


@dataclass(frozen=True, kw_only=True)
class StepForecast:
    """What a step would take, by the simulator's model."""

    step_ms: float
    without_ms: float
    """The same without balancing."""
    share_of_ideal: float
    """Of the speed of forced even routing."""
    solve_from: str | None
    """`hardware` if its file has the time of a plan, `here` if that is as on this machine."""

    @property
    def speed_up(self) -> float:
        """How many times as fast as without balancing."""
        return self.without_ms / self.step_ms


class Forecast(NamedTuple):
    """What a run would choose and move."""

    costs: LayerCosts | None = None
    """What `balance.objective=time` plans by; None for a model without experts."""
    replication: Replication | None = None
    """None if the run makes no plans, has nobody to share with, or places replicas by what only the
    run knows: earlier loads, predictions, a placement."""
    step: StepForecast | None = None
    """None where the simulator has no model of the run: with tensor parallelism, also of experts
    alone, for one EP rank, and without `replication`, unless the strategy is `none`."""


def forecast(
    config: TrainConfig, dry_run: DryRun, *, imbalance: float, hardware: Hardware
) -> Forecast:
    """Plan loads of this imbalance, busiest rank / mean.

    Raises:
        ValueError: No load of so many experts and ranks has this imbalance.
    """
    stage = next((stage for stage in dry_run.stages if stage.expert_params), None)
    if stage is None:
        return Forecast()
    costs = forecast_costs(config, stage, hardware)
    balance, replication, step = config.balance, None, None
    plans = _makes_plans(config)
    is_known = plans or balance.strategy == NONE
    if is_known and config.parallel.ep_size > 1 and not balance.placement:
        shards = expert_shards(config)  # Each computes the tokens of all.
        loads = Loads(_loads(config, tokens=shards * dry_run.tokens, imbalance=imbalance))
        asked = Asked(
            # As a layer makes its planner (`LayerBalancer`).
            planning=PlanSettings.of(balance, costs if balance.plans_for_time else None, None),
            slots=balance.slots,
            nvlink_domain=forecast_transport(config, hardware).domain_ranks,
        )
        if plans:
            replication = _replication(balance.strategy, stage, loads, asked, costs, hardware)
        if config.parallel.tp_size == shards == 1:
            step = _step(config, dry_run, loads, asked, hardware)
    return Forecast(costs=costs, replication=replication, step=step)


def _makes_plans(config: TrainConfig) -> bool:
    # The loads here follow no others: there is no history, and nothing to predict from.
    return isinstance(get_strategy(config.balance.strategy).kind, Solves)


def _replication(
    strategy: str, stage: Stage, loads: Loads, asked: Asked, costs: LayerCosts, hardware: Hardware
) -> Replication:
    planner = PlannerInOrder(strategy, asked.layout(strategy, loads), asked.planning)
    plan = planner.plan_in_order(loads.load)
    sends = torch.stack([timed_sends(each, hardware).max() for each in plan.unbatch()])
    mean_sends = float(sends.double().mean())
    before, after = home_loads(loads.load), plan.rank_loads()
    return Replication(
        imbalance_before=float(imbalances(before).mean()),
        imbalance_after=float(imbalances(after).mean()),
        replicas=float((plan.experts_in_slots >= 0).sum()) / _LOADS,
        sends=mean_sends,
        weight_bytes=mean_sends * stage.expert_bytes,
        weight_ms=1e3 * mean_sends * stage.expert_bytes / hardware.weight_bandwidth,
        grad_bytes=mean_sends * stage.expert_grad_bytes,
        grad_ms=1e3 * mean_sends * stage.expert_grad_bytes / hardware.weight_bandwidth,
        experts_ms=1e3 * costs.assignment_time * float(after.amax(-1).double().mean()),
        experts_before_ms=1e3 * costs.assignment_time * float(before.amax(-1).double().mean()),
    )


def _step(
    config: TrainConfig, dry_run: DryRun, loads: Loads, asked: Asked, hardware: Hardware
) -> StepForecast:
    balance = config.balance
    shape = dataclasses.replace(
        shape_of(config, config.recipe), num_microbatches=dry_run.num_microbatches
    )
    setting = Setting(
        planning=asked.planning,
        slots=asked.slots,
        nvlink_domain=asked.nvlink_domain,
        shape=shape,
        hardware=as_measured(hardware, shape, balance),
        num_gpus=dry_run.num_ranks,
    )
    name = f"{balance.strategy}:time" if balance.plans_for_time else balance.strategy
    of = simulate(loads, [name] if _makes_plans(config) else [], setting)["strategies"]
    return StepForecast(
        step_ms=of[name]["step_ms"],
        without_ms=of[NONE]["step_ms"],
        share_of_ideal=of[name]["share_of_ideal"],
        solve_from=of[name].get("solve_from"),
    )


def _loads(config: TrainConfig, *, tokens: int, imbalance: float) -> Tensor:
    """Return a few loads of this imbalance: int64 [B, R, E]."""
    spec = make_spec(
        "zipf",
        ranks=config.parallel.ep_size,
        experts=config.model.num_experts,
        tokens=tokens,
        top_k=config.model.topk,
        batch=_LOADS,
        imbalance=imbalance,
    )
    return generate("zipf", spec).load


def forecast_costs(config: TrainConfig, stage: Stage, hardware: Hardware) -> LayerCosts:
    """Return the costs that `balance.objective=time` plans by: as given, else of the machine."""
    balance = config.balance
    flops_per_s = hardware.peak_flops_per_s * hardware.expert_efficiency
    bandwidth, time = balance.link_bandwidth, balance.assignment_time
    width = config.megatron.get("moe_latent_size") or config.model.hidden_size
    return LayerCosts(
        expert_bytes=stage.expert_bytes,
        link_bandwidth=hardware.weight_bandwidth if bandwidth == "auto" else float(bandwidth),
        assignment_time=2 * stage.expert_params / flops_per_s if time == "auto" else float(time),
        token_bytes=(4 if config.model.precision == "fp32" else 2) * width,
    )


def forecast_transport(config: TrainConfig, hardware: Hardware | None) -> Choice:
    """Return what `balance.transport` and `balance.nvlink_domain` would stand for.

    Without `hardware` they are those of ranks on this machine, without GPUs.

    Raises:
        ValueError, RuntimeError: The transport cannot serve there; the message says why.
    """
    ranks = config.parallel.ep_size
    domain = ranks if hardware is None else hardware.domain_ranks

    def look(kind: TransportKind) -> list[list[str]]:
        far = "it is in another NVLink domain"
        return [
            ["" if a // domain == b // domain else far for b in range(ranks)] for a in range(ranks)
        ]

    balance = config.balance
    device = "cpu" if hardware is None else "cuda"
    return choose_transport(balance.transport, balance.domain_ranks, ranks, device, look)
