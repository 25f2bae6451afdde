"""All planners on the same loads in one run: balance, replicas, senders, time.

    python tests/perf/planner.py [--loads N] [--quick] [--json FILE]

Columns: `imbalance` and `worst` are mean and worst of busiest rank / mean, `gap` and `worst gap` of
busiest rank / its proven lower bound. `x bound` is replicas / the proven bound for the busiest
rank's load that was reached (or allowed, if that is more), `x plain` the same for the plainest
bound, the number of ranks with excess or of roomy ranks needed. `sends` are replicas that the
busiest sender has to fill.

Times are of one load on one core: the planner alone, that is its native op and a few microseconds
of Python, after a warm-up, strategies in turn load by load. Every call counts for p50 and p99.
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
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from megatron_ext.balance.bounds import lower_bound, replicas_lower_bound  # noqa: E402
from megatron_ext.balance.layout import ExpertLayout  # noqa: E402
from megatron_ext.balance.metrics import home_loads, imbalance, max_rank_sends  # noqa: E402
from megatron_ext.balance.plan import BalancePlan  # noqa: E402
from megatron_ext.balance.strategies import STRATEGIES, PlanSettings  # noqa: E402
from megatron_ext.config import BalanceConfig  # noqa: E402
from tests import workloads  # noqa: E402

TOKENS, TOP_K = 8192, 8  # per rank
REPEATS = 5  # timed calls per load
EXPONENTS = (0.4, 0.8, 1.2)
GRID = [
    *((ranks, (64, 128, 256), slots) for slots in (1, 2, 4) for ranks in (8, 16, 32, 64)),
    (64, (256,), 2),
    *((ranks, (8 * ranks,), 2) for ranks in (128, 256, 512)),
]
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
    "p50 us",
    "p99 us",
)


def main() -> None:
    """Measure, print the table, and write it as JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--loads", type=int, default=8, help="loads of each kind (default: 8)")
    parser.add_argument("--quick", action="store_true", help="one of each kind, up to 64 ranks")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the table")
    options = parser.parse_args()
    torch.set_num_threads(1)
    command = shlex.join(["python", *sys.argv])
    print(command)
    print(describe_machine())
    print(" ".join(f"{name:>11}" for name in COLUMNS))
    rows = []
    for ranks, experts, slots in GRID:
        if options.quick and ranks > 64:
            continue
        for row in measure(ranks, experts, slots, 1 if options.quick else options.loads):
            rows.append(row)
            print(" ".join(f"{_text(row[name]):>11}" for name in COLUMNS), flush=True)
    if options.json:
        table = {"command": command, "machine": describe_machine(), "rows": rows}
        options.json.write_text(json.dumps(table, indent=1))


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
    planners = {
        name: each for name, each in STRATEGIES.items() if each.solve and each.name != "time"
    }
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
                start = time.perf_counter()
                plan = strategy.solve(load, layout, PlanSettings(tolerance=tolerance))
                elapsed_us = (time.perf_counter() - start) * 1e6
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
                        "sends": max_rank_sends(plan),
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
