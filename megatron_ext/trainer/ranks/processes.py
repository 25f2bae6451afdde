"""Processes, and the one that started them: with which they end, and which says what ended them."""

from __future__ import annotations

import ctypes
import os
import pickle
import resource
import signal
from contextlib import suppress
from pathlib import Path

TORCHRUN = "TORCHELASTIC_RUN_ID"
"""In the environment of ranks that torchrun started."""

AGENT = "MEGATRON_EXT_AGENT"
"""In the environment of ranks that `agent.py` started: its process id."""

_PR_SET_PDEATHSIG = 1

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")


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


def exit_code(child: int) -> int | None:
    """Return the exit status, or minus the signal, of a child that ended; None while it runs.

    The child stays there for who waits for it; of one that is gone the status is 0.
    """
    try:
        end = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return 0
    if end is None:
        return None
    return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status


def allow_open_files(num_ranks: int, ep_size: int) -> None:
    """Let this process, and those that it starts, open as many files as a rank needs.

    Measured on 2 to 8 CPU ranks: a rank has up to 24 open, 13 for each rank of the run (connections
    of 11 groups, and pipes), and 11 for each rank of its EP group (the process, and shared memory:
    two for each of the experts' weights and biases, flags, and rows).

    Raises:
        RuntimeError: The system's limit is lower.
    """
    needed = 24 + 13 * num_ranks + 11 * ep_size
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most < needed:
        raise RuntimeError(
            f"the limit of open files (ulimit -n) is {most}: each of {num_ranks} ranks with "
            f"parallel.ep_size={ep_size} needs up to {needed}"
        )
    if limit < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def how_it_failed(rank: int, exitcode: int, kills: MemoryKills) -> str:
    """Say what ended a rank: its exit status, or minus a signal, and what that mostly means."""
    if exitcode >= 0:
        return f"rank {rank} failed (exit status {exitcode})"
    number = signal.Signals(-exitcode)
    said = f"rank {rank} was ended by {number.name}"
    if number == signal.SIGKILL:
        return f"{said}: {kills}"
    if number == signal.SIGBUS:
        why = "a memory-mapped file became shorter (data.path), or a disk or memory page failed"
        return f"{said}: {why}"
    return said


class MemoryKills:
    """Processes of this cgroup that Linux has killed for want of memory, since the construction."""

    def __init__(self) -> None:
        self._before = _memory_kills()

    def __str__(self) -> str:
        """Say whether there were some, as far as can be known."""
        file, number = _memory_kills()
        if file is None:
            return "most likely memory ran out (dmesg | grep -i oom)"
        if new := number - self._before[1]:
            return f"memory ran out ({file} counts {new} more killed for it)"
        return f"by hand, or memory ran out ({file} counts none killed for it; dmesg | grep -i oom)"


def _memory_kills() -> tuple[Path | None, int]:
    """Return the file that counts what Linux killed in this cgroup for want of memory, and them."""
    for line in _OWN_CGROUP.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            base, name = _CGROUPS / "memory", "memory.oom_control"
        elif not controllers:
            base, name = _CGROUPS, "memory.events"
        else:
            continue
        # Containers may see their own cgroup as the root of all.
        for file in (base / path.lstrip("/") / name, base / name):
            with suppress(OSError):
                counts = dict(each.split() for each in file.read_text().splitlines())
                return file, int(counts.get("oom_kill", 0))
    return None, 0
