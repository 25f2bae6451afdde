"""What ranks say is in a file each, and `megatron-ext logs` shows them as one."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command import run
from tests.processes import running

RANK = """
import logging, os, sys
from pathlib import Path
logging.basicConfig(format="%(message)s", level=logging.INFO)
from megatron_ext.trainer.logs.rank_logs import LOG_ONLY, keep_output
keep_output(Path(sys.argv[1]), verbose=len(sys.argv) > 2)
logging.info("fine")
logging.error("traceback", extra=LOG_ONLY)
logging.error("bad\\nreally")
os.write(2, b"native\\n")
"""


def _be_rank(rank: int, run_dir: Path, *words: str) -> str:
    """What the terminal shows of a rank."""
    environment = os.environ | {"RANK": str(rank), "WORLD_SIZE": "2"}
    done = subprocess.run(
        [sys.executable, "-c", RANK, run_dir, *words],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    return done.stderr


def test_the_terminal_shows_rank_0_and_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _be_rank(0, tmp_path) == "fine\nbad\nreally\nnative\n"
    assert _be_rank(1, tmp_path) == "[rank 1] bad\n[rank 1] really\n"
    status, out, _ = run(capsys, "logs", str(tmp_path), "--rank", "1")
    lines = [line.partition("Z ")[2] or line for line in out.splitlines()]
    assert status == 0
    assert lines[0].startswith("rank 1 of 2 on host ")
    assert lines[1:] == ["fine", "traceback", "bad", "[rank 1] really", "[rank 1] native"]
    assert _be_rank(0, tmp_path, "verbose") == "fine\ntraceback\nbad\nreally\nnative\n"


def test_the_logs_of_more_ranks_than_a_process_may_have_files_open(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "logs").mkdir()
    for rank in range(100):
        (tmp_path / "logs" / f"rank_{rank:05d}.log").write_text(
            f"2026-01-31T23:59:59.{99 - rank:03d}Z a\n2026-01-31T22:59:00.000Z clock set back\n"
        )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 50, hard))
    try:
        status, out, said = run(capsys, "logs", str(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert status == 0, said
    assert [line.partition("]")[0] for line in out.splitlines()[::2]] == [
        f"[rank {rank}" for rank in reversed(range(100))
    ]
    assert all(line.endswith("set back") for line in out.splitlines()[1::2])


def test_lines_are_in_the_order_of_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "logs").mkdir()
    for rank, said in {
        0: "2026-01-31T23:59:59.999Z a\n of a\n2026-02-01T00:00:01.000Z c\nunfinished",
        1: "2026-02-01T00:00:00.000Z b\n",
    }.items():
        (tmp_path / "logs" / f"rank_0000{rank}.log").write_text(said)
    assert run(capsys, "logs", str(tmp_path))[1].splitlines() == [
        "[rank 0] 2026-01-31T23:59:59.999Z a",
        "[rank 0]  of a",
        "[rank 1] 2026-02-01T00:00:00.000Z b",
        "[rank 0] 2026-02-01T00:00:01.000Z c",
    ]
    status, _, said = run(capsys, "logs", str(tmp_path), "--rank", "7")
    assert (status, said) == (
        2,
        f"megatron-ext logs: error: --rank (7): {tmp_path} has logs of 2 ranks\n",
    )
    (tmp_path / "logs" / "rank_00001.log").unlink()
    assert run(capsys, "logs", str(tmp_path), "--rank", "7")[2].endswith("has logs of 1 rank\n")
    status, _, said = run(capsys, "logs", str(tmp_path / "logs"))
    assert (status, len(said.splitlines())) == (2, 1)

    command = [sys.executable, "-m", "megatron_ext", "logs", str(tmp_path), "--follow"]
    with running(command, tmp_path / "output") as follower:
        follower.wait_for_output("c\n")
        with (tmp_path / "logs" / "rank_00000.log").open("a") as log:
            log.write(" line\n")
        follower.wait_for_output("[rank 0] unfinished line\n")
