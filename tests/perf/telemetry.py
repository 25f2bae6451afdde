"""What telemetry takes of a step, with and without it in one run.

    python tests/perf/telemetry.py [OVERRIDES...] [--config quickstart] [--steps 40] [--json FILE]

Two trainings of one recipe live in the same processes and take their steps in turn, each time the
other one first. One records what a run records, and writes its lines; the other records nothing.
A time is of a whole step on rank 0, from a barrier on. `cpu` is that of the processor in the main
thread, which other programs on the machine do not disturb; `wall` holds the waits for other ranks,
too. `ratio` is a step with telemetry over the same step without; its median and quartiles over the
steps. Steps differ by more than telemetry takes, so `share` is measured directly: the time within
telemetry's own functions over the step's, median and largest.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from pathlib import Path
from time import perf_counter, thread_time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch.distributed as dist

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from megatron_ext.balance.stage_times import TIMES, StageTimes  # noqa: E402
from megatron_ext.cpu_platform import enable_cpu_platform  # noqa: E402
from megatron_ext.telemetry import recorder  # noqa: E402
from megatron_ext.telemetry.gather import GatheredStep  # noqa: E402
from megatron_ext.telemetry.recorder import LoadRecorder  # noqa: E402
from megatron_ext.trainer.compose import load_config  # noqa: E402
from megatron_ext.trainer.logs.run_log import RunLog  # noqa: E402
from megatron_ext.trainer.quickstart import build_data  # noqa: E402
from megatron_ext.trainer.ranks.launch import join_ranks, launch_ranks, quiet_megatron  # noqa: E402
from tests.perf.planner import describe_machine  # noqa: E402

WARMUP = 5
"""Steps that do not count: memory is allocated and files are begun in them."""


class Within:
    """Sums the time within functions; of those that call each other, the outermost counts."""

    def __init__(self) -> None:
        self.wall = self.cpu = 0.0
        self._depth = 0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            wall, cpu = perf_counter(), thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self.wall += perf_counter() - wall
                    self.cpu += thread_time() - cpu

        return run


def patch_telemetry(stack: ExitStack, within: Within) -> None:
    """Time all that telemetry does in a step."""
    from megatron_ext.trainer import loop

    for owner, name in (
        (LoadRecorder, "_observe"),
        (LoadRecorder, "_count"),
        (LoadRecorder, "take_step"),
        (recorder._Held, "forward_ended"),
        (StageTimes, "mark"),
        (StageTimes, "add"),
        (loop, "gather_step"),
        (GatheredStep, "metrics"),
        (GatheredStep, "layers"),
        (RunLog, "write"),
    ):
        timed = within.timed(getattr(owner, name))
        stack.enter_context(mock.patch.object(owner, name, timed))


def train_in_turn(runs: list[Any], steps: int, file: Path) -> None:
    """Train both runs on this rank; rank 0 writes the times of their steps after the warm-up."""
    within = Within()
    with join_ranks(runs[0].group_timeout), ExitStack() as stack:
        patch_telemetry(stack, within)
        from megatron_ext.trainer import loop
        from megatron_ext.trainer.loop import Training

        recording, silent = (Training(config) for config in runs)
        silence(silent)
        log = RunLog(runs[0], start_step=0) if dist.get_rank() == 0 else None
        nothing = SimpleNamespace(metrics=dict, layers=lambda with_experts: {})
        times: dict[str, list[tuple[float, float]]] = {"with": [], "without": [], "within": []}

        def with_telemetry() -> None:
            TIMES.readers = 1
            metrics = recording.train_step()
            if log is not None:
                log.write(metrics, recording.layers)

        def without_telemetry() -> None:
            TIMES.readers = 0
            with mock.patch.object(loop, "gather_step", return_value=nothing):
                silent.train_step()

        ways = [("with", with_telemetry), ("without", without_telemetry)]
        for _ in range(steps):
            ways.reverse()
            for name, take_step in ways:
                dist.barrier()
                within.wall = within.cpu = 0.0
                wall, cpu = perf_counter(), thread_time()
                take_step()
                times[name].append((perf_counter() - wall, thread_time() - cpu))
                if name == "with":
                    times["within"].append((within.wall, within.cpu))
        for training in (recording, silent):
            training.close()
        if log is not None:
            log.__exit__(None, None, None)
            file.write_text(json.dumps({name: each[WARMUP:] for name, each in times.items()}))


def silence(training: Any) -> None:
    """Let a training record nothing."""
    training.recorder.close()
    training.recorder.close = lambda: None
    empty = SimpleNamespace(computed=(), own={}, predicted_by_layer={})
    training.recorder.take_step = lambda: empty


def measure(config_name: str, overrides: list[str], steps: int) -> dict[str, Any]:
    """The row of a comparison over `steps` steps."""
    with tempfile.TemporaryDirectory() as folder:
        runs = [
            load_config(
                [f"steps={WARMUP + steps}", f"run_dir={folder}/{name}", *overrides],
                config_name=config_name,
            )
            for name in ("with", "without")
        ]
        build_data(Path(runs[0].data.path))
        file = Path(folder) / "times.json"
        config = runs[0]
        parallel = config.parallel
        ranks = parallel.ep_size * parallel.pp_size
        launch_ranks(train_in_turn, runs, WARMUP + steps, file, num_ranks=ranks)
        times = json.loads(file.read_text())
    row = {"recipe": config_name, "overrides": overrides, "ranks": ranks, "steps": steps}
    for place, clock in enumerate(("wall", "cpu")):
        by_way = {name: [each[place] for each in steps] for name, steps in times.items()}
        pairs = list(zip(by_way["with"], by_way["without"], strict=True))
        shares = [a / b for a, b in zip(by_way["within"], by_way["with"], strict=True)]
        ratios = statistics.quantiles([a / b for a, b in pairs], n=4)
        row |= {
            f"{clock} ms with": round(1e3 * statistics.median(a for a, _ in pairs), 2),
            f"{clock} ms without": round(1e3 * statistics.median(b for _, b in pairs), 2),
            f"{clock} ratio": round(ratios[1], 4),
            f"{clock} quartiles": [round(ratios[0], 4), round(ratios[2], 4)],
            f"{clock} share": [round(statistics.median(shares), 5), round(max(shares), 5)],
        }
    return row


def main() -> None:
    """Measure, and print or write the row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("overrides", nargs="*", help="settings of both trainings")
    parser.add_argument("--config", default="quickstart")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    file = arguments.json.absolute() if arguments.json else None
    os.chdir(ROOT)  # where the recipes are
    quiet_megatron()
    enable_cpu_platform()
    row = measure(arguments.config, arguments.overrides, arguments.steps)
    report = {"machine": describe_machine()} | row
    print(json.dumps(report, indent=1))
    if file is not None:
        file.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
