"""Which forwards a strategy learns from: those of training, each once; all ranks plan alike."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from megatron_ext.balance.strategies.settings import BalanceConfig
from megatron_ext.balance.strategies.strategy import HistorySettings
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
    return [observed, [layer.state.planner._num_observed for layer in balanced_layers(gpt)]]


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_every_training_microbatch_counts_once(recompute: str) -> None:
    for observed, counts in run_ranks(_train_and_evaluate, 2, recompute):
        assert counts == [MICROBATCHES] * len(counts)
        layers = sorted({layer for layer, _ in observed})
        for layer in layers:
            replicas = [number for at, number in observed if at == layer]
            assert len(replicas) == MICROBATCHES
            assert replicas[:2] == [0, 0], "nothing is placed before the first interval is over"
