"""Plans for many loads, and the numbers by which they are compared."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from megatron_ext.balance.bounds import lower_bound
from megatron_ext.balance.metrics import home_loads, imbalance, max_fanouts, rank_sends
from megatron_ext.balance.plan import BalancePlan
from megatron_ext.balance.planner import LayerPlanner, plan_layout
from megatron_ext.balance.strategies import PlanSettings, get_strategy
from megatron_ext.balance.strategies.strategy import FromHistory
from megatron_ext.config import BalanceConfig, HistorySettings
from megatron_ext.files.loads import Loads


@dataclass(frozen=True)
class Planned:
    """A plan and its measured numbers."""

    plan: BalancePlan
    measured: dict[str, float]
    """Imbalances and their lower bound as ratios to the mean. `solve_us`: microseconds of the call
    of `plan_in_order` that made the plan, including its work in Python and the replicas it places
    for later loads."""


def read_name(name: str) -> tuple[str, bool]:
    """Return the strategy that a name in a comparison means, and whether it plans for time.

    Raises:
        ValueError: There is no such objective.

    >>> read_name("quota"), read_name("quota:time")
    (('quota', False), ('quota', True))
    """
    strategy, colon, objective = name.partition(":")
    return strategy, colon != "" and BalanceConfig(objective=objective).plans_for_time


def make_planners(
    loads: Loads, strategy: str, settings: PlanSettings, *, slots: int, nvlink_domain: int | None
) -> list[LayerPlanner]:
    """Return the planner of each load: one for each layer of a trace, else one for all loads.

    Args:
        loads: The loads, in the order in which they are to be planned.
        strategy: A planner of `megatron_ext.balance.strategies`.
        settings: What is asked for.
        slots: Replicas a rank can hold, as asked for.
        nvlink_domain: Ranks per NVLink domain; one domain if None.

    Raises:
        ValueError: A setting is out of range, or the strategy makes no plans.
    """
    _, ranks, experts = loads.load.shape
    layout = plan_layout(
        strategy, num_experts=experts, ep_size=ranks, slots=slots, nvlink_domain=nvlink_domain
    )
    layers = loads.layers()
    planners = {
        layer: LayerPlanner(strategy, layout, settings, layer=layer)
        for layer in sorted(set(layers))
    }
    return [planners[layer] for layer in layers]


def missing_history(loads: Loads, strategies: Iterable[str], settings: PlanSettings) -> str | None:
    """Return a message that names strategies without a history for most loads; None if none."""
    interval = settings.section(HistorySettings).interval
    names = [read_name(name)[0] for name in strategies]
    from_history = [name for name in names if isinstance(get_strategy(name).kind, FromHistory)]
    microbatches = max(Counter(loads.layers()).values())
    if not from_history or 2 * interval <= microbatches:
        return None
    return (
        f"{', '.join(from_history)} without replicas in the first {min(interval, microbatches)} of "
        f"{microbatches} microbatches of a layer: the first placement from history comes after "
        f"interval ({interval}) microbatches"
    )


def plan_loads(
    loads: Loads,
    planners: list[LayerPlanner],
    *,
    on_load: Callable[[int], object] = lambda count: None,
) -> list[Planned]:
    """Plan loads, at least one, each by its planner; call `on_load` with 1 after each."""
    planned = []
    # The first plan of a process pays for loading the library; its time does not count.
    planners[0].solve(loads.load[0])
    for index, (load, planner) in enumerate(zip(loads.load, planners, strict=True)):
        placed = planner.expect_in_order(loads.prediction(index))
        start = time.perf_counter()
        plan = planner.plan_in_order(load, placed)
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
                    "max_fanout": int(max_fanouts(plan)),
                    "max_rank_sends": int(rank_sends(plan).max()),
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
