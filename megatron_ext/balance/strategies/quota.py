"""The quota planner: a search over the busiest rank's load with a greedy test, all in integers.

It promises a legal plan that is never worse than no balancing. Whether it gets within the tolerance
depends on the greedy test, which is a heuristic: with one or two slots it can stop a few percent
above what is possible.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ext.balance import reference
from megatron_ext.balance.layout import ExpertLayout
from megatron_ext.balance.plan import BalancePlan
from megatron_ext.balance.strategies.strategy import Strategy


def solve(load: Tensor, layout: ExpertLayout, *, tolerance: float, min_quota: int) -> BalancePlan:
    """Plan for the lowest busiest-rank load, from the tolerance up, that the greedy test reaches.

    Source: UltraEP, Algorithm 1 (SolveReplication); `reference.solve_quota`, which this equals bit
    by bit, lists the differences.
    """
    ranks, experts = layout.ep_size, layout.num_experts
    results = [
        reference.solve_quota(
            one,
            num_slots=layout.slots,
            nvlink_domain=layout.nvlink_domain,
            tolerance_ppm=round(tolerance * 1e6),
            min_quota=min_quota,
        )
        for one in load.reshape(-1, ranks, experts).tolist()
    ]
    batch = load.shape[:-2]
    quota = torch.tensor([quota for quota, _ in results], dtype=torch.int64)
    slots = torch.tensor([slots for _, slots in results], dtype=torch.int32)
    return BalancePlan(
        layout,
        quota.view(*batch, experts, ranks).to(load.device),
        slots.view(*batch, ranks, layout.slots).to(load.device),
    )


QUOTA = Strategy(name="quota", kind="planner", solve=solve)
