"""Own tokens first: what travels, in which order, and what happens to each gradient.

Layer 2. Where a part is empty, compared with Megatron's own layer in float64; layouts and options
are in `test_parity`. The order is read from a list of events, not from a clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_ext.config import BalanceConfig
from tests.gpt import TinyGPT, build_gpt
from tests.mcore import inside
from tests.mcore.parity import balanced_gpt, balanced_layers
from tests.mcore.test_layer import assert_close, layer_outcome
from tests.ranks import run_ranks

HIDDEN = 16
TOLERANCE = 1e-12
OWN_FIRST = BalanceConfig(tolerance=0.0, local_first=True)


class _NotedWork:
    def __init__(self, work: Any, events: list[str]) -> None:
        self._work = work
        self._events = events

    def wait(self) -> None:
        self._events.append("wait")
        self._work.wait()


@contextmanager
def noted(gpt: TinyGPT, events: list[str]) -> Iterator[None]:
    """Note exchanges, experts and reductions of a model with one layer, forward and backward."""
    exchange, reduce = dist.all_to_all_single, inside.original(inside.START_REDUCE)

    def noted_exchange(*args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        events.append("start" if async_op else "exchange")
        work = exchange(*args, async_op=async_op, **kwargs)
        return _NotedWork(work, events) if async_op else work

    def noted_reduce(*args: Any, **kwargs: Any) -> Any:
        events.append("reduce")
        return reduce(*args, **kwargs)

    experts = balanced_layers(gpt)[0].experts
    hooks = [
        experts.register_forward_pre_hook(lambda *_: events.append("experts")),
        experts.register_full_backward_pre_hook(lambda *_: events.append("experts back")),
    ]
    with (
        mock.patch.object(dist, "all_to_all_single", noted_exchange),
        mock.patch(inside.START_REDUCE, noted_reduce),
    ):
        yield
    for hook in hooks:
        hook.remove()


def _events(rank: int, recompute: str) -> list[str]:
    gpt = balanced_gpt(dict(ep=2, num_layers=1, recompute=recompute), OWN_FIRST)
    gpt.forward_backward()
    events: list[str] = []
    with noted(gpt, events):
        gpt.forward_backward()
    return events


FORWARD = ["start", "start", "experts", "wait", "wait", "experts", "exchange"]
BACKWARD = [
    *("exchange", "experts back", "start", "start", "experts back", "reduce", "wait", "wait")
]


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_own_tokens_are_computed_between_start_and_wait(recompute: str) -> None:
    forwards = FORWARD if recompute == "none" else FORWARD + FORWARD
    assert run_ranks(_events, 2, recompute) == [forwards + BACKWARD] * 2


def _travelled(rank: int, ep: int, local_first: bool) -> torch.Tensor:
    """Bytes of all exchanges of one step to each EP rank."""
    balance = BalanceConfig(tolerance=0.0, local_first=local_first)
    gpt = balanced_gpt(dict(ep=ep), balance)
    sent = torch.zeros(ep, dtype=torch.int64)
    exchange = dist.all_to_all_single

    def counted(
        output: Any,
        rows: torch.Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        **kwargs: Any,
    ) -> Any:
        row_bytes = rows[:1].nbytes if len(rows) else 0
        sent.add_(torch.tensor([int(size) for size in input_split_sizes]) * row_bytes)
        return exchange(output, rows, output_split_sizes, input_split_sizes, **kwargs)

    with mock.patch.object(dist, "all_to_all_single", counted):
        gpt.forward_backward()
    return sent


@pytest.mark.parametrize("ep", [2, 4])
def test_a_rank_sends_nothing_to_itself_and_to_others_what_it_did(ep: int) -> None:
    usual, own_first = (run_ranks(_travelled, ep, ep, local_first) for local_first in (False, True))
    for rank, (before, after) in enumerate(zip(usual, own_first, strict=True)):
        assert before[rank] > 0
        before[rank] = 0
        assert torch.equal(before, after)


def _route_to(rank: int, layer: Any, hidden: torch.Tensor, padding_mask: Any = None) -> Any:
    """Top-k among the experts of one rank."""
    logits = hidden.flatten(0, 1) @ layer.router.weight.T
    elsewhere = torch.arange(logits.shape[1]) // layer.num_local_experts != rank
    probs = logits.masked_fill(elsewhere, float("-inf")).softmax(1)
    chosen = probs.topk(layer.config.moe_router_topk).indices
    routing_map = torch.zeros_like(logits, dtype=torch.bool).scatter(1, chosen, True)
    return probs * routing_map, routing_map


def _one_sided(rank: int, targets: list[int], slots: int, num_tokens: list[int]) -> list[int]:
    """Compare with Megatron's layer; return tokens of the mains, own ones and those of others."""
    case = dict(ep=len(targets), experts=8)
    balance = BalanceConfig(tolerance=0.0, local_first=True, slots=slots)
    plain = build_gpt(**case, dtype=torch.float64)
    gpt = balanced_gpt(case, balance, dtype=torch.float64)
    for model in (plain, gpt):
        layer = model.chunks[0].module.decoder.layers[0].mlp
        layer.route = partial(_route_to, targets[rank], layer)
    generator = torch.Generator().manual_seed(rank)
    shape = (num_tokens[rank], 1, HIDDEN)
    hidden, upstream = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
    sizes: list[int] = []
    layer = balanced_layers(gpt)[0]
    with layer.experts.register_forward_pre_hook(lambda _, args: sizes.append(len(args[0]))):
        found = layer_outcome(gpt, hidden, upstream)
    assert_close(layer_outcome(plain, hidden, upstream), found, TOLERANCE)
    return sizes


