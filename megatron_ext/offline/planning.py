"""Plans for many loads, and the numbers by which they are compared."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron_ext.balance.bounds import lower_bound
from megatron_ext.balance.costs import LayerCosts
from megatron_ext.balance.metrics import home_loads, imbalance, max_fanout, max_rank_sends
from megatron_ext.balance.plan import BalancePlan, solve


@dataclass(frozen=True)
class Planned:
    """A plan and what was measured of it."""

    plan: BalancePlan
    measured: dict[str, float]
    """Imbalances and their lower bound as ratios to the mean. `solve_us`: microseconds of the one
    call of `solve` that made the plan, measured around it, what it does in Python included."""


def plan_loads(
    loads: Tensor,
    settings: dict[str, Any],
    costs: LayerCosts | None = None,
    *,
    on_load: Callable[[int], object] = lambda count: None,
) -> list[Planned]:
    """Plan loads one by one.

    Args:
        loads: int64 [B, R, E], B >= 1.
        settings: Of `solve`, besides `ep_size` and `costs`.
        costs: For the objective of time.
        on_load: Called with 1 after every load.

    Raises:
        ValueError: A setting is out of range, or the strategy makes no plans.
    """
    planned = []
    # The first plan of a process pays for loading the library; it is not the one that is timed.
    solve(loads[0], ep_size=loads.shape[1], costs=costs, **settings)
    for load in loads:
        start = time.perf_counter()
        plan = solve(load, ep_size=load.shape[0], costs=costs, **settings)
        solve_us = (time.perf_counter() - start) * 1e6
        mean = int(load.sum()) / load.shape[0]
        bound = int(lower_bound(load, plan.layout))
        planned.append(
            Planned(
                plan,
                {
                    "imbalance_before": imbalance(home_loads(load)),
                    "imbalance_after": imbalance(plan.rank_loads()),
                    "lower_bound": bound / mean if mean else 1.0,
                    "replicas": plan.num_replicas(),
                    "max_fanout": max_fanout(plan),
                    "max_rank_sends": max_rank_sends(plan),
                    "solve_us": solve_us,
                },
            )
        )
        on_load(1)
    return planned


def summarize(planned: list[Planned]) -> dict[str, Any]:
    """Mean and worst of every number, the gap (achieved / bound), and quantiles of the time."""
    rows = [
        one.measured | {"gap": one.measured["imbalance_after"] / one.measured["lower_bound"]}
        for one in planned
    ]
    times = sorted(row["solve_us"] for row in rows)
    summary: dict[str, Any] = {
        name: {
            "mean": statistics.fmean(row[name] for row in rows),
            "worst": max(row[name] for row in rows),
        }
        for name in rows[0]
    }
    summary["solve_us"] |= {
        "p50": statistics.median(times),
        "p99": times[-(-len(times) * 99 // 100) - 1],
    }
    return {"instances": len(rows)} | summary
