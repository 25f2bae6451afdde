"""Whether all machines of a run see one run directory, and the same data.

With a directory of its own each machine would write its part of a checkpoint where no other finds
it, and watchdogs would miss the ranks of other machines. Each machine may have a copy of the data;
with other data its ranks would train on other samples than the position in the data says.
"""

from __future__ import annotations

import hashlib
import os
import socket
import time
from collections.abc import Iterable
from pathlib import Path

import torch.distributed as dist

from megatron_ext.arguments import WRONG_USAGE
from megatron_ext.telemetry.heartbeat import STATUS_FOLDER, own_status, read_statuses
from megatron_ext.trainer.config import TrainConfig
from megatron_ext.trainer.ranks.launch import end_all
from megatron_ext.transport.reach import gather

PATIENCE_S = 60.0
"""Longest time, in seconds, that NFS by default keeps what it once saw of a folder."""

_END_BYTES = 1 << 16
"""Bytes at each end of a file that machines compare: a thousand may read the same files."""


def check_shared(config: TrainConfig) -> None:
    """Check that each machine finds the status that rank 0 has written for its watchdog.

    All ranks of a process group call it, inside `watch_over`.

    Raises:
        SystemExit: With status 2, on all ranks, after rank 0 has said which machine does not.
    """
    if _is_one_machine():
        return
    me = own_status(rank=dist.get_rank(), num_ranks=dist.get_world_size(), limit_s=config.timeout_s)
    written = [(me.host, me.pid, me.started)]
    dist.broadcast_object_list(written)
    problem = None
    # Other ranks must not wait longer than for a collective of the training.
    if _speaks_for_machine() and not _appears(
        written[0], Path(config.run_dir) / STATUS_FOLDER, min(PATIENCE_S, config.timeout_s)
    ):
        problem = (
            f"run_dir ({config.run_dir}): host {socket.gethostname()} does not see what rank 0, on "
            f"host {written[0][0]}, writes there: all machines must share its file system"
        )
    problems = gather(problem)
    # Where rank 0 itself does not see it, nothing could be written: that is reported elsewhere.
    if problems[0] or not (said := next(filter(None, problems), None)):
        return
    end_all(said, WRONG_USAGE)


def check_same(setting: str, files: Iterable[str]) -> None:
    """Check that all machines have the same files for a setting, by their sizes and both ends.

    All ranks of a process group call it.

    Raises:
        SystemExit: With status 2, on all ranks, after rank 0 has said which file differs where.
    """
    if _is_one_machine():
        return
    marks = {file: _mark(Path(file)) for file in files} if _speaks_for_machine() else {}
    (first_host, first), *others = gather((socket.gethostname(), marks))
    for host, marks in others:
        for file in {**first, **marks} if marks else ():
            here, there = first.get(file, "not there"), marks.get(file, "not there")
            if here != there:
                end_all(
                    f"{setting}: {file} differs between host {first_host} ({here}) and host {host} "
                    f"({there}): all machines must have the same data",
                    WRONG_USAGE,
                )


def _is_one_machine() -> bool:
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1)) == dist.get_world_size()


def _speaks_for_machine() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _mark(path: Path) -> str:
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            checksum = hashlib.sha256()
            for start in (0, max(0, size - _END_BYTES)):
                file.seek(start)
                checksum.update(file.read(_END_BYTES))
    except OSError as error:
        return str(error.strerror)
    return f"{size:,} bytes, checksum of its ends {checksum.hexdigest()[:12]}"


def _appears(written: tuple[str, int, int], folder: Path, patience_s: float) -> bool:
    """Wait for the status of this process, given as host, process id and start."""
    deadline = time.monotonic() + patience_s
    while written not in [(each.host, each.pid, each.started) for each in read_statuses(folder)]:
        if time.monotonic() > deadline:
            return False
        time.sleep(1.0)
    return True
