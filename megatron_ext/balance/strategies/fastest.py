"""Objective `time`: of one planner's plans at several tolerances, the fastest by modelled time.

Candidates are no balancing and the plans for `TOLERANCES`. One rule skips some of them. The
tightest tolerance comes first, then the others from loose to tight. The rule assumes that a plan's
busiest rank is just within the tolerance, and that the busiest sender sends at least half as much
as in every looser plan.

- A tolerance is skipped if the least time of its plan is not below the fastest time so far. The
  least time counts half of the most sends so far, at least 1, and the fewest tokens that may have
  to be sent (`LayerCosts.least_time`). If the tightest tolerance is skipped, all are.
- The first plan on the way that misses its tolerance is the last one planned, because a tighter
  tolerance asks for even more.

The fastest of the planned candidates is chosen; of equally fast candidates the first, with no
balancing before all others. Where an assumption is wrong, a skipped plan may be faster:
docs/decisions/022 has the frequency and the loss.

The quota planner on the CPU does all of that in one native op (`solve_fastest`). On a device one
launch plans all tolerances, and the rule is applied to their plans, by tensors: both ways choose
the same plan. Legend: R ranks, E logical experts, S slots per rank, B loads, T tolerances.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import torch
from torch import Tensor

from megatron_ext.balance.batches import pick_plans
from megatron_ext.balance.layout import ExpertLayout
from megatron_ext.balance.plan import BalancePlan
from megatron_ext.balance.plan_metrics import rank_sends
from megatron_ext.balance.strategies import none, quota
from megatron_ext.balance.strategies.strategy import PlanSettings, Solver
from megatron_ext.ops import load_library

TOLERANCES = (2.0, 1.0, 0.5, 0.3, 0.2, 0.12, 0.08, 0.05, 0.03, 0.02, 0.01, 0.005, 0.0)
"""Tolerances from loose to tight; no balancing at all comes before them."""

_MILLION = 1_000_000
_PPM = tuple(round(tolerance * _MILLION) for tolerance in TOLERANCES)


def solve(load: Tensor, layout: ExpertLayout, settings: PlanSettings) -> BalancePlan:
    """Plan for the least time with the quota planner; `settings.tolerance` counts for nothing.

    The costs of the layer must be given.
    """
    costs = settings.costs
    assert costs is not None, "planning for time needs costs"
    if load.device.type != "cpu":
        return solve_by_tensors(load, layout, settings)
    load_library()
    quota, experts_in_slots = torch.ops.megatron_ext.solve_fastest(
        load,
        layout.slots,
        layout.nvlink_domain,
        _PPM,
        settings.min_quota,
        *costs.picoseconds,
    )
    return BalancePlan(layout, quota, experts_in_slots)


def solve_by_tensors(load: Tensor, layout: ExpertLayout, settings: PlanSettings) -> BalancePlan:
    """Plan as `solve` does, bit by bit, with all candidates at once and without asking the host."""
    load_library()
    quota, experts_in_slots = torch.ops.megatron_ext.solve_ladder(
        load, layout.slots, layout.nvlink_domain, _PPM, settings.min_quota
    )
    return _choose(load, BalancePlan(layout, quota, experts_in_slots), settings)


def solve_with(
    load: Tensor, layout: ExpertLayout, settings: PlanSettings, *, solve_one: Solver
) -> BalancePlan:
    """Plan for the least time, by the module's rule, with a planner that takes one tolerance.

    Each load of a batch gets its own tolerance. The costs of the layer must be given.
    """
    plans = [
        solve_one(load, layout, dataclasses.replace(settings, tolerance=tolerance))
        for tolerance in TOLERANCES
    ]
    ladder = BalancePlan(
        plans[0].layout,
        torch.stack([plan.quota for plan in plans], -3),
        torch.stack([plan.experts_in_slots for plan in plans], -3),
    )
    return _choose(load, ladder, settings)


def solver_for_time(solve_one: Solver) -> Solver:
    """Return a solver for the least time, from `solve_one`, which plans with one tolerance."""
    if solve_one in (solve, quota.solve):
        return solve
    return partial(solve_with, solve_one=solve_one)


def _choose(load: Tensor, ladder: BalancePlan, settings: PlanSettings) -> BalancePlan:
    """Choose by the module's rule, from a plan for each of `TOLERANCES`, [..., T, E, R]."""
    costs = settings.costs
    assert costs is not None, "planning for time needs costs"
    home = none.solve(load, ladder.layout, settings)
    targets = _target_loads(load)
    each = load.unsqueeze(-3)
    times = costs.layer_time(each, ladder)
    sends = rank_sends(ladder).amax(-1)
    misses = ladder.rank_loads().amax(-1) > targets
    # Without the experts' way, which depends on what was planned before.
    floors = costs.least_time(each, torch.zeros_like(sends), targets, ladder.layout)
    expert_ps = costs.picoseconds[0]

    best_time = costs.layer_time(load, home)
    most_sends = torch.ones_like(best_time)
    chosen = torch.full_like(best_time, -1)
    goes_on = torch.ones_like(best_time, dtype=torch.bool)
    tightest = len(TOLERANCES) - 1
    for i in (tightest, *range(tightest)):
        is_worth_it = floors[..., i] + (most_sends + 1) // 2 * expert_ps < best_time
        is_tried = goes_on & is_worth_it
        is_best = is_tried & (times[..., i] < best_time)
        best_time = best_time.where(~is_best, times[..., i])
        chosen = chosen.masked_fill(is_best, i)
        if i == tightest:
            goes_on = is_tried
        else:
            goes_on = goes_on & ~(is_tried & misses[..., i])
            most_sends = most_sends.where(~is_tried, torch.maximum(most_sends, sends[..., i]))

    def take(of_all: Tensor) -> Tensor:
        index = chosen.clamp(min=0)[..., None, None, None]
        return of_all.take_along_dim(index, -3).squeeze(-3)

    of_ladder = BalancePlan(ladder.layout, take(ladder.quota), take(ladder.experts_in_slots))
    return pick_plans(chosen >= 0, of_ladder, home)


def _target_loads(load: Tensor) -> Tensor:
    """The busiest rank's load of each tolerance, rounded as the quota planner does: [..., T]."""
    total, ranks = load.sum((-2, -1)), load.shape[-2]
    mean = total // ranks + (total % ranks != 0)
    targets = []
    for ppm in _PPM:
        whole, part = ranks * _MILLION, _MILLION + ppm
        # In two steps, because the product leaves int64 first. All on one rank is always allowed.
        share = total // whole * part + total % whole * part // whole if part < whole else total
        targets.append(torch.maximum(share, mean))
    return torch.stack(targets, -1)
