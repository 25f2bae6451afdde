"""Step times of the quickstart's model with and without own tokens first, in one run.

    python tests/perf/local_first.py [--steps N] [--json FILE]

All models live in the same processes and take their steps in turn, each time another one first, so
that whatever else the machine does meets all alike. `ratio` is the time of a step with own tokens
first over the time of the same step without: below 1 it gains. Its median and quartiles over steps.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch.distributed as dist

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from megatron_ext.cpu_platform import enable_cpu_platform  # noqa: E402
from megatron_ext.quickstart import build_data  # noqa: E402
from megatron_ext.train import join_ranks, launch_ranks, load_config, quiet_megatron  # noqa: E402
from tests.perf.planner import describe_machine  # noqa: E402

STRATEGIES = ("quota", "libra")


def train_in_turn(runs: list[Any], steps: int, file: Path) -> None:
    """Train all runs on this rank; rank 0 writes the times of their steps but the first."""
    with join_ranks():
        from megatron_ext.mcore.training import Training

        trainings = [Training(config) for config in runs]
        step_ms: list[list[float]] = [[] for _ in runs]
        for step in range(steps + 1):
            for turn in range(len(runs)):
                run = (step + turn) % len(runs)
                step_ms[run].append(trainings[run].train_step()["step_ms"])
        for training in trainings:
            training.close()
        if dist.get_rank() == 0:
            file.write_text(json.dumps([times[1:] for times in step_ms]))


def measure(steps: int) -> list[dict[str, Any]]:
    """One row for each strategy."""
    runs = [
        load_config(
            [
                f"balance.strategy={strategy}",
                f"balance.local_first={local_first}",
                f"steps={steps + 1}",
                "optimizer.warmup_steps=0",
                "run_dir=runs/perf_local_first",
            ],
            config_name="quickstart",
        )
        for strategy in STRATEGIES
        for local_first in (False, True)
    ]
    build_data(Path(runs[0].data.path))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "step_ms.json"
        launch_ranks(train_in_turn, runs, steps, file, num_ranks=runs[0].parallel.ep_size)
        step_ms = json.loads(file.read_text())
    return [
        _row(strategy, *step_ms[2 * index : 2 * index + 2])
        for index, strategy in enumerate(STRATEGIES)
    ]


def _row(strategy: str, without: list[float], own_first: list[float]) -> dict[str, Any]:
    ratios = [after / before for before, after in zip(without, own_first, strict=True)]
    quarter, ratio, three_quarters = statistics.quantiles(ratios, n=4)
    return {
        "strategy": strategy,
        "median ms": statistics.median(without),
        "own first": statistics.median(own_first),
        "fastest ms": min(without),
        "own first, fastest": min(own_first),
        "ratio": ratio,
        "lower quartile": quarter,
        "upper quartile": three_quarters,
    }


def main() -> None:
    """Measure, print the table, and write it as JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=24, help="of each model (default: 24)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the table")
    options = parser.parse_args()
    file = options.json.absolute() if options.json else None
    os.chdir(ROOT)  # where the recipes are
    quiet_megatron()
    enable_cpu_platform()
    rows = measure(options.steps)
    print(describe_machine())
    print(" | ".join(rows[0]))
    for row in rows:
        print(" | ".join(f"{v:.3f}" if isinstance(v, float) else v for v in row.values()))
    if file:
        file.write_text(json.dumps({"machine": describe_machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
