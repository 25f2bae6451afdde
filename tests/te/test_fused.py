"""Fused weight gradients of Transformer Engine's experts, mains and slots, go where they belong.

Layer 2. Megatron's own layers have the same fusion.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_ext.config import BalanceConfig
from tests.gpt import build_gpt
from tests.mcore.parity import balanced_gpt, balanced_layers, step_difference
from tests.mcore.test_precision import errors_added
from tests.ranks import run_ranks
from tests.te.test_experts import EXACT, GATED, OVERLAPPED, STEP_TOLERANCE, TE

FUSED = TE | dict(gradient_accumulation_fusion=True)


# It reads gradients where data-parallel training has them, in their dtype.
PRECISION_AWARE = OVERLAPPED | dict(optimizer_settings=dict(use_precision_aware_optimizer=True))

CASES: list[tuple[dict[str, Any], BalanceConfig]] = [
    (FUSED | GATED | PRECISION_AWARE, EXACT),
    (FUSED | GATED | OVERLAPPED | dict(num_layers=3), EXACT),
    (FUSED | dict(add_bias_linear=True, recompute="selective"), EXACT),
    # The second part's backward comes first, and the first's must not overwrite it.
    (FUSED, BalanceConfig(tolerance=0.0, local_first=True)),
    (FUSED | dict(moe_grouped_gemm=False, recompute="full"), EXACT),
]


def _steps(rank: int) -> list[Any]:
    return [step_difference(case, num_microbatches=3, balance=balance) for case, balance in CASES]


def test_training_equals_unbalanced_megatron() -> None:
    for case, *differences in zip(CASES, *run_ranks(_steps, 2, timeout_s=400), strict=True):
        worst = max(differences, key=lambda difference: difference.worst)
        assert worst.worst <= STEP_TOLERANCE, f"{case}: {worst}"
        assert all(each.replicas > 0 for each in differences), f"{case}: nothing was tested"


def _main_grads(rank: int) -> tuple[float, int]:
    """Largest relative distance of an expert's float32 main gradients, in a bfloat16 model."""
    settings = FUSED | GATED | dict(num_layers=1, dtype=torch.bfloat16)
    plain, gpt = build_gpt(**settings), balanced_gpt(settings, EXACT)
    for model in (plain, gpt):
        model.forward_backward(num_microbatches=3)
    found = gpt.gradients()
    expected = {name: value for name, value in plain.gradients().items() if "experts" in name}
    assert {value.dtype for value in expected.values()} == {torch.float32}
    distances = [float((found[n] - value).norm() / value.norm()) for n, value in expected.items()]
    return max(distances), sum(layer.num_replicas for layer in balanced_layers(gpt))


def test_main_gradients_of_bfloat16_experts_are_not_rounded() -> None:
    for distance, replicas in run_ranks(_main_grads, 2):
        assert distance <= 1e-5
        assert replicas > 0


@pytest.mark.parametrize(("grad_reduce_in_fp32", "limit"), [(True, 1.01), (False, 1.1)])
def test_balancing_does_not_add_to_the_error(grad_reduce_in_fp32: bool, limit: float) -> None:
    """As in `tests/mcore/test_precision.py`; gradients of both parts of a group are bfloat16."""
    case = dict(
        transformer_engine=True,
        moe_grouped_gemm=True,
        gradient_accumulation_fusion=True,
        ddp=dict(grad_reduce_in_fp32=grad_reduce_in_fp32),
    )
    ratios = errors_added(case)
    assert max(ratios.values()) <= limit, ratios


def _square_errors_of_parameters(rank: int, grad_reduce_in_fp32: bool) -> list[float]:
    """Of a bfloat16 model trained without and with balancing, against one of float32."""
    settings = FUSED | GATED | PRECISION_AWARE
    settings |= dict(ddp=dict(grad_reduce_in_fp32=grad_reduce_in_fp32))
    rounded = dict(dtype=torch.bfloat16)
    exact, plain = build_gpt(**settings), build_gpt(**settings, **rounded)
    gpt = balanced_gpt(settings, EXACT, **rounded)
    for model in (exact, plain, gpt):
        with torch.no_grad():
            for _, parameter in model.named_parameters():
                parameter.copy_(parameter.bfloat16())
        model.optimizer.reload_model_params()
        for step in range(3):
            model.train_step(step, num_microbatches=4)
    assert sum(layer.num_replicas for layer in balanced_layers(gpt)) > 0
    expected = exact.parameters()
    return [
        sum(float((value - expected[name]).square().sum()) for name, value in found.items())
        for found in (plain.parameters(), gpt.parameters())
    ]


@pytest.mark.option("precision_aware")
@pytest.mark.parametrize(("grad_reduce_in_fp32", "limit"), [(True, 1.01), (False, 1.1)])
def test_precision_aware_training_is_as_exact_as_unbalanced(
    grad_reduce_in_fp32: bool, limit: float
) -> None:
    ranks = run_ranks(_square_errors_of_parameters, 2, grad_reduce_in_fp32)
    plain, balanced = (sum(errors) ** 0.5 for errors in zip(*ranks, strict=True))
    assert 0 < balanced <= limit * plain
