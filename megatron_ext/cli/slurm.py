"""Slurm, as `submit` talks to it: what the cluster has, a job queued, its log followed."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from megatron_ext.arguments import did_you_mean

_POLL_S = 2.0
"""Between two looks at a job: often enough for people, seldom enough for a controller."""


def is_here() -> bool:
    """Return whether this machine has Slurm's commands."""
    return shutil.which("sbatch") is not None


def check_partitions(names: str) -> None:
    """Check that the cluster has the partitions, which commas part.

    Raises:
        ValueError: It has not.
        RuntimeError: Slurm does not answer.
    """
    known = sorted(set(_ask("sinfo", "--noheader", "--format=%R").split()))
    for name in names.split(","):
        if name not in known:
            near = did_you_mean(name, known)
            raise ValueError(f"--partition ({name}): the cluster has {', '.join(known)}{near}")


def queue(script: str) -> str:
    """Queue a job and return its number.

    Raises:
        RuntimeError: Slurm refuses it.
    """
    return _ask("sbatch", "--parsable", given=script).strip().split(";")[0]


def follow(job: str, logs: Mapping[str, Path]) -> bool:
    """Print what a job writes until it has ended, however often it starts again.

    Args:
        job: Its number.
        logs: Its log files, each with what stands before its lines.

    Returns:
        Whether all of it was completed.
    """
    read = dict.fromkeys(logs, 0)
    is_active = True
    while is_active:
        is_active = bool(_ask("squeue", "--noheader", f"--jobs={job}", gone="Invalid job id"))
        for label, file in logs.items():
            read[label] += _print_new(file, read[label], label)
        if is_active:
            time.sleep(_POLL_S)
    states = _ask("scontrol", "show", "job", job, "--oneliner").split("JobState=")[1:]
    ends = [state.split()[0] for state in states]
    sys.stdout.write(f"job {job}: {', '.join(sorted(set(ends)))}\n")
    return set(ends) == {"COMPLETED"}


def _print_new(file: Path, start: int, label: str) -> int:
    """Print the whole lines of a file from a byte on; return how many bytes they have."""
    if not file.exists():
        return 0
    with file.open("rb") as log:
        log.seek(start)
        lines = log.read().rpartition(b"\n")[0]
    for line in lines.decode(errors="replace").splitlines():
        sys.stdout.write(f"{label}{line}\n")
    sys.stdout.flush()
    return len(lines) + 1 if lines else 0


def _ask(*command: str, given: str | None = None, gone: str | None = None) -> str:
    """Return what a command of Slurm prints, nothing where it fails with the words `gone`.

    Raises:
        RuntimeError: It failed.
    """
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    if done.returncode != 0 and not (gone and gone in done.stderr):
        raise RuntimeError(done.stderr.strip() or f"{command[0]} failed")
    return done.stdout if done.returncode == 0 else ""
