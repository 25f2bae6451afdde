"""Training with balancing beside training without, from the same weights on the same samples.

    python -m tests.gpu.first_run.parity [--ep N] [--pp N] [--dp N] [--steps N] [--json FILE]
        [overrides]

The quickstart's model on a few words, with Megatron's distributed optimizer and both of its
overlaps; with a pipeline, in two model chunks a stage. As in the quickstart a third run, whose
samples come in another order within a microbatch, says what rounding alone does. Status 0 if
balancing moves the losses no more than `ROOM` times as far, as long as all tokens choose the same
experts.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_ext.trainer.compose import load_config
from megatron_ext.trainer.logs.run_log import read_metrics
from megatron_ext.trainer.quickstart import (
    YARDSTICK,
    give_each_a_folder,
    steps_alike,
    train_in_turn,
)
from megatron_ext.trainer.ranks.launch import quiet_megatron
from megatron_ext.trainer.reports.summary import Drift
from megatron_ext.trainer.train import check
from tests.gpu.one_gpu import launch
from tests.trainer import dataset

ROOM = 10.0
"""Both distances are largest values of a few steps: by chance one is several times the other."""

ROUNDING = 1e-7
"""Of a loss in float32, where the yardstick happens to meet none."""


def main() -> None:
    """Train, print, and judge."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--ep", type=int, default=2, help="ranks of expert parallelism (default: 2)"
    )
    parser.add_argument("--pp", type=int, default=1, help="pipeline stages (default: 1)")
    parser.add_argument("--dp", type=int, default=1, help="ranks of each expert (default: 1)")
    parser.add_argument("--steps", type=int, default=200, help="(default: 200)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the row")
    parser.add_argument("overrides", nargs="*", help="of the quickstart")
    options = parser.parse_intermixed_args()
    quiet_megatron()
    with tempfile.TemporaryDirectory() as folder:
        # Not of this machine's text, which takes longer than a short run.
        overrides = [f"data.path={dataset.build(Path(folder))}", *options.overrides]
        row = measure(options.ep, options.pp, options.steps, overrides, dp=options.dp)
    print(row)
    if options.json:
        options.json.write_text(json.dumps({"rows": [row]}, indent=1) + "\n")
    sys.exit(not is_right(row))


def measure(
    ep: int, pp: int, steps: int, overrides: Sequence[str], *, dp: int = 1
) -> dict[str, Any]:
    """Train all three and compare the first and last of them with the one without balancing.

    Each expert is on `dp` ranks, so a stage of the pipeline has as many EP groups.
    """
    num_ranks = ep * pp * dp
    common = [
        f"parallel.ep_size={ep}",
        f"parallel.pp_size={pp}",
        f"parallel.vpp_size={2 if pp > 1 else 1}",
        "model.num_layers=4",
        "parallel.overlap_grad_reduce=true",
        "parallel.overlap_param_gather=true",
        f"steps={steps}",
        f"logging.trace_steps={steps}",
        # Of a microbatch on each rank, and as many microbatches as stages, twice.
        f"data.global_batch_size={48 * num_ranks * 2}",
        f"run_dir=runs/first_run/ep{ep}_pp{pp}_dp{dp}/" + "${balance.strategy}",
        *overrides,
    ]
    runs = {
        name: load_config([f"balance={name}", *common], config_name="quickstart")
        for name in ("none", "quota")
    }
    runs[YARDSTICK] = load_config(
        ["balance=none", "data.reverse_samples=true", *common], config_name="quickstart"
    )
    give_each_a_folder(runs)
    for config in runs.values():
        check(config, num_ranks=num_ranks)
    launch(train_in_turn, runs, num_ranks=num_ranks)
    losses = {
        name: [step["loss"] for step in read_metrics(Path(config.run_dir))]
        for name, config in runs.items()
    }
    quota, yardstick = (
        Drift.of(losses["none"], losses[name], steps_alike(runs["none"], runs[name]))
        for name in ("quota", YARDSTICK)
    )
    return {
        "EP": ep,
        "PP": pp,
        "DP": dp,
        "steps": len(losses["quota"]),
        "steps of equal choices": quota.steps_alike,
        "quota": quota.while_alike,
        "rounding": yardstick.while_alike,
        "quota, later": quota.after,
        "rounding, later": yardstick.after,
        "last loss, none": losses["none"][-1],
        "last loss, quota": losses["quota"][-1],
    }


def is_right(row: dict[str, Any]) -> bool:
    """Whether balancing did no more to the losses than rounding may."""
    return bool(
        row["steps of equal choices"] > 0 and row["quota"] <= ROOM * max(row["rounding"], ROUNDING)
    )


if __name__ == "__main__":
    main()
