"""A recipe as it stands: without balancing, with it, and with ideal routing.

python -m tests.gpu.first_run.recipe [--config-name NAME] [--steps N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_ext.trainer.compose import load_config
from megatron_ext.trainer.logs.run_log import read_metrics
from megatron_ext.trainer.quickstart import build_data
from megatron_ext.trainer.ranks.launch import quiet_megatron
from megatron_ext.trainer.reports.summary import summarize
from megatron_ext.trainer.train import train
from tests.gpu.first_run.parts import RECIPE

STRATEGIES = ("none", "quota", "ideal")
SHOWN = ("imbalance_before", "imbalance_after", "step_ms", "tokens_per_s", "final_loss", "replicas")


def main() -> None:
    """Train all, print, and write the rows if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config-name", default=RECIPE, help=f"(default: {RECIPE})")
    parser.add_argument("--steps", type=int, default=60, help="of each (default: 60)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the rows")
    options = parser.parse_args()
    quiet_megatron()
    rows = measure(options.config_name, options.steps, Path("runs/first_run"))
    for row in rows:
        print(row)
    if options.json:
        options.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


def measure(recipe: str, steps: int, folder: Path) -> Sequence[dict[str, Any]]:
    """Train `recipe` for so many steps with every strategy, and return a row for each."""
    rows = []
    for name in STRATEGIES:
        config = load_config(
            [
                f"balance={name}",
                f"steps={steps}",
                f"optimizer.warmup_steps={max(steps // 10, 1)}",
                "data.path=runs/data",
                f"run_dir={folder / recipe / name}",
                "eval_every=0",
                "checkpoint.every=0",
            ],
            config_name=recipe,
        )
        build_data(Path(config.data.path))
        train(config)
        summary = summarize(read_metrics(Path(config.run_dir)))
        rows.append({"balance": name, **{key: summary[key] for key in SHOWN}})
    return rows


if __name__ == "__main__":
    main()
