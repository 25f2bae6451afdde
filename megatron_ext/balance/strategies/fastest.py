"""The quota planner at the tolerance that makes each load's modelled layer time least."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from megatron_ext.balance.layout import ExpertLayout
from megatron_ext.balance.plan import BalancePlan, pick_plans
from megatron_ext.balance.strategies import none, quota
from megatron_ext.balance.strategies.strategy import PlanSettings, Solver, Strategy

TOLERANCES = (0.0, 0.005, 0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.2, 0.3, 0.5, 1.0, 2.0)
"""The tolerances that are compared; no balancing at all is compared too."""


def fastest_plan(
    load: Tensor, layout: ExpertLayout, settings: PlanSettings, *, solve_one: Solver
) -> BalancePlan:
    """Plan with the tolerance that makes the modelled time of the layer least.

    Args:
        load: Assignments, int64 [R, E] or [B, R, E]; each load gets its own tolerance.
        layout: Where experts and slots are.
        settings: What is asked for; `costs` of this layer on this machine must be given.
        solve_one: Plans with one tolerance.

    Returns:
        The plan; of equally fast ones that with least to send.
    """
    costs = settings.costs
    assert costs is not None, "planning for time needs costs"
    best = none.solve(load, layout, settings)
    best_time = costs.layer_time(load, best)
    # From loose to tight, and only what is faster counts.
    for tolerance in reversed(TOLERANCES):
        plan = solve_one(load, layout, dataclasses.replace(settings, tolerance=tolerance))
        time = costs.layer_time(load, plan)
        best = pick_plans(time < best_time, plan, best)
        best_time = torch.minimum(time, best_time)
    return best


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
    return fastest_plan(load, layout, settings, solve_one=quota.solve)


TIME = Strategy(
    name="time",
    summary="the quota planner at the tolerance that makes the layer fastest",
    kind="planner",
    solve=solve,
)
