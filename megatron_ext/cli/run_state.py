"""The state of a training from outside, for `doctor --run`: what its ranks last said of themselves.

Ranks of other machines are judged by the clock, so a machine whose clock is far off seems silent.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_ext.files.opening import MOST_BYTES, look_at, open_regular
from megatron_ext.telemetry.heartbeat import (
    DONE,
    RUNNING,
    STATUS_FOLDER,
    Status,
    read_statuses,
    stacks_path,
)
from megatron_ext.trainer.ranks.signals import catches
from megatron_ext.trainer.ranks.watchdog import STACKS_SIGNAL, ended, least_far, lost, missing, told

_STACKS_S = 30.0
"""Longest wait for the stacks of a rank, in seconds."""


def run_state(run_dir: Path) -> dict[str, Any]:
    """Return what the ranks of a run do, and a verdict."""
    if not run_dir.is_dir():
        raise FileNotFoundError(f"{run_dir} is no folder")
    folder = run_dir / STATUS_FOLDER
    if not (statuses := read_statuses(folder)):
        raise FileNotFoundError(f"{folder} has no status of a rank: no training began here")
    verdict, is_well = _verdict(statuses)
    return {
        "run_dir": str(run_dir),
        "verdict": verdict,
        "is_well": is_well,
        "ranks": [_row(status) for status in statuses],
    }


def add_stacks(state: dict[str, Any]) -> None:
    """Ask the ranks of this machine for their Python stacks; put them into their rows."""
    folder = Path(state["run_dir"]) / STATUS_FOLDER
    asked: dict[int, int] = {}
    for status in read_statuses(folder):
        # A look at the process first: its number may be another's by now.
        if status.process == "runs" and _answers(status.pid, stacks_path(folder, status.rank)):
            asked[status.rank] = _size(stacks_path(folder, status.rank))
            os.kill(status.pid, STACKS_SIGNAL)
    deadline = time.monotonic() + _STACKS_S
    for row in state["ranks"]:
        rank = row["rank"]
        if rank not in asked:
            row["stacks"] = "not asked: no rank that runs on this machine as this user"
            continue
        path = stacks_path(folder, rank)
        while _size(path) == asked[rank] and time.monotonic() < deadline:
            time.sleep(0.05)
        found = -1
        while found < (found := _size(path)):  # Until nothing more comes.
            time.sleep(0.1)
        with open_regular(path) as file:
            file.seek(asked[rank])
            row["stacks"] = file.read(MOST_BYTES).decode(errors="replace") or "no answer"


def _answers(pid: int, stacks: Path) -> bool:
    """Whether a process writes its stacks to this file when it gets the signal.

    By what the process does, not by what its status says: that could name any process, which the
    signal would end.
    """
    try:
        file, opened = look_at(stacks), os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return False
    for each in opened if catches(pid, STACKS_SIGNAL) else ():
        with suppress(OSError):  # It closes files meanwhile.
            if os.path.samestat(file, os.stat(f"/proc/{pid}/fd/{each}")):
                return True
    return False


def _row(status: Status) -> dict[str, Any]:
    said = ("rank", "host", "pid", "process", "state")
    place = ("step", "stage", "layer", "microbatch")
    return {
        **{name: getattr(status, name) for name in said},
        **{name: getattr(status.note, name) for name in place},
        "moved_s": round(status.still_s + status.silent_s, 1),
        "beat_s": round(status.silent_s, 1),
        "line": status.line,
    }


def _verdict(statuses: list[Status]) -> tuple[str, bool]:
    """Say how the run is in one line, and whether it runs or is done."""
    if all(status.state == DONE for status in statuses) and not missing(statuses):
        return f"done, at step {max(status.note.step for status in statuses)}", True
    if said := told(statuses):
        return f"ended: {said}", False
    running = [status for status in statuses if status.state == RUNNING]
    silent = [each for each in running if each.silent_s > each.lost_s]
    if running and len(silent) == len(running) and all(x.process in "gone?" for x in running):
        last = min(silent, key=lambda status: status.silent_s)
        return f"killed {last.silent_s:.0f} s ago, in {last.note}", False
    if said := ended(statuses) or missing(statuses):
        return f"ended: {said}", False
    if silent:
        return lost(silent), False
    late = least_far(running)
    if late.still_s > late.limit_s / 2:
        place = f"rank {late.rank} is in {late.note}, and has not moved for {late.still_s:.0f} s"
        return f"{place} (limit {late.limit_s:.0f} s)", False
    return f"runs, in step {late.note.step}", True


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
