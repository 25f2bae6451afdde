"""TAOT: ranks with room choose experts, by load first, then nearness, then optimal transport.

Legend: D ranks of an NVLink domain, M mains per rank, X experts that are to give some load away.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_ext.balance.batches import plan_each
from megatron_ext.balance.layout import ExpertLayout
from megatron_ext.balance.plan import BalancePlan
from megatron_ext.balance.strategies import none
from megatron_ext.balance.strategies.strategy import PlanSettings, Solves, Strategy

RANKS_PER_NODE = 8
"""Neighbours in the EP group that count as one machine."""
FAR_COST = 3.0
"""Cost of moving an expert to another machine, as a multiple of that within one."""
ROUNDS = 50
"""Sinkhorn-Knopp's alternations of rows and columns."""
LEAST = 1e-8
"""What Sinkhorn-Knopp divides by at least."""
HINT = 0.1
"""Weight of the transport's hint beside nearness."""


def solve(load: Tensor, layout: ExpertLayout, settings: PlanSettings) -> BalancePlan:
    """Plan each NVLink domain by itself, in rounds of at most one new replica a rank.

    What a rank has above the mean is to move; its coldest experts stay as long as they fit. A rank
    below the mean has room. In a round each rank with room asks for the expert with the highest
    score. An expert that several ask for goes to the one where its score is highest, and the others
    ask again. The replica takes all that is to move and fits. There are as many rounds as slots.

    The score is a sum: the assignments that would move; the mean divided by the mains of a rank,
    or a third of that on another machine than the home's; and a tenth of the same mean times the
    part of the home's excess that optimal transport ships to the host (`_shares`).

    The plan cannot be worse than no balancing: no rank gets above the mean. Loads are planned on
    the CPU, one after the other.

    >>> layout = ExpertLayout(num_experts=4, ep_size=2, slots=1, nvlink_domain=2)
    >>> solve(torch.tensor([[6, 1, 1, 0], [4, 2, 1, 1]]), layout, PlanSettings()).quota.tolist()
    [[5, 5], [3, 0], [0, 2], [0, 1]]

    Source: TAOT (arXiv:2608.03676), its abstract and its authors' description, and a public copy of
    its implementation (`offloading_planner.py` in Zachary-wW/Loong-Megatron at 84aea31). Differs in
    that counts are whole (the mean is rounded up for who gives, down for who takes), numbers are
    float64, a piece is not smaller than `min_quota`, and replicas stay in the NVLink domain. Loads
    are split over sources as for all strategies, which leaves out the last of its three phases.
    """
    return plan_each(load, layout, lambda one: _plan_one(one, layout, settings))


def _plan_one(load: Tensor, layout: ExpertLayout, settings: PlanSettings) -> BalancePlan:
    """Plan one load, int64 [R, E]."""
    expert_load = load.sum(0).view(layout.ep_size, -1).numpy()
    quota = none.solve(load, layout, settings).quota
    held: list[list[int]] = [[] for _ in range(layout.ep_size)]
    for first in range(0, layout.ep_size, layout.nvlink_domain):
        ranks = np.arange(first, first + layout.nvlink_domain)
        node = ranks // RANKS_PER_NODE
        for local, t, count in _match(expert_load[ranks], node, layout.slots, settings.min_quota):
            expert, host = first * layout.mains_per_rank + local, first + t
            held[host].append(expert)
            quota[expert, layout.home_rank(expert)] -= count
            quota[expert, host] += count
    rows = [row + [-1] * (layout.slots - len(row)) for row in held]
    experts_in_slots = torch.tensor(rows, dtype=torch.int32).view(layout.ep_size, layout.slots)
    return BalancePlan(layout, quota, experts_in_slots)


def _match(
    expert_load: NDArray[np.int64], node: NDArray[np.int64], slots: int, min_quota: int
) -> list[tuple[int, int, int]]:
    """Choose a domain's replicas: expert, rank and assignments of each, by rounds.

    Loads of the mains are [D, M], machines of the ranks [D]; there are as many rounds as slots.
    """
    num_ranks, mains = expert_load.shape
    rank_load = expert_load.sum(1)
    mean = int(rank_load.sum()) / num_ranks
    whole = int(rank_load.sum()) // num_ranks
    room = np.maximum(whole - rank_load, 0)
    spill = _spill(expert_load, -(-int(rank_load.sum()) // num_ranks)).flatten()
    expert = np.flatnonzero(spill)
    home, spill = expert // mains, spill[expert]
    hint = _shares(np.maximum(rank_load - mean, 0.0), np.maximum(mean - rank_load, 0.0), node)
    near = np.where(node[:, None] == node, 1.0, 1.0 / FAR_COST)
    preference = mean / mains * (near + HINT * hint)[home]

    chosen: list[tuple[int, int, int]] = []
    for _ in range(slots):
        asks = np.ones(num_ranks, dtype=bool)
        while True:
            piece = np.minimum(spill[:, None], room)
            fits = (piece >= min_quota) & asks
            hosts = np.flatnonzero(fits.any(0))
            if len(hosts) == 0:
                break
            score = np.where(fits, piece + preference, -math.inf)
            asked = score.argmax(0)
            for x in np.unique(asked[hosts]):
                rivals = hosts[asked[hosts] == x]
                t = rivals[score[x, rivals].argmax()]
                chosen.append((int(expert[x]), int(t), int(piece[x, t])))
                spill[x] -= piece[x, t]
                room[t] -= piece[x, t]
                asks[t] = False
    return chosen


def _spill(expert_load: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    """Return what each main gives away so that its rank keeps `most`, the coldest first: [D, M]."""
    order = expert_load.argsort(1, kind="stable")
    above = np.maximum(np.take_along_axis(expert_load, order, 1).cumsum(1) - most, 0)
    spill = np.empty_like(expert_load)
    np.put_along_axis(spill, order, np.diff(above, axis=1, prepend=0), 1)
    return spill


def _shares(excess: NDArray[Any], room: NDArray[Any], node: NDArray[np.int64]) -> NDArray[Any]:
    """Return the part of each rank's excess that optimal transport ships to each rank, [D, D].

    The transport is entropy-regularized, by `FAR_COST`; shipping costs 1 within a machine and
    `FAR_COST` between two. Excess and room are float64 [D], with equal sums. Ranks of one machine
    have equal parts, to the bit, so that rounding breaks no ties.
    """
    kernel = np.where(node[:, None] == node, math.exp(-1 / FAR_COST), math.exp(-1))
    of_host = np.ones_like(room)
    for _ in range(ROUNDS):
        row = np.maximum(_times(kernel, of_host), LEAST)
        of_host = room / np.maximum(_times(kernel, excess / row), LEAST)
    return kernel * of_host / row[:, None]


def _times(kernel: NDArray[Any], factor: NDArray[Any]) -> NDArray[Any]:
    """Multiply a symmetric matrix and a vector, row after row: so all machines add alike."""
    return (kernel * factor[:, None]).sum(0)


TAOT = Strategy(
    name="taot",
    summary="TAOT: ranks with room choose experts by load, nearness and optimal transport",
    kind=Solves(solve),
)
