"""Backwards that are not one of each layer, one after the other: twice, in part, side by side.

And backwards that end before the MoE layer's input, behind a stop-gradient.

Layer 2 (2 gloo ranks). Gradients are compared with Megatron's own layers under the same backwards;
where they cannot be right, every rank raises an error that names the layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_ext.config import BalanceConfig
from megatron_ext.transport.collective import CollectiveTransport
from tests.gpt import TinyGPT, build_gpt  # first: it enables the CPU platform
from tests.mcore import inside
from tests.mcore.parity import (
    GRADIENT_TOLERANCE,
    STEP_TOLERANCE,
    balanced_gpt,
    balanced_layers,
    relative_distance,
)
from tests.ranks import run_ranks

from megatron_ext.mcore.between_steps import reset_after_abort  # isort: skip

EXPERTS = r"\.experts\."

Backwards = Callable[[TinyGPT], None]


def _loss(gpt: TinyGPT, microbatch: int) -> torch.Tensor:
    tokens = gpt.tokens(0, microbatch)[:, :-1]
    positions = torch.arange(tokens.shape[1]).expand(len(tokens), -1)
    logits: torch.Tensor = gpt.chunks[0](tokens, positions, None)
    return logits.square().mean()


def _gradients(gpt: TinyGPT, backwards: Backwards) -> dict[str, torch.Tensor]:
    for chunk in gpt.chunks:
        chunk.zero_grad_buffer()
    backwards(gpt)
    for chunk in gpt.chunks:
        chunk.finish_grad_sync()
    return gpt.gradients()


def _assert_equal_gradients(
    case: dict[str, Any], balance: BalanceConfig, backwards: Backwards, tolerance: float
) -> None:
    expected = _gradients(build_gpt(**case), backwards)
    gpt = balanced_gpt(case, balance)
    found = _gradients(gpt, backwards)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        distance = relative_distance(found[name], value)
        assert distance <= tolerance, f"{name}: {distance}"
    assert all(layer.num_replicas > 0 for layer in balanced_layers(gpt)), "nothing was tested"


def _twice(rank: int, case: dict[str, Any]) -> None:
    gpt = balanced_gpt(dict(ep=2, **case), BalanceConfig(tolerance=0.0))
    loss = _loss(gpt, 0)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="layer 2"):
        loss.backward()
    assert all(layer.num_replicas > 0 for layer in balanced_layers(gpt)), "nothing was tested"


@pytest.mark.parametrize(
    "case",
    [
        {},
        # No reduction asks for the plan, so only what materializes notices.
        dict(frozen=EXPERTS),
        dict(gradient_accumulation_fusion=True),
    ],
    ids=["trained", "frozen", "fused"],
)
def test_a_second_backward_is_an_error_on_all_ranks(case: dict[str, Any]) -> None:
    """The first one released the plan, and layer 1's replicas are in layer 2's slots."""
    run_ranks(_twice, 2, case)


def _in_part_before(gpt: TinyGPT) -> None:
    """A router's gradient alone, an evaluation that takes the slots, and then all gradients."""
    loss = _loss(gpt, 0)
    router = next(
        value for name, value in gpt.named_parameters() if "layers.1.mlp.router.weight" in name
    )
    torch.autograd.grad(loss, router, retain_graph=True)
    with torch.no_grad():
        _loss(gpt, 1)
    loss.backward()


def _after_a_part(rank: int) -> None:
    # Many small experts: another microbatch has other replicas.
    case = dict(ep=2, experts=32, topk=1, dtype=torch.float64)
    balance = BalanceConfig(tolerance=0.0)
    _assert_equal_gradients(case, balance, _in_part_before, GRADIENT_TOLERANCE)


def test_a_backward_after_one_of_a_part_finds_its_replicas() -> None:
    run_ranks(_after_a_part, 2)


def _stopped_before_the_experts(rank: int) -> None:
    """A backward that ends at the last experts' output has set their mains' gradients aside."""
    case = dict(ep=2, dtype=torch.bfloat16, gradient_accumulation_fusion=True)
    gpt = balanced_gpt(case | dict(ddp=dict(grad_reduce_in_fp32=False)), BalanceConfig())
    run_experts = inside.original(inside.RUN_EXPERTS)
    outputs: list[torch.Tensor] = []

    def noted(*arguments: Any) -> torch.Tensor:
        outputs.append(run_experts(*arguments))
        return outputs[-1]

    def backwards(stops: bool) -> dict[str, torch.Tensor]:
        def all_of(gpt: TinyGPT) -> None:
            _loss(gpt, 0).backward()
            with mock.patch(inside.RUN_EXPERTS, noted):
                loss = _loss(gpt, 1)
            if stops:
                torch.autograd.grad(loss, outputs[-1], retain_graph=True)
            loss.backward()

        return _gradients(gpt, all_of)

    found, expected = backwards(stops=True), backwards(stops=False)
    # Those of the output layer are there twice: its products have added them twice.
    experts = [name for name in expected if ".experts." in name]
    assert {found[name].dtype for name in experts} == {torch.bfloat16}
    assert all(torch.equal(found[name], expected[name]) for name in experts)
    assert all(layer.num_replicas > 0 for layer in balanced_layers(gpt)), "nothing was tested"


def test_gradients_set_aside_come_back_after_a_backward_that_stopped_halfway() -> None:
    run_ranks(_stopped_before_the_experts, 2)


