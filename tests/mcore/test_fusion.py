"""Gradient accumulation fusion: weight gradients are added to `main_grad` where they are computed.

Layer 2 (gloo ranks on the CPU), with `FusedWeightGradient` in place of Apex's kernels. Balanced
training is compared with Megatron's own layers, both with fusion.
"""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from megatron_ext.balance.layout import ExpertLayout
from megatron_ext.balance.main_weights import MainWeights, Segment, SeparateMains, StackedMains
from megatron_ext.balance.slots import SlotBuffers
from megatron_ext.config import BalanceConfig
from megatron_ext.ops import load_library
from tests.mcore.parity import Difference, balanced_gpt, balanced_layers, step_difference
from tests.ranks import run_ranks

TOLERANCE = 1e-5
"""A few float32 steps, as in `test_parity`."""

OVERLAPPED = dict(distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True)
"""Megatron reduces a bucket as soon as its last parameter is ready: sums that come later are
lost, and miss the scaling of the bucket."""

CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (dict(optimizer="sgd"), {}),
    (dict(num_layers=3, **OVERLAPPED), {}),
    (dict(recompute="selective", experts=2, topk=1, **OVERLAPPED), {}),  # no joint, one main
    (dict(recompute="full", add_bias_linear=True), {}),
    (dict(gated_linear_unit=True, bias_activation_fusion=False), dict(local_first=True)),
]
"""(model, balance)."""


def _differences(rank: int) -> list[Difference]:
    return [
        step_difference(
            dict(ep=2, gradient_accumulation_fusion=True, **case),
            num_microbatches=3,
            balance=BalanceConfig(tolerance=0.0, **balance),
        )
        for case, balance in CASES
    ]


@pytest.mark.option("fusion")
def test_training_equals_unbalanced_megatron() -> None:
    for case, *differences in zip(CASES, *run_ranks(_differences, 2), strict=True):
        worst = max(differences, key=lambda difference: difference.worst)
        assert worst.worst <= TOLERANCE, f"{case}: {worst}"
        assert all(each.replicas > 0 for each in differences), f"{case}: nothing tested"


def _without_main_grads(rank: int) -> str:
    gpt = balanced_gpt(dict(ep=2, gradient_accumulation_fusion=True), BalanceConfig())
    for layer in balanced_layers(gpt):
        for weight in layer.experts.parameters():
            del weight.main_grad
    gpt.forward_backward(forward_only=True)  # needs none
    with pytest.raises(ValueError, match="gradient_accumulation_fusion") as error:
        gpt.forward_backward()
    return str(error.value)


def test_fusion_without_main_grads_is_one_clear_error() -> None:
    message, _ = run_ranks(_without_main_grads, 2)
    assert "DistributedDataParallel" in message
    assert "--no-gradient-accumulation-fusion" in message


@pytest.mark.parametrize("stacked", [False, True])
def test_main_grads_take_the_sums_over_replicas_themselves(stacked: bool) -> None:
    """Narrow ones are emptied before, so that the transport rounds a sum of all parts once."""
    mains = torch.nn.Parameter(torch.zeros(2, 4, dtype=torch.bfloat16))
    mains.main_grad = torch.full_like(mains, 256.0)
    rows = [torch.nn.Parameter(row) for row in mains.detach()]
    for row, main_grad in zip(rows, mains.main_grad, strict=True):
        row.main_grad = main_grad
    load_library()
    held = StackedMains(mains, mains) if stacked else SeparateMains(rows)
    weights = MainWeights((held,), fused=True)
    slot_grads = [torch.zeros(1, 4, dtype=torch.bfloat16)]
    slots = torch.tensor([[-1], [1]], dtype=torch.int32)
    assert weights.set_aside(slots, ep_rank=0, in_place=lambda _: False) == [None]
    ((_, aside),) = weights.set_aside(slots, ep_rank=0, in_place=lambda _: True)
    assert aside.tolist() == [256.0] * 4
    assert mains.main_grad.tolist() == [[256.0] * 4, [0.0] * 4], "main 0 has no replicas"
    totals = weights.totals(slot_grads, in_place=lambda _: True)
    totals[0][1].fill_(258.0)
    assert mains.main_grad.tolist() == [[256.0] * 4, [258.0] * 4]
    assert weights.hand_over(totals, in_place=lambda _: True) == [
        None for _ in weights.parameters()
    ]
    # Where autograd gets the sums, they are rounded to the weights' dtype at the end.
    totals = weights.totals(slot_grads, in_place=lambda _: False)
    totals[0][1].fill_(257.0)
    found = weights.hand_over(totals, in_place=lambda _: False)
    expected = torch.tensor([[0.0] * 4, [256.0] * 4], dtype=torch.bfloat16)
    assert torch.equal(found[0] if stacked else torch.stack(found), expected)


def test_sums_for_a_frozen_main_have_the_dtype_of_the_others() -> None:
    """Transport `cuda` has one for all of a segment, and refused float32 beside bfloat16."""
    rows = [torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16)) for _ in range(3)]
    for row in rows:
        row.main_grad = torch.zeros_like(row, requires_grad=False)
    rows[0].requires_grad_(False)
    weights = MainWeights((SeparateMains(rows),), fused=True)
    (totals,) = weights.totals(
        [torch.zeros(1, 4, dtype=torch.bfloat16)], in_place=lambda main: main is not rows[1]
    )
    frozen, by_autograd, by_product = totals
    assert by_product is rows[2].main_grad
    assert (frozen.dtype, by_autograd.dtype) == (torch.bfloat16, torch.float32)


def test_gradients_of_two_dtypes_in_the_same_slots_are_refused() -> None:
    transport: Any = types.SimpleNamespace(
        allocate=lambda shape, dtype, device: torch.zeros(shape, dtype=dtype)
    )
    buffers = SlotBuffers(
        ExpertLayout(num_experts=2, ep_size=2, slots=1, nvlink_domain=2),
        [Segment("weight", (2, 3))],
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        ep_rank=0,
        transport=transport,
    )
    assert buffers.allocate_grads([None]) == buffers.slot_grads == [None]  # evaluated, or frozen
    for _ in range(2):
        buffers.allocate_grads([torch.float32])
    assert [grad.dtype for grad in buffers.slot_grads] == [torch.float32]
    with pytest.raises(ValueError, match=r"bfloat16, and torch.float32 .* grad_reduce_in_fp32"):
        buffers.allocate_grads([torch.bfloat16])
