"""Norms with sequence parallelism: their gradient is that of the loss over all tokens.

Layer 2 (2 gloo ranks). Gradients are compared with differences of the loss, in float64.
"""

from __future__ import annotations

import pytest
import torch

from tests.gpt import build_gpt  # first: it enables the CPU platform
from tests.ranks import run_ranks

STEP = 1e-5


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
    # A central difference is off by the third derivative times STEP squared, 1e-10.
    assert first[0] == pytest.approx(first[1], rel=1e-6)