def _ended_by_an_error(rank: int, dtype: torch.dtype) -> bool:
    """The experts' products have added to slots, whose gradients no reduction has taken."""
    case = dict(ep=2, dtype=dtype, gradient_accumulation_fusion=True)
    gpt = balanced_gpt(case | dict(ddp=dict(grad_reduce_in_fp32=False)), BalanceConfig())

    def one(gpt: TinyGPT) -> None:
        _loss(gpt, 0).backward()

    expected = _gradients(gpt, one)
    with (
        mock.patch(inside.START_REDUCE, side_effect=ArithmeticError),
        pytest.raises(ArithmeticError),
    ):
        one(gpt)
    are_left = any(bool(grad.any()) for grad in inside.slot_grads(balanced_layers(gpt)[0]))
    reset_after_abort(gpt.chunks)
    found = _gradients(gpt, one)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    return are_left


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_aborted_backward_leaves_no_gradients_in_slots(dtype: torch.dtype) -> None:
    assert any(run_ranks(_ended_by_an_error, 2, dtype)), "nothing was tested"


def _of_the_input_alone(gpt: TinyGPT) -> None:
    """All gradients of one microbatch, and then those of the embeddings in another."""
    _loss(gpt, 0).backward()
    embeddings = dict(gpt.named_parameters())["embedding.word_embeddings.weight"]
    torch.autograd.grad(_loss(gpt, 1), embeddings)


def _a_part(rank: int, case: dict[str, Any]) -> None:
    is_float64 = case.get("dtype") == torch.float64
    _assert_equal_gradients(
        dict(ep=2, **case),
        BalanceConfig(tolerance=0.0),
        _of_the_input_alone,
        GRADIENT_TOLERANCE if is_float64 else STEP_TOLERANCE,
    )


@pytest.mark.parametrize("case", [dict(dtype=torch.float64), dict(grouped_mm=True)])
def test_gradients_of_something_else_leave_main_grads_as_they_were(case: dict[str, Any]) -> None:
    run_ranks(_a_part, 2, case)


class LateTransport(CollectiveTransport):
    """Reads slot gradients as late as a transport may: in the wait for their sums."""

    def pull_add(self, *arguments: Any) -> Any:
        def wait() -> None:
            if not done:
                done.append(True)
                pull_add(*arguments).wait()

        pull_add, done = super().pull_add, []
        return mock.Mock(wait=wait)


def _beside(gpt: TinyGPT) -> None:
    """Layer 2 runs between layer 1's attention and its experts, so both reduce at a time."""
    first, second = gpt.chunks[0].module.decoder.layers
    beside: list[torch.Tensor] = []

    def before(_: Any, arguments: Any) -> None:
        beside.append(second(hidden_states=arguments[0], attention_mask=None)[0])

    def after(_: Any, __: Any, outputs: Any) -> Any:
        return (outputs[0] + beside.pop(), *outputs[1:])

    hooks = [
        first.mlp.register_forward_pre_hook(before),
        first.mlp.register_forward_hook(after),
    ]
    _loss(gpt, 0).backward()
    for hook in hooks:
        hook.remove()


def _two_reductions(rank: int, fused: bool) -> None:
    case = dict(ep=2, gradient_accumulation_fusion=fused)
    balance = BalanceConfig(tolerance=0.0, transport="collective", max_in_flight=2)
    with mock.patch(inside.MAKE_TRANSPORT, lambda name, group, *_: LateTransport(group)):
        _assert_equal_gradients(case, balance, _beside, STEP_TOLERANCE)


@pytest.mark.parametrize("fused", [False, True])
def test_gradient_slots_are_not_taken_from_a_reduction_that_reads_them(fused: bool) -> None:
    run_ranks(_two_reductions, 2, fused)


DETACHED_CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (dict(dtype=torch.float64), {}),
    (dict(dtype=torch.float64), dict(transport="collective")),
    (dict(grouped_mm=True), {}),
    (dict(dtype=torch.float64, overlap_grad_reduce=True), {}),
    (dict(dtype=torch.float64, recompute="full"), {}),
    (dict(dtype=torch.float64), dict(local_first=True)),
    (dict(dtype=torch.float64, num_layers=3), dict(strategy="libra")),
    (dict(gradient_accumulation_fusion=True), {}),
]
"""(model, balance)."""


def _detached(gpt: TinyGPT) -> None:
    """Train where the MoE layers' inputs need no gradient, but their transformer layers' do."""
    for layer in gpt.chunks[0].module.decoder.layers:
        layer.mlp.register_forward_pre_hook(lambda _, given: (given[0].detach(), *given[1:]))
    _loss(gpt, 0).backward()


def _behind_a_stop_gradient(rank: int, case: dict[str, Any], balance: dict[str, Any]) -> None:
    is_float64 = case.get("dtype") == torch.float64
    _assert_equal_gradients(
        dict(ep=2, **case),
        BalanceConfig(tolerance=0.0, **balance),
        _detached,
        GRADIENT_TOLERANCE if is_float64 else STEP_TOLERANCE,
    )


@pytest.mark.parametrize(("case", "balance"), DETACHED_CASES)
def test_behind_a_stop_gradient_mains_get_their_replicas_gradients(
    case: dict[str, Any], balance: dict[str, Any]
) -> None:
    """The residual path reaches the transformer layer's input before the experts' gradients."""
    run_ranks(_behind_a_stop_gradient, 2, case, balance)
