"""Processes, and the process that started them: with which they end."""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
from pathlib import Path

TORCHRUN = "TORCHELASTIC_RUN_ID"
"""In the environment of ranks that torchrun started."""

AGENT = "MEGATRON_EXT_AGENT"
"""In the environment of ranks that `agent.py` started: its process id."""

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Have Linux kill this process when its parent, of this process id, ends in any way.

    The parent is the thread that started this process; so a process must be started by a thread
    that lives as long as the process shall live. If it has ended, this process ends at once.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        os._exit(1)


def die_with_launcher() -> None:
    """Do so in a rank that torchrun or `agent.py` started; do nothing in others."""
    if TORCHRUN in os.environ:
        die_with(int(os.environ.get(AGENT, os.getppid())))


def call_with(parent: int, call: bytes) -> None:
    """Die with the parent from now on, and call a pickled callable: the target of a new process."""
    die_with(parent)  # First, as unpickling imports modules, which takes seconds.
    pickle.loads(call)()


def children(pid: int) -> list[int]:
    """Return the processes that a process's main thread has started and that are there still."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
