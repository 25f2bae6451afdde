"""The quota planner at the tolerance that makes each load's modelled layer time least."""

from __future__ import annotations

from torch import Tensor

from megatron_ext.balance.costs import fastest_plan
from megatron_ext.balance.layout import ExpertLayout
from megatron_ext.balance.plan import BalancePlan
from megatron_ext.balance.strategies.quota import QUOTA
from megatron_ext.balance.strategies.strategy import PlanSettings, Strategy


def solve(load: Tensor, layout: ExpertLayout, settings: PlanSettings) -> BalancePlan:
    """Plan for the least time; `settings.tolerance` counts for nothing.

    Raises:
        ValueError: If the costs of the layer are not given.
    """
    if settings.costs is None:
        raise ValueError(
            "strategy 'time' needs the costs of the layer: bytes of an expert, link bandwidth and "
            "time of an assignment"
        )
    return fastest_plan(
        load, layout, settings.costs, strategy=QUOTA.name, min_quota=settings.min_quota
    )


TIME = Strategy(
    name="time",
    summary="the quota planner at the tolerance that makes the layer fastest",
    kind="planner",
    solve=solve,
)
