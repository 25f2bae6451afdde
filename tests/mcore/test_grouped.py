"""`GroupedExperts` compute what `SequentialMLP` computes, under the same checkpoint keys.

Layer 2. float32 (grouped products take no float64): both paths sum the same products in another
order.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch

from megatron_ext.config import BalanceConfig
from tests.gpt import TinyGPT, build_gpt
from tests.mcore.parity import balanced_gpt, balanced_layers
from tests.ranks import run_ranks

TOLERANCE = 1e-5
"""A few float32 steps, as in `test_parity`."""

EXACT = BalanceConfig(tolerance=0.0)


def copy_experts(source: TinyGPT, target: TinyGPT) -> None:
    """Stack the sequential experts' weights into the grouped ones, and tell the optimizer."""
    with torch.no_grad():
        for name, weight in per_expert(source).items():
            layer, expert, segment = name
            getattr(_experts(target, layer), segment)[expert].copy_(weight)
    target.optimizer.reload_model_params()


def per_expert(gpt: TinyGPT) -> dict[tuple[int, int, str], torch.Tensor]:
    """Expert weights by (layer, local expert, segment), however they are held."""
    weights = {}
    for layer in range(len(gpt.chunks[0].module.decoder.layers)):
        experts = _experts(gpt, layer)
        for index in range(experts.num_local_experts):
            for segment in ("fc1", "fc2"):
                if hasattr(experts, "local_experts"):
                    linear = getattr(experts.local_experts[index], f"linear_{segment}")
                    weights[layer, index, segment] = linear.weight.detach()
                else:
                    weights[layer, index, segment] = getattr(experts, segment)[index].detach()
    return weights


def _experts(gpt: TinyGPT, layer: int) -> Any:
    return gpt.chunks[0].module.decoder.layers[layer].mlp.experts


def _train(rank: int, case: dict[str, Any], balance: BalanceConfig | None) -> int:
    sequential = build_gpt(**case)
    gpt = (
        balanced_gpt(case, balance, grouped_mm=True)
        if balance
        else build_gpt(**case, grouped_mm=True)
    )
    copy_experts(sequential, gpt)
    for step in range(3):
        expected = sequential.train_step(step, num_microbatches=2)
        assert abs(gpt.train_step(step, num_microbatches=2) - expected) <= TOLERANCE * expected
    found = per_expert(gpt)
    for name, weight in per_expert(sequential).items():
        assert float((found[name] - weight).norm()) <= TOLERANCE * float(weight.norm()), name
    return sum(layer.num_replicas for layer in balanced_layers(gpt))


@pytest.mark.option("grouped_mm")
@pytest.mark.parametrize(
    ("case", "balance"),
    [
        (dict(ep=2), None),
        (dict(ep=2), EXACT),
        (dict(ep=2), dataclasses.replace(EXACT, local_first=True)),
        (dict(ep=2, distributed_optimizer=True, recompute="selective"), EXACT),
        (
            dict(
                ep=2,
                gated_linear_unit=True,
                bias_activation_fusion=False,
                shared_ffn=24,
                # Grouped products hand their gradients to autograd, also with this.
                gradient_accumulation_fusion=True,
            ),
            EXACT,
        ),
    ],
)
def test_training_equals_sequential_experts(
    case: dict[str, Any], balance: BalanceConfig | None
) -> None:
    replicas = run_ranks(_train, 2, case, balance)
    assert (min(replicas) > 0) == (balance is not None)


def _shapes(gpt: TinyGPT) -> set[tuple[str, Any]]:
    state = gpt.chunks[0].module.sharded_state_dict()
    return {(value.key, value.global_shape) for value in state.values()}


def _keys(rank: int) -> None:
    assert _shapes(build_gpt(ep=2, grouped_mm=True)) == _shapes(build_gpt(ep=2))


def test_checkpoint_keys_are_those_of_sequential_experts() -> None:
    run_ranks(_keys, 2)


def _initial(rank: int) -> tuple[float, float]:
    gpt = build_gpt(ep=2, hidden=64, ffn=64, grouped_mm=True, init_method_std=0.5)
    # `build_gpt` names and fills parameters itself; here Megatron's own initialisation is looked
    # at.
    from megatron_ext.mcore.grouped_experts import GroupedExperts

    experts = GroupedExperts(2, gpt.config, pg_collection=_groups())
    return float(experts.fc1.std()), float(experts.fc1[0].sum() - experts.fc1[1].sum())


def _groups() -> Any:
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

    return get_default_pg_collection()


def test_initial_weights_follow_the_config_and_differ_between_experts() -> None:
    for std, difference in run_ranks(_initial, 2):
        assert 0.45 < std < 0.55
        assert difference != 0.0


class LeavesEmptyGroups(torch.autograd.Function):
    """A grouped product that does not write weight gradients of groups without rows."""

    @staticmethod
    def forward(ctx: Any, rows: Any, weights: Any, ends: Any) -> Any:
        ctx.save_for_backward(rows, weights, ends)
        return torch.nn.functional.grouped_mm(rows, weights, offs=ends)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        rows, weights, ends = ctx.saved_tensors
        inputs = rows.detach().requires_grad_(), weights.detach().requires_grad_()
        with torch.enable_grad():
            product = torch.nn.functional.grouped_mm(*inputs, offs=ends)
        of_rows, of_weights = torch.autograd.grad(product, inputs, grad)
        of_weights[ends.diff(prepend=ends.new_zeros(1)) == 0] = torch.nan
        return of_rows, of_weights, None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_broken", [False, True])
def test_experts_without_tokens_have_gradients_of_zero(
    is_broken: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_ext.mcore import grouped_product

    trial = functools.cache(grouped_product.writes_empty_groups.__wrapped__)
    monkeypatch.setattr(grouped_product, "writes_empty_groups", trial)
    if is_broken:
        monkeypatch.setattr(
            grouped_product, "grouped_mm", lambda a, b, offs: LeavesEmptyGroups.apply(a, b, offs)
        )
    assert trial(torch.device("cpu"), dtype) is not is_broken
    for counts in ([0, 3, 0, 2], [0, 0, 0, 0]):
        rows = torch.randn(sum(counts), 16, dtype=dtype).requires_grad_()
        weights = torch.randn(4, 16, 8, dtype=dtype).requires_grad_()
        ends = torch.tensor(counts).cumsum(0, dtype=torch.int32)
        product = grouped_product.grouped_product(rows, weights, ends)
        singles = [part @ weight for part, weight in zip(rows.split(counts), weights, strict=True)]
        expected = torch.cat(singles)
        assert torch.allclose(product, expected)
        grad = torch.randn(expected.shape, dtype=dtype)
        found, right = (
            torch.autograd.grad(output, (rows, weights), grad) for output in (product, expected)
        )
        assert all(map(torch.allclose, found, right))
        assert not found[1][torch.tensor(counts) == 0].any()
