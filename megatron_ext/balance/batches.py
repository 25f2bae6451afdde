"""Batches of plans, and whole splits: for plans of loads that are all there already.

Legend: B loads, R ranks of the EP group, E logical experts. A layer plans one load at a time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_ext.balance.layout import ExpertLayout
from megatron_ext.balance.plan import BalancePlan
from megatron_ext.ops import load_library


def pick_plans(is_first: Tensor, first: BalancePlan, second: BalancePlan) -> BalancePlan:
    """Take the first plan where bool [] or [B] is true, else the second; of a batch, each plan.

    >>> from megatron_ext.balance.solve import solve
    >>> first, second = (solve(torch.tensor([[9, 1], [9, 1]]), ep_size=2, slots=s) for s in (1, 1))
    >>> pick_plans(torch.tensor(True), first, second).quota.tolist()
    [[10, 8], [0, 2]]
    """
    is_first = is_first[..., None, None]
    return BalancePlan(
        first.layout,
        torch.where(is_first, first.quota, second.quota),
        torch.where(is_first, first.experts_in_slots, second.experts_in_slots),
    )


def stack_plans(plans: list[BalancePlan], layout: ExpertLayout) -> BalancePlan:
    """Make a batch of plans of one layout; the batch may be empty."""
    sizes = (0, layout.num_experts, layout.ep_size), (0, layout.ep_size, layout.slots)
    if not plans:
        quota, experts_in_slots = (torch.zeros(size, dtype=torch.int64) for size in sizes)
        return BalancePlan(layout, quota, experts_in_slots.int())
    return BalancePlan(
        layout,
        torch.stack([plan.quota for plan in plans]),
        torch.stack([plan.experts_in_slots for plan in plans]),
    )


def plan_each(
    load: Tensor, layout: ExpertLayout, plan_one: Callable[[Tensor], BalancePlan]
) -> BalancePlan:
    """Plan a load [R, E], or each of a batch [B, R, E], by a planner of single loads on the CPU.

    The plan is on `load`'s device.
    """
    if load.dim() == 2:
        plan = plan_one(load.cpu())
    else:
        plan = stack_plans([plan_one(one) for one in load.cpu()], layout)
    return BalancePlan(layout, plan.quota.to(load.device), plan.experts_in_slots.to(load.device))


def split_quota(load: Tensor, plan: BalancePlan, source_rank: int | None = None) -> Tensor:
    """Return the shares that the source ranks have of every quota (`share_plan`), without shards.

    Args:
        load: The load the plan was made for, int64 [R, E]. It is read on the CPU.
        plan: One plan (not a batch).
        source_rank: The rank whose rows are wanted; all of them if None.

    Returns:
        Assignments to expert e that rank t computes: of the source rank, int64 [E, R], or of each
        rank, [R, E, R].

    Raises:
        ValueError: If a shape does not fit, or `source_rank` is no rank.

    >>> from megatron_ext.balance.solve import solve
    >>> load = torch.tensor([[6, 1, 1, 0], [4, 2, 1, 1]])
    >>> plan = solve(load, ep_size=2, slots=1)
    >>> split_quota(load, plan, 0)[0].tolist(), split_quota(load, plan, 1)[0].tolist()
    ([5, 1], [0, 4])
    """
    load_library()
    split = torch.ops.megatron_ext.split_quota(load.cpu(), plan.quota.cpu(), source_rank)
    return split.to(load.device)
