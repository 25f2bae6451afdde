"""A long undisturbed run, whose memory and open files are looked at all the time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from megatron_ext.telemetry.heartbeat import STATUS_FOLDER, Status, read_statuses
from tests.chaos.attempt import LIMIT_S
from tests.trainer.dataset import overrides

MOST_MB_PER_1000_STEPS = 1.0
"""Growth of a rank's memory, over the second half of the run, that counts as flat."""

_PAUSE_S = 5.0


@dataclass(frozen=True)
class Sample:
    """What a rank has at one moment."""

    step: int
    resident_mb: float
    open_files: int


def soak(data: Path, run_dir: Path, *, minutes: float) -> list[str]:
    """Train for so long with evaluation, checkpoints and a trace; print and judge what ranks have.

    The real command is run, since the settings of the C library's memory are read when a program
    starts.

    Returns:
        What is wrong, a line each.
    """
    settings = ["steps=10000000", "eval_every=50", "eval_steps=1", "checkpoint.every=100"]
    command = [sys.executable, "-m", "megatron_ext", "train", *overrides(data, run_dir), *settings]
    samples: dict[int, list[Sample]] = {}
    run_dir.mkdir(parents=True)
    with (
        (run_dir / "output.txt").open("w") as output,
        subprocess.Popen(
            [*command, "logging.trace_steps=20", "balance.check_plans=true"],
            stdout=output,
            stderr=output,
            start_new_session=True,
        ) as process,
    ):
        started = time.monotonic()
        while time.monotonic() < started + 60 * minutes and process.poll() is None:
            time.sleep(_PAUSE_S)
            for status in read_statuses(run_dir / STATUS_FOLDER):
                with suppress(psutil.NoSuchProcess):  # It has just ended: seen at the next look.
                    samples.setdefault(status.rank, []).append(_sample(status))
        problems = [] if process.poll() is None else [f"the soak ended: {process.returncode}"]
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            problems.append(f"the soak did not end within {LIMIT_S:.0f} s of SIGTERM")
            os.killpg(process.pid, signal.SIGKILL)
    if not samples:
        problems.append(f"no rank of the soak was seen\n{(run_dir / 'output.txt').read_text()}")
    for rank, of_rank in sorted(samples.items()):
        problems += _judge(rank, of_rank)
    return problems


def _sample(status: Status) -> Sample:
    rank = psutil.Process(status.pid)
    return Sample(status.note.step, rank.memory_info().rss / 2**20, rank.num_fds())


def _judge(rank: int, samples: list[Sample]) -> list[str]:
    half = samples[len(samples) // 2 :]
    steps = np.array([one.step for one in half])
    resident = np.array([one.resident_mb for one in half])
    files = [one.open_files for one in half]
    growth = 1e3 * float(np.polyfit(steps, resident, 1)[0]) if len(set(steps)) > 1 else 0.0
    print(
        f"soak, rank {rank}: steps {samples[0].step} to {samples[-1].step}, "
        f"{samples[0].resident_mb:.0f} to {samples[-1].resident_mb:.0f} MB; second half "
        f"{growth:+.2f} MB per 1,000 steps, {min(files)} to {max(files)} open files",
        flush=True,
    )
    problems = []
    if growth > MOST_MB_PER_1000_STEPS:
        problems.append(f"soak: rank {rank} grows by {growth:.2f} MB per 1,000 steps")
    if half[-1].open_files > half[0].open_files:
        problems.append(
            f"soak: rank {rank} opened files: {half[0].open_files}, then {half[-1].open_files}"
        )
    return problems
