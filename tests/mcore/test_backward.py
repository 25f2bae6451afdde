"""When the reduction of replica gradients starts and ends in a layer's backward.

Layer 2 (2 gloo ranks). Events are noted in the order in which they happen; that the gradients are
right is tested by `test_parity.py`, which runs the same layers.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_ext.balance import held_back
from megatron_ext.config import BalanceConfig
from tests.gpt import SEQUENCE, VOCAB, TinyGPT, build_gpt  # first: it enables the CPU platform
from tests.mcore import inside
from tests.mcore.parity import balanced_gpt, balanced_layers
from tests.ranks import run_ranks

from megatron.core.transformer.transformer_layer import (  # isort: skip
    TransformerLayer,
)

CASE = dict(ep=2, num_layers=2)


class DerivedTransformerLayer(TransformerLayer):
    """A program's class that calls `super().forward`."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class OtherTransformerLayer(TransformerLayer):
    """A program's class that does not call `super().forward`."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return TransformerLayer.forward(self, *args, **kwargs)


@contextmanager
def noted(gpt: TinyGPT, events: list[str]) -> Iterator[None]:
    """Note the start and end of reductions, attention's backward, and the mains' gradients."""
    start, wait = inside.original(inside.START_REDUCE), inside.original(inside.REDUCED)

    def noted_start(self: Any, *arguments: Any, **options: Any) -> Any:
        reducing = start(self, *arguments, **options)
        events.append("start")
        return reducing

    def noted_wait(self: Any) -> Any:
        if inside.is_reducing(self):
            events.append("end")
        return wait(self)

    for layer in gpt.chunks[0].module.decoder.layers:
        layer.self_attention.register_full_backward_hook(lambda *_: events.append("attention"))
        main = next(layer.mlp.experts.parameters())
        main.register_post_accumulate_grad_hook(lambda _: events.append("main"))
    with (
        mock.patch(inside.START_REDUCE, noted_start),
        mock.patch(inside.REDUCED, noted_wait),
    ):
        yield


def _events(rank: int, transform: Any, case: dict[str, Any]) -> list[str]:
    from megatron_ext.mcore.spec import balance_spec

    def balanced(spec: Any) -> Any:
        if transform is not None:
            spec = transform(spec)
        return balance_spec(spec, BalanceConfig(tolerance=0.0))

    gpt = build_gpt(**CASE, **case, spec_transform=balanced)
    assert len(balanced_layers(gpt)) == 2
    events: list[str] = []
    with noted(gpt, events):
        gpt.forward_backward(num_microbatches=2)
    return events


def _restoring(rank: int, dispatcher: str) -> list[str]:
    from megatron.core.tensor_parallel.mappings import _AllToAll

    gpt = balanced_gpt({**CASE, "dispatcher": dispatcher}, BalanceConfig(tolerance=0.0))
    events: list[str] = []
    start, exchange = inside.original(inside.START_REMATERIALIZE), _AllToAll.backward
    wait = inside.original(inside.MATERIALIZED)

    def noted_start(self: Any) -> Any:
        if not inside.is_rematerializing(self):
            events.append("start")
        return start(self)

    def noted_wait(self: Any) -> None:
        events.append("end")
        wait(self)

    def noted_exchange(ctx: Any, *grads: Any) -> Any:
        events.append("exchange")
        return exchange(ctx, *grads)

    loss = gpt.chunks[0].module(*_inputs())
    with (
        mock.patch(inside.START_REMATERIALIZE, noted_start),
        mock.patch(inside.MATERIALIZED, noted_wait),
        mock.patch.object(_AllToAll, "backward", staticmethod(noted_exchange)),
    ):
        loss.sum().backward()
    return events


def _inputs() -> tuple[torch.Tensor, ...]:
    tokens = torch.arange(SEQUENCE).expand(2, -1) % VOCAB
    return tokens, tokens, None


def test_slots_are_restored_behind_the_experts_of_the_layer_above() -> None:
    for events in run_ranks(_restoring, 2, "alltoall"):
        # Tokens and probabilities go back one by one. The first layer's replicas start in between.
        last = ["start", "exchange", "end", "start", "exchange", "exchange"]
        first = ["exchange", "end", "exchange", "exchange"]
        assert events == last + first


def _of_class(layer_class: type, spec: Any) -> Any:
    for layer in spec.layer_specs:
        layer.module = layer_class
    return spec


_derived = partial(_of_class, DerivedTransformerLayer)
_of_another_class = partial(_of_class, OtherTransformerLayer)


@pytest.mark.parametrize(
    ("transform", "recompute"), [(None, "none"), (None, "full"), (_derived, "none")]
)
def test_attention_runs_beside_the_reduction(transform: Any, recompute: str) -> None:
    for events in run_ranks(_events, 2, transform, dict(recompute=recompute)):
        # Two layers, two microbatches. A main's gradient is accumulated once, and complete.
        assert events == ["start", "attention", "end", "main"] * 4


def _alive(rank: int, case: dict[str, Any], transport: str) -> tuple[int, int]:
    """How many tensors were made for reductions, beside gradients; and most that lived at once."""
    balance = BalanceConfig(tolerance=0.0, transport=transport)
    gpt = balanced_gpt({**CASE, **case}, balance, dtype=torch.bfloat16)
    made: list[Any] = []
    alive: list[int] = []
    set_aside, reduce = map(inside.original, (inside.SET_ASIDE, inside.START_REDUCE))

    def note(tensors: Any) -> None:
        kept = {each.main_grad.data_ptr() for each in gpt.chunks[0].parameters()}
        for each in (each for of_segment in tensors for each in of_segment or ()):
            if each is not None and each.data_ptr() not in kept:
                made.append(weakref.ref(each))

    def noted_aside(*args: Any, **kwargs: Any) -> Any:
        aside = set_aside(*args, **kwargs)
        note(aside)
        return aside

    def noted_reduce(*args: Any, **kwargs: Any) -> Any:
        if not case["gradient_accumulation_fusion"]:  # else there are those that were set aside
            alive.append(sum(each() is not None for each in made))
        reducing = reduce(*args, **kwargs)
        note(inside.sums_of(reducing))
        return reducing

    with (
        mock.patch(inside.SET_ASIDE, noted_aside),
        mock.patch(inside.START_REDUCE, noted_reduce),
    ):
        loss = gpt.chunks[0].module(*_inputs()).sum()
        loss.backward()
    alive.append(sum(each() is not None for each in made))
    return len(made), max(alive)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize("transport", ["shared_memory", "collective"])
def test_sums_live_until_the_mains_have_them(recompute: str, transport: str, fused: bool) -> None:
    case = dict(
        recompute=recompute,
        gradient_accumulation_fusion=fused,
        ddp=dict(grad_reduce_in_fp32=False),
    )
    for num_made, most_left in run_ranks(_alive, 2, case, transport):
        assert num_made > 0 == most_left


@pytest.mark.parametrize(
    ("transform", "case"),
    [(None, dict(recompute="selective")), (_of_another_class, {})],
)
def test_elsewhere_the_reduction_is_waited_for_at_once(transform: Any, case: Any) -> None:
    for events in run_ranks(_events, 2, transform, case):
        assert events == ["start", "end", "main", "attention"] * 4


FUSED_AND_RECOMPUTED = dict(
    recompute="selective", gradient_accumulation_fusion=True, overlap_grad_reduce=True
)


def _told(rank: int, surround: Any) -> list[str]:
    """What happens in a backward of recomputed MoE layers, and what DDP hears of their mains."""
    gpt = balanced_gpt({**CASE, **FUSED_AND_RECOMPUTED}, BalanceConfig(tolerance=0.0))
    events: list[str] = []
    tell = held_back.call_when_complete
    of_experts = {each for layer in balanced_layers(gpt) for each in layer.experts.parameters()}

    def noted_tell(main: Any, call: Any) -> None:
        def noted_call() -> None:
            if main in of_experts:
                events.append("ready")
            call()

        tell(main, noted_call)

    surround(gpt)
    with noted(gpt, events), mock.patch.object(held_back, "call_when_complete", noted_tell):
        gpt.forward_backward(0)
    events = [each for each in events if each != "main"]
    return [event for event, _ in itertools.groupby(events)]


def _as_it_is(gpt: TinyGPT) -> None: ...


def _with_another_input(gpt: TinyGPT) -> None:
    """Let MoE layers get what does not come from their transformer layer's input."""
    for layer in gpt.chunks[0].module.decoder.layers:
        layer.mlp.register_forward_pre_hook(
            lambda _, given: (given[0].detach().requires_grad_(), *given[1:])
        )


