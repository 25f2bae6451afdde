"""The plan that makes each load's modelled layer time least: one planner at several tolerances.

Candidates are no balancing, then the plans for `TOLERANCES` from loose to tight. The fastest is
chosen, of equally fast ones the first, which has least to send. Which candidates count is one rule,
by which a host leaves tries out: a candidate is the last one if

- it misses its own tolerance, because then tighter ones ask for what was not found; or
- nothing that follows can be worth it, taking for granted that tighter plans give the busiest
  sender no less to send: its sends, with the least tokens and the mean load that any plan has
  (`LayerCosts.least_time`), take no less time than the fastest so far.

The first is no more than likely, and so is what the second takes for granted: a plan behind the
last candidate may be faster (docs/decisions/020 says by how much).

The quota planner on the CPU does all of that in one native op (`solve_fastest`). On a device all
candidates are planned by one launch and the rule is applied to them, by tensors: both choose the
same plan. Legend: R ranks, E logical experts, S slots per rank, B loads, T tolerances.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import torch
from torch import Tensor

from megatron_ext.balance.layout import ExpertLayout
from megatron_ext.balance.metrics import mean_loads, rank_sends
from megatron_ext.balance.plan import BalancePlan
from megatron_ext.balance.strategies import none, quota
from megatron_ext.balance.strategies.strategy import PlanSettings, Solver, Strategy
from megatron_ext.ops import load_library

TOLERANCES = (2.0, 1.0, 0.5, 0.3, 0.2, 0.12, 0.08, 0.05, 0.03, 0.02, 0.01, 0.005, 0.0)
"""From loose to tight; no balancing at all comes before them."""

_MILLION = 1_000_000
_PPM = tuple(round(tolerance * _MILLION) for tolerance in TOLERANCES)


def solve(load: Tensor, layout: ExpertLayout, settings: PlanSettings) -> BalancePlan:
    """Plan for the least time with the quota planner; `settings.tolerance` counts for nothing.

    Raises:
        ValueError: If the costs of the layer are not given.
    """
    costs = settings.costs
    if costs is None:
        raise ValueError(
            "strategy 'time' needs the costs of the layer: bytes of an expert, link bandwidth and "
            "time of an assignment"
        )
    if load.device.type != "cpu":
        return solve_by_tensors(load, layout, settings)
    load_library()
    quota, slots = torch.ops.megatron_ext.solve_fastest(
        load,
        layout.slots,
        layout.nvlink_domain,
        _PPM,
        settings.min_quota,
        *costs.picoseconds,
    )
    return BalancePlan(layout, quota, slots)


def solve_by_tensors(load: Tensor, layout: ExpertLayout, settings: PlanSettings) -> BalancePlan:
    """Plan as `solve` does, bit by bit, with all candidates at once and without asking the host."""
    load_library()
    quota, slots = torch.ops.megatron_ext.solve_ladder(
        load, layout.slots, layout.nvlink_domain, _PPM, settings.min_quota
    )
    return _choose(load, BalancePlan(layout, quota, slots), settings)


def solve_with(
    load: Tensor, layout: ExpertLayout, settings: PlanSettings, *, solve_one: Solver
) -> BalancePlan:
    """Plan for the least time with another planner.

    Args:
        load: Assignments, int64 [R, E] or [B, R, E]; each load gets its own tolerance.
        layout: Where experts and slots are.
        settings: What is asked for; `costs` of this layer on this machine must be given.
        solve_one: Plans with one tolerance.

    Returns:
        The plan; of equally fast ones that of the loosest tolerance.
    """
    plans = [
        solve_one(load, layout, dataclasses.replace(settings, tolerance=tolerance))
        for tolerance in TOLERANCES
    ]
    ladder = BalancePlan(
        plans[0].layout,
        torch.stack([plan.quota for plan in plans], -3),
        torch.stack([plan.slots for plan in plans], -3),
    )
    return _choose(load, ladder, settings)


def solver_for_time(solve_one: Solver) -> Solver:
    """Return what plans for the least time where `solve_one` plans with one tolerance."""
    if solve_one in (solve, quota.solve):
        return solve
    return partial(solve_with, solve_one=solve_one)


def _choose(load: Tensor, ladder: BalancePlan, settings: PlanSettings) -> BalancePlan:
    """Choose by the module's rule.

    Args:
        load: Int64 [..., R, E].
        ladder: A plan for each of `TOLERANCES`: quota [..., T, E, R], slots [..., T, R, S].
        settings: With costs.
    """
    costs = settings.costs
    assert costs is not None, "planning for time needs costs"
    home = none.solve(load, ladder.layout, settings)
    plans = BalancePlan(
        ladder.layout,
        torch.cat([home.quota.unsqueeze(-3), ladder.quota], -3),
        torch.cat([home.slots.unsqueeze(-3), ladder.slots], -3),
    )
    each = load.unsqueeze(-3)
    times = costs.layer_time(each, plans)
    fastest_yet = times.cummin(-1).values
    sends = rank_sends(plans).amax(-1)
    is_last = costs.least_time(each, sends, plans.layout) >= fastest_yet
    is_last[..., 1:] |= _misses(load, ladder)
    num_last = is_last.cumsum(-1)
    is_tried = num_last - is_last.long() == 0
    chosen = times.where(is_tried, torch.iinfo(times.dtype).max).argmin(-1)
    chosen = chosen[..., None, None, None]

    def take(of_all: Tensor) -> Tensor:
        return of_all.take_along_dim(chosen, -3).squeeze(-3)

    return BalancePlan(plans.layout, take(plans.quota), take(plans.slots))


def _misses(load: Tensor, ladder: BalancePlan) -> Tensor:
    """Whether the busiest rank is above the tolerance, rounded as planners do: bool [..., T]."""
    ranks = load.shape[-2]
    total = load.sum((-2, -1))
    mean = mean_loads(load)
    asked = []
    for ppm in _PPM:
        whole, part = ranks * _MILLION, _MILLION + ppm
        # In two steps, because the product leaves int64 first. All on one rank is always allowed.
        share = total // whole * part + total % whole * part // whole if part < whole else total
        asked.append(torch.maximum(share, mean))
    return ladder.rank_loads().amax(-1) > torch.stack(asked, -1)


TIME = Strategy(
    name="time",
    summary="the quota planner at the tolerance that makes the layer fastest",
    kind="planner",
    solve=solve,
)
