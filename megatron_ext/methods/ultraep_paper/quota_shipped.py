"""UltraEP's planner with the settings and the search that its authors ship, to compare with."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ext.balance.layout import ExpertLayout
from megatron_ext.balance.plan import BalancePlan
from megatron_ext.balance.strategies.strategy import PlanSettings, Solves, Strategy
from megatron_ext.ops import load_library

MIN_QUOTA = 1024
"""Fewest assignments of a replica in their search, unless `balance.min_quota` is set."""


def solve(load: Tensor, layout: ExpertLayout, settings: PlanSettings) -> BalancePlan:
    """Plan each NVLink domain by itself, as UltraEP's release does.

    The main of an expert with a load keeps at least one assignment. Three tests come first, of the
    mean and `tolerance`, and of 1 % and 2 % of the busiest rank's load more. No replica has less
    than an equal part of what its rank still has to shed then, shared among the ranks that can take
    some. If no test succeeds, a search from the mean on has replicas of at least 1,024 assignments.
    A `min_quota` above 1 takes the place of 1,024, and holds in the tests, too. The result equals
    `solve_shipped` in `tests/reference/paper.py` bit by bit.

    Source: UltraEP, release 1.0.0 (Dots-Infra/UltraEP at 94cab09); `solve_shipped` lists the
    differences.
    """
    load_library()
    asked = settings.min_quota
    quota, experts_in_slots = torch.ops.megatron_ext.solve_shipped(
        load.cpu(),
        layout.slots,
        layout.nvlink_domain,
        round(settings.tolerance * 1e6),
        asked,
        asked if asked > 1 else MIN_QUOTA,
    )
    return BalancePlan(layout, quota.to(load.device), experts_in_slots.to(load.device))


QUOTA_SHIPPED = Strategy(
    name="quota_shipped",
    summary="UltraEP's planner as its authors ship it",
    kind=Solves(solve),
)
