"""What a program does to experts after they were made: tied, replaced, hooked, given adapters.

Layer 2 (2 gloo ranks). Replicas compute as their experts do, and hooks of a parameter get its whole
gradient; what a replica cannot have is refused on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_ext.config import BalanceConfig
from tests.gpt import TinyGPT, build_gpt  # first: it enables the CPU platform
from tests.mcore.parity import (
    GRADIENT_TOLERANCE,
    STEP_TOLERANCE,
    balanced_gpt,
    balanced_layers,
    relative_distance,
)
from tests.ranks import run_ranks

from megatron_ext.mcore.sequential_experts import SequentialWeights  # isort: skip

Change = Callable[[TinyGPT], None]


def _gradients(gpt: TinyGPT, change: Change) -> dict[str, torch.Tensor]:
    change(gpt)
    gpt.forward_backward(num_microbatches=2)
    return gpt.gradients()


def _experts(gpt: TinyGPT) -> list[Any]:
    return [layer.mlp.experts for layer in gpt.chunks[0].module.decoder.layers]


def _parameters(gpt: TinyGPT) -> Iterator[torch.Tensor]:
    return (parameter for experts in _experts(gpt) for parameter in experts.parameters())


def _halve(parameter: Any) -> None:
    if parameter.grad is not None:
        parameter.grad.mul_(0.5)


def _with_hooks_on_gradients(gpt: TinyGPT) -> None:
    for parameter in _parameters(gpt):
        parameter.register_hook(lambda grad: grad * 0.5)


def _with_hooks_behind_gradients(gpt: TinyGPT) -> None:
    for parameter in _parameters(gpt):
        parameter.register_post_accumulate_grad_hook(_halve)


def _with_tied_layers(gpt: TinyGPT) -> None:
    first, second = (layer.mlp for layer in gpt.chunks[0].module.decoder.layers)
    second.experts = first.experts


def _with_hooks_on_experts(gpt: TinyGPT) -> None:
    for experts in _experts(gpt):
        experts.register_forward_pre_hook(lambda _, given: (given[0] * 2, *given[1:]))
        experts.register_forward_hook(lambda _, __, out: (out[0] * 3, *out[1:]))


def _equal(rank: int, case: dict[str, Any], change: Change) -> None:
    expected = _gradients(build_gpt(ep=2, **case), change)
    gpt = balanced_gpt(dict(ep=2, **case), BalanceConfig(tolerance=0.0))
    found = _gradients(gpt, change)
    assert found.keys() == expected.keys()
    tolerance = GRADIENT_TOLERANCE if case.get("dtype") == torch.float64 else STEP_TOLERANCE
    for name, value in expected.items():
        distance = relative_distance(found[name], value)
        assert distance <= tolerance, f"{name}: {distance}"
    assert all(layer.num_replicas > 0 for layer in balanced_layers(gpt)), "nothing was tested"


@pytest.mark.parametrize("case", [dict(dtype=torch.float64), dict(grouped_mm=True)])
@pytest.mark.parametrize(
    "change",
    [
        _with_hooks_on_gradients,
        _with_hooks_behind_gradients,
        _with_tied_layers,
        _with_hooks_on_experts,
    ],
)
def test_gradients_equal_those_of_megatrons_layers(case: dict[str, Any], change: Change) -> None:
    run_ranks(_equal, 2, case, change)


class _Scaled(torch.nn.Module):
    def __init__(self, experts: Any) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, *given: Any) -> Any:
        output, bias = self.experts(*given)
        return 2 * output, bias


def _with_wrapped_experts(gpt: TinyGPT) -> None:
    for layer in gpt.chunks[0].module.decoder.layers:
        layer.mlp.experts = _Scaled(layer.mlp.experts)


def _with_another_forward(gpt: TinyGPT) -> None:
    for experts in _experts(gpt):
        experts.forward = partial(experts.forward)


def _first_linears(gpt: TinyGPT) -> list[Any]:
    return [expert.linear_fc1 for experts in _experts(gpt) for expert in experts.local_experts]


def _with_another_forward_of_a_linear(gpt: TinyGPT) -> None:
    for linear in _first_linears(gpt):
        linear.forward = partial(linear.forward)


def _with_adapters(gpt: TinyGPT) -> None:
    for linear in _first_linears(gpt):
        linear.adapter = torch.nn.Linear(*linear.weight.T.shape, dtype=linear.weight.dtype)


def _with_buffers(gpt: TinyGPT) -> None:
    for linear in _first_linears(gpt):
        linear.register_buffer("amax", torch.ones(1))


def _with_hooks_on_each_expert(gpt: TinyGPT) -> None:
    for linear in _first_linears(gpt):
        linear.register_forward_hook(lambda _, __, out: out)


REFUSED: list[tuple[Change, str]] = [
    (_with_wrapped_experts, "experts of type _Scaled cannot be balanced"),
    (_with_another_forward, "experts.forward was replaced"),
    (_with_another_forward_of_a_linear, "local_experts.0 has a replaced forward"),
    (_with_adapters, r"local_experts.0 has further parameters.*\(linear_fc1.adapter.weight"),
    (_with_buffers, r"local_experts.0 has further parameters or buffers \(linear_fc1.amax\)"),
    (_with_hooks_on_each_expert, r"local_experts.0 has a hook \(_with_hooks_on_each_expert"),
]


def _refused(rank: int, change: Change, message: str, is_late: bool) -> None:
    gpt = balanced_gpt(dict(ep=2), BalanceConfig(tolerance=0.0))
    if is_late:
        gpt.forward_backward()
    with pytest.raises(ValueError, match=message):
        _gradients(gpt, change)


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_what_replicas_cannot_have_is_refused(change: Change, message: str) -> None:
    run_ranks(_refused, 2, change, message, False)


LATE = (_with_another_forward, _with_adapters, _with_buffers)


@pytest.mark.parametrize(("change", "message"), [each for each in REFUSED if each[0] in LATE])
def test_it_is_refused_in_the_middle_of_a_training_too(change: Change, message: str) -> None:
    """Balancing looked in a layer's first forward only: replicas computed without adapters."""
    run_ranks(_refused, 2, change, message, True)


def _look_again(rank: int, case: dict[str, Any]) -> None:
    gpt = balanced_gpt(dict(ep=2, **case), BalanceConfig())
    gpt.forward_backward()
    with mock.patch.object(SequentialWeights, "require_plain", side_effect=AssertionError):
        gpt.forward_backward(num_microbatches=2)


@pytest.mark.parametrize(
    "case",
    [
        {},
        # The router sets its buffer of counts in each forward.
        dict(moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True),
    ],
)
def test_experts_that_got_nothing_are_looked_at_once(case: dict[str, Any]) -> None:
    run_ranks(_look_again, 2, case)


def _without_slots(rank: int, change: Change) -> None:
    found = _gradients(balanced_gpt(dict(ep=2), BalanceConfig(slots=0)), change)
    expected = _gradients(build_gpt(ep=2), change)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_without_slots_experts_may_have_hooks() -> None:
    run_ranks(_without_slots, 2, _with_hooks_on_each_expert)
