"""The quota planner: a search over the busiest rank's load with a greedy test, all in integers.

It promises a legal plan that is never worse than no balancing. Whether it gets within the tolerance
depends on the greedy test, which is a heuristic: with one or two slots it can stop a few percent
above what is possible.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ext.balance.layout import ExpertLayout
from megatron_ext.balance.plan import BalancePlan
from megatron_ext.balance.strategies.strategy import Strategy
from megatron_ext.ops import load_library


def solve(load: Tensor, layout: ExpertLayout, *, tolerance: float, min_quota: int) -> BalancePlan:
    """Plan for the lowest busiest-rank load, from the tolerance up, that the greedy test reaches.

    Source: UltraEP, Algorithm 1 (SolveReplication); `reference.solve_quota`, which this equals bit
    by bit, lists the differences.
    """
    load_library()
    # There is no planner on the device yet: a load on a GPU is planned by the host.
    quota, slots = torch.ops.megatron_ext.solve_quota(
        load.cpu(), layout.slots, layout.nvlink_domain, round(tolerance * 1e6), min_quota
    )
    return BalancePlan(layout, quota.to(load.device), slots.to(load.device))


QUOTA = Strategy(name="quota", kind="planner", solve=solve)
