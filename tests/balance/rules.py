"""What a legal plan is, and the fewest replicas that it can have."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ext.balance.layout import ExpertLayout
from megatron_ext.balance.metrics import home_loads
from megatron_ext.balance.plan import BalancePlan


def check_plan(load: Tensor, plan: BalancePlan, *, min_quota: int = 1) -> None:
    """Check that a plan is legal for a load, by the rules of docs/method.md.

    Args:
        load: The load the plan was made for, int64 [R, E].
        plan: One plan (not a batch).
        min_quota: Fewest assignments a replica may carry.

    Raises:
        ValueError: A rule is broken; the message names what breaks it, the numbers and the rule.
    """
    layout, quota = plan.layout, plan.quota
    experts, ranks = layout.num_experts, layout.ep_size
    if quota.shape != (experts, ranks) or quota.dtype != torch.int64:
        raise ValueError(f"quota must be int64 [{experts}, {ranks}], got {_describe(quota)}")
    held = plan.experts_in_slots
    if held.shape != (ranks, layout.slots) or held.dtype != torch.int32:
        raise ValueError(f"slots must be int32 [{ranks}, {layout.slots}], got {_describe(held)}")

    instances = {(expert, layout.home_rank(expert)) for expert in range(experts)}
    for rank, row in enumerate(held.tolist()):
        for slot, expert in enumerate(row):
            if expert == -1:
                continue
            what = f"slot {slot} of rank {rank} holds expert {expert}"
            if not 0 <= expert < experts:
                raise ValueError(f"{what}; logical experts are 0 to {experts - 1}")
            if (expert, rank) in instances:
                raise ValueError(f"{what}; a rank has at most one instance of an expert")
            if layout.domain(rank) != layout.domain(layout.home_rank(expert)):
                raise ValueError(f"{what}; replicas stay in the home rank's NVLink domain")
            if quota[expert, rank] < min_quota:
                raise ValueError(
                    f"{what} for a quota of {int(quota[expert, rank])}; min_quota is {min_quota}"
                )
            instances.add((expert, rank))

    expert_load = load.sum(0).tolist()
    for expert, row in enumerate(quota.tolist()):
        for rank, count in enumerate(row):
            if count < 0:
                raise ValueError(f"quota[{expert}, {rank}] is {count}; quotas must be >= 0")
            if count > 0 and (expert, rank) not in instances:
                raise ValueError(f"quota[{expert}, {rank}] is {count}; there is no instance there")
        if sum(row) != expert_load[expert]:
            raise ValueError(
                f"quotas of expert {expert} sum to {sum(row)}; its load is {expert_load[expert]}"
            )
    before = int(load.sum(0).view(ranks, -1).sum(1).max())
    after = int(plan.rank_loads().max())
    if after > before:
        raise ValueError(f"the busiest rank has {after} assignments; without balancing {before}")


def replicas_lower_bound(load: Tensor, layout: ExpertLayout, busiest: int) -> int:
    """Return the least number of replicas of plans whose busiest rank has at most `busiest`.

    The argument counts edges, for each NVLink domain. Replicas are edges between ranks. A connected
    part with `n` ranks has at least `n - 1` edges, and the room of the part's ranks below `busiest`
    covers the excess of the part's ranks above. So there are at least

    - as many replicas as ranks with excess;
    - as many as ranks with room are needed to cover all excess, the roomiest first;
    - `sum(ceil(excess / most room))`: in one part, `ceil` over the ranks with excess adds less than
      one for each of them, so the sum is at most the number of ranks with room needed, plus the
      number of ranks with excess, minus one.

    Args:
        load: Assignments, int64 [R, E].
        layout: Where experts and slots are.
        busiest: A busiest rank's load that some legal plan reaches.
    """
    bound = 0
    for loads in home_loads(load).view(-1, layout.nvlink_domain).tolist():
        excess = [own - busiest for own in loads if own > busiest]
        if not excess:
            continue
        rooms = sorted((busiest - own for own in loads if own < busiest), reverse=True)
        left, hosts = sum(excess), 0
        while left > 0 and hosts < len(rooms):
            left -= rooms[hosts]
            hosts += 1
        most_room = rooms[0] if rooms else 1
        bound += max(len(excess), hosts, sum(-(-x // most_room) for x in excess))
    return bound


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
