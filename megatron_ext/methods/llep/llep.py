"""LLEP: experts that do not fit into their home rank's capacity spill to the least loaded ranks.

Legend: R ranks of the EP group, E logical experts, S slots per rank.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_ext.balance.batches import plan_each
from megatron_ext.balance.layout import ExpertLayout
from megatron_ext.balance.plan import BalancePlan
from megatron_ext.balance.strategies.strategy import PlanSettings, Solves, Strategy
from megatron_ext.config import LlepSettings


def solve(load: Tensor, layout: ExpertLayout, settings: PlanSettings) -> BalancePlan:
    """Load ranks up to `alpha` times the mean, and spill the load above to other ranks.

    The hottest expert comes first. Its home rank takes as much of the expert's load as fits beside
    the rank's other experts; the rest goes to the least loaded ranks of the NVLink domain that have
    a free slot, in pieces of at least `min_tokens_per_gemm`; what is left may be less. Load for
    which no rank has room goes to the least loaded of the home rank, the expert's other ranks and
    the ranks with a free slot. Loads are planned on the CPU, one after the other.

    The plan cannot be worse than no balancing. A piece ends within the capacity, and the busiest
    rank is above the capacity when anything is moved. A rank that takes load without room ends with
    no more than the home rank would have with that load.

    >>> layout = ExpertLayout(num_experts=4, ep_size=2, slots=1, nvlink_domain=2)
    >>> load = torch.tensor([[6, 1, 1, 0], [4, 2, 1, 1]])
    >>> exact = LlepSettings(alpha=1.0)
    >>> solve(load, layout, PlanSettings(sections=(exact,))).quota.tolist()
    [[5, 5], [3, 0], [0, 2], [0, 1]]

    Source: LLEP (ICML 2026), `compute_llep_lpt_plan` (SalesforceAIResearch/LeastLoadedEP at
    0349746). Here a rank takes no more foreign experts than it has slots, no piece is smaller than
    `min_quota`, load without room may go home, and there is no threshold of imbalance (1.3 in its
    example, off by default) below which nothing is planned.
    """
    return plan_each(load, layout, lambda one: _spill(one.sum(0).tolist(), layout, settings))


def _spill(loads: list[int], layout: ExpertLayout, settings: PlanSettings) -> BalancePlan:
    """Plan one load, given as assignments of each expert."""
    ranks, mains, domain = layout.ep_size, layout.mains_per_rank, layout.nvlink_domain
    own = settings.section(LlepSettings)
    capacity = math.floor(own.alpha * sum(loads) / ranks)
    least = settings.min_quota
    # A rank's load so far, and the load that its own later experts would add to it.
    planned = [sum(loads[rank * mains : (rank + 1) * mains]) for rank in range(ranks)]
    quota = torch.zeros(layout.num_experts, ranks, dtype=torch.int64)
    held: list[list[int]] = [[] for _ in range(ranks)]

    for expert in sorted(range(len(loads)), key=lambda expert: -loads[expert]):
        home = expert // mains
        planned[home] -= loads[expert]
        given = {home: min(loads[expert], max(0, capacity - planned[home]))}
        rest = loads[expert] - given[home]
        first = home // domain * domain
        hosts = [rank for rank in range(first, first + domain) if len(held[rank]) < layout.slots]
        hosts = [rank for rank in hosts if rank != home]
        while rest >= least and hosts:
            host = min(hosts, key=planned.__getitem__)
            piece = min(rest, capacity - planned[host])
            if piece < least or piece < min(rest, own.min_tokens_per_gemm):
                break
            given[host] = piece
            rest -= piece
            hosts.remove(host)
        if rest > 0:
            takers = [*given, *(hosts if rest >= least else [])]
            taker = min(takers, key=lambda rank: planned[rank] + given.get(rank, 0))
            given[taker] = given.get(taker, 0) + rest
        for rank, count in given.items():
            planned[rank] += count
            quota[expert, rank] = count
            if rank != home:
                held[rank].append(expert)

    rows = [row + [-1] * (layout.slots - len(row)) for row in held]
    experts_in_slots = torch.tensor(rows, dtype=torch.int32).view(ranks, layout.slots)
    return BalancePlan(layout, quota, experts_in_slots)


LLEP = Strategy(
    name="llep",
    summary="LLEP: what is above `alpha` times the mean spills to the least loaded ranks",
    kind=Solves(solve),
)
