"""A run that is asked to stop, in every way a terminal or a scheduler asks. Layer 2.

Metrics are compared exactly: a run that stopped and continued does the arithmetic of one that never
stopped.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron_ext.cpu_platform import enable_cpu_platform
from megatron_ext.trainer.compose import load_config
from megatron_ext.trainer.logs.run_log import read_metrics
from megatron_ext.trainer.ranks.signals import STOP_SIGNALS, StopRequest
from tests.processes import Program, listening, pending, running
from tests.ranks import run_ranks
from tests.steps import repeatable_steps
from tests.trainer.dataset import overrides

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="about ranks on CPUs")

ROOT = Path(__file__).parents[3]
ENDLESS = ["steps=1000000", "optimizer.decay=constant"]
LOOPBACK = {"0100007F", "00000000000000000000000001000000"}


def train_command(data: Path, run_dir: Path, *settings: str) -> list[str]:
    return [
        *(sys.executable, "-m", "megatron_ext", "train"),
        *(*overrides(data, run_dir), *ENDLESS, *settings),
    ]


def train_here(rank: int, arguments: list[str]) -> None:
    enable_cpu_platform()
    from megatron.core import parallel_state

    from megatron_ext.trainer.loop import Training

    parallel_state.destroy_model_parallel()
    Training(load_config(arguments)).run()


def ask_launcher(run: Program) -> signal.Signals:
    os.kill(run.pid, signal.SIGTERM)
    return signal.SIGTERM


def ask_as_a_terminal_does(run: Program) -> signal.Signals:
    os.killpg(run.pid, signal.SIGINT)
    return signal.SIGINT


def ask_one_rank(run: Program) -> signal.Signals:
    os.kill(run.ranks()[1], signal.SIGUSR1)
    return signal.SIGUSR1


@pytest.mark.slow
def test_a_stopped_run_has_saved_its_step_and_continues_exactly(data: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    asks: list[Callable[[Program], signal.Signals]] = [
        ask_launcher,
        ask_as_a_terminal_does,
        ask_one_rank,
    ]
    last = 0
    for ask in asks:
        # Never due by itself.
        command = train_command(data, run_dir, "checkpoint.every=900000")
        with running(command, tmp_path / "output") as run:
            run.wait_for_output(f"step {last + 2}/")
            heard = listening(run.pids())
            assert heard, "gloo's own sockets are not seen"
            assert {address for address, _ in heard} <= LOOPBACK
            asked = ask(run)
            assert run.status() == 128 + asked, run.output()
            run.wait_until_gone()
            last = len(read_metrics(run_dir))
            newest = run_dir / "checkpoints" / f"step_{last:08d}"
            said = [line for line in run.output().splitlines() if not line.startswith("step ")]
            assert said[-1] == f"stopped by {asked.name} after step {last}: saved {newest}"
            assert not any(line.startswith("stopped") for line in said[:-1])
            assert "Traceback" not in run.output()
            assert newest.is_dir()
    whole = tmp_path / "whole"
    run_ranks(train_here, 2, [*overrides(data, whole), *ENDLESS, f"steps={last}"])
    assert repeatable_steps(run_dir) == repeatable_steps(whole)


@pytest.mark.slow
def test_a_second_ctrl_c_ends_at_once(data: Path, tmp_path: Path) -> None:
    with running(train_command(data, tmp_path / "run"), tmp_path / "output") as run:
        run.wait_for_output("step 1/")
        hangs = run.ranks()[1]
        os.kill(hangs, signal.SIGSTOP)  # So that no step ends.
        os.kill(run.pid, signal.SIGINT)
        run.wait_for(lambda: pending(hangs, signal.SIGINT), "passed on")
        run.wait_for_output("SIGINT: the run ends after this step; ")
        os.kill(run.pid, signal.SIGINT)
        assert run.status() == 130
        run.wait_until_gone()
        assert run.output().splitlines()[-1] == "ended at once by SIGINT; nothing more was saved"
        assert "Traceback" not in run.output()


@pytest.mark.slow
def test_a_signal_before_training_ends_at_once(data: Path, tmp_path: Path) -> None:
    with running(train_command(data, tmp_path / "run"), tmp_path / "output") as run:
        run.wait_for(lambda: len(run.ranks()) == 2, "two ranks")
        os.killpg(run.pid, signal.SIGINT)
        assert run.status() == 130
        run.wait_until_gone()
        assert run.output().splitlines()[-1] == "ended at once by SIGINT; nothing more was saved"
        assert "Traceback" not in run.output()


def test_all_ranks_take_the_signal_that_any_of_them_noted() -> None:
    asked, other = StopRequest(), StopRequest()
    asked._note(signal.SIGUSR1, None)
    votes = [mine + theirs for mine, theirs in zip(asked.votes(), other.votes(), strict=True)]
    asked.decide(votes)
    other.decide(votes)
    assert asked.agreed is other.agreed is signal.SIGUSR1
    other.decide([0.0] * len(STOP_SIGNALS))
    assert other.agreed is None