def _and_nothing_else(gpt: TinyGPT) -> None:
    """Let the second layer's output be its MoE layer's, so that no path leads to its input."""
    _with_another_input(gpt)
    layer, outputs = gpt.chunks[0].module.decoder.layers[1], []
    layer.mlp.register_forward_hook(lambda _, __, output: outputs.append(output[0]))
    layer.register_forward_hook(lambda _, __, output: (outputs.pop(), *output[1:]))


def _with_a_frozen_embedding(gpt: TinyGPT) -> None:
    """Let the first layer's input have no gradient, and its MoE layer's one of its attention."""
    for name, parameter in gpt.named_parameters():
        if "embedding" in name:
            parameter.requires_grad_(False)


LATE, AT_ONCE = ["start", "attention", "end", "ready"], ["start", "end", "ready", "attention"]
"""Of a layer whose backward waits at its input, and of one that waits where it starts."""


@pytest.mark.parametrize(
    ("surround", "expected"),
    [
        (_as_it_is, LATE * 2),
        # The residual path leads there.
        (_with_another_input, LATE * 2),
        (_and_nothing_else, AT_ONCE[:-1]),
        (_with_a_frozen_embedding, LATE + AT_ONCE),
    ],
)
def test_a_recomputed_layer_waits_at_the_transformer_layers_input(
    surround: Any, expected: list[str]
) -> None:
    """With fused gradients; DDP hears of a main when its replicas' part is in it."""
    for events in run_ranks(_told, 2, surround):
        assert events == expected


