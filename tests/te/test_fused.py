"""Fused weight gradients of Transformer Engine's experts, mains and slots, go where they belong.

Layer 2. Megatron's own layers have the same fusion.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_ext.config import BalanceConfig
from tests.gpt import build_gpt
from tests.mcore.parity import balanced_gpt, balanced_layers, step_difference
from tests.ranks import run_ranks
from tests.te.test_experts import EXACT, GATED, OVERLAPPED, STEP_TOLERANCE, TE

FUSED = TE | dict(gradient_accumulation_fusion=True)


CASES: list[tuple[dict[str, Any], BalanceConfig]] = [
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
