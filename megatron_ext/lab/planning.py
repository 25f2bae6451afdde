"""Plans for many loads, and the numbers by which they are compared."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Self, cast

import torch
from torch import Tensor

from megatron_ext.balance.bounds import lower_bound
from megatron_ext.balance.layout import ExpertLayout
from megatron_ext.balance.metrics import home_loads, imbalance
from megatron_ext.balance.plan import BalancePlan
from megatron_ext.balance.plan_metrics import max_fanouts, rank_sends
from megatron_ext.balance.planner import plan_layout
from megatron_ext.balance.solve import PlannerInOrder
from megatron_ext.balance.strategies import PlanSettings, get_strategy
from megatron_ext.balance.strategies.strategy import FromHistory
from megatron_ext.config import BalanceConfig, HistorySettings
from megatron_ext.files.loads import Loads


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What planners are asked for."""

    planning: PlanSettings
    slots: int
    """Replicas a rank can hold; the strategy may take another number."""
    nvlink_domain: int | None
    """Ranks within which replicas are placed; the whole EP group if None."""

    def layout(self, strategy: str, loads: Loads) -> ExpertLayout:
        """Return the layout that a strategy plans these loads for."""
        _, ranks, experts = loads.load.shape
        return plan_layout(
            strategy,
            num_experts=experts,
            ep_size=ranks,
            slots=self.slots,
            nvlink_domain=self.nvlink_domain,
        )

    def by_name(self, name: str) -> tuple[str, Self]:
        """Return the strategy of a name in a comparison, and what is asked of it: costs or not."""
        strategy, for_time = read_name(name)
        planning = self.planning if for_time else dataclasses.replace(self.planning, costs=None)
        return strategy, dataclasses.replace(self, planning=planning)

    def settings(self) -> dict[str, Any]:
        """Return the settings: sections without their names, a placement as replicas by layer."""
        asked = self.planning
        told: dict[str, Any] = {"tolerance": asked.tolerance, "min_quota": asked.min_quota}
        for section in asked.sections:
            told |= dataclasses.asdict(cast("Any", section))
        told["costs"] = None if asked.costs is None else dataclasses.asdict(asked.costs)
        told["placement"] = None if asked.placement is None else asked.placement.num_replicas()
        return told


@dataclass(frozen=True)
class Planned:
    """The plan of one load."""

    plan: BalancePlan
    placed: Tensor | None
    """Replicas placed by a prediction, int32 [R, S]; None if the strategy does not predict."""
    solve_us: float
    """Microseconds of the call of `plan_in_order` that made the plan, including its work in Python
    and the replicas it places for later loads."""


def in_two(plan: BalancePlan, placed: Tensor) -> tuple[BalancePlan, BalancePlan]:
    """Return the replicas of a forward that move by a prediction, and those that the plan adds.

    Both are as plans, whose quotas count for nothing; also of a batch, with `placed` [B, R, S].
    """
    held = plan.experts_in_slots
    added = torch.where(held == placed, -1, held)
    return (
        dataclasses.replace(plan, experts_in_slots=placed),
        dataclasses.replace(plan, experts_in_slots=added),
    )


def read_name(name: str) -> tuple[str, bool]:
    """Return the strategy that a name in a comparison means, and whether it plans for time.

    Raises:
        ValueError: There is no such objective.

    >>> read_name("quota"), read_name("quota:time")
    (('quota', False), ('quota', True))
    """
    strategy, colon, objective = name.partition(":")
    return strategy, colon != "" and BalanceConfig(objective=objective).plans_for_time


def make_planners(loads: Loads, strategy: str, asked: Asked) -> list[PlannerInOrder]:
    """Return the planner of each load: one for each layer of a trace, else one for all loads.

    Raises:
        ValueError: A setting is out of range, or the strategy makes no plans.
    """
    layout, layers = asked.layout(strategy, loads), loads.layers()
    planners = {
        layer: PlannerInOrder(strategy, layout, asked.planning, layer=layer)
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
    planners: list[PlannerInOrder],
    *,
    on_load: Callable[[int], object] = lambda count: None,
) -> Iterator[Planned]:
    """Plan loads, at least one, each by its planner; call `on_load` with 1 after each."""
    # The first plan of a process pays for loading the library; its time does not count.
    planners[0].solve(loads.load[0])
    for index, (load, planner) in enumerate(zip(loads.load, planners, strict=True)):
        placed = planner.expect_in_order(loads.prediction(index))
        start = time.perf_counter()
        plan = planner.plan_in_order(load, placed)
        solve_us = (time.perf_counter() - start) * 1e6
        on_load(1)
        yield Planned(plan, placed, solve_us)


def measure(load: Tensor, planned: Planned) -> dict[str, float]:
    """Return the numbers of a plan; imbalances and their lower bound are ratios to the mean."""
    plan = planned.plan
    mean = int(load.sum()) / load.shape[0]
    bound = int(lower_bound(load, plan.layout))
    return {
        "imbalance_before": imbalance(home_loads(load)),
        "imbalance_after": imbalance(plan.rank_loads()),
        "lower_bound": bound / mean if mean else 1.0,
        "replicas": plan.num_replicas(),
        "max_fanout": int(max_fanouts(plan)),
        "max_rank_sends": int(rank_sends(plan).max()),
        "solve_us": planned.solve_us,
    }


def summarize(measured: list[dict[str, float]]) -> dict[str, Any]:
    """Mean and worst of every number, the gap (achieved / bound), and quantiles of the time."""
    rows = [one | {"gap": one["imbalance_after"] / one["lower_bound"]} for one in measured]
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
