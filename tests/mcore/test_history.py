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