@pytest.mark.parametrize(
    ("targets", "slots", "num_tokens", "main_tokens"),
    [
        # Everything is an own token; nothing is.
        ([0, 1], 2, [12, 12], [[24, 0], [24, 0]]),
        ([1, 0], 2, [12, 12], [[0, 24], [0, 24]]),
        # Rank 0 has both experts: without slots it computes all, and nothing is left to rank 1.
        ([0, 0], 0, [12, 8], [[24, 16], [0, 0]]),
        ([1, 2, 3, 0], 2, [6, 6, 6, 6], [[0, 12]] * 4),
        ([0, 1], 2, [12, 0], None),
        ([0, 0], 2, [0, 12], None),
        ([0, 0, 0, 0], 2, [3, 0, 9, 20], None),
    ],
)
def test_either_part_may_be_empty(
    targets: list[int], slots: int, num_tokens: list[int], main_tokens: list[list[int]] | None
) -> None:
    found = run_ranks(_one_sided, len(targets), targets, slots, num_tokens)
    assert main_tokens is None or found == main_tokens


def _accumulations(rank: int, case: dict[str, Any]) -> dict[str, int]:
    gpt = balanced_gpt(case, OWN_FIRST)
    counts: dict[str, int] = {}

    def count(name: str, _: Any) -> None:
        counts[name] = counts.get(name, 0) + 1

    for name, parameter in gpt.named_parameters():
        parameter.register_post_accumulate_grad_hook(partial(count, name))
    gpt.forward_backward()
    return counts


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_weight_used_in_both_parts_accumulates_once(recompute: str) -> None:
    for counts in run_ranks(_accumulations, 2, dict(ep=2, recompute=recompute)):
        assert set(counts.values()) == {1}, counts
        assert sum("experts" in name for name in counts) == 8


def _one_rank(rank: int) -> None:
    from megatron_ext.methods.libra.local_first import LocalFirstDispatcher

    gpt = balanced_gpt(dict(ep=1), OWN_FIRST)
    assert not isinstance(balanced_layers(gpt)[0].token_dispatcher, LocalFirstDispatcher)
    gpt.forward_backward()


def test_one_rank_has_nothing_to_exchange() -> None:
    run_ranks(_one_rank, 1)
