"""One weight for all experts of a linear (`moe_single_grouped_weight`) trains as one for each.

Layer 2. Megatron has it for the op fuser only, whose products of it are bfloat16's. Compared bit by
bit: Megatron's own layers with and without it, and balanced layers with and without it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.gpt import TinyGPT, build_gpt
from tests.mcore.parity import balanced_gpt, balanced_layers
from tests.ranks import run_ranks
from tests.te.test_experts import EXACT, GATED, HAS_BLOCKS, OVERLAPPED, TE

pytestmark = pytest.mark.skipif(not HAS_BLOCKS, reason="Megatron has no single weight")

ALLOWED = dict(NVTE_CUTEDSL_FUSED_GROUPED_MLP="1", NVTE_GROUPED_LINEAR_SINGLE_PARAM="1")
"""What Megatron and Transformer Engine want to see in the environment."""

OP_FUSER = TE | GATED | dict(moe_mlp_glu_interleave_size=4, use_transformer_engine_op_fuser=True)
NARROW: dict[str, Any] = dict(ddp=dict(grad_reduce_in_fp32=False))
CASES: list[dict[str, Any]] = [
    OP_FUSER | dict(num_layers=1, gradient_accumulation_fusion=True),
    OP_FUSER | OVERLAPPED | NARROW | dict(gradient_accumulation_fusion=True, recompute="selective"),
    OP_FUSER | NARROW | dict(gradient_accumulation_fusion=False, num_layers=1),
]


def _single_weights(gpt: TinyGPT) -> list[Any]:
    named = gpt.chunks[0].module.named_parameters()
    return [parameter for name, parameter in named if name.endswith(("fc1.weight", "fc2.weight"))]


def _training(gpt: TinyGPT) -> dict[str, torch.Tensor]:
    """Gradients of three microbatches, then losses and parameters of two steps."""
    gpt.forward_backward(num_microbatches=3)
    gradients = {f"gradient of {name}": value for name, value in gpt.gradients().items()}
    losses = [gpt.train_step(step, num_microbatches=3) for step in range(2)]
    return gradients | gpt.parameters() | {"losses": torch.tensor(losses)}


def _unequal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    assert found.keys() == expected.keys()
    return [name for name, value in expected.items() if not torch.equal(found[name], value)]


@mock.patch.dict(os.environ, ALLOWED)
def _with_and_without(rank: int, case: dict[str, Any]) -> float:
    """Largest relative distance of experts' gradients from Megatron's own layers."""
    case = case | dict(dtype=torch.bfloat16)
    single = case | dict(moe_single_grouped_weight=True)
    stock, gpt = build_gpt(**single), balanced_gpt(single, EXACT)
    num_weights = 2 * case.get("num_layers", 2)
    assert len(_single_weights(stock)) == len(_single_weights(gpt)) == num_weights
    expected, found = _training(stock), _training(gpt)
    assert _unequal(expected, _training(build_gpt(**case))) == []
    assert _unequal(found, _training(balanced_gpt(case, EXACT))) == []
    assert all(layer.num_replicas > 0 for layer in balanced_layers(gpt))
    return max(
        float((found[name] - value).norm() / value.norm())
        for name, value in expected.items()
        if name.startswith("gradient of") and "experts" in name
    )


@pytest.mark.option("single_grouped_weight")
@pytest.mark.parametrize("index", range(len(CASES)))
def test_training_equals_that_with_a_weight_for_each(index: int) -> None:
    distances = run_ranks(_with_and_without, 2, CASES[index])
    if index == 0:
        # As in `test_fused.py`: in one layer, nothing that was rounded comes before.
        assert max(distances) <= 1e-5


@mock.patch.dict(os.environ, ALLOWED)
def _heard(rank: int, fused: bool) -> None:
    """DDP hears of a single weight once a microbatch, when all of its gradient is there."""
    case = OP_FUSER | dict(num_layers=1, dtype=torch.bfloat16, moe_single_grouped_weight=True)
    gpt = balanced_gpt(case, EXACT, gradient_accumulation_fusion=fused)
    heard: list[list[torch.Tensor]] = []
    for parameter in _single_weights(gpt):
        of_parameter: list[torch.Tensor] = []
        heard.append(of_parameter)
        # Without fusion DDP adds the gradient afterwards.
        parameter.register_post_accumulate_grad_hook(
            lambda weight, of_parameter=of_parameter: of_parameter.append(
                weight.main_grad + (0 if fused else weight.grad)
            )
        )
    gpt.forward_backward(num_microbatches=2)
    assert all(layer.num_replicas > 0 for layer in balanced_layers(gpt))
    for weight, gradients in zip(_single_weights(gpt), heard, strict=True):
        assert len(gradients) == 2
        # DDP takes the mean over two data-parallel ranks.
        assert torch.equal(gradients[-1] / 2, weight.main_grad)


@pytest.mark.parametrize("fused", [True, False])
def test_ddp_hears_once_and_last(fused: bool) -> None:
    run_ranks(_heard, 2, fused)


@mock.patch.dict(os.environ, ALLOWED)
def _save_and_load(rank: int, folder: str) -> None:
    from megatron.core import dist_checkpointing

    case = OP_FUSER | dict(dtype=torch.bfloat16)
    single = case | dict(moe_single_grouped_weight=True)
    saved = balanced_gpt(single, EXACT)
    saved.train_step(0)
    expected = saved.parameters()
    dist_checkpointing.save(saved.chunks[0].module.sharded_state_dict(), folder)
    for settings in (single, case):
        gpt = build_gpt(**settings)
        module = gpt.chunks[0].module
        assert len(_unequal(gpt.parameters(), expected)) > 8
        module.load_state_dict(dist_checkpointing.load(module.sharded_state_dict(), folder))
        assert _unequal(gpt.parameters(), expected) == []


def test_checkpoints_fit_those_with_a_weight_for_each(tmp_path: Path) -> None:
    run_ranks(_save_and_load, 2, str(tmp_path))


@mock.patch.dict(os.environ, ALLOWED)
def _freed(rank: int) -> None:
    gpt = balanced_gpt(OP_FUSER | dict(dtype=torch.bfloat16, moe_single_grouped_weight=True), EXACT)
    weight = _single_weights(gpt)[0]
    weight.rowwise_data = weight.rowwise_data.clone()
    weight.rowwise_data.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=r"experts.linear_fc1.weight has 0 of its \d+ bytes"):
        gpt.forward_backward()


def test_freed_memory_is_refused_by_name() -> None:
    run_ranks(_freed, 2)
