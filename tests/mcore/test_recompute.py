"""A recomputed forward has the plan of its first pass, whatever happened in between.

Layer 2 (2 and 4 gloo ranks). Plans are compared by digest, what was solved and pushed is counted,
and gradients are compared with Megatron's own layers in float64.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_ext.config import BalanceConfig, HistorySettings
from tests.gpt import SEQUENCE, VOCAB, TinyGPT, build_gpt  # first: it enables the CPU platform
from tests.mcore import inside
from tests.mcore.parity import balanced_gpt, balanced_layers
from tests.ranks import run_ranks

TOLERANCE = 1e-10
"""As in `test_parity.py`."""

HISTORY = BalanceConfig(strategy="eplb", history=HistorySettings(interval=1))
"""Plans by the loads so far: planned again, a load gets another plan."""


def full(method: str, num_layers: int) -> dict[str, Any]:
    """Settings of full recompute."""
    return dict(recompute="full", recompute_method=method, recompute_num_layers=num_layers)


CASES: list[tuple[dict[str, Any], int]] = [
    # In backward, the last layer finds its replicas, the first needs them once more.
    (dict(), 3),
    (full("uniform", 1), 3),
    (full("block", 1), 3),
    (dict(recompute="selective"), 3),
    # Both layers in one block: the last one's replicas follow the first one's.
    (full("uniform", 2), 5),
]
"""Recompute of two layers, and the pushes of a microbatch."""

PIPELINE_CASES: list[dict[str, Any]] = [
    dict(pp=2, num_layers=2, **full("uniform", 1)),
    dict(pp=2, vpp=2, num_layers=4, recompute="selective"),
]


@dataclass
class Noted:
    """What the layers of a rank did."""

    counts: Counter[str] = field(default_factory=Counter)
    first: dict[int, list[int]] = field(default_factory=dict)
    """Digests of the plans of passes without gradients, by layer."""
    second: dict[int, list[int]] = field(default_factory=dict)
    """Those of passes with gradients."""


@contextmanager
def noted(gpt: TinyGPT) -> Iterator[Noted]:
    """Note plans, and count what is gathered, solved and pushed."""
    found = Noted()

    def counted(name: str, point: str) -> Any:
        method = inside.original(point)

        def count(*args: Any) -> Any:
            found.counts[name] += 1
            return method(*args)

        return mock.patch(point, count)

    def note(number: int, plan: Any, _: Any) -> None:
        passes = found.second if torch.is_grad_enabled() else found.first
        passes.setdefault(number, []).append(plan.digest())

    for layer in balanced_layers(gpt):
        inside.watch_plans(layer, partial(note, layer.layer_number))
    with (
        counted("gather", inside.GATHER_LOAD),
        counted("solve", inside.SOLVE),
        counted("push", inside.PUSH),
    ):
        yield found


def move_on(layer: Any, plan: Any, _: Any) -> None:
    """Let the layer's history move on after every plan, as later microbatches' would."""
    load = torch.zeros(plan.layout.ep_size, plan.layout.num_experts, dtype=torch.int64)
    load[:, inside.num_observed(layer) % plan.layout.num_experts] = 1000
    inside.planner(layer).observe(load)


def gradients(gpt: TinyGPT, num_microbatches: int) -> dict[str, torch.Tensor]:
    """The gradients of one schedule."""
    gpt.forward_backward(num_microbatches=num_microbatches)
    return gpt.gradients()


def assert_equal(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> None:
    """Check gradients to rounding."""
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        distance, scale = float((found[name] - value).norm()), float(value.norm())
        assert distance <= TOLERANCE * scale, f"{name}: {distance} of {scale}"


def tensors_of(shape: tuple[int, int]) -> list[torch.Tensor]:
    """The tensors of a shape that this process holds."""
    return [one for one in gc.get_objects() if isinstance(one, torch.Tensor) and one.shape == shape]


def _one_plan(rank: int) -> list[Noted]:
    everything = []
    for case, _ in CASES:
        expected = gradients(build_gpt(ep=2, **case, dtype=torch.float64), 2)
        gpt = balanced_gpt(dict(ep=2, **case), HISTORY, dtype=torch.float64)
        maps = (gpt.micro_batch_size * SEQUENCE, balanced_layers(gpt)[0].layout.num_physical)
        others = tensors_of(maps)
        gpt.forward_backward()  # The first microbatch has no history to be planned from.
        for layer in balanced_layers(gpt):
            inside.watch_plans(layer, partial(move_on, layer))
            layer.num_replicas = 0
        with noted(gpt) as found:
            assert_equal(expected, gradients(gpt, 2))
        assert all(layer.num_replicas > 0 for layer in balanced_layers(gpt)), "nothing was tested"
        assert all(inside.in_flight(layer) == 0 for layer in balanced_layers(gpt))
        left = [one for one in tensors_of(maps) if not any(one is other for other in others)]
        assert left == [], "maps that nothing will read"
        everything.append(found)
    return everything


@pytest.mark.option("recompute_moe")
@pytest.mark.option("recompute_full")
def test_the_second_pass_plans_nothing_and_pushes_what_is_missing() -> None:
    for of_rank in run_ranks(_one_plan, 2):
        for (case, pushes), found in zip(CASES, of_rank, strict=True):
            plans = 2 * 2  # of two microbatches and layers
            counts = dict(gather=plans, solve=plans, push=2 * pushes)
            assert found.counts == counts, case
            recomputed = {1, 2} if case else set()
            recomputed -= {2} if case.get("recompute_method") == "block" else set()
            assert found.first.keys() == recomputed
            for number, digests in found.first.items():
                assert found.second[number] == digests, f"{case}, layer {number}"
            assert all(len(set(digests)) == 2 for digests in found.second.values()), (
                "the plans did not change, so nothing was tested"
            )


def _pipelined(rank: int) -> list[Noted]:
    everything = []
    for case in PIPELINE_CASES:
        expected = gradients(build_gpt(ep=2, **case, dtype=torch.float64), 4)
        gpt = balanced_gpt(dict(ep=2, **case), HISTORY, dtype=torch.float64)
        with noted(gpt) as found:
            assert_equal(expected, gradients(gpt, 4))
        everything.append(found)
    return everything


@pytest.mark.slow
def test_with_pipelining_every_microbatch_finds_its_own_plan() -> None:
    for of_rank in run_ranks(_pipelined, 4):
        for case, found in zip(PIPELINE_CASES, of_rank, strict=True):
            layers = case["num_layers"] // case["pp"]
            assert found.counts["solve"] == 4 * layers
            assert len(found.first) == layers
            assert found.first == found.second


def _inputs() -> tuple[torch.Tensor, ...]:
    tokens = torch.arange(SEQUENCE).expand(2, -1) % VOCAB
    return tokens, tokens, None


def _without_backward(rank: int) -> None:
    balance = BalanceConfig(tolerance=0.0)
    for recompute in ("full", "selective"):
        case = dict(ep=2, recompute=recompute)
        quiet, busy = balanced_gpt(case, balance), balanced_gpt(case, balance)
        busy.chunks[0].train()
        for step in range(2):
            with torch.no_grad():
                busy.chunks[0](*_inputs())
            assert [inside.in_flight(layer) for layer in balanced_layers(busy)] == [0, 0]
            with noted(busy) as found:
                assert busy.train_step(step) == quiet.train_step(step)
            assert found.first == found.second


def test_a_pass_in_training_mode_without_backward_leaves_no_plan() -> None:
    run_ranks(_without_backward, 2)


def _other_choices(gpt: TinyGPT) -> None:
    """Let the routers choose other experts in the second pass, as rounding may near a tie."""
    from megatron_ext.mcore.recompute import in_backward

    def routed(route: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        probs, routing_map = route(*args, **kwargs)
        if not in_backward():
            return probs, routing_map
        shifted = [each.clone() for each in (probs, routing_map)]
        for before, after in zip((probs, routing_map), shifted, strict=True):
            after[::2] = before[::2].roll(1, dims=1)
        return shifted[0], shifted[1]

    for layer in gpt.chunks[0].module.decoder.layers:
        layer.mlp.route = partial(routed, layer.mlp.route)


def _unstable_router(rank: int, case: dict[str, Any]) -> int:
    plain = build_gpt(**case, dtype=torch.float64)
    gpt = balanced_gpt(case, BalanceConfig(tolerance=0.0), dtype=torch.float64)
    for each in (plain, gpt):
        _other_choices(each)
    assert_equal(gradients(plain, 2), gradients(gpt, 2))
    return sum(layer.num_replicas for layer in balanced_layers(gpt))


@pytest.mark.parametrize("topk", [1, 2])
def test_a_router_that_chooses_otherwise_the_second_time_changes_no_sum(topk: int) -> None:
    case = dict(ep=2, experts=8, topk=topk, recompute="full", micro_batch_size=1)
    assert all(replicas > 0 for replicas in run_ranks(_unstable_router, 2, case))


def checkpoint_for(settings: dict[str, Any]) -> Callable[..., Any]:
    """Transformer Engine's checkpoint for its layers, PyTorch's for others."""
    if settings.get("transformer_engine"):
        from transformer_engine.pytorch.distributed import checkpoint
    else:
        from torch.utils.checkpoint import checkpoint
    return checkpoint


def in_a_checkpoint(rank: int, settings: dict[str, Any]) -> list[int]:
    """One MoE layer in a checkpoint of its library's, without and with Megatron's inside.

    Returns:
        How many plans were solved.
    """
    checkpoint, solved = checkpoint_for(settings), []
    for recompute in ("none", "selective"):
        case = dict(ep=2, recompute=recompute) | settings
        gpt = balanced_gpt(case, BalanceConfig(tolerance=0.0), dtype=torch.float64)
        generator = torch.Generator().manual_seed(rank)
        hidden = torch.randn(32, 1, 16, generator=generator, dtype=torch.float64)
        outcomes = []
        for each in (build_gpt(**case, dtype=torch.float64), gpt):
            each.chunks[0].zero_grad_buffer()
            layer = each.chunks[0].module.decoder.layers[0].mlp
            inputs = hidden.clone().requires_grad_()
            with noted(gpt) as found:
                checkpoint(
                    lambda x, run=layer: run(x)[0], inputs, use_reentrant=True
                ).sum().backward()
            outcomes.append(each.gradients() | {"inputs": inputs.grad})
        assert_equal(*outcomes)
        assert balanced_layers(gpt)[0].num_replicas > 0
        assert inside.in_flight(balanced_layers(gpt)[0]) == 0
        solved.append(found.counts["solve"])
        with torch.no_grad():
            checkpoint(lambda x, run=layer: run(x)[0], hidden, use_reentrant=False)
        inputs = hidden.clone().requires_grad_()
        with pytest.raises(
            RuntimeError,
            match=rf"layer 1: {checkpoint.__module__}\.checkpoint.*use_reentrant=True",
        ):
            checkpoint(lambda x, run=layer: run(x)[0], inputs, use_reentrant=False)
    return solved


def test_other_checkpoints_and_one_in_another_are_recomputed_as_well() -> None:
    # The inner checkpoint has a first pass in both passes of the outer one.
    assert run_ranks(in_a_checkpoint, 2, {}) == [[1, 2], [1, 2]]
