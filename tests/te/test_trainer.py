"""The trainer makes models of Transformer Engine's layers, which learn what Megatron's own learn.

Layer 2. All runs go on from one checkpoint, of Megatron's layers; from one of Transformer Engine's
they go on as well, with both.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megatron_ext.cpu_platform import enable_cpu_platform
from tests.ranks import run_ranks
from tests.te_on_cpu import enable_te_on_cpu
from tests.te_quantized_on_cpu import GPU, answer_like
from tests.trainer.dataset import build, overrides

SETTINGS = [
    "model.experts=grouped_mm",
    "model.activation=swiglu",
    "+megatron.normalization=RMSNorm",
    "+megatron.num_query_groups=1",
    "+megatron.qk_layernorm=true",
    "steps=4",
    "checkpoint.every=2",
]
RUNS = {
    "local": ["model.transformer_impl=local", "balance.strategy=none"],
    "unbalanced": ["model.transformer_impl=transformer_engine", "balance.strategy=none"],
    "balanced": ["model.transformer_impl=transformer_engine", "balance.tolerance=0"],
}
LOSS_TOLERANCE = 1e-5
"""Of float32 losses of about 5, after two steps of Adam whose sums were rounded in other orders."""


def _train(
    rank: int, words: list[str], saves: bool = True
) -> tuple[list[dict[str, Any]], set[str], bool]:
    """The metrics of a run's steps, the kinds of its modules, whether gradients are fused."""
    enable_te_on_cpu()  # before anything of Megatron
    enable_cpu_platform()
    from megatron.core import parallel_state

    from megatron_ext.trainer.compose import load_config
    from megatron_ext.trainer.loop import Training

    parallel_state.destroy_model_parallel()
    training = Training(load_config(words))
    steps = []
    while training.step < training.config.steps:
        steps.append(training.train_step())
    if saves and not training.config.checkpoint.load:
        training._save()
        training.checkpoints.finish()
    (chunk,) = training.chunks
    kinds = {type(module).__name__ for module in chunk.modules()}
    fuses = chunk.config.gradient_accumulation_fusion
    training.close()
    parallel_state.destroy_model_parallel()
    return steps, kinds, fuses


def _go_on(
    folder: Path, first: str, names: Iterable[str]
) -> dict[str, tuple[list[dict[str, Any]], set[str], bool]]:
    """What runs say of steps 3 and 4, from the checkpoint that the run `first` wrote after 2."""
    data = build(folder)
    run_ranks(_train, 2, [*overrides(data, folder / "first"), *SETTINGS, "steps=2", *RUNS[first]])
    found = {}
    for name in names:
        words = [*overrides(data, folder / name), *SETTINGS, *RUNS[name]]
        words.append(f"checkpoint.load={folder}/first/checkpoints/step_00000002")
        found[name], *_ = run_ranks(_train, 2, words)
    return found


def _losses(steps: list[dict[str, Any]]) -> list[float]:
    assert len(steps) == 2
    return [step["loss"] for step in steps]


def test_megatrons_layers_go_on_from_a_checkpoint_of_transformer_engines(tmp_path: Path) -> None:
    found = _go_on(tmp_path, "balanced", ["unbalanced", "local"])
    losses = {name: _losses(steps) for name, (steps, *_) in found.items()}
    assert losses["local"] == pytest.approx(losses["unbalanced"], abs=LOSS_TOLERANCE), losses
    assert "GroupedExperts" in found["local"][1]
    assert "TEGroupedMLP" in found["unbalanced"][1]


def test_losses_are_those_of_megatrons_layers(tmp_path: Path) -> None:
    found = _go_on(tmp_path, "local", RUNS)
    losses = {name: _losses(steps) for name, (steps, *_) in found.items()}
    for name in ("unbalanced", "balanced"):
        steps, kinds, fuses = found[name]
        assert losses[name] == pytest.approx(losses["local"], abs=LOSS_TOLERANCE), losses
        assert {"TEGroupedMLP", "TELayerNormColumnParallelLinear"} <= kinds
        assert fuses
        assert all(step["imbalance_after"] < step["imbalance_before"] for step in steps) is (
            name == "balanced"
        )
    _, kinds, fuses = found["local"]
    assert "GroupedExperts" in kinds
    assert not any(kind.startswith("TE") for kind in kinds)
    assert not fuses


def _train_quantized(rank: int, words: list[str]) -> tuple[list[dict[str, Any]], int]:
    """The metrics of a run's steps, and the bytes of a replica in its first balanced layer."""
    enable_te_on_cpu()
    answer_like(GPU["mxfp8"])
    from megatron_ext.mcore import moe_layer

    made: list[Any] = []
    with mock.patch.object(moe_layer, "LayerBalancer", _noting(moe_layer.LayerBalancer, made)):
        # Megatron-Core 0.16.1 cannot save what this version of Transformer Engine has to.
        steps, *_ = _train(rank, words, saves=False)
    return steps, made[0].expert_bytes if made else 0


def _noting(made_by: Any, made: list[Any]) -> Any:
    def make(**settings: Any) -> Any:
        made.append(made_by(**settings))
        return made[-1]

    return make


def test_training_in_mxfp8_is_the_same(tmp_path: Path) -> None:
    """Losses differ by what bfloat16 activations round."""
    data, found = build(tmp_path), {}
    in_mxfp8 = ["model.precision=bf16", "+megatron.fp8=e4m3", "+megatron.fp8_recipe=mxfp8"]
    for name in ("unbalanced", "balanced"):
        words = [*overrides(data, tmp_path / name), *in_mxfp8, "steps=2", *RUNS[name]]
        words += ["model.hidden_size=64", "model.expert_hidden_size=64", "model.experts=grouped_mm"]
        (found[name], num_bytes), *_ = run_ranks(_train_quantized, 2, words)
    losses = {name: [step["loss"] for step in steps] for name, steps in found.items()}
    assert losses["balanced"] == pytest.approx(losses["unbalanced"], rel=1e-3), losses
    assert all(step["imbalance_after"] < step["imbalance_before"] for step in found["balanced"])
    # Two matrices of 64 x 64, each with scales for blocks of 32, padded to 128 x 4 or 4 x 128.
    assert num_bytes == 2 * (64 * 64 + 128 * 4)
