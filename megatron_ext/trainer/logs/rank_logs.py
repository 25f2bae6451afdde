"""The output of each rank in a file of its own; the terminal shows rank 0, and others' errors.

    RUN/logs/rank_00001.log
    2026-01-31T23:59:59.999Z rank 1 of 2 on host a, process 4711
    2026-02-01T00:03:12.345Z rank 1 failed

A time is UTC, so that lines of several machines are in order. Lines without one belong to the line
before: the rest of a message, or a library's words past Python's logging. Those of rank 0 go to the
terminal only. Tracebacks are in the files only. `megatron-ext logs` shows all files as one.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from pathlib import Path

from megatron_ext.files.opening import open_own

LOGS_FOLDER = "logs"
"""In a run directory."""


LOG_ONLY = {"is_log_only": True}
"""`extra` of what is logged to the rank's file, and to the terminal only where all is asked for."""


def rank_log(run_dir: Path, rank: int) -> Path:
    """Return the file of a rank."""
    return run_dir / LOGS_FOLDER / f"rank_{rank:05d}.log"


def keep_output(run_dir: Path, *, verbose: bool = False) -> None:
    """From now on write the output of this process, a rank of a launch, to the rank's file.

    Call it when logging to the terminal is set up. The terminal gets warnings and errors of all
    ranks, with the rank before each line, and everything of rank 0; tracebacks only if `verbose`.
    """
    rank = int(os.environ["RANK"])
    path = rank_log(run_dir, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.fdopen(open_own(path, os.O_APPEND), "a", buffering=1)
    if not verbose:
        for handler in logging.getLogger().handlers:
            handler.addFilter(lambda record: not hasattr(record, "is_log_only"))
    if rank != 0:
        terminal = os.fdopen(os.dup(2), "w", buffering=1)
        for handler in logging.getLogger().handlers:
            if isinstance(handler, logging.StreamHandler):
                handler.setStream(terminal)
                handler.setLevel(logging.WARNING)
                handler.setFormatter(_Named(rank))
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    kept = logging.StreamHandler(file)
    kept.setFormatter(_Timed("%(asctime)s %(message)s"))
    logging.getLogger().addHandler(kept)
    who = f"rank {rank} of {os.environ['WORLD_SIZE']} on host {socket.gethostname()}"
    kept.handle(
        logging.makeLogRecord({"msg": f"{who}, process {os.getpid()}", "levelno": logging.INFO})
    )


class _Named(logging.Formatter):
    """Puts the rank before each line of a message."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._start = f"[rank {rank}] "

    def format(self, record: logging.LogRecord) -> str:
        return self._start + super().format(record).replace("\n", f"\n{self._start}")


class _Timed(logging.Formatter):
    """Writes times in UTC, as in the example above."""

    converter = staticmethod(time.gmtime)
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"
