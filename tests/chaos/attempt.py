"""One start of a training program, and the processes that belong to it."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from megatron_ext.cli import main
from megatron_ext.telemetry.heartbeat import STATUS_FOLDER, read_statuses

LIMIT_S = 120.0
"""Longest wait for anything: far more than a calm machine needs."""


class Attempt:
    """A launcher started in a session of its own, so that all its processes are known.

    It is forked from this process, which has imported what training needs: starting Python and
    importing Megatron would take most of a campaign's time.

    Args:
        run_dir: The run's directory.
        overrides: Words after `megatron-ext train`.
        folder: Where its output and its temporary files go.
        most_bytes: Largest file that it may write; None for any.
    """

    def __init__(
        self, run_dir: Path, overrides: list[str], folder: Path, *, most_bytes: int | None = None
    ) -> None:
        self.run_dir = run_dir
        self.temporary = folder / "tmp"
        self.temporary.mkdir(parents=True, exist_ok=True)
        self._output = folder / "output.txt"
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self._become_launcher(overrides, most_bytes)
        self.status: int | None = None

    def _become_launcher(self, overrides: list[str], most_bytes: int | None) -> None:
        status = 70
        try:
            os.setsid()
            # A shell lets what it starts in the background ignore this signal.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.environ["TMPDIR"] = str(self.temporary)
            output = os.open(self._output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for stream in (1, 2):
                os.dup2(output, stream)
            if most_bytes is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
            status = main(["train", *overrides])
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    @property
    def output(self) -> str:
        """What the launcher and its ranks have written."""
        return self._output.read_text(errors="replace") if self._output.exists() else ""

    def lines(self) -> list[str]:
        """Lines of the run's metrics."""
        file = self.run_dir / "metrics.jsonl"
        return file.read_text(errors="replace").splitlines() if file.exists() else []

    def processes(self) -> list[psutil.Process]:
        """The processes of its session that have not ended, but for unreaped ones."""
        return [process for process in _of_session(self.pid) if _lives(process)]

    def ranks(self) -> list[int]:
        """Process ids by rank, as the run itself tells them."""
        mine = {process.pid for process in self.processes()}
        statuses = read_statuses(self.run_dir / STATUS_FOLDER)
        return [status.pid for status in statuses if status.pid in mine]

    def has_ended(self) -> bool:
        """Whether the launcher has ended; sets `status`."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
        return self.status is not None

    def wait_for(self, condition: Callable[[], object], what: str) -> bool:
        """Wait until `condition` holds; return False if the launcher ended before it did.

        Raises:
            TimeoutError: Neither came.
        """
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            if self.has_ended():
                return False
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {LIMIT_S:.0f} s for {what}\n{self.output}")
            time.sleep(0.01)
        return True

    def wait(self) -> int:
        """Wait for the launcher's end; return its status, or minus the signal that ended it."""
        self.wait_for(self.has_ended, "the launcher's end")
        assert self.status is not None
        return self.status

    def end(self) -> None:
        """Kill all that is left."""
        for process in self.processes():
            process.kill()
        if not self.has_ended():
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)

    def listening(self) -> set[str]:
        """Addresses on which its processes accept connections."""
        return {
            socket.laddr.ip
            for process in self.processes()
            for socket in _sockets(process)
            if socket.status == psutil.CONN_LISTEN
        }


def _of_session(session: int) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session:
                yield process
        except ProcessLookupError:
            continue


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _sockets(process: psutil.Process) -> list[psutil._common.pconn]:
    try:
        return process.net_connections("inet")
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return []
