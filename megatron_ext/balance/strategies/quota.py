"""The quota planner: within the tolerance whenever it can, with few replicas and few sends a rank.

`csrc/include/megatron_ext/planner/search.h` describes how it plans; `solve_quota` of
`tests/reference/` specifies its result, bit by bit. It promises a legal plan that is never worse
than no balancing, after bounded work for every load. Within the tolerance it needs no more replicas
than Algorithm 1 of UltraEP for the same threshold. Where it misses the tolerance, an NVLink domain
never ends worse than by that algorithm. With tolerance 0 it needs no more replicas than MoonEP's
exact fill.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ext.balance.layout import ExpertLayout
from megatron_ext.balance.plan import BalancePlan
from megatron_ext.balance.strategies.strategy import PlanSettings, Solves, Strategy
from megatron_ext.ops import load_library


def solve(load: Tensor, layout: ExpertLayout, settings: PlanSettings) -> BalancePlan:
    """Plan for a busiest rank within the tolerance, else for the least found."""
    load_library()
    quota, experts_in_slots = torch.ops.megatron_ext.solve_quota(
        load,
        layout.slots,
        layout.nvlink_domain,
        round(settings.tolerance * 1e6),
        settings.min_quota,
    )
    return BalancePlan(layout, quota, experts_in_slots)


QUOTA = Strategy(
    name="quota",
    summary="the quota planner: within the tolerance at least cost",
    kind=Solves(solve),
    reaches=lambda asked: asked,
    plans_on_device=True,
)
