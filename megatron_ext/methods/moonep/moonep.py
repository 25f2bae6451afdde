"""MoonEP's exact fill: an overloaded rank fills the roomiest rank completely, until all are even.

Every rank computes the mean, rounded down or up, at any number of replicas; a rank needs as many
slots as mains. Legend: R ranks of the EP group, E logical experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ext.balance.batches import plan_each
from megatron_ext.balance.layout import ExpertLayout
from megatron_ext.balance.plan import BalancePlan
from megatron_ext.balance.strategies import none
from megatron_ext.balance.strategies.strategy import PlanSettings, Solves, Strategy


def solve(load: Tensor, layout: ExpertLayout, settings: PlanSettings) -> BalancePlan:
    """Plan each NVLink domain by itself, so that its ranks differ by at most one assignment.

    The rank that is furthest above the mean, the sender, gives the roomiest rank as much as this
    rank has room for. The sender may give more than it has above the mean; then another rank fills
    the sender. Every rank is filled at most once, so a rank holds replicas of one home rank only,
    and as many slots as mains suffice. Then experts are chosen: the transfer with most left to
    choose takes from the main with most left. If the mean is no whole number, the ranks that were
    busiest get the mean rounded up. Loads are planned on the CPU, one after the other.

    The algorithm has no tolerance and no least quota, and expects as many slots as mains. With
    `min_quota` above 1 or fewer slots, replicas below `min_quota` are dropped, and on each rank the
    smallest replicas that find no slot; their assignments stay at home. If the plan would then be
    worse than no balancing, it has no replicas. Such plans are not even.

    Rank 0 has 14, rank 1 has 9, and rank 2 has room for 7: rank 0 gives it all 7, and gets 1 back.

    >>> layout = ExpertLayout(num_experts=6, ep_size=3, slots=2, nvlink_domain=3)
    >>> load = torch.tensor([[6, 8, 4, 5, 1, 0], [0] * 6, [0] * 6])
    >>> plan = solve(load, layout, PlanSettings())
    >>> plan.quota.tolist()
    [[6, 0, 0], [1, 0, 7], [0, 4, 0], [1, 4, 0], [0, 0, 1], [0, 0, 0]]
    >>> plan.experts_in_slots.tolist()
    [[3, -1], [-1, -1], [1, -1]]

    Source: MoonEP, `moonep/planning.py` and `tests/planning_reference.py` (in public copies:
    zhumakhan/MoonEP at f08da5e and 4818969, Ascend/MoonEP at 33327eb); Megatron-LM pull request
    7450, `virtual_expert_triton.py` (NVIDIA/Megatron-LM at 28a708c), which plans the same, ties
    included. Differs from both for a mean that is no whole number (there all ranks have equally
    many tokens), in NVLink domains, and with few slots.
    """
    return plan_each(load, layout, lambda one: _plan_one(one, layout, settings))


def _plan_one(load: Tensor, layout: ExpertLayout, settings: PlanSettings) -> BalancePlan:
    """Plan one load, int64 [R, E]."""
    mains, domain = layout.mains_per_rank, layout.nvlink_domain
    expert_load = load.sum(0).tolist()
    held: list[list[tuple[int, int]]] = [[] for _ in range(layout.ep_size)]
    for first in range(0, layout.ep_size, domain):
        ranks = range(first, first + domain)
        given_by = _transfers([sum(expert_load[r * mains : (r + 1) * mains]) for r in ranks])
        for sender, given in zip(ranks, given_by, strict=True):
            start = sender * mains
            for host, main, count in _choose(expert_load[start : start + mains], given):
                held[first + host].append((count, start + main))

    # The largest first; of equal replicas the last expert's, as in the source.
    kept = [
        [replica for replica in sorted(replicas, reverse=True) if replica[0] >= settings.min_quota]
        for replicas in held
    ]
    experts_in_slots = torch.full((layout.ep_size, layout.slots), -1, dtype=torch.int32)
    quota = none.solve(load, layout, settings).quota
    for host, replicas in enumerate(kept):
        for slot, (count, expert) in enumerate(replicas[: layout.slots]):
            experts_in_slots[host, slot] = expert
            quota[expert, layout.home_rank(expert)] -= count
            quota[expert, host] += count
    return none.unless_worse(load, BalancePlan(layout, quota, experts_in_slots))


def _transfers(loads: list[int]) -> list[dict[int, int]]:
    """Return the assignments that each rank gives to each other rank, so that all ranks are even.

    A sender always has enough: it has at least one more than the mean, rounded down or up, and no
    host has room for more than the mean. Each round makes a rank even for good.
    """
    mean, num_rounded_up = divmod(sum(loads), len(loads))
    excess = [load - mean for load in loads]
    for rank in sorted(range(len(loads)), key=lambda rank: -loads[rank])[:num_rounded_up]:
        excess[rank] -= 1
    given: list[dict[int, int]] = [{} for _ in loads]
    while max(excess) > 0:
        sender, host = excess.index(max(excess)), excess.index(min(excess))
        given[sender][host] = -excess[host]
        excess[sender] += excess[host]
        excess[host] = 0
    return given


def _choose(loads: list[int], given: dict[int, int]) -> list[tuple[int, int, int]]:
    """Choose the mains that a sender gives: host, main and assignments of each replica.

    Each round empties a main or fills a host, so no pair of a main and a host comes twice.
    """
    left, chosen = list(loads), []
    missing = dict(sorted(given.items()))
    while any(missing.values()):
        host, main = max(missing, key=missing.__getitem__), left.index(max(left))
        count = min(missing[host], left[main])
        chosen.append((host, main, count))
        missing[host] -= count
        left[main] -= count
    return chosen


MOONEP = Strategy(
    name="moonep",
    summary="MoonEP: every rank the mean; each takes replicas of one overloaded rank only",
    kind=Solves(solve),
    num_slots=lambda asked, mains_per_rank: mains_per_rank,
)
