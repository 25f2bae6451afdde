"""EPLB: replicas for hot experts of the past or of the exact load, split evenly over instances.

Mains do not move here, so that parameters and optimizer state stay on their ranks; the published
rearrangement of all experts is `rearrange.py`. Legend: R ranks of the EP group, E logical experts,
S slots per rank, G groups of assignments, each dealt by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_ext.balance.batches import plan_each
from megatron_ext.balance.layout import ExpertLayout
from megatron_ext.balance.plan import BalancePlan
from megatron_ext.balance.strategies import none
from megatron_ext.balance.strategies.strategy import FromHistory, PlanSettings, Solves, Strategy
from megatron_ext.transport.reach import domain_of


def place(expert_load: Tensor, layout: ExpertLayout, settings: PlanSettings) -> Tensor:
    """Place replicas of the experts that are hottest per instance, by past loads, int64 [E].

    Each NVLink domain is planned by itself.

    Returns:
        Logical expert in each slot, or -1: int32 [R, S]. Slots stay empty if every expert with a
        load is on every rank already, or if the last replicas fit on no rank.

    >>> layout = ExpertLayout(num_experts=4, ep_size=2, slots=1, nvlink_domain=2)
    >>> place(torch.tensor([10, 3, 4, 1]), layout, PlanSettings()).tolist()
    [[2], [0]]

    Source: DeepSeek EPLB, README (replicate the heavy, pack on the light). Here mains do not move,
    and replicas stay in their NVLink domain.
    """
    return place_replicas(expert_load, layout, most_replicas=layout.nvlink_domain - 1)


def place_replicas(
    expert_load: Tensor,
    layout: ExpertLayout,
    *,
    most_replicas: int,
    capacities: Sequence[int] | None = None,
    num_replicas: int | None = None,
) -> Tensor:
    """Place replicas as `place` does, with at most `most_replicas` of one expert.

    `capacities` [R] are the most replicas of each rank, by default all slots; `num_replicas` is the
    most in all, by default the sum of these.
    """
    capacities = [layout.slots] * layout.ep_size if capacities is None else list(capacities)
    room = torch.tensor(capacities).view(-1, layout.nvlink_domain).sum(1)
    instances = _replicate(
        expert_load.double(),
        room,
        sum(capacities) if num_replicas is None else num_replicas,
        most_replicas + 1,
    )
    experts_in_slots = torch.full((layout.ep_size, layout.slots), -1, dtype=torch.int32)
    for rank, row in enumerate(_pack(expert_load.tolist(), instances, capacities, layout)):
        experts_in_slots[rank, : len(row)] = torch.tensor(row, dtype=torch.int32)
    return experts_in_slots


def share(
    load: Tensor, placed: Tensor, layout: ExpertLayout, settings: PlanSettings
) -> BalancePlan:
    """Split every expert's load evenly over its instances.

    The remainder of the division goes to the main and the first replicas, by rank. If the shares
    would be below `min_quota`, the last replicas are dropped. If the plan would be worse than no
    balancing, as can be when the hot experts changed, the load is planned without replicas.

    >>> layout = ExpertLayout(num_experts=4, ep_size=2, slots=1, nvlink_domain=2)
    >>> load = torch.tensor([[6, 1, 1, 0], [4, 2, 1, 1]])
    >>> plan = share(load, torch.tensor([[2], [0]], dtype=torch.int32), layout, PlanSettings())
    >>> plan.quota.tolist(), plan.rank_loads().tolist()
    ([[5, 5], [3, 0], [1, 1], [0, 1]], [9, 7])

    Source: DeepSeek EPLB, README (an expert's load is shared evenly by its instances). Here no load
    gets worse; as published, stale replicas make some loads worse (UltraEP, Figure 6).
    """
    return deal(load, load.sum(-2, keepdim=True), placed, layout, settings)


def deal(
    load: Tensor, groups: Tensor, placed: Tensor, layout: ExpertLayout, settings: PlanSettings
) -> BalancePlan:
    """Share loads as `share` does, but deal each group of assignments by itself.

    Groups are int64 [G, E] or [B, G, E]. Each group begins at the main, so with more groups more
    remainders go to the first instances. `placed` are the replicas that may be used.
    """
    turn = _turns(placed, layout)  # [..., E, R]
    used = (turn >= 0).sum(-1).expand(*load.shape[:-2], -1)
    # With fewer instances each share is larger; a main alone is always allowed.
    while True:
        least = (groups // used[..., None, :]).sum(-2)
        too_small = (least < settings.min_quota) & (used > 1)
        if not too_small.any():
            break
        used = used - too_small.long()
    whole, rest = (groups // used[..., None, :]).sum(-2), groups % used[..., None, :]
    turns = int(used.max()) if used.numel() else 1
    extra = [(rest > i).sum(-2) for i in range(turns)]
    shares = whole[..., None] + torch.stack(extra, -1)  # [..., E, turns]
    serves = (turn >= 0) & (turn < used[..., None])
    by_rank = shares.gather(-1, torch.where(serves, turn, 0).expand(*shares.shape[:-1], -1))
    quota = torch.where(serves, by_rank, 0)
    experts = placed.clamp(min=0).long().expand(*load.shape[:-2], -1, -1)
    is_kept = (placed >= 0) & serves.mT.gather(-1, experts)
    plan = BalancePlan(layout, quota, torch.where(is_kept, placed, -1).int())
    return none.unless_worse(load, plan)


def _turns(placed: Tensor, layout: ExpertLayout) -> Tensor:
    """Return the turn at which each rank serves an expert, or -1: int64 [..., E, R].

    The main has turn 0; the replicas follow by rank.
    """
    experts, ranks = layout.num_experts, layout.ep_size
    # Row E takes what empty slots write.
    is_replica = placed.new_zeros(*placed.shape[:-2], ranks, experts + 1, dtype=torch.bool)
    held = torch.where(placed < 0, experts, placed.long())
    is_replica = is_replica.scatter(-1, held, True)[..., :-1].mT
    turn = torch.where(is_replica, is_replica.long().cumsum(-1), -1)
    home = torch.arange(experts, device=placed.device) // layout.mains_per_rank
    is_home = home[:, None] == torch.arange(ranks, device=placed.device)
    return torch.where(is_home, 0, turn)


def _replicate(load: Tensor, room: Tensor, num_replicas: int, most_instances: int) -> list[int]:
    """Count the instances of each expert: the next replica goes to the most load per instance.

    Loads are float64 [E]. `room` is the number of replicas that each NVLink domain can take, int64
    [domains], changed in place; `most_instances` is of one expert.
    """
    instances = torch.ones_like(load)
    for _ in range(num_replicas):
        has_room = (room > 0).repeat_interleave(len(load) // len(room))
        per_instance = torch.where((instances < most_instances) & has_room, load / instances, 0.0)
        hottest = int(per_instance.argmax())
        if per_instance[hottest] == 0:
            break
        instances[hottest] += 1
        room[hottest * len(room) // len(load)] -= 1
    return [int(count) for count in instances]


def _pack(
    loads: list[int], instances: list[int], capacities: list[int], layout: ExpertLayout
) -> list[list[int]]:
    """Put replicas, the heaviest first, on the domain's least loaded rank that can take them."""
    mains = layout.mains_per_rank
    share = [load / count for load, count in zip(loads, instances, strict=True)]
    rank_loads = [sum(share[start : start + mains]) for start in range(0, len(share), mains)]
    held: list[list[int]] = [[] for _ in rank_loads]
    for expert in sorted(range(len(loads)), key=lambda expert: -share[expert]):
        home = layout.home_rank(expert)
        for _ in range(instances[expert] - 1):
            takers = [
                rank
                for rank in domain_of(home, layout.nvlink_domain)
                if len(held[rank]) < capacities[rank] and rank != home and expert not in held[rank]
            ]
            if not takers:
                break
            rank = min(takers, key=rank_loads.__getitem__)
            held[rank].append(expert)
            rank_loads[rank] += share[expert]
    return held


def solve(load: Tensor, layout: ExpertLayout, settings: PlanSettings) -> BalancePlan:
    """Place replicas by the exact load; every source rank deals its assignments in turn.

    Each source rank begins at the main. If the plan would be worse than no balancing, the load is
    planned without replicas.

    >>> layout = ExpertLayout(num_experts=4, ep_size=2, slots=1, nvlink_domain=2)
    >>> plan = solve(torch.tensor([[5, 1, 1, 0], [5, 2, 1, 1]]), layout, PlanSettings())
    >>> plan.experts_in_slots.tolist(), plan.quota.tolist()
    ([[-1], [0]], [[6, 4], [3, 0], [0, 2], [0, 1]])

    Source: UltraEP, section 8.1 (EPLB++: standard EPLB and round-robin reroute).
    """

    def solve_one(one: Tensor) -> BalancePlan:
        return deal(one, one, place(one.sum(0), layout, settings), layout, settings)

    return plan_each(load, layout, solve_one)


EPLB = Strategy(
    name="eplb",
    summary="EPLB: replicas by load history, every `interval` microbatches; even split",
    kind=FromHistory(place, share),
)

EPLB_EXACT = Strategy(
    name="eplb_exact",
    summary="EPLB++: EPLB fed the exact load of every microbatch; round-robin split",
    kind=Solves(solve),
)
