"""CUDA's Multi-Process Service (MPS): kernels of ranks that share a GPU run side by side.

Without it the driver gives the whole GPU to one process after the other, 2 ms or so each, and a
kernel that waits for another rank uses up its turn. The service is two programs of the driver; no
setting of the GPU changes. They end with the `with`.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.gpu.first_run.environment import ROOT

CONTROL = "nvidia-cuda-mps-control"

LIMIT_S = 20.0
"""Of each program that starts the service, uses it first, or ends it."""

CLIENT = """
import os, pickle, socket
from megatron_ext.transport.gpu_driver import Driver

here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
if os.fork() == 0:  # before CUDA starts
    here.close()  # else it would wait for itself, should the other fail
    given, files, _, _ = socket.recv_fds(there, 4096, 1)
    num_bytes, handle = pickle.loads(given)
    found = Driver().read(0, files[0] if files else handle, num_bytes, 4)
    raise SystemExit(0 if found == b"page" else f"it read {found}")
page = Driver().share(0, b"page")
is_file = isinstance(page.handle, int)
given = pickle.dumps((page.num_bytes, None if is_file else page.handle))
socket.send_fds(here, [given], [page.handle] if is_file else [])
raise SystemExit(os.waitstatus_to_exitcode(os.wait()[1]))
"""
"""Two processes share memory by the service as ranks do; the first starts its server."""


@contextmanager
def service() -> Iterator[tuple[Mapping[str, str], str]]:
    """Start the service, if the machine has it and a first process can use it.

    Yields:
        Variables of the processes that are to use it, none if it does not run; and a line that
        says whether it does.
    """
    with tempfile.TemporaryDirectory(prefix="mps.", ignore_cleanup_errors=True) as folder:
        ours = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        environment = {**os.environ, **ours}
        if problem := _start(environment):
            _end(environment, Path(folder))
            yield {}, f"in turns, without MPS: {problem}"
            return
        try:
            yield ours, "with MPS"
        finally:
            _end(environment, Path(folder))


def _start(environment: Mapping[str, str]) -> str:
    """Start the programs; return why they are of no use, or ""."""
    if shutil.which(CONTROL) is None:
        return f"there is no {CONTROL}"
    for command in ([CONTROL, "-d"], [sys.executable, "-c", CLIENT]):
        status, said = _run(command, environment)
        if status:
            return f"{Path(command[0]).name} ended with status {status} {said}".strip()
    return "" if _servers(environment) else "the first processes did not use it"


def _end(environment: Mapping[str, str], folder: Path) -> None:
    """End the programs, also where they do not answer."""
    file = folder / f"{CONTROL}.pid"
    if not file.is_file():
        return
    processes = [*_servers(environment), int(file.read_text())]
    _run([CONTROL], environment, "quit -t 2\n")
    ends = time.monotonic() + LIMIT_S
    for process in processes:
        while Path(f"/proc/{process}").exists() and time.monotonic() < ends:
            time.sleep(0.1)
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def _servers(environment: Mapping[str, str]) -> list[int]:
    _, said = _run([CONTROL], environment, "get_server_list\n")
    return [int(word) for word in said.split() if word.isdigit()]


def _run(
    command: Sequence[str], environment: Mapping[str, str], given: str = ""
) -> tuple[int, str]:
    """Run a program and return its status and what it said, on a line.

    It writes to a file: a pipe would stay open as long as what it leaves in the background.
    """
    with tempfile.TemporaryFile("w+") as output:
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env=environment,
                input=given,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=LIMIT_S,
            )
            status = done.returncode
        except subprocess.TimeoutExpired:
            status = -signal.SIGKILL
        output.seek(0)
        return status, " ".join(output.read().split())[-400:]
