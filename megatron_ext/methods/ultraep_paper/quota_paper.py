"""Algorithm 1 of UltraEP as published: the baseline of the quota planner.

The algorithm bisects the busiest rank's load with a greedy test: overloaded ranks shed load to the
roomiest ranks. With one or two slots it can stop a few percent above the best plan.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ext.balance.layout import ExpertLayout
from megatron_ext.balance.plan import BalancePlan
from megatron_ext.balance.strategies.strategy import PlanSettings, Solves, Strategy
from megatron_ext.ops import load_library


def solve(load: Tensor, layout: ExpertLayout, settings: PlanSettings) -> BalancePlan:
    """Plan for the lowest busiest-rank load, from the tolerance up, that the greedy test reaches.

    The result equals `solve_paper` in `tests/reference/paper.py` bit by bit.

    Source: UltraEP, Algorithm 1 (SolveReplication); `solve_paper` lists the differences.
    """
    load_library()
    quota, experts_in_slots = torch.ops.megatron_ext.solve_paper(
        load.cpu(),
        layout.slots,
        layout.nvlink_domain,
        round(settings.tolerance * 1e6),
        settings.min_quota,
    )
    return BalancePlan(layout, quota.to(load.device), experts_in_slots.to(load.device))


QUOTA_PAPER = Strategy(
    name="quota_paper",
    summary="Algorithm 1 of UltraEP as published",
    kind=Solves(solve),
)
