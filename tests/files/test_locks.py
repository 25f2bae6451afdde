"""A folder that one process holds, and what is left of it when that process is killed."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Timer
from unittest import mock

import pytest

from megatron_ext.files import locks
from megatron_ext.files.locks import FolderInUseError, held

HOLDER = """
import os, sys
from pathlib import Path
from megatron_ext.files import locks
from megatron_ext.files.locks import held

with held(Path(sys.argv[1])):
    if not os.fork():
        print(os.getpid(), flush=True)  # By the child: it has come out of the fork.
    # Both wait until their input ends; the child lives on when the parent is killed.
    sys.stdin.read()
"""


@contextmanager
def holder_of(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the folder and has a child."""
    words = [sys.executable, "-c", HOLDER, str(folder)]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        yield process
        os.kill(child, 0)  # Raises if it did not live so long.


def test_a_second_holder_is_told_of_the_first(tmp_path: Path) -> None:
    with holder_of(tmp_path / "run") as process:
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        rule = rf"run is in use by process {process.pid} on \S+ since 20\d\d-"
        with pytest.raises(FolderInUseError, match=rule), held(tmp_path / "run"):
            raise AssertionError("two hold it")
        assert {path: path.read_bytes() for path in before} == before


def test_a_lost_machine_is_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file server keeps its locks for a while."""
    monkeypatch.setattr(locks, "_POLL_S", 0.05)
    elsewhere = "process 7 on a-machine-that-is-lost since 2026-11-28 10:00:00+00:00"
    with holder_of(tmp_path) as process:
        (tmp_path / ".lock").write_text(f"{elsewhere}\n")
        monkeypatch.setattr(locks, "PATIENCE_S", 0.2)
        rule = f"is in use by {re.escape(elsewhere)}; if that machine is lost, delete .lock in it"
        with pytest.raises(FolderInUseError, match=rule), held(tmp_path):
            raise AssertionError("two hold it")
        monkeypatch.setattr(locks, "PATIENCE_S", 60.0)
        Timer(0.3, process.kill).start()
        with held(tmp_path):
            assert process.wait() < 0
    assert [record.getMessage().split("; ")[1] for record in caplog.records] == [
        f"waiting {patience} s, in case that machine is lost" for patience in (0, 60)
    ]


def test_a_killed_holder_leaves_the_folder_free(tmp_path: Path) -> None:
    with holder_of(tmp_path) as process:
        process.kill()
        process.wait()
        with held(tmp_path):
            pass
    with held(tmp_path):  # Nor does one that ended.
        pass


def test_a_file_system_without_locks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    refusal = OSError(errno.ENOLCK, "No locks available")
    with mock.patch.object(fcntl, "flock", side_effect=refusal), held(tmp_path):
        pass
    (record,) = caplog.records
    assert record.getMessage() == (
        f"warning: {tmp_path} cannot be locked (No locks available): start no second run there"
    )
