"""What a dry run counts, compared with what ranks of a real run have, byte by byte."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from megatron_ext.cpu_platform import enable_cpu_platform
from megatron_ext.data.manifest import Manifest
from megatron_ext.trainer.compose import load_config
from tests.mcore import inside
from tests.ranks import run_ranks
from tests.trainer.dataset import overrides


def _dry_run(rank: int, arguments: list[str], num_ranks: int) -> Any:
    """In a kept rank: what a dry run leaves in a process must not meet other tests."""
    enable_cpu_platform()
    from megatron_ext.trainer.model.dry_run import dry_run

    config = load_config(arguments)
    vocab_size = Manifest.load(config.data.path).vocab_size
    dist.destroy_process_group()
    try:
        return dry_run(config, num_ranks=num_ranks, vocab_size=vocab_size, imbalances=(1.0, 2.0))
    finally:
        assert not dist.is_initialized()
        with tempfile.TemporaryDirectory() as folder:
            dist.init_process_group(
                "gloo", init_method=f"file://{folder}/store", rank=0, world_size=1
            )


def _real_run(rank: int, arguments: list[str]) -> dict[str, Any]:
    """Train one step, and count what is there."""
    enable_cpu_platform()
    from megatron.core import parallel_state

    from megatron_ext.trainer.loop import Training
    from megatron_ext.trainer.model.build import moe_layers
    from megatron_ext.trainer.model.meta_model import Kept

    parallel_state.destroy_model_parallel()
    training = Training(load_config(arguments))
    with Kept(training.chunks[0]) as kept:
        training.train_step()
    chunks = training.chunks
    weights = [weight for chunk in chunks for weight in chunk.parameters()]
    buffers = [each for chunk in chunks for each in chunk.buffers + chunk.expert_parallel_buffers]
    layers = moe_layers(chunks)
    slots = set(map(inside.slot_buffers, layers)) - {None}
    found = {
        "params": sum(weight.numel() for weight in weights),
        "weights": sum(
            {w.untyped_storage().data_ptr(): w.untyped_storage().nbytes() for w in weights}.values()
        ),
        "gradients": sum(buffer.grad_data.nbytes for buffer in buffers),
        "optimizer": _optimizer_bytes(training.optimizer),
        "slots": sum(each.num_bytes for each in slots),
        "layers": [layer.layer_number for layer in layers],
        "kept": kept.num_bytes,
        "stage": parallel_state.get_pipeline_model_parallel_rank(),
    }
    training.close()
    parallel_state.destroy_model_parallel()
    return found


def _optimizer_bytes(optimizer: Any) -> int:
    """Moments, and float32 weights that are not the model's own."""
    total = 0
    for each in optimizer.chained_optimizers:
        for state in each.optimizer.state.values():
            total += sum(state[name].nbytes for name in ("exp_avg", "exp_avg_sq"))
        for group in getattr(each, "shard_fp32_from_float16_groups", []):
            total += sum(weight.nbytes for weight in group)
    return total


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "settings"),
    [
        (
            4,
            [
                "parallel.pp_size=2",
                "parallel.vpp_size=2",
                "model.num_layers=4",
                "model.shared_expert_hidden_size=8",
                "data.global_batch_size=16",
                "balance.strategy=libra",
            ],
        ),
        (
            2,
            [
                "parallel.tp_size=2",
                "model.precision=bf16",
                "model.experts=grouped_mm",
                "data.global_batch_size=2",
                "balance.strategy=quota",
                "parallel.overlap_grad_reduce=true",
                "parallel.overlap_param_gather=true",
            ],
        ),
    ],
    ids=["pipeline", "tensor"],
)
def test_it_counts_what_ranks_have(
    num_ranks: int, settings: list[str], data: Path, tmp_path: Path
) -> None:
    arguments = [*overrides(data, tmp_path / "run"), *settings]
    real = run_ranks(_real_run, num_ranks, arguments)
    (dry,) = run_ranks(_dry_run, 1, arguments, num_ranks)
    for stage in dry.stages:
        ranks = [rank for rank in real if rank["stage"] == stage.pp_rank]
        for rank in ranks:
            assert rank["params"] == stage.params
            assert rank["weights"] == stage.weights
            assert rank["gradients"] == stage.gradients
            assert rank["slots"] == stage.slots + stage.slot_gradients
            assert rank["layers"] == stage.layers
        # Ranks share it, not all alike.
        assert sum(rank["optimizer"] for rank in ranks) == len(ranks) * stage.optimizer
    if num_ranks == 2:  # A step of one microbatch, so all that it kept was kept at a time.
        busiest = max(rank["kept"] for rank in real)
        assert dry.stages[0].activations[1.0] < busiest < dry.stages[0].activations[2.0]


def _activations(rank: int, settings: list[str], each_layer_runs: bool) -> list[dict[float, int]]:
    from megatron_ext.trainer.model import meta_model

    with mock.patch.object(meta_model, "_kind", id if each_layer_runs else meta_model._kind):
        return [stage.activations for stage in _dry_run(rank, settings, 2).stages]


@pytest.mark.parametrize("recompute", ["none", "selective", "full", "block"])
def test_layers_that_are_alike_count_as_if_all_ran(
    recompute: str, data: Path, tmp_path: Path
) -> None:
    settings = [
        *overrides(data, tmp_path / "run"),
        "model.num_layers=7",
        "model.num_dense_layers=3",
        f"parallel.recompute={recompute if recompute != 'block' else 'full'}",
        *(
            ["+megatron.recompute_method=block", "+megatron.recompute_num_layers=2"]
            if recompute == "block"
            else []
        ),
    ]
    (some,) = run_ranks(_activations, 1, settings, False)
    (all_,) = run_ranks(_activations, 1, settings, True)
    assert some == all_


def test_grouped_products_of_float32_are_counted(data: Path, tmp_path: Path) -> None:
    settings = [*overrides(data, tmp_path / "run"), "model.precision=fp32"]
    sequential, grouped = (
        run_ranks(_dry_run, 1, [*settings, f"model.experts={kind}"], 2)[0].stages[0]
        for kind in ("sequential", "grouped_mm")
    )
    assert (grouped.weights, grouped.slots) == (sequential.weights, sequential.slots)
    assert grouped.activations[1.0] == pytest.approx(sequential.activations[1.0], rel=0.1)


def test_layers_of_transformer_engine_keep_no_scores(data: Path, tmp_path: Path) -> None:
    settings = [
        *overrides(data, tmp_path / "run"),
        "model.precision=bf16",
        "data.sequence_length=64",
        "+megatron.normalization=RMSNorm",
        "balance.strategy=quota",
    ]
    counted = {
        impl: run_ranks(_dry_run, 1, [*settings, f"model.transformer_impl={impl}"], 2)[0].stages[0]
        for impl in ("local", "transformer_engine")
    }
    local, engine = counted.values()
    layers, samples, heads, tokens = 2, 2, 2, 64
    scores = layers * samples * heads * tokens**2 * 2
    assert engine.activations[1.0] <= local.activations[1.0] - scores
    assert (engine.weights, engine.gradients, engine.slots) == (
        local.weights,
        local.gradients,
        local.slots,
    )
    # Fused into the float32 gradients of DDP, of which replicas have their part.
    assert engine.slot_gradients == 2 * local.slot_gradients > 0
