"""All planners on the same loads in one run: balance, replicas, senders, time.

    python tests/perf/planner.py [--loads N] [--json FILE]

Times are of one load on one core, solved after a warm-up, strategies in turn load by load. The
imbalance bound and the replicas bound are proven (`megatron_ext/balance/bounds.py`); a gap is
achieved / bound.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from megatron_ext.balance.bounds import lower_bound, replicas_lower_bound  # noqa: E402
from megatron_ext.balance.layout import ExpertLayout  # noqa: E402
from megatron_ext.balance.metrics import imbalance, max_rank_sends  # noqa: E402
from megatron_ext.balance.plan import solve  # noqa: E402
from megatron_ext.balance.strategies import STRATEGIES  # noqa: E402
from megatron_ext.config import BalanceConfig  # noqa: E402
from tests import workloads  # noqa: E402

TOKENS, TOP_K = 8192, 8  # per rank
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
    "replicas",
    "x bound",
    "sends",
    "p50 us",
    "p99 us",
)


def main() -> None:
    """Measure, print the table, and write it as JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--loads", type=int, default=8, help="loads of each kind (default: 8)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the table")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(describe_machine())
    print(" ".join(f"{name:>11}" for name in COLUMNS))
    rows = []
    for ranks, experts, slots in GRID:
        for row in measure(ranks, experts, slots, options.loads):
            rows.append(row)
            print(" ".join(f"{_text(row[name]):>11}" for name in COLUMNS), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"machine": describe_machine(), "rows": rows}, indent=1))


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
    planners = [name for name, strategy in STRATEGIES.items() if strategy.solve]
    found: dict[str, list[dict[str, float]]] = {name: [] for name in planners}
    # Few tokens are drawn, and each is counted many times: it is the shape that matters.
    drawn = 512 if ranks <= 64 else 2**14 // ranks
    if ranks > 64:
        num_loads = max(num_loads // 4, 1)
    for size, exponent, seed in itertools.product(experts, EXPONENTS, range(num_loads)):
        load = workloads.zipf_top_k(ranks, size, drawn, TOP_K, exponent, seed) * (TOKENS // drawn)
        mean = int(load.sum()) / ranks
        for name in planners:
            solve(load, ep_size=ranks, slots=slots, strategy=name)
            times = []
            for _ in range(3):
                start = time.perf_counter()
                plan = solve(load, ep_size=ranks, slots=slots, strategy=name)
                times.append((time.perf_counter() - start) * 1e6)
            layout = ExpertLayout(
                num_experts=size, ep_size=ranks, slots=plan.layout.slots, nvlink_domain=ranks
            )
            busiest = int(plan.rank_loads().max())
            bound = replicas_lower_bound(load, layout, max(busiest, int((1 + tolerance) * mean)))
            found[name].append(
                {
                    "imbalance": imbalance(plan.rank_loads()),
                    "gap": busiest / int(lower_bound(load, layout)),
                    "replicas": plan.num_replicas(),
                    "x bound": plan.num_replicas() / bound if bound else 1.0,
                    "sends": max_rank_sends(plan),
                    "us": statistics.median(times),
                }
            )
    return [
        {
            "EP": ranks,
            "experts": "/".join(map(str, experts)),
            "slots": slots,
            "strategy": name,
            "worst": max(one["imbalance"] for one in each),
            **{
                key: statistics.fmean(one[key] for one in each)
                for key in ("imbalance", "gap", "replicas", "x bound", "sends")
            },
            "p50 us": statistics.median(one["us"] for one in each),
            "p99 us": sorted(one["us"] for one in each)[min(len(each) * 99 // 100, len(each) - 1)],
        }
        for name, each in found.items()
    ]


def _text(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"


if __name__ == "__main__":
    main()
