"""A recipe with balancing, with ideal routing, and without balancing: how much of ideal it gets.

    python -m tests.gpu.first_run.recipe [--config-name NAME] [--steps N] [--json FILE] [overrides]

The last line says it: the ratio of tokens per second. Rows are written after each training. The
recipe is as it stands, but Megatron's local attention keeps its scores: without Transformer Engine
a microbatch is one sample, because the recipe's would not fit into 80 GB.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from megatron_ext.files.run_dir import ABOUT_FILE
from megatron_ext.trainer.compose import load_config
from megatron_ext.trainer.config import TrainConfig
from megatron_ext.trainer.logs.run_log import read_metrics
from megatron_ext.trainer.quickstart import build_data
from megatron_ext.trainer.ranks.launch import quiet_megatron
from megatron_ext.trainer.reports.read import Metrics, column
from megatron_ext.trainer.reports.speed import MIN_STEPS, WARMUP_STEPS
from megatron_ext.trainer.reports.summary import summarize_runs
from megatron_ext.trainer.train import train
from tests.gpu.first_run.parts import RECIPE, lacks_te

STRATEGIES = ("quota", "ideal", "none")
"""First the two that are compared: the time may end behind them."""

COSTS = ("plan_ms", "materialize_exposed_ms", "reduce_exposed_ms")
"""What balancing adds to a step where nothing hides it, of the rank where it takes longest."""

SHOWN = ("tokens_per_s", "step_ms", "imbalance_before", "imbalance_after", "final_loss", "replicas")


def main() -> None:
    """Train all; print and write what is known after each."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config-name", default=RECIPE, help=f"(default: {RECIPE})")
    parser.add_argument("--steps", type=int, default=60, help="of each (default: 60)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the rows")
    parser.add_argument("overrides", nargs="*", help="of the recipe")
    options = parser.parse_intermixed_args()
    quiet_megatron()
    metrics: dict[str, Metrics] = {}
    used: dict[str, dict[str, Any]] = {}
    for name in STRATEGIES:
        config = config_of(options.config_name, name, options.steps, options.overrides)
        build_data(Path(config.data.path))
        train(config)
        metrics[name] = read_metrics(Path(config.run_dir))
        used[name] = what_was_used(config)
        rows = rows_of(metrics, used)
        print(rows[-1], flush=True)
        if options.json:
            options.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    print(verdict(rows))


def config_of(recipe: str, balance: str, steps: int, overrides: Sequence[str]) -> TrainConfig:
    """Return the settings of one training: of so many steps, with a strategy of `STRATEGIES`."""
    words = [
        f"balance={balance}",
        f"steps={steps}",
        f"optimizer.warmup_steps={max(steps // 10, 1)}",
        "data.path=runs/data",
        f"run_dir=runs/first_run/{recipe}/{balance}",
        "overwrite=true",  # of an earlier try
        "eval_every=0",
        "checkpoint.every=0",
    ]
    if lacks_te():
        words.append("data.micro_batch_size=1")
    return load_config([*words, *overrides], config_name=recipe)


def what_was_used(config: TrainConfig) -> dict[str, Any]:
    """Return what a training's speed depends on beside its strategy."""
    about = json.loads((Path(config.run_dir) / ABOUT_FILE).read_text())
    return {
        "transport": about.get("transport"),
        "layers": "local" if lacks_te() else "Transformer Engine",
        "samples of a microbatch": config.data.micro_batch_size,
    }


def rows_of(
    metrics: Mapping[str, Metrics], used: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return a row for each training so far, with its speed over that of ideal routing and none."""
    others = [name for name in ("ideal", "none") if name in metrics]
    rows = []
    for name, of_run in summarize_runs(metrics, against=others).items():
        row = {"balance": name, **{key: of_run[key] for key in SHOWN}, **used[name]}
        timed = metrics[name][WARMUP_STEPS:]
        row |= {key: median(column(timed, key)) for key in COSTS if timed and key in timed[0]}
        for other in others:
            if (ratio := of_run["vs"][other]) is not None:
                row[f"of {other}"] = ratio["value"]
                row[f"of {other}, 95 %"] = f"{ratio['low']:.3f} to {ratio['high']:.3f}"
        rows.append(row)
    return rows


def verdict(rows: Sequence[Mapping[str, Any]]) -> str:
    """Say how fast the training with balancing is, beside ideal routing and beside none."""
    quota = next(row for row in rows if row["balance"] == "quota")
    if "of ideal" not in quota:
        return f"no ratio: it needs {MIN_STEPS} steps after the first {WARMUP_STEPS}"
    return (
        f"quota trains {quota['of ideal']:.3f} times as fast as ideal routing "
        f"({quota['of ideal, 95 %']}) and {quota['of none']:.3f} times as fast as none, "
        f"at an imbalance of {quota['imbalance_before']:.2f}"
    )


if __name__ == "__main__":
    main()
