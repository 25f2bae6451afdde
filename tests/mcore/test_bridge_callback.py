"""A callback of Megatron-Bridge's training writes each step; its loop is played here. Layer 2."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import megatron_ext
from megatron_ext.config import BalanceConfig
from megatron_ext.telemetry.step_lines import read_lines
from tests.gpt import build_gpt  # first: it enables the CPU platform
from tests.ranks import run_ranks


class Board:
    """In place of W&B and of a TensorBoard writer: keeps what it is given."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, dict[str, float]]] = []
        self.scalars: list[tuple[str, float, int]] = []

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.steps.append((step, metrics))

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))


def _train(rank: int, run_dir: Path) -> Any:
    from megatron.core import num_microbatches_calculator as batches

    # Of 6 samples, two ranks with microbatches of 2 samples train 4.
    batches.init_num_microbatches_calculator(rank, None, 6, 2, 2, True)
    balanced = partial(megatron_ext.balance_spec, balance=BalanceConfig(tolerance=0.0))
    gpt = build_gpt(ep=2, num_layers=2, experts=6, spec_transform=balanced)
    board = Board() if rank == 1 else None  # Bridge's last rank has them.
    state = SimpleNamespace(
        train_state=SimpleNamespace(step=7),
        cfg=SimpleNamespace(
            train=SimpleNamespace(global_batch_size=6), model=SimpleNamespace(seq_length=16)
        ),
        wandb_logger=board,
        tensorboard_logger=board,
    )
    context = SimpleNamespace(state=state, model=gpt.chunks, loss_dict=None)
    callback = megatron_ext.BridgeCallback(run_dir=run_dir)
    callback.on_train_start(context)
    for step in range(2):
        gpt.forward_backward(step, num_microbatches=2)
        context.loss_dict = {"lm loss": torch.tensor(2.5 + step)} if step else {}
        callback.on_train_step_end(context)
        state.train_state.step += 1
    callback.on_train_end(context)
    batches.unset_num_microbatches_calculator()
    return board and (board.steps, board.scalars)


def test_steps_go_to_the_run_directory_and_to_bridges_boards(tmp_path: Path) -> None:
    _, (steps, scalars) = run_ranks(_train, 2, tmp_path / "run")
    lines = list(read_lines(tmp_path / "run" / "metrics.jsonl"))
    assert [line["step"] for line in lines] == [8, 9] == [step for step, _ in steps]
    assert "loss" not in lines[0]
    assert lines[1]["loss"] == 3.5
    assert lines[1]["tokens_per_s"] == pytest.approx(4 * 16 / (lines[1]["step_ms"] / 1000))
    for step, metrics in steps:
        assert metrics["balance/replicas"] > 0
        assert [each for each in scalars if each[2] == step] == [
            (name, value, step) for name, value in metrics.items()
        ]
