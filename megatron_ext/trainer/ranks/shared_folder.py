"""Whether all machines of a run see one run directory.

With a directory of its own each machine would write its part of a checkpoint where no other finds
it, and watchdogs would miss the ranks of other machines.
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import torch.distributed as dist

from megatron_ext.arguments import WRONG_USAGE
from megatron_ext.telemetry.heartbeat import STATUS_FOLDER, own_status, read_statuses
from megatron_ext.trainer.config import TrainConfig
from megatron_ext.trainer.ranks.launch import end_all
from megatron_ext.transport.reach import gather

PATIENCE_S = 60.0
"""Longest time, in seconds, that NFS by default keeps what it once saw of a folder."""


def check_shared(config: TrainConfig) -> None:
    """Check that each machine finds the status that rank 0 has written for its watchdog.

    All ranks of a process group call it, inside `watch_over`.

    Raises:
        SystemExit: With status 2, on all ranks, after rank 0 has said which machine does not.
    """
    if int(os.environ.get("LOCAL_WORLD_SIZE", 1)) == dist.get_world_size():
        return
    me = own_status(rank=dist.get_rank(), num_ranks=dist.get_world_size(), limit_s=config.timeout_s)
    written = [(me.host, me.pid, me.started)]
    dist.broadcast_object_list(written)
    problem = None
    # Other ranks must not wait longer than for a collective of the training.
    if os.environ.get("LOCAL_RANK", "0") == "0" and not _appears(
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


def _appears(written: tuple[str, int, int], folder: Path, patience_s: float) -> bool:
    """Wait for the status of this process, given as host, process id and start."""
    deadline = time.monotonic() + patience_s
    while written not in [(each.host, each.pid, each.started) for each in read_statuses(folder)]:
        if time.monotonic() > deadline:
            return False
        time.sleep(1.0)
    return True
