"""EPLB fed the exact load instead of history (UltraEP's EPLB++), tokens dealt round-robin."""

from __future__ import annotations

from torch import Tensor

from megatron_ext.balance.layout import ExpertLayout
from megatron_ext.balance.plan import BalancePlan, plan_each
from megatron_ext.balance.strategies.strategy import PlanSettings, Solves, Strategy
from megatron_ext.methods.eplb import eplb


def solve(load: Tensor, layout: ExpertLayout, settings: PlanSettings) -> BalancePlan:
    """Place replicas by this very load; every source rank deals its assignments in turn.

    Each source rank begins at the main. Where the result is worse than no balancing, the load is
    planned without replicas.

    >>> import torch
    >>> layout = ExpertLayout(num_experts=4, ep_size=2, slots=1, nvlink_domain=2)
    >>> plan = solve(torch.tensor([[5, 1, 1, 0], [5, 2, 1, 1]]), layout, PlanSettings())
    >>> plan.slots.tolist(), plan.quota.tolist()
    ([[-1], [0]], [[6, 4], [3, 0], [0, 2], [0, 1]])

    Source: UltraEP, section 8.1 (EPLB++: standard EPLB and round-robin reroute).
    """
    return plan_each(load, layout, lambda one: _solve(one, layout, settings))


def _solve(load: Tensor, layout: ExpertLayout, settings: PlanSettings) -> BalancePlan:
    """Plan one load."""
    slots = eplb.place(load.sum(0), layout, settings)
    return eplb.deal(load, load, slots, layout, settings)


EPLB_EXACT = Strategy(
    name="eplb_exact",
    summary="EPLB++: EPLB fed the exact load of every microbatch; round-robin split",
    kind=Solves(solve),
)
