"""LLEP: experts that do not fit into their home rank's capacity spill to the least loaded ranks.

Legend: R ranks of the EP group, E logical experts, S slots per rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from megatron_ext.balance.layout import ExpertLayout
from megatron_ext.balance.plan import BalancePlan, plan_each
from megatron_ext.balance.strategies.strategy import PlanSettings, Solves, Strategy
from megatron_ext.config import Section, setting


@dataclass(kw_only=True, slots=True)
class LlepSettings(Section):
    """How much load LLEP leaves on a rank, and the least that it moves."""

    NAME: ClassVar[str] = "balance.llep"

    alpha: float = setting(1.1, least=1, most=1_000_000)
    """Capacity of a rank, as a multiple of the mean rank load: load above it spills to other
    ranks."""

    min_tokens_per_gemm: int = setting(1024, least=1)
    """Fewest assignments that are moved to another rank in one piece."""


def solve(load: Tensor, layout: ExpertLayout, settings: PlanSettings) -> BalancePlan:
    """Load ranks up to `alpha` times the mean, and spill what is above.

    The hottest expert comes first. Its home rank takes what it has room for, beside its other
    experts; the rest goes to the least loaded ranks of the NVLink domain that have a free slot, in
    pieces of at least `min_tokens_per_gemm` (and `min_quota`). Load that no rank has room for goes
    to the least loaded rank that can take it all the same. Planning is on the CPU, one load after
    the other.

    The plan cannot be worse than no balancing. A piece ends within the capacity, and the busiest
    rank is above the capacity when anything is moved. Load without room goes to a rank that then
    has no more than the home rank would have with it.

    >>> layout = ExpertLayout(num_experts=4, ep_size=2, slots=1, nvlink_domain=2)
    >>> load = torch.tensor([[6, 1, 1, 0], [4, 2, 1, 1]])
    >>> small = LlepSettings(alpha=1.0, min_tokens_per_gemm=2)
    >>> solve(load, layout, PlanSettings(sections=(small,))).quota.tolist()
    [[5, 5], [3, 0], [0, 2], [0, 1]]

    Source: LLEP (ICML 2026), abstract, and the settings of its published test; differs from it in
    that a rank takes no more foreign experts than it has slots, that no piece is smaller than the
    least, that load without room may go home, and that there is no further threshold of imbalance
    (1.3 in that test) below which nothing is planned.
    """
    return plan_each(load, layout, lambda one: _spill(one.sum(0).tolist(), layout, settings))


def _spill(loads: list[int], layout: ExpertLayout, settings: PlanSettings) -> BalancePlan:
    """Plan one load, given as assignments of each expert."""
    ranks, mains, domain = layout.ep_size, layout.mains_per_rank, layout.nvlink_domain
    own = settings.section(LlepSettings)
    capacity = math.floor(own.alpha * sum(loads) / ranks)
    least = max(own.min_tokens_per_gemm, settings.min_quota)
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
            if piece < least:
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
    slots = torch.tensor(rows, dtype=torch.int32).view(ranks, layout.slots)
    return BalancePlan(layout, quota, slots)


LLEP = Strategy(
    name="llep",
    summary="LLEP: what is above `alpha` times the mean spills to the least loaded ranks",
    kind=Solves(solve),
    settings=LlepSettings,
)
