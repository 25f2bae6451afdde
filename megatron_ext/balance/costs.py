"""What a plan costs in time, and the tolerance at which a layer is fastest.

A tighter plan shortens the experts' work and lengthens the transfer of weights. How much of the one
is worth how much of the other depends on the machine and the model: `LayerCosts` says it in
numbers. Legend: B loads, R ranks, E logical experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ext.balance.layout import ExpertLayout
from megatron_ext.balance.metrics import rank_sends
from megatron_ext.balance.plan import BalancePlan, pick_plans, solve_plan

TOLERANCES = (0.0, 0.005, 0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.2, 0.3, 0.5, 1.0, 2.0)
"""The tolerances that are compared; no balancing at all is compared too."""

_PICOSECONDS = 1e12


@dataclass(frozen=True, kw_only=True)
class LayerCosts:
    """The machine and the model in one MoE layer's forward, for `fastest_plan`."""

    expert_bytes: int
    """Weights of one expert: what a replica costs its sender."""
    link_bandwidth: float
    """Bytes per second that a rank sends to, or receives from, its peers."""
    assignment_time: float
    """Seconds of expert computation per assignment."""
    token_bytes: int = 0
    """Bytes of one token's hidden state, sent there and back."""
    token_bandwidth: float | None = None
    """The same of tokens, where they take another way than weights; None is `link_bandwidth`."""

    def __post_init__(self) -> None:
        """Check each number."""
        for name, least in (("expert_bytes", 0), ("token_bytes", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} ({getattr(self, name)}) must be >= {least}")
        for name in ("link_bandwidth", "assignment_time"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} ({getattr(self, name)}) must be > 0 and finite")
        if self.token_bandwidth is not None and not 0 < self.token_bandwidth < float("inf"):
            raise ValueError(f"token_bandwidth ({self.token_bandwidth}) must be > 0 and finite")

    def layer_time(self, load: Tensor, plan: BalancePlan) -> Tensor:
        """Modelled time of the parts of a forward that depend on the plan, in picoseconds.

        The sum of `layer_parts`. Whole numbers, so that all ranks choose alike.

        Args:
            load: Assignments, int64 [R, E] or [B, R, E].
            plan: One for each load.

        Returns:
            int64 [] or [B].

        Source: UltraEP, Eq. 1; solving and reroute cost every plan the same.
        """
        weights, tokens, experts = self.layer_parts(load, plan, rank_sends(plan))
        return weights + tokens + experts

    def layer_parts(
        self, load: Tensor, plan: BalancePlan, sends: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Modelled time of weights, of tokens there and back, and of the experts, in picoseconds.

        The busiest sender's weights; the most tokens that a rank sends, or receives, there and
        back; the busiest rank's computation. A token that stays on its rank is not sent.

        Args:
            load: Assignments, int64 [R, E] or [B, R, E].
            plan: One for each load.
            sends: Experts that each rank sends, int64 [..., R]: `rank_sends`, or less with relays.

        Returns:
            int64 [] or [B] each.

        Source: UltraEP, Eq. 5, 4 and 3.
        """
        local = torch.minimum(load.mT, plan.quota)
        received = (plan.quota - local).sum(-2).amax(-1)
        sent = (load.mT - local).sum(-2).amax(-1)
        token_bandwidth = self.token_bandwidth or self.link_bandwidth
        return (
            sends.amax(-1) * _picoseconds(self.expert_bytes / self.link_bandwidth),
            torch.maximum(received, sent) * _picoseconds(2 * self.token_bytes / token_bandwidth),
            plan.rank_loads().amax(-1) * _picoseconds(self.assignment_time),
        )


def fastest_plan(
    load: Tensor, layout: ExpertLayout, costs: LayerCosts, *, strategy: str, min_quota: int
) -> BalancePlan:
    """Plan with the tolerance that makes the modelled time of the layer least.

    Args:
        load: Assignments, int64 [R, E] or [B, R, E]; each load gets its own tolerance.
        layout: Where experts and slots are.
        costs: Of this layer on this machine.
        strategy: A planner of `megatron_ext.balance.strategies`.
        min_quota: Fewest assignments a replica may carry.

    Returns:
        The plan; of equally fast ones that with least to send.
    """
    best = solve_plan(load, layout, strategy="none")
    best_time = costs.layer_time(load, best)
    # From loose to tight, and only what is faster counts.
    for tolerance in reversed(TOLERANCES):
        plan = solve_plan(load, layout, strategy=strategy, tolerance=tolerance, min_quota=min_quota)
        time = costs.layer_time(load, plan)
        best = pick_plans(time < best_time, plan, best)
        best_time = torch.minimum(time, best_time)
    return best


def _picoseconds(seconds: float) -> int:
    return round(seconds * _PICOSECONDS)
