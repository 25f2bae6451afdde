"""Ranks of one machine: their environment, and what becomes of them when one dies. Layer 2."""

import errno
import json
import logging
import os
import platform
import re
import resource
import signal
import statistics
import subprocess
import sys
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_ext.config import ConfigError
from megatron_ext.trainer.compose import load_config
from megatron_ext.trainer.config import TrainConfig
from megatron_ext.trainer.logs.rank_logs import rank_log
from megatron_ext.trainer.ranks import launch
from megatron_ext.trainer.ranks.launch import NO_RESTART, join_ranks, launch_ranks
from tests.processes import running
from tests.ranks import run_ranks
from tests.steps import repeatable_steps
from tests.trainer.dataset import overrides
from tests.trainer.ranks.test_signals import ROOT, train_command, train_here

on_a_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="about ranks on CPUs")

BLOCK = 64 << 20
"""Bytes that the C library would return to the kernel as soon as they are free."""
HUGE_PAGE = 2 << 20
ROUNDS = 30
"""Half of them may take new memory: in what was freed, an aligned block does not always fit."""


def count_faults(file: str) -> None:
    """Write the page faults of each round in which this rank takes a block and frees it."""
    with join_ranks():
        faults = []
        for _ in range(ROUNDS):
            before = _faults()
            torch.ones(BLOCK // 4)
            faults.append(_faults() - before)
        Path(file).write_text(json.dumps(faults))


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


LAUNCHES = """
import sys
from megatron_ext.cpu_platform import enable_cpu_platform
enable_cpu_platform()
from megatron_ext.trainer.ranks.launch import launch_ranks
from tests.trainer.ranks.test_launch import count_faults
launch_ranks(count_faults, sys.argv[1], num_ranks=1)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="about glibc's settings")
@pytest.mark.parametrize("kept", [True, False], ids=["kept", "as_a_user_has_set"])
@on_a_cpu
def test_a_rank_keeps_the_memory_it_freed(kept, tmp_path):
    theirs = {} if kept else {"MALLOC_MMAP_THRESHOLD_": "131072"}
    file = tmp_path / "faults.json"
    subprocess.run(
        [sys.executable, "-c", LAUNCHES, file], cwd=ROOT, env=os.environ | theirs, check=True
    )
    faults = json.loads(file.read_text())
    # In huge pages, also what the kernel gives anew takes few faults.
    assert faults[0] < BLOCK // resource.getpagesize() // 10
    assert (statistics.median(faults) < BLOCK // HUGE_PAGE) == kept


def _train_and_fall(config: TrainConfig, marker: str) -> None:
    """Train; the first time, rank 1 is killed in its fifth step."""
    with join_ranks(config.group_timeout):
        from megatron_ext.trainer.loop import Training

        training = Training(config)
        train_step = training.train_step

        def fall():
            if training.step == 4 and os.environ["RANK"] == "1" and not Path(marker).exists():
                Path(marker).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return train_step()

        training.train_step = fall  # type: ignore[method-assign]
        training.run()


@pytest.mark.slow
@on_a_cpu
def test_a_run_starts_again_after_a_rank_was_killed(data, tmp_path, caplog):
    run_dir, whole = tmp_path / "run", tmp_path / "whole"
    config = load_config([*overrides(data, run_dir), "checkpoint.every=3"])
    with caplog.at_level(logging.INFO, "megatron_ext"):
        launch_ranks(_train_and_fall, config, str(tmp_path / "fell"), num_ranks=2, restarts=2)
    said = [record.message for record in caplog.records if "restart" in record.message]
    assert len(said) == 1
    assert re.match(r"restart 1 of 2 at 2\S+ \S+: rank 1 was ended by SIGKILL: .*memory", said[0])
    run_ranks(train_here, 2, overrides(data, whole))
    assert repeatable_steps(run_dir) == repeatable_steps(whole)


def _end_for_good(file: str) -> None:
    with Path(file).open("a") as starts:
        starts.write("started\n")
    raise SystemExit(NO_RESTART)


@on_a_cpu
def test_what_would_come_again_is_not_started_again(tmp_path, capfd):
    with pytest.raises(SystemExit) as ended:
        launch_ranks(_end_for_good, str(tmp_path / "starts"), num_ranks=1, restarts=2)
    assert ended.value.code == 1
    assert (tmp_path / "starts").read_text() == "started\n"
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RuntimeError("no"), 1),
        (ConfigError(["no"]), 2),
        (OSError(errno.ENOSPC, "No space left on device"), NO_RESTART),
    ],
)
def test_a_traceback_is_for_the_log_of_the_rank(error, status, monkeypatch, caplog):
    def fail(timeout):
        raise error

    monkeypatch.setattr(launch, "_join", fail)
    monkeypatch.setattr(launch, "quiet_megatron", lambda: None)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as ended, join_ranks():
        pass
    assert ended.value.code == status
    (record,) = caplog.records
    assert record.getMessage() == "rank 1 failed"
    assert record.exc_info
    assert record.is_log_only


def test_of_ranks_that_fell_together_the_one_that_knows_why_decides(monkeypatch):
    monkeypatch.setattr(launch, "LAST_WORDS_S", 0.0)
    ranks = [SimpleNamespace(exitcode=code, join=lambda _: None) for code in (1, NO_RESTART, 1)]
    assert launch._watch(ranks, []) == launch._Failure(1, NO_RESTART)


def test_a_rank_that_failed_before_it_was_watched_is_noticed():
    rank = get_context("spawn").Process(target=os._exit, args=(1,))
    rank.start()
    rank.join()
    assert launch._watch([rank], []) == launch._Failure(0, 1)


@pytest.mark.slow
@on_a_cpu
def test_nothing_outlives_a_rank_that_was_killed(data, tmp_path):
    with running(train_command(data, tmp_path / "run"), tmp_path / "output") as run:
        run.wait_for_output("step 1/")
        os.kill(run.ranks()[1], signal.SIGKILL)
        run.wait_until_gone()
        assert run.status() == 1
        said = run.output().splitlines()[-1]
        assert said.startswith("error: rank 1 was ended by SIGKILL: ")
    logs = [rank_log(tmp_path / "run", rank).read_text() for rank in (0, 1)]
    assert "Z step 1/" in logs[0]
    assert "Z rank 1 of 2 on host " in logs[1]


@pytest.mark.slow
@on_a_cpu
def test_nothing_outlives_a_launcher_that_was_killed(data, tmp_path):
    with running(train_command(data, tmp_path / "run"), tmp_path / "output") as run:
        run.wait_for_output("step 1/")
        os.kill(run.pid, signal.SIGKILL)
        run.wait_until_gone()


@pytest.mark.parametrize("missing", ["MASTER_ADDR", "RDZV_SECRET"])
def test_several_machines_need_an_address_and_a_secret(missing, tmp_path):
    given = {"NNODES": "2", "MASTER_ADDR": "127.0.0.1", "RDZV_SECRET": "secret"}
    done = subprocess.run(
        ["bash", f"{ROOT}/launch/train.sh", "data.path=nowhere"],
        env={**os.environ, **given, missing: ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert missing in done.stderr.splitlines()[-1]
