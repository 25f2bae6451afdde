"""The quota planner without any slack: every rank computes the mean, rounded down or up.

That is always possible with as many slots as mains on every rank. An overloaded rank fills another
rank completely with replicas of its own mains, which are no more than the other rank's slots; so
rank after rank becomes even.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

from megatron_ext.balance.layout import ExpertLayout
from megatron_ext.balance.plan import BalancePlan
from megatron_ext.balance.strategies import quota
from megatron_ext.balance.strategies.strategy import PlanSettings, Solves, Strategy


def solve(load: Tensor, layout: ExpertLayout, settings: PlanSettings) -> BalancePlan:
    """Plan for busiest - idlest <= 1, with any tolerance.

    With several NVLink domains that holds in the hottest domain, and the other domains need only
    come down to its load. `min_quota` above 1 can make it impossible; then the plan comes as close
    as it can.

    Source: MoonEP, for the slots that suffice.
    """
    return quota.solve(load, layout, dataclasses.replace(settings, tolerance=0.0))


EXACT = Strategy(
    name="exact",
    summary="the quota planner without slack: every rank computes the mean (MoonEP)",
    kind=Solves(solve),
    num_slots=lambda asked, mains_per_rank: mains_per_rank,
    reaches=lambda asked: 0.0,
    plans_on_device=True,
)
