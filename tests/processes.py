"""A program started in a session of its own, watched and attacked from outside."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron_ext.trainer.ranks.processes import children

_LISTENS = "0A"

_PATIENCE_S = 600
"""For what takes seconds on a calm machine."""


class Program:
    """A running program and all processes of its session.

    Args:
        command: The program and its arguments.
        folder: Where its output is written, into a new file.
        environment: Added to this process's, without what would make it a rank.
    """

    def __init__(self, command: Sequence[str], folder: Path, **environment: str) -> None:
        inherited = {name: value for name, value in os.environ.items() if name != "RANK"}
        folder.mkdir(exist_ok=True)
        self._output = folder / f"output_{len(list(folder.iterdir()))}"
        with self._output.open("w") as file:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
                env=inherited | environment,
            )
        self.pid = self._process.pid

    def output(self) -> str:
        """Return what it has written by now."""
        return self._output.read_text()

    def wait_for(self, condition: Callable[[], object], what: str) -> None:
        """Return when the condition holds."""
        deadline = time.monotonic() + _PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, f"no {what} in {_PATIENCE_S} s\n{self.output()}"
            time.sleep(0.01)

    def wait_for_output(self, text: str) -> None:
        """Return when it has written the text."""
        self.wait_for(lambda: text in self.output() or self._process.poll() is not None, repr(text))
        assert text in self.output(), self.output()

    def status(self) -> int:
        """Return its exit status when it has ended."""
        self.wait_for(lambda: self._process.poll() is not None, "end")
        assert self._process.returncode is not None
        return self._process.returncode

    def pids(self) -> list[int]:
        """Return the processes of the session that live, without zombies."""
        return [pid for pid in _all_pids() if _session(pid) == self.pid and _state(pid) != "Z"]

    def wait_until_gone(self) -> None:
        """Return when no process of the session is left. One that is forgotten stays for ever."""
        self.wait_for(lambda: not self.pids(), "end of all processes")

    def ranks(self) -> list[int]:
        """Return the processes that it started as ranks by now, in their order."""
        return [pid for pid in children(self.pid) if "resource_tracker" not in _words(pid)]

    def end(self) -> None:
        """Kill whatever is left of it."""
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()


@contextmanager
def running(command: Sequence[str], folder: Path, **environment: str) -> Iterator[Program]:
    """A program that is ended with the block, at the latest."""
    program = Program(command, folder, **environment)
    try:
        yield program
    finally:
        program.end()


def pending(pid: int, number: signal.Signals) -> bool:
    """Return whether a process has not yet taken a signal that was sent to it."""
    status = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("ShdPnd:"))
    return bool(int(line.split()[1], 16) >> (number - 1) & 1)


def listening(pids: Sequence[int]) -> list[tuple[str, int]]:
    """Return address and port of each socket on which one of the processes listens for TCP.

    Addresses are in the kernel's hexadecimal form: 0100007F is 127.0.0.1.
    """
    inodes = {inode for pid in pids for inode in _sockets(pid)}
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENS and fields[9] in inodes:
                address, port = fields[1].split(":")
                found.append((address, int(port, 16)))
    return found


def _sockets(pid: int) -> list[str]:
    try:
        files = list(Path(f"/proc/{pid}/fd").iterdir())
    except FileNotFoundError:
        return []
    targets = []
    for file in files:
        with suppress(FileNotFoundError):
            targets.append(os.readlink(file))
    return [target[8:-1] for target in targets if target.startswith("socket:[")]


def _all_pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _session(pid: int) -> int | None:
    with suppress(ProcessLookupError):
        return os.getsid(pid)
    return None


def _state(pid: int) -> str:
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return "Z"


def _words(pid: int) -> str:
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


def unused_shared_files() -> frozenset[str]:
    """Names in shared memory that no process uses.

    Those of tests that run beside are used by them, but for the moment between two calls.
    Semaphores are left out: Python removes those of a killed program, unless a test beside kills
    what removes them, too, and their names do not say whose they are.
    """
    names = frozenset(name for name in os.listdir("/dev/shm") if not name.startswith("sem."))
    used: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            used.update(re.findall(r"/dev/shm/(\S+)", (process / "maps").read_text()))
            for file in (process / "fd").iterdir():
                with suppress(OSError):
                    used.add(file.readlink().name)
    return names - used


def left_in_shared_memory(before: frozenset[str], *, patience_s: float) -> list[str]:
    """Return what nobody uses for so long, in seconds, and was not there before."""
    deadline = time.monotonic() + patience_s
    while (left := unused_shared_files() - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    return sorted(left)
