"""Backwards that are not one of each layer, one after the other: twice, in part, side by side.

And backwards that end before the MoE layer's input, behind a stop-gradient.

Layer 2 (2 gloo ranks). Gradients are compared with Megatron's own layers under the same backwards;
where they cannot be right, every rank raises an error that names the layer.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils.checkpoint import checkpoint

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


def _compare(rank: int, case: dict[str, Any], backwards: Backwards) -> None:
    is_float64 = case.get("dtype") == torch.float64
    tolerance = GRADIENT_TOLERANCE if is_float64 else STEP_TOLERANCE
    _assert_equal_gradients(dict(ep=2, **case), BalanceConfig(tolerance=0.0), backwards, tolerance)


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


def _in_part_of_fused(rank: int) -> None:
    gpt = balanced_gpt(dict(ep=2, gradient_accumulation_fusion=True), BalanceConfig(tolerance=0.0))
    embeddings = dict(gpt.named_parameters())["embedding.word_embeddings.weight"]
    message = "layer 2: with gradient_accumulation_fusion.*backward\\(\\) without inputs"
    with pytest.raises(RuntimeError, match=message):
        _loss(gpt, 0).backward(inputs=[embeddings])
    with pytest.raises(RuntimeError, match=message):
        torch.autograd.grad(_loss(gpt, 1), embeddings)


def test_fused_gradients_of_a_part_are_refused() -> None:
    """Fused products add to `main_grad` of all weights that they meet on the way."""
    run_ranks(_in_part_of_fused, 2)


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


@pytest.mark.parametrize("case", [dict(dtype=torch.float64), dict(grouped_mm=True)])
def test_gradients_of_something_else_leave_main_grads_as_they_were(case: dict[str, Any]) -> None:
    run_ranks(_compare, 2, case, _of_the_input_alone)


class LateTransport(CollectiveTransport):
    """Reads slot gradients as late as a transport may: in the wait for their sums.

    If nobody waits, before the next ones are read.
    """

    last: Any = mock.Mock()

    def pull_add(self, *arguments: Any) -> Any:
        def wait() -> None:
            if not done:
                done.append(True)
                pull_add(*arguments).wait()

        self.last.wait()
        pull_add, done = super().pull_add, []
        self.last = mock.Mock(wait=wait)
        return self.last


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


def _without_the_join(gpt: TinyGPT) -> None:
    """A backward that ends between the experts and their layer's input, and then all gradients."""
    weight = gpt.chunks[0].module.decoder.layers[1].self_attention.linear_qkv.weight
    torch.autograd.grad(_loss(gpt, 0), weight)
    _loss(gpt, 0).backward()  # Of the same tokens, whose replicas are in the same slots.


def _two_reductions(rank: int, fused: bool, backwards: Backwards) -> None:
    case = dict(ep=2, gradient_accumulation_fusion=fused)
    balance = BalanceConfig(tolerance=0.0, transport="collective", max_in_flight=2)
    with mock.patch(inside.MAKE_TRANSPORT, lambda name, group, *_: LateTransport(group)):
        _assert_equal_gradients(case, balance, backwards, STEP_TOLERANCE)


@pytest.mark.parametrize(
    ("fused", "backwards"), [(False, _beside), (True, _beside), (False, _without_the_join)]
)
def test_gradient_slots_are_not_taken_from_a_reduction_that_reads_them(
    fused: bool, backwards: Backwards
) -> None:
    run_ranks(_two_reductions, 2, fused, backwards)


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


def _dropped_forwards(rank: int) -> None:
    """Forwards without a backward, also in evaluation where nobody said `no_grad`; then train."""
    case = dict(ep=2, num_layers=1, dtype=torch.float64)
    gpt = balanced_gpt(case, BalanceConfig(tolerance=0.0, max_in_flight=2))
    if rank == 1:
        gc.disable()
    try:
        for microbatch in range(40):
            dropped = [_loss(gpt, microbatch)]
            if microbatch % 8 == 0:
                dropped.append(dropped)  # Only the garbage collector ends such a cycle.
        gpt.chunks[0].eval()
        for microbatch in range(200):
            _loss(gpt, microbatch)
    finally:
        gc.enable()
    gpt.chunks[0].train()
    found = _gradients(gpt, lambda gpt: _loss(gpt, 0).backward())
    expected = _gradients(build_gpt(**case), lambda gpt: _loss(gpt, 0).backward())
    for name, value in expected.items():
        assert relative_distance(found[name], value) <= GRADIENT_TOLERANCE, name


def test_dropped_forwards_need_no_garbage_collector() -> None:
    """The collector is off on one rank, and more forwards are dropped than may wait."""
    run_ranks(_dropped_forwards, 2)


def _in_a_checkpoint_behind_a_stop_gradient(gpt: TinyGPT) -> None:
    """The transformer layer's input needs no gradient, so no path leads on to it."""
    layer = gpt.chunks[0].module.decoder.layers[1]
    run = layer.mlp.forward
    layer.mlp.forward = lambda hidden, **rest: checkpoint(
        lambda hidden: run(hidden, **rest), hidden, use_reentrant=True
    )
    layer.register_forward_pre_hook(
        lambda _, args, given: (args, given | {"hidden_states": given["hidden_states"].detach()}),
        with_kwargs=True,
    )
    _loss(gpt, 0).backward()


def test_a_checkpoint_around_an_moe_layer_behind_a_stop_gradient() -> None:
    case = dict(dtype=torch.float64)
    run_ranks(_compare, 2, case, _in_a_checkpoint_behind_a_stop_gradient)


def _second_derivative(rank: int) -> None:
    gpt = balanced_gpt(dict(ep=2), BalanceConfig())
    with pytest.raises(RuntimeError, match=r"no second derivatives.*create_graph=False"):
        _loss(gpt, 0).backward(create_graph=True)


def test_a_second_derivative_is_refused_on_all_ranks() -> None:
    run_ranks(_second_derivative, 2)


def _some_experts(gpt: TinyGPT) -> None:
    """Gradients of the experts' first products: to `.grad`, returned, and of all in between."""
    first = [
        p for name, p in gpt.chunks[0].named_parameters() if "experts" in name and "fc1" in name
    ]
    _loss(gpt, 0).backward(inputs=first)
    _loss(gpt, 1).backward()
    for parameter, grad in zip(first, torch.autograd.grad(_loss(gpt, 2), first), strict=True):
        parameter.main_grad += grad


@pytest.mark.parametrize("case", [dict(dtype=torch.float64), dict(grouped_mm=True)])
def test_gradients_of_some_experts_alone(case: dict[str, Any]) -> None:
    run_ranks(_compare, 2, case, _some_experts)


def _beside_its_experts(rank: int, where: str) -> None:
    """Another layer runs where this layer's experts do, or in their backward."""
    gpt = balanced_gpt(dict(ep=2), BalanceConfig(tolerance=0.0))
    first, second = (layer.mlp for layer in gpt.chunks[0].module.decoder.layers)

    def run_second(tensor: torch.Tensor) -> None:
        with torch.no_grad():
            second(torch.randn(16, 1, tensor.shape[-1]))

    def before(_: Any, given: Any) -> None:
        if where == "forward":
            run_second(given[0])
        else:
            given[0].register_hook(run_second)

    first.experts.register_forward_pre_hook(before)
    with pytest.raises(RuntimeError, match=r"^layer 1.*ran in the middle of this layer's experts"):
        _loss(gpt, 0).backward()


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_replicas_overwritten_under_their_experts_are_an_error_on_all_ranks(where: str) -> None:
    run_ranks(_beside_its_experts, 2, where)
