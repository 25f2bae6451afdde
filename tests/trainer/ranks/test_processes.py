"""What ended a rank, and what it needs of the system. Layer 1."""

from __future__ import annotations

import re
import resource
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_ext.trainer.ranks import processes
from megatron_ext.trainer.ranks.processes import (
    MemoryKills,
    allow_open_files,
    exit_code,
    how_it_failed,
)
from megatron_ext.trainer.ranks.signals import can_be_told


@pytest.mark.parametrize(
    ("file", "counts", "expected"),
    [
        (None, (0, 0), r"most likely memory ran out \(dmesg \| grep -i oom\)"),
        (Path("/c/memory.events"), (3, 4), r"memory ran out \(/c/memory\.events counts 1 more .*"),
        (Path("/c/memory.events"), (3, 3), r"by hand, or memory ran out \(.* none .*dmesg .*"),
    ],
)
def test_a_rank_that_was_killed_mostly_had_no_memory(
    file: Path | None,
    counts: tuple[int, int],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left = iter(counts)
    monkeypatch.setattr(processes, "_memory_kills", lambda: (file, next(left)))
    said = how_it_failed(1, -signal.SIGKILL, MemoryKills())
    assert re.fullmatch(f"rank 1 was ended by SIGKILL: {expected}", said)


@pytest.mark.parametrize(
    ("listed", "name"), [("0::/job", "memory.events"), ("4:cpu,memory:/job", "memory.oom_control")]
)
def test_kills_are_counted_where_either_kind_of_cgroup_has_them(
    listed: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("memory/job" if "," in listed else "job")
    folder.mkdir(parents=True)
    (folder / name).write_text("oom 9\noom_kill 2\n")
    (tmp_path / "cgroup").write_text(f"{listed}\n")
    monkeypatch.setattr(processes, "_CGROUPS", tmp_path)
    monkeypatch.setattr(processes, "_OWN_CGROUP", tmp_path / "cgroup")
    assert processes._memory_kills() == (folder / name, 2)


def test_other_ends_say_what_they_mean() -> None:
    kills = MemoryKills()
    assert how_it_failed(0, 1, kills) == "rank 0 failed (exit status 1)"
    assert how_it_failed(0, -signal.SIGSEGV, kills) == "rank 0 was ended by SIGSEGV"
    assert how_it_failed(0, -signal.SIGBUS, kills) == (
        "rank 0 was ended by SIGBUS: a memory-mapped file became shorter (data.path), or a disk or "
        "memory page failed"
    )


def test_ranks_may_open_as_many_files_as_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [80, 80]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda _, given: limits.__setitem__(0, given[0]))
    allow_open_files(2, 2)
    with pytest.raises(RuntimeError) as refused:
        allow_open_files(4, 4)
    assert str(refused.value) == (
        "the limit of open files (ulimit -n) is 80: each of 4 ranks with parallel.ep_size=4 needs "
        "up to 120"
    )
    limits[1] = 4096
    allow_open_files(4, 4)
    assert limits[0] == 4096


@pytest.fixture
def child(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[bytes]]:
    """A shell that has done this."""
    command = ["sh", "-c", f"{request.param}; echo; read line"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as started:
        assert started.stdout is not None
        started.stdout.readline()
        yield started
        started.kill()


@pytest.mark.parametrize(
    ("child", "harmless"),
    [(":", False), ("trap : TERM", True), ("trap '' TERM", True)],
    indirect=["child"],
)
def test_a_signal_harms_no_rank_that_notes_it_or_is_done(
    child: subprocess.Popen[bytes], harmless: bool
) -> None:
    assert can_be_told(child.pid) == harmless
    assert exit_code(child.pid) is None
    child.kill()
    while exit_code(child.pid) is None:
        pass
    assert exit_code(child.pid) == -signal.SIGKILL
    child.wait()
    assert exit_code(child.pid) == 0
    assert can_be_told(child.pid)
