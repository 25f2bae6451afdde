"""Which forwards a strategy learns from: those of training, each once; all ranks plan alike."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_ext.config import BalanceConfig, HistorySettings
from tests.mcore import inside
from tests.mcore.parity import balanced, balanced_layers
from tests.ranks import run_ranks

MICROBATCHES = 3


def _train_and_evaluate(rank: int, recompute: str) -> list[Any]:
    from tests.gpt import build_gpt

    # A rank that planned differently from another would stop the run.
    balance = BalanceConfig(strategy="eplb", history=HistorySettings(interval=2), check_plans=True)
    gpt = build_gpt(ep=2, recompute=recompute, spec_transform=partial(balanced, balance=balance))
    observed: list[tuple[int, int]] = []
    for layer in balanced_layers(gpt):
        layer.observers.append(
            lambda report: observed.append((report.layer_number, report.num_replicas))
        )
    gpt.forward_backward(num_microbatches=MICROBATCHES)
    with torch.no_grad():
        gpt.forward_backward(num_microbatches=2, forward_only=True)
    return [observed, [inside.num_observed(layer) for layer in balanced_layers(gpt)]]


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_every_training_microbatch_counts_once(recompute: str) -> None:
    for observed, counts in run_ranks(_train_and_evaluate, 2, recompute):
        assert counts == [MICROBATCHES] * len(counts)
        layers = sorted({layer for layer, _ in observed})
        for layer in layers:
            replicas = [number for at, number in observed if at == layer]
            assert len(replicas) == MICROBATCHES
            assert replicas[:2] == [0, 0], "nothing is placed before the first interval is over"


def _aborted_at_different_places(rank: int) -> list[int]:
    """Rank 0 fails when it has counted the load, rank 1 before it has."""
    from megatron_ext import reset_after_abort
    from tests.gpt import build_gpt

    balance = BalanceConfig(strategy="eplb", history=HistorySettings(interval=2), check_plans=True)
    gpt = build_gpt(ep=2, spec_transform=partial(balanced, balance=balance))
    gpt.forward_backward(num_microbatches=MICROBATCHES)
    first, *_ = balanced_layers(gpt)
    fail = mock.Mock(side_effect=ArithmeticError)
    if rank == 0:
        first.observers.append(fail)
    failing = mock.patch(inside.REROUTE, fail) if rank == 1 else nullcontext()
    with failing, pytest.raises(ArithmeticError):
        gpt.forward_backward(num_microbatches=1)
    first.observers[:] = [each for each in first.observers if each is not fail]
    reset_after_abort(gpt.chunks)
    gpt.forward_backward(num_microbatches=2 * MICROBATCHES)
    return [inside.num_observed(layer) for layer in balanced_layers(gpt)]


def test_ranks_that_counted_differently_before_an_abort_plan_alike_after_a_reset() -> None:
    first, second = run_ranks(_aborted_at_different_places, 2)
    assert first == second == [2 * MICROBATCHES] * len(first)


def _run_again(rank: int) -> tuple[list[dict[str, torch.Tensor]], list[int]]:
    from megatron.core.rerun_state_machine import RerunMode, RerunStateMachine

    from tests.gpt import build_gpt

    balance = BalanceConfig(strategy="eplb", history=HistorySettings(interval=2), check_plans=True)
    gpt = build_gpt(ep=2, spec_transform=partial(balanced, balance=balance))
    machine = RerunStateMachine(mode=RerunMode.REPORT_DETERMINISM_STATS)
    runs = []
    for step in range(2):
        while machine.should_run_forward_backward(None):
            gpt.forward_backward(step, num_microbatches=MICROBATCHES)
            runs.append(gpt.gradients())
            machine.rerun_requested = True
    return runs, [inside.num_observed(layer) for layer in balanced_layers(gpt)]


def test_a_step_that_megatron_runs_again_plans_from_the_same_history() -> None:
    """Megatron compares both runs, and takes a difference for a broken machine."""
    for runs, counts in run_ranks(_run_again, 2):
        assert counts == [2 * MICROBATCHES] * len(counts)
        for first, second in (runs[:2], runs[2:]):
            assert all(torch.equal(second[name], value) for name, value in first.items())
