"""What balancing would move in a run, and choose, on the machine that its recipe names.

Loads are drawn at a given imbalance and planned as the run would plan them; the simulator's model
(`simulate.py`) turns plans into seconds. Nothing is measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from megatron_ext.balance.costs import LayerCosts
from megatron_ext.balance.metrics import home_loads, imbalances
from megatron_ext.balance.solve import solve
from megatron_ext.balance.strategies import get_strategy
from megatron_ext.lab.hardware import Hardware
from megatron_ext.lab.simulate import timed_sends
from megatron_ext.lab.synthetic import generate, make_spec
from megatron_ext.trainer.config import TrainConfig
from megatron_ext.transport import Choice, TransportKind, choose_transport

if TYPE_CHECKING:
    from megatron_ext.trainer.model.dry_run import Stage

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


def forecast_replication(
    config: TrainConfig, stage: Stage, *, tokens: int, imbalance: float, hardware: Hardware
) -> Replication | None:
    """Plan a layer's loads; return None if the run makes no plans, or has nobody to share with.

    Each rank has `tokens` in a microbatch; `imbalance` is busiest rank / mean without balancing.

    Raises:
        ValueError: No load of so many experts and ranks has this imbalance.
    """
    model, balance, ep_size = config.model, config.balance, config.parallel.ep_size
    strategy = get_strategy(balance.strategy)
    if strategy.kind is not strategy.planner or ep_size == 1 or balance.placement:
        return None
    spec = make_spec(
        "zipf",
        ranks=ep_size,
        experts=model.num_experts,
        tokens=tokens,
        top_k=model.topk,
        batch=_LOADS,
        imbalance=imbalance,
    )
    load = generate("zipf", spec).load
    costs = forecast_costs(config, stage, hardware)
    plan = solve(
        load,
        ep_size=ep_size,
        slots=balance.slots,
        strategy=balance.strategy,
        tolerance=balance.tolerance,
        min_quota=balance.min_quota,
        nvlink_domain=forecast_transport(config, hardware).domain_ranks,
        costs=costs if balance.plans_for_time else None,
    )
    sends = torch.stack([timed_sends(each, hardware).max() for each in plan.unbatch()])
    mean_sends = float(sends.double().mean())
    before, after = home_loads(load), plan.rank_loads()
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


def forecast_costs(config: TrainConfig, stage: Stage, hardware: Hardware) -> LayerCosts:
    """Return the costs that `balance.objective=time` plans by: as given, else of the machine."""
    balance = config.balance
    flops_per_s = hardware.peak_flops_per_s * hardware.expert_efficiency
    bandwidth, time = balance.link_bandwidth, balance.assignment_time
    return LayerCosts(
        expert_bytes=stage.expert_bytes,
        link_bandwidth=hardware.weight_bandwidth if bandwidth == "auto" else float(bandwidth),
        assignment_time=2 * stage.expert_params / flops_per_s if time == "auto" else float(time),
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
