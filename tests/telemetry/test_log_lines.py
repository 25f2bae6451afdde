"""A user of three lines sees that it works: lines at start and every few microbatches, by one rank.

What the lines say is compared with what the layers told their observers.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.balance.metrics import home_loads, imbalance
from megatron_ext.config import BalanceConfig
from tests.mcore.parity import balanced_gpt, balanced_layers  # enables the CPU platform
from tests.ranks import run_ranks

from megatron_ext.telemetry import log_lines  # isort: skip


class Notes(logging.Handler):
    """Keeps the lines of a rank."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _lines(
    rank: int, log_every: int | str, ep: int, **settings: Any
) -> tuple[list[str], list[tuple[float, ...]]]:
    """Lines of three microbatches, and what each layer reported of the first two."""
    notes, reported = Notes(), []
    logging.getLogger().addHandler(notes)
    try:
        gpt = balanced_gpt(dict(ep=ep, **settings), BalanceConfig(slots=1, log_every=log_every))
        for layer in balanced_layers(gpt):
            layer.observers.append(reported.append)
        gpt.forward_backward(num_microbatches=3)
        gpt.forward_backward(forward_only=True)
    finally:
        logging.getLogger().removeHandler(notes)
    values = [
        (imbalance(home_loads(one.load)), imbalance(one.rank_loads_after), one.num_replicas)
        for one in reported[:4]
    ]
    return [line for line in notes.lines if line.startswith("MoE")], values


def test_lines_say_what_the_layers_did() -> None:
    (spoken, values), (silent, _) = run_ranks(_lines, 2, 2, 2)
    start, did = spoken
    megabytes = 2 * 3 * 16 * 32 * 4 / 1e6  # Weights and gradients of an expert, gated, in float32.
    assert start == (
        "MoE layers 1-2: balanced over 2 EP ranks with strategy quota: 1 slot on each, "
        f"{megabytes:.1f} MB for all layers, transport shared_memory, 1 NVLink domain"
    )
    before, after, replicas = (sum(each) / 4 for each in zip(*values, strict=True))
    worst_before, worst_after, _ = (max(each) for each in zip(*values, strict=True))
    assert did == (
        f"MoE layers 1-2, last 2 microbatches: imbalance {before:.2f} -> {after:.2f} "
        f"(worst {worst_before:.2f} -> {worst_after:.2f}), {replicas:.1f} replicas a layer"
    )
    assert before > after
    assert silent == []


def test_without_slots_the_line_says_so_and_0_is_silence() -> None:
    alone, also_alone = run_ranks(_lines, 2, "auto", 1)
    assert alone[0] == ["MoE layers 1-2: not balanced, for there is 1 EP rank"]
    assert also_alone[0] == [], "the same layers of another data-parallel rank"
    assert [spoken for spoken, _ in run_ranks(_lines, 2, 0, 2)] == [[], []]


def _lines_of_droppers(rank: int) -> list[list[str]]:
    """Lines of models that drop tokens, without and with padding."""
    drops = dict(moe_expert_capacity_factor=0.5)
    return [
        _lines(rank, "auto", 2, **settings)[0]
        for settings in (drops, drops | dict(moe_pad_expert_input_to_capacity=True))
    ]


def test_whoever_drops_tokens_is_told_once_what_balancing_changes() -> None:
    ((dropped,), (padded,)), silent = run_ranks(_lines_of_droppers, 2)
    assert dropped.startswith(
        "MoE layers 1-2: balanced over 2 EP ranks with strategy quota: 1 slot"
    )
    assert dropped.endswith(
        "; tokens beyond moe_expert_capacity_factor (0.5) are dropped before balancing"
    )
    assert padded == (
        "MoE layers 1-2: not balanced, for moe_pad_expert_input_to_capacity (True) fills all "
        "experts, so that all ranks compute equally much"
    )
    assert silent == [[], []]


def test_only_a_line_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors on `meta` have no values: whoever asks for one fails."""
    said: list[str] = []
    monkeypatch.setattr(log_lines, "_say", said.append)
    layer: Any = _Layer()
    every = log_lines.BalanceLines(3)
    every.watch(layer)
    report = SimpleNamespace(
        layer_number=1,
        load=torch.ones(2, 4, dtype=torch.int64, device="meta"),
        rank_loads_after=torch.ones(2, dtype=torch.int64, device="meta"),
        experts_in_slots=torch.zeros(2, 1, dtype=torch.int32, device="meta"),
        rows_over=torch.zeros(2, dtype=torch.int64, device="meta"),
    )
    layer.observers[0](report)
    layer.observers[0](report)
    with pytest.raises(RuntimeError, match="meta"):
        layer.observers[0](report)
    assert len(said) == 1


def test_layers_of_a_model_that_is_only_evaluated_do_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As of a reference model beside the one that is trained, made from the same spec."""
    said: list[str] = []
    monkeypatch.setattr(log_lines, "_say", said.append)
    policy, reference = _Layer(), _Layer()
    reference.training = False
    every = log_lines.BalanceLines(2)
    for layer in (policy, reference):
        every.watch(layer)
    report = SimpleNamespace(
        load=torch.ones(2, 4, dtype=torch.int64),
        rank_loads_after=torch.ones(2, dtype=torch.int64),
        experts_in_slots=torch.zeros(2, 1, dtype=torch.int32),
        rows_over=None,
    )
    policy.observers[0](report)
    policy.observers[0](report)
    start, did = said
    assert start.startswith("MoE layer 1: ")
    assert did.startswith("MoE layer 1, last 2 microbatches: ")


class _Layer:
    layer_number = 1
    training = True
    balancer = SimpleNamespace(buffers=None)
    layout = SimpleNamespace(ep_size=2)
    config = SimpleNamespace(
        moe_expert_capacity_factor=None, moe_pad_expert_input_to_capacity=False
    )

    def __init__(self) -> None:
        self.observers: list[Any] = []


def test_where_no_logging_is_set_up_lines_go_to_stderr(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    log_lines._say("to the log")  # pytest has set it up, for warnings only.
    assert caplog.messages == ["to the log"]
    monkeypatch.setattr(log_lines._logger, "propagate", False)
    log_lines._say("to stderr")
    assert capsys.readouterr().err == "megatron_ext: to stderr\n"
    monkeypatch.setattr(log_lines._logger, "disabled", True)
    log_lines._say("to nobody")
    assert capsys.readouterr().err == ""
