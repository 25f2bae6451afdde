"""bfloat16 and float16: a balanced layer is as near to the float32 result as Megatron's own layer.

Layer 2 (2 gloo ranks). One MoE layer on inputs that bfloat16 can hold. The router computes in
float32, so all make the same choices, and what differs is rounding. A replicated expert's gradient
is a sum of parts: each part that is rounded before it is added makes the error a little larger. To
a `main_grad` in bfloat16 both parts must be added at once: each addition rounds the sum of all
microbatches, and the more they are, the more that outweighs the rest.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from megatron_ext.config import BalanceConfig
from tests.gpt import TinyGPT, build_gpt
from tests.mcore import inside
from tests.mcore.parity import balanced_gpt
from tests.ranks import run_ranks

EXACT = BalanceConfig(tolerance=0.0)
SIZES = dict(ep=2, num_layers=1, hidden=64, ffn=128, experts=4, topk=2)
NUM_TOKENS = 512
NUM_MICROBATCHES = 16

Results = dict[str, torch.Tensor]


def _results(rank: int, gpt: TinyGPT) -> Results:
    """Outputs and gradients of some microbatches, of whose choices one expert has many."""
    layer = gpt.chunks[0].module.decoder.layers[0].mlp
    with torch.no_grad():
        for weight in layer.parameters():
            weight.copy_(weight.bfloat16())  # for the reference
    outputs, input_gradients = [], []
    common = torch.randn(SIZES["hidden"], generator=torch.Generator().manual_seed(1))
    for microbatch in range(NUM_MICROBATCHES):
        generator = torch.Generator().manual_seed(10 * microbatch + rank)
        shape = (NUM_TOKENS, 1, SIZES["hidden"])
        tokens, gradient = (
            (torch.randn(shape, generator=generator) + shift).bfloat16().to(gpt.dtype)
            for shift in (common, 0.0)
        )
        tokens.requires_grad_()
        joined = layer.join_reduction(tokens) if hasattr(layer, "join_reduction") else tokens
        output, _ = layer(joined)
        output.backward(gradient)
        outputs.append(output.detach())
        input_gradients.append(tokens.grad)
    results = {"outputs": torch.cat(outputs), "input gradients": torch.cat(input_gradients)}
    for part in ("router", "experts"):
        of_part = [p.main_grad.flatten() for n, p in layer.named_parameters() if part in n]
        results[f"gradients of {part}"] = torch.cat(of_part)
    return {name: value.double() for name, value in results.items()}


def errors_added(
    case: dict[str, Any],
    dtype: torch.dtype = torch.bfloat16,
    balance: BalanceConfig = EXACT,
) -> dict[str, float]:
    """The balanced layer's errors, divided by those of Megatron's own."""
    ranks = run_ranks(_square_errors, 2, case, dtype, balance)
    plain, balanced = (
        {name: sum(rank[which][name] for rank in ranks) ** 0.5 for name in ranks[0][which]}
        for which in (0, 1)
    )
    assert min(plain.values()) > 0
    return {name: balanced[name] / plain[name] for name in plain}


def _square_errors(
    rank: int, case: dict[str, Any], dtype: torch.dtype, balance: BalanceConfig
) -> tuple[dict[str, float], ...]:
    """The squares of both layers' errors on this rank, Megatron's first."""
    expected = _results(rank, build_gpt(**SIZES, **case))
    settings = SIZES | case | dict(dtype=dtype)
    plain = _results(rank, build_gpt(**settings))
    gpt = balanced_gpt(settings, balance)
    balanced = _results(rank, gpt)
    layer = gpt.chunks[0].module.decoder.layers[0].mlp
    assert layer.num_replicas >= NUM_MICROBATCHES
    main_grads = {weight.main_grad.dtype for weight in layer.experts.parameters()}
    if layer.config.gradient_accumulation_fusion:  # One product has one dtype.
        assert {grad.dtype for grad in inside.slot_grads(layer)} == main_grads
    return tuple(map(partial(_square_distances, expected), (plain, balanced)))


def _square_distances(expected: Results, found: Results) -> dict[str, float]:
    return {name: float((found[name] - value).square().sum()) for name, value in expected.items()}


@pytest.mark.option("bf16_gradients")
@pytest.mark.parametrize(
    ("experts", "main_grads", "limit"),
    [
        ("fused", "fp32", 1.01),
        ("fused", "bf16", 1.1),
        ("single", "fp32", 1.01),
        ("single", "bf16", 1.1),
        ("grouped", "bf16", 1.1),
    ],
)
def test_balancing_does_not_add_to_the_error(experts: str, main_grads: str, limit: float) -> None:
    case = dict(
        gradient_accumulation_fusion=experts == "fused",
        grouped_mm=experts == "grouped",
        ddp=dict(grad_reduce_in_fp32=main_grads == "fp32"),
    )
    ratios = errors_added(case)
    assert max(ratios.values()) <= limit, ratios


@pytest.mark.option("fp16")
def test_float16_gradients_add_no_error_where_they_are_added() -> None:
    case = dict(gradient_accumulation_fusion=False, ddp=dict(grad_reduce_in_fp32=False))
    balance = BalanceConfig(tolerance=0.0, transport="collective")
    ratios = errors_added(case, torch.float16, balance)
    assert max(ratios.values()) <= 1.1, ratios
