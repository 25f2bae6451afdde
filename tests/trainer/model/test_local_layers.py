"""Norms with sequence parallelism: their gradient is that of the loss over all tokens.

Layer 2 (2 gloo ranks). Gradients are compared with differences of the loss, in float64.
"""

from __future__ import annotations

import pytest
import torch

from tests.gpt import build_gpt  # first: it enables the CPU platform
from tests.ranks import run_ranks

STEP = 1e-4  # Little enough that no token chooses other experts.


def _loss_around(rank: int, name: str) -> tuple[float, float]:
    """The gradient of one element, and the same from two more losses."""
    gpt = build_gpt(ep=2, tp=2, dtype=torch.float64)
    parameter = dict(gpt.named_parameters())[name]
    gpt.forward_backward()
    gradient = float(gpt.gradients()[name][3])
    losses = []
    for change in (STEP, -2 * STEP):
        parameter.data[3] += change
        (report,) = gpt.forward_backward(forward_only=True)
        losses.append(float(report["loss"]))
    return gradient, (losses[0] - losses[1]) / (2 * STEP)


@pytest.mark.parametrize(
    "name", ["decoder.layers.0.pre_mlp_layernorm.weight", "decoder.final_layernorm.bias"]
)
def test_gradients_are_of_the_whole_sequence(name: str) -> None:
    first, second = run_ranks(_loss_around, 2, name)
    assert first == second
    # Megatron's attention rounds to float32: it moves the loss by 1e-8, the difference by 1e-4.
    # Without the other rank's tokens the gradient would be another one altogether.
    assert first[0] == pytest.approx(first[1], abs=1e-4)