def _moved(rank: int, case: dict[str, Any], is_between: bool = False) -> list[str]:
    """When replicas start to move in a backward, and what runs meanwhile.

    The last layer's are still in the slots, unless an evaluation comes in between.
    """
    gpt = balanced_gpt({**CASE, "num_layers": 3, **case}, BalanceConfig(tolerance=0.0))
    events: list[str] = []
    for layer in gpt.chunks[0].module.decoder.layers:
        layer.self_attention.register_full_backward_hook(lambda *_: events.append("attention"))
    loss = gpt.chunks[0].module(*_inputs())
    if is_between:
        with torch.no_grad():
            gpt.chunks[0].module(*_inputs())
    attention = type(gpt.chunks[0].module.decoder.layers[0].self_attention)
    with (
        inside.noting(
            f"{attention.__module__}.{attention.__qualname__}.forward", "attention again", events
        ),
        inside.noting(inside.PUSH, "push", events),
        inside.noting(inside.RUN_EXPERTS, "experts again", events),
        inside.noting(inside.START_REDUCE, "reduce", events),
    ):
        loss.sum().backward()
    return events


@pytest.mark.parametrize(
    "case",
    [
        dict(recompute="full"),
        dict(recompute="selective"),
        FUSED_AND_RECOMPUTED,
    ],
)
def test_replicas_of_a_recomputed_layer_start_behind_the_experts_of_the_layer_above(
    case: dict[str, Any],
) -> None:
    again = ["attention again"] * (case["recompute"] == "full") + ["experts again"]
    for events in run_ranks(_moved, 2, case):
        above = [*again, "reduce", "push", "attention"]
        assert events == [*above, *above, *again, "reduce", "attention"]


def test_the_first_replicas_of_a_recomputed_backward_move_beside_attention() -> None:
    for events in run_ranks(_moved, 2, dict(recompute="full"), True):
        assert events[:4] == ["push", "attention again", "experts again", "reduce"]


def test_of_layers_recomputed_together_the_first_one_pushes_in_its_second_pass() -> None:
    """Another one's replicas, sent ahead, would be overwritten there."""
    together = dict(recompute_method="uniform", recompute_num_layers=2, num_layers=4)
    for events in run_ranks(_moved, 2, dict(recompute="full") | together):
        again = ["push", "attention again", "experts again"] * 2
        backward = ["reduce", "push", "attention", "reduce", "attention"]
        assert events == (again + backward) * 2
