"""CRAFT: splits each load over replicas that were placed before the run.

`place.py` decides from a trace how many replicas each layer gets, and on which ranks. Legend: R
ranks of the EP group, E logical experts, S slots per rank.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from megatron_ext.balance.batches import plan_each
from megatron_ext.balance.bounds import target_load
from megatron_ext.balance.layout import ExpertLayout
from megatron_ext.balance.plan import BalancePlan
from megatron_ext.balance.strategies import none
from megatron_ext.balance.strategies.strategy import FromPlacement, PlanSettings, Strategy


def share(
    load: Tensor, placed: Tensor, layout: ExpertLayout, settings: PlanSettings
) -> BalancePlan:
    """Split every load over fixed replicas: within the tolerance, or as evenly as these allow.

    The busiest rank has at most `(1 + tolerance)` times the mean, or the least load that whole
    numbers can reach with these replicas (proof: `_level`). A replica below `min_quota` is dropped,
    and the load is split again. The search begins at no balancing, so that the plan is never worse.
    Loads are planned on the CPU, one after the other.

    >>> layout = ExpertLayout(num_experts=4, ep_size=2, slots=1, nvlink_domain=2)
    >>> load = torch.tensor([[6, 1, 1, 0], [4, 2, 1, 1]])
    >>> plan = share(load, torch.tensor([[-1], [0]], dtype=torch.int32), layout, PlanSettings())
    >>> plan.quota.tolist(), plan.rank_loads().tolist()
    ([[5, 5], [3, 0], [0, 2], [0, 1]], [8, 8])

    Source: CRAFT, section 4.2, which leaves the split to the serving framework (even by Algorithm
    1). Here mains do not move, and the split is the best one.
    """
    placed = placed.cpu()
    return plan_each(load, layout, lambda one: _plan(one, placed, layout, settings))


def _plan(
    load: Tensor, placed: Tensor, layout: ExpertLayout, settings: PlanSettings
) -> BalancePlan:
    """Plan one load."""
    plan = none.solve(load, layout, settings)
    target = target_load(int(load.sum()), layout.ep_size, round(settings.tolerance * 1e6))
    kept = placed.clone()
    while True:
        quota = plan.quota.clone()
        _level(quota, kept, layout, target)
        served = quota.gather(0, kept.clamp(min=0).long().T).T
        too_small = (kept >= 0) & (served > 0) & (served < settings.min_quota)
        if not too_small.any():
            return BalancePlan(layout, quota, torch.where(served > 0, kept, -1))
        kept[too_small] = -1


def _level(quota: Tensor, replicas: Tensor, layout: ExpertLayout, level: int) -> None:
    """Move assignments between instances, in place, until no rank has more than `level`.

    Assignments go from a rank above the level along a shortest path of instances to a rank below
    the level. Where no path is left, all ranks that a path reaches are at or above the level, and
    the assignments of these ranks cannot leave them. So no split has a busiest rank below the mean
    of these ranks. The mean, rounded up, becomes the level. In the end the level is the least that
    a split can meet, or still the first, which is at least the mean rank load. Quotas are int64
    [E, R]; `replicas` are experts in slots, int32 [R, S].
    """
    loads, counts = quota.sum(0).tolist(), quota.tolist()
    shares: dict[int, dict[int, int]] = {}
    for rank, row in enumerate(replicas.tolist()):
        for expert in row:
            if expert >= 0:
                home = layout.home_rank(expert)
                of_expert = shares.setdefault(expert, {home: counts[expert][home]})
                of_expert[rank] = counts[expert][rank]
    experts_of: list[list[int]] = [[] for _ in loads]
    for expert, of_expert in shares.items():
        for rank in of_expert:
            experts_of[rank].append(expert)

    while max(loads) > level:
        came_by: dict[int, tuple[int, int] | None] = {
            rank: None for rank, load in enumerate(loads) if load > level
        }
        queue = deque(came_by)
        end = -1
        while queue and end < 0:
            rank = queue.popleft()
            for expert in experts_of[rank]:
                if shares[expert][rank] == 0:
                    continue
                for host in shares[expert]:
                    if host not in came_by:
                        came_by[host] = (rank, expert)
                        queue.append(host)
                        if loads[host] < level and end < 0:
                            end = host
        if end < 0:
            level = -(-sum(loads[rank] for rank in came_by) // len(came_by))
            continue
        steps = []
        rank = end
        while (step := came_by[rank]) is not None:
            steps.append((*step, rank))
            rank = step[0]
        amount = min(
            loads[rank] - level,
            level - loads[end],
            *(shares[expert][source] for source, expert, _ in steps),
        )
        for source, expert, host in steps:
            shares[expert][source] -= amount
            shares[expert][host] += amount
        loads[rank] -= amount
        loads[end] += amount

    for expert, share in shares.items():
        quota[expert, list(share)] = torch.tensor(list(share.values()))


CRAFT = Strategy(
    name="craft",
    summary="CRAFT: replicas from a placement file, where a trace showed that layers gain by them",
    kind=FromPlacement(share),
)
