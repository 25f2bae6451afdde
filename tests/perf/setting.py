"""Step times of one recipe with and without settings, in one run.

    python tests/perf/setting.py balance.local_first=true [--base balance.strategy=libra]

Both models live in the same processes and take their steps in turn, each time the other one first,
so that whatever else the machine does meets both alike. `ratio` is the time of a step with the
settings over the time of the same step without: below 1 they gain. Its median and quartiles over
the steps.
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
from megatron_ext.trainer.compose import load_config  # noqa: E402
from megatron_ext.trainer.quickstart import build_data  # noqa: E402
from megatron_ext.trainer.ranks.launch import join_ranks, launch_ranks, quiet_megatron  # noqa: E402
from tests.perf.planner import describe_machine  # noqa: E402

WARMUP = 5
"""Steps that do not count: memory is allocated and files are begun in them."""


def train_in_turn(runs: list[Any], steps: int, file: Path) -> None:
    """Train all runs on this rank; rank 0 writes the times of their steps after the warm-up."""
    with join_ranks(runs[0].group_timeout):
        from megatron_ext.trainer.loop import Training

        trainings = [Training(config) for config in runs]
        step_ms: list[list[float]] = [[] for _ in runs]
        for step in range(steps):
            for turn in range(len(runs)):
                run = (step + turn) % len(runs)
                step_ms[run].append(trainings[run].train_step()["step_ms"])
        for training in trainings:
            training.close()
        if dist.get_rank() == 0:
            file.write_text(json.dumps([times[WARMUP:] for times in step_ms]))


def measure(config_name: str, base: list[str], settings: list[str], steps: int) -> dict[str, Any]:
    """The row of a comparison over `steps` steps."""
    with tempfile.TemporaryDirectory() as folder:
        runs = [
            load_config(
                [
                    f"steps={WARMUP + steps}",
                    "optimizer.warmup_steps=0",
                    f"run_dir={folder}/{name}",
                    *base,
                    *added,
                ],
                config_name=config_name,
            )
            for name, added in (("without", []), ("with", settings))
        ]
        build_data(Path(runs[0].data.path))
        file = Path(folder) / "step_ms.json"
        num_ranks = runs[0].parallel.ep_size
        launch_ranks(train_in_turn, runs, WARMUP + steps, file, num_ranks=num_ranks)
        without, with_settings = json.loads(file.read_text())
    ratios = [after / before for before, after in zip(without, with_settings, strict=True)]
    lower, ratio, upper = statistics.quantiles(ratios, n=4)
    return {
        "fastest ms without": min(without),
        "with": min(with_settings),
        "median ms without": statistics.median(without),
        "median with": statistics.median(with_settings),
        "ratio": ratio,
        "lower quartile": lower,
        "upper quartile": upper,
    }


def main() -> None:
    """Measure, print the row, and write it as JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("settings", nargs="+", help="section.name=value, of one of the two models")
    parser.add_argument(
        "--base", nargs="+", default=[], metavar="SETTING", help="settings of both models"
    )
    parser.add_argument("--config-name", default="quickstart", help="default: quickstart")
    parser.add_argument("--steps", type=int, default=30, help="of each model (default: 30)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the row")
    options = parser.parse_args()
    file = options.json.absolute() if options.json else None
    os.chdir(ROOT)  # where the recipes are
    quiet_megatron()
    enable_cpu_platform()
    row = measure(options.config_name, options.base, options.settings, options.steps)
    print(describe_machine())
    print(*options.base, "with and without", *options.settings)
    print(" | ".join(row))
    print(" | ".join(f"{value:.3f}" for value in row.values()))
    if file:
        report = {"machine": describe_machine(), "settings": options.settings} | row
        file.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
