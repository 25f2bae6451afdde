"""All planners on the same loads in one run: balance, replicas, senders, time.

    python tests/perf/planner.py [--loads N] [--quick] [--only smooth|hard] [--json FILE]

Two tables. The first is of smooth loads, which are Zipf-distributed, with all planners. Columns:
`imbalance` and `worst` are mean and worst of busiest rank / mean, `gap` and `worst gap` of busiest
rank / its proven bound. `x bound` is replicas / the proven bound for the busiest rank's load that
was reached (or allowed, if that is more), `x plain` the same for the plainest bound, the number of
ranks with excess or of roomy ranks needed. `sends` are replicas that the busiest sender has to
fill, `far` those on another machine than their home, with 8 ranks a machine.

The second is of the loads that planners may stumble over (`tests.workloads.hard_loads`), with the
quota planner beside UltraEP's, as published and as shipped, and TAOT: median, 99th percentile and
worst of the times of single loads, and the name of the worst load.

Times are of one load on one core: the planner alone, that is its native op and a few microseconds
of Python, after a warm-up, strategies in turn load by load. Processor time of the thread, so that
other programs do not count where they take the core away. In the first table every call counts; in
the second the median of a load's calls, so that a worst time is a load's and not a moment's.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from megatron_ext.balance.bounds import lower_bound  # noqa: E402
from megatron_ext.balance.layout import ExpertLayout  # noqa: E402
from megatron_ext.balance.metrics import home_loads, imbalance  # noqa: E402
from megatron_ext.balance.plan import BalancePlan  # noqa: E402
from megatron_ext.balance.plan_metrics import rank_sends  # noqa: E402
from megatron_ext.balance.strategies import STRATEGIES, PlanSettings, Strategy  # noqa: E402
from megatron_ext.balance.strategies.strategy import Solves  # noqa: E402
from megatron_ext.config import BalanceConfig  # noqa: E402
from tests import workloads  # noqa: E402
from tests.balance.rules import replicas_lower_bound  # noqa: E402

TOKENS, TOP_K = 8192, 8  # per rank
REPEATS = 5  # timed calls per load
EXPONENTS = (0.4, 0.8, 1.2)
GRID = [
    *((ranks, (64, 128, 256), slots) for slots in (1, 2, 4) for ranks in (8, 16, 32, 64)),
    (64, (256,), 2),
    *((ranks, (8 * ranks,), 2) for ranks in (128, 256, 512)),
]
HARD = [
    *(
        (ranks, experts, slots)
        for ranks, experts in (
            (8, 64),
            (8, 256),
            (16, 128),
            (32, 256),
            (64, 64),
            (64, 256),
            (64, 512),
        )
        for slots in (1, 2, 4)
    ),
    (72, 288, 2),
]
ON_HARD_LOADS = ("quota", "quota_paper", "quota_shipped", "taot")
HARD_COLUMNS = (
    "EP",
    "experts",
    "slots",
    "strategy",
    "imbalance",
    "gap",
    "worst gap",
    "p50 us",
    "p99 us",
    "max us",
    "worst load",
)
COLUMNS = (
    "EP",
    "experts",
    "slots",
    "strategy",
    "imbalance",
    "worst",
    "gap",
    "worst gap",
    "replicas",
    "x bound",
    "x plain",
    "sends",
    "far",
    "p50 us",
    "p99 us",
)


def main() -> None:
    """Measure, print the table, and write it as JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--loads", type=int, default=8, help="loads of each kind (default: 8)")
    parser.add_argument("--quick", action="store_true", help="one of each kind, up to 64 ranks")
    parser.add_argument("--only", choices=("smooth", "hard"), help="one of the two tables")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the table")
    options = parser.parse_args()
    torch.set_num_threads(1)
    command = shlex.join(["python", *sys.argv])
    print(command)
    print(describe_machine())
    num_loads = 1 if options.quick else options.loads
    table: dict[str, Any] = {"command": command, "machine": describe_machine()}
    if options.only != "hard":
        grid = [row for row in GRID if row[0] <= 64 or not options.quick]
        table["rows"] = _print_rows(COLUMNS, (measure(*sizes, num_loads) for sizes in grid))
    if options.only != "smooth":
        grid = HARD[:3] if options.quick else HARD
        seeds = max(num_loads // 2, 1)
        table["hard"] = _print_rows(HARD_COLUMNS, (measure_hard(*sizes, seeds) for sizes in grid))
        table["hard, all"] = [summarize(table["hard"], name) for name in ON_HARD_LOADS]
    if options.json:
        options.json.write_text(json.dumps(table, indent=1))


def _print_rows(
    columns: tuple[str, ...], groups: Iterable[list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    print(" ".join(f"{name:>11}" for name in columns))
    rows = []
    for row in itertools.chain.from_iterable(groups):
        rows.append(row)
        print(" ".join(f"{_text(row[name]):>11}" for name in columns), flush=True)
    return rows


def describe_machine() -> str:
    """Processor and versions."""
    names = [
        line.split(":")[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return (
        f"{names[0] if names else platform.processor()}, {len(names)} cores, "
        f"Python {platform.python_version()}, torch {torch.__version__}"
    )


def measure(
    ranks: int, experts: tuple[int, ...], slots: int, num_loads: int
) -> list[dict[str, Any]]:
    """One row for each planner, over `num_loads` loads of every kind."""
    tolerance = BalanceConfig().tolerance
    planners = {name: each for name, each in STRATEGIES.items() if isinstance(each.planner, Solves)}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in planners}
    times: dict[str, list[float]] = {name: [] for name in planners}
    # Few tokens are drawn, and each is counted many times: it is the shape that matters.
    drawn = 512 if ranks <= 64 else 2**14 // ranks
    if ranks > 64:
        num_loads = max(num_loads // 4, 1)
    for size, exponent, seed in itertools.product(experts, EXPONENTS, range(num_loads)):
        load = workloads.zipf_top_k(ranks, size, drawn, TOP_K, exponent, seed) * (TOKENS // drawn)
        within = int((1 + tolerance) * int(load.sum()) / ranks)
        for repeat in range(1 + REPEATS):  # the first one warms up
            for name, strategy in planners.items():
                layout = ExpertLayout(
                    num_experts=size,
                    ep_size=ranks,
                    slots=strategy.num_slots(slots, size // ranks),
                    nvlink_domain=ranks,
                )
                plan, elapsed_us = _solve(strategy, load, layout)
                if repeat > 0:
                    times[name].append(elapsed_us)
                    continue
                busiest = int(plan.rank_loads().max())
                allowed = max(busiest, within)
                found[name].append(
                    {
                        "imbalance": imbalance(plan.rank_loads()),
                        "gap": busiest / int(lower_bound(load, layout)),
                        "replicas": plan.num_replicas(),
                        "x bound": _ratio(plan, replicas_lower_bound(load, layout, allowed)),
                        "x plain": _ratio(plan, plain_bound(load, allowed)),
                        "sends": int(rank_sends(plan).max()),
                        "far": far_replicas(plan),
                    }
                )
    return [
        {
            "EP": ranks,
            "experts": "/".join(map(str, experts)),
            "slots": slots,
            "strategy": name,
            "worst": max(one["imbalance"] for one in each),
            "worst gap": max(one["gap"] for one in each),
            **{key: statistics.fmean(one[key] for one in each) for key in each[0]},
            "p50 us": statistics.median(times[name]),
            "p99 us": sorted(times[name])[len(times[name]) * 99 // 100],
        }
        for name, each in found.items()
    ]


def measure_hard(ranks: int, experts: int, slots: int, seeds: int) -> list[dict[str, Any]]:
    """One row for each planner, over all kinds of hard loads, each from `seeds` seeds."""
    layout = ExpertLayout(num_experts=experts, ep_size=ranks, slots=slots, nvlink_domain=ranks)
    rows = []
    found: dict[str, list[tuple[float, float, float, str]]] = {name: [] for name in ON_HARD_LOADS}
    for seed in range(seeds):
        for kind, load in workloads.hard_loads(ranks, experts, seed):
            bound = int(lower_bound(load, layout))
            times: dict[str, list[float]] = {name: [] for name in found}
            for _ in range(REPEATS):
                for name in found:
                    plan, elapsed_us = _solve(STRATEGIES[name], load, layout)
                    times[name].append(elapsed_us)
                    if len(times[name]) == REPEATS:
                        busiest = int(plan.rank_loads().max())
                        us = statistics.median(times[name])
                        found[name].append(
                            (us, busiest * ranks / int(load.sum()), busiest / bound, kind)
                        )
    for name, each in found.items():
        each.sort()
        rows.append(
            {
                "EP": ranks,
                "experts": experts,
                "slots": slots,
                "strategy": name,
                "imbalance": statistics.fmean(one[1] for one in each),
                "gap": statistics.fmean(one[2] for one in each),
                "worst gap": max(one[2] for one in each),
                "p50 us": each[len(each) // 2][0],
                "p99 us": each[len(each) * 99 // 100][0],
                "max us": each[-1][0],
                "worst load": each[-1][3],
                "times us": [one[0] for one in each],
            }
        )
    return rows


def summarize(rows: list[dict[str, Any]], strategy: str) -> dict[str, Any]:
    """Times over all hard loads of up to 64 ranks and 256 experts; printed, too."""
    times = sorted(
        time
        for row in rows
        if row["strategy"] == strategy and row["EP"] <= 64 and row["experts"] <= 256
        for time in row["times us"]
    )
    summary = {"p50 us": times[len(times) // 2], "p99 us": times[len(times) * 99 // 100]}
    summary["max us"] = times[-1]
    figures = ", ".join(f"{name} {_text(value)}" for name, value in summary.items())
    print(f"{strategy}, {len(times)} loads of up to 64 ranks and 256 experts: {figures}")
    return {"strategy": strategy, "loads": len(times), **summary}


def _solve(strategy: Strategy, load: Tensor, layout: ExpertLayout) -> tuple[BalancePlan, float]:
    """Plan, and the thread's microseconds of that."""
    assert isinstance(strategy.planner, Solves)
    settings = PlanSettings(tolerance=BalanceConfig().tolerance)
    start = time.thread_time_ns()
    plan = strategy.planner.solve(load, layout, settings)
    return plan, (time.thread_time_ns() - start) / 1e3


def far_replicas(plan: BalancePlan) -> int:
    """Replicas on another machine of 8 ranks than their home."""
    held = plan.experts_in_slots
    machine = torch.arange(len(held))[:, None] // 8
    home = held // plan.layout.mains_per_rank // 8
    return int(((held >= 0) & (home != machine)).sum())


def plain_bound(load: Tensor, busiest: int) -> int:
    """The more of ranks with excess and of roomy ranks needed for it."""
    excess = home_loads(load) - busiest
    total = int(excess.clamp(min=0).sum())
    rooms = (-excess).clamp(min=0).sort(descending=True).values.cumsum(0)
    needed = int((rooms < total).sum()) + 1 if total else 0
    return max(int((excess > 0).sum()), needed)


def _ratio(plan: BalancePlan, bound: int) -> float:
    return plan.num_replicas() / bound if bound else 1.0


def _text(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"


if __name__ == "__main__":
    main()
