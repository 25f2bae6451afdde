"""Slurm, as `submit` talks to it: what the cluster has, a job queued, its log followed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from megatron_ext.arguments import plain
from megatron_ext.files.opening import NotRegularError, whole_lines
from megatron_ext.words import did_you_mean

_POLL_S = 2.0
"""Between two looks at a job: often enough for people, seldom enough for a controller."""

_NAMES_OF_SLURM = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT")
"""What tells Slurm's commands which cluster to ask, and as whom."""

_FORGOTTEN = "Invalid job id"
"""What Slurm says of a job that ended longer ago than its `MinJobAge`."""


def is_here() -> bool:
    """Whether this machine has Slurm's commands."""
    return shutil.which("sbatch") is not None


def check_partitions(names: str) -> None:
    """Raise a `ValueError` unless the cluster has the partitions, which commas part."""
    known = sorted(set(_ask("sinfo", "--all", "--noheader", "--format=%R").split()))
    for name in names.split(","):
        if name not in known:
            near = did_you_mean(name, known)
            raise ValueError(f"--partition ({name}): the cluster has {', '.join(known)}{near}")


def queue(script: str) -> str:
    """Queue a job and return its number; a `RuntimeError` says why Slurm refuses it.

    Called inside a job, as of an interactive shell, it hands on nothing of that job: `srun` would
    bind tasks of the new one to the cores and memory of the old one.
    """
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM_", "SRUN_")) or name in _NAMES_OF_SLURM
    }
    said = _ask("sbatch", "--parsable", given=script, environment=environment)
    return said.strip().split(";")[0]


def follow(job: str, logs: Mapping[str, Path]) -> bool:
    """Print what a job writes until it has ended, however often it starts again.

    Where Slurm does not answer, the job goes on: this is said once, and Slurm asked again. `logs`
    are its log files, each with what stands before its lines.

    Returns:
        Whether Slurm says that all of it was completed.
    """
    read = dict.fromkeys(logs, 0)
    states: dict[str, str] = {}
    is_over, was_answered = False, True
    while not is_over:
        try:
            is_queued = bool(_ask("squeue", "--noheader", f"--jobs={job}", gone=_FORGOTTEN))
            # Slurm forgets an array's tasks one by one, as they end.
            if not is_queued or len(logs) > 1:
                states |= _states(job)
            if not (is_queued or states):
                states = _states_by_accounts(job)
            is_over, was_answered = not is_queued, True
        except RuntimeError as error:
            if was_answered:
                sys.stdout.write(f"{error}; job {job} goes on, and Slurm is asked again\n")
            was_answered = False
        for label in list(read):
            try:
                read[label] += _print_new(logs[label], read[label], label)
            except NotRegularError as error:  # The job goes on, and so do its other logs.
                del read[label]
                sys.stdout.write(f"{plain(str(error))}; this log is followed no more\n")
        sys.stdout.flush()
        if not is_over:
            time.sleep(_POLL_S)
    ends = set(states.values())
    unknown = "its end is not known, for Slurm has forgotten the job: see its log"
    sys.stdout.write(f"job {job}: {', '.join(sorted(ends)) or unknown}\n")
    return ends == {"COMPLETED"}


def _states(job: str) -> dict[str, str]:
    """Return the states of a job's tasks that Slurm has not forgotten, by a name of each."""
    shown = _ask("scontrol", "show", "job", job, "--oneliner", gone=_FORGOTTEN)
    tasks = [line for line in shown.splitlines() if "JobState=" in line]
    return {line.split()[0]: line.split("JobState=")[1].split()[0] for line in tasks}


def _states_by_accounts(job: str) -> dict[str, str]:
    """Return the same of a job that Slurm has forgotten; nothing where nobody knows any more."""
    if not shutil.which("sacct"):
        return {}
    columns = "JobID,State"
    known = _ask("sacct", "-X", "-n", "-P", "-o", columns, f"-j{job}", gone="is disabled")
    tasks = (line.split("|") for line in known.splitlines())
    return {name: state.split()[0] for name, state in tasks}


def _print_new(file: Path, start: int, label: str) -> int:
    """Print the whole lines of a file from a byte on; return how many bytes they have."""
    if not file.exists():
        return 0
    num_bytes = 0
    for whole in whole_lines(file, start, follow=True):
        num_bytes += len(whole)
        for line in whole[:-1].decode(errors="replace").splitlines() or [""]:
            sys.stdout.write(plain(f"{label}{line}\n"))
    return num_bytes


def _ask(
    *command: str,
    given: str | None = None,
    gone: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> str:
    """Return what a command of Slurm prints, nothing where it fails with the words `gone`.

    Raises:
        RuntimeError: It fails otherwise: Slurm does not answer, or refuses.
    """
    done = subprocess.run(
        command, input=given, capture_output=True, text=True, check=False, env=environment
    )
    if done.returncode != 0 and not (gone and gone in done.stderr):
        raise RuntimeError(done.stderr.strip() or f"{command[0]} failed")
    return done.stdout if done.returncode == 0 else ""
