"""Training with balancing equals training without it where experts or layers are cut. Layer 2.

Cut are: experts (expert tensor parallelism), dense layers (tensor parallelism with sequence
parallelism), sequences (context parallelism), and the model into stages of unequal length. Shards
start with different values, so that a replica of another rank's shard would show.
"""

from __future__ import annotations

import copy
import gc
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_ext.config import BalanceConfig
from tests.gpt import build_gpt  # first: it enables the CPU platform
from tests.mcore import inside
from tests.mcore.parity import (
    GRADIENT_TOLERANCE,
    balanced_gpt,
    balanced_layers,
    gradient_difference,
)
from tests.ranks import run_ranks

Case = tuple[dict[str, Any], int, dict[str, Any]]
"""Arguments of `build_gpt`, microbatches, differences of `BalanceConfig`."""

CASES: list[Case] = [
    (dict(ep=2, etp=2, tp=2, shared_ffn=24, recompute="selective"), 2, dict(check_plans=True)),
    (dict(ep=2, etp=2, dispatcher="allgather", topk=1), 2, dict(transport="collective")),
    (dict(ep=2, etp=2, num_layers=3, overlap_grad_reduce=True), 2, dict(strategy="libra")),
    (dict(ep=2, etp=2, context_parallel_size=2), 2, {}),
    (dict(ep=4, tp=2), 1, {}),
    (dict(ep=2, tp=2, distributed_optimizer=True, dispatcher="allgather"), 2, {}),
    (dict(ep=2, pp=2, num_layers=3, num_layers_in_first_pipeline_stage=1), 4, {}),
    (
        dict(ep=2, pp=2, vpp=2, num_layers=5, pipeline_model_parallel_layout="Et|t|tt|tL"),
        4,
        dict(strategy="libra"),
    ),
]


def _gradients(rank: int) -> list[Any]:
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    # Without Transformer Engine, Megatron's attention refuses context parallelism. Here the tokens
    # of every rank are a sequence of their own.
    attend = partial(_attend_to_own_tokens, DotProductAttention.__init__)
    with mock.patch.object(
        DotProductAttention, "__init__", lambda *args, **kw: attend(*args, **kw)
    ):
        return [
            gradient_difference(
                case, num_microbatches=n, balance=BalanceConfig(tolerance=0.0, **differences)
            )
            for case, n, differences in CASES
        ]


def _attend_to_own_tokens(
    init: Any, attention: Any, config: Any, *args: Any, **kwargs: Any
) -> None:
    config = copy.copy(config)
    config.context_parallel_size = 1
    init(attention, config, *args, **kwargs)


@pytest.mark.option("expert_tp")
@pytest.mark.option("sequence_parallel")
@pytest.mark.option("context_parallel")
@pytest.mark.option("uneven_stages")
@pytest.mark.slow
def test_gradients_equal_unbalanced_megatron() -> None:
    differences = run_ranks(_gradients, 4, timeout_s=400)
    for index, case in enumerate(CASES):
        worst = max((of_rank[index] for of_rank in differences), key=lambda each: each.worst)
        assert worst.worst <= GRADIENT_TOLERANCE, f"{case}: {worst}"
        assert all(of_rank[index].replicas > 0 for of_rank in differences), f"{case}: no replica"


GRIDS = [
    dict(etp=etp, ep=ep, tp=tp, dispatcher=dispatcher)
    for etp, ep, tp in ((1, 4, 1), (2, 2, 1), (2, 2, 2), (4, 1, 1), (1, 2, 2))
    for dispatcher in ("alltoall", "allgather")
]
"""Every way to lay 4 ranks out, as Megatron's own test of its dispatchers does."""


def _come_back(rank: int) -> None:
    for grid in GRIDS:
        gpt = balanced_gpt(grid, BalanceConfig(tolerance=0.0), dtype=torch.float64)
        layer = balanced_layers(gpt)[0]
        inside.replace_experts(layer, _hand_back)
        generator = torch.Generator().manual_seed(rank)
        hidden = torch.randn(24, 1, 16, generator=generator, dtype=torch.float64)
        routed = [value.detach() for value in layer.route(hidden)]
        layer.route = lambda *_, _routed=routed, **__: _routed
        hidden.requires_grad_()
        output, _ = layer(hidden)
        output.backward(hidden.detach())
        # Each shard hands every token back, weighted with its probabilities.
        expected = grid["etp"] * hidden.detach() * routed[0].sum(1).view(-1, 1, 1)
        torch.testing.assert_close(output.detach(), expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(hidden.grad, expected, rtol=1e-12, atol=1e-12)
        assert (layer.num_replicas > 0) == (grid["ep"] > 1), grid


def _hand_back(slot_weights: list[Any], part: Any) -> torch.Tensor:
    """In place of the experts: each token times its probability, and nothing of any weight."""
    nothing = sum(weight.sum() * 0 for segment in slot_weights for weight in segment)
    return part.tokens * part.probs.unsqueeze(-1) + nothing


def test_tokens_come_back_from_physical_experts_in_every_grid() -> None:
    run_ranks(_come_back, 4)


def _policy_and_reference(rank: int) -> None:
    exact = BalanceConfig(tolerance=0.0)
    policy = dict(ep=2, dtype=torch.float64)
    plain = build_gpt(**policy)
    expected = _loss_and_gradients(plain)
    gpt = balanced_gpt(dict(ep=2), exact, dtype=torch.float64)
    # The second has the policy's shapes and other weights; the third has other shapes as well.
    others = [
        balanced_gpt(dict(ep=2, seed=77, **shape), exact, dtype=torch.float64)
        for shape in ({}, dict(hidden=32, num_layers=3, experts=8))
    ]
    alone = [_loss_and_gradients(other) for other in others]

    with torch.no_grad():
        evaluated = [float(_loss(other)) for other in others]
    losses = [_loss(model) for model in (gpt, *others)]
    buffers = [{inside.slot_buffers(layer) for layer in balanced_layers(m)} for m in (gpt, *others)]
    assert buffers[0] == buffers[1] != buffers[2]
    assert [len(each) for each in buffers] == [1, 1, 1]
    for model in (gpt, *others):
        assert all(inside.in_flight(layer) == 1 for layer in balanced_layers(model))
        model.chunks[0].zero_grad_buffer()
    with torch.no_grad():
        assert [float(_loss(other)) for other in others] == evaluated
    # Backward in the order of the forwards, with the other model's replicas in the shared slots.
    for loss in losses:
        loss.backward()
    found = [
        (float(loss), model.gradients()) for loss, model in zip(losses, (gpt, *others), strict=True)
    ]
    for (loss, gradients), (one, ones) in zip(found, [expected, *alone], strict=True):
        assert abs(loss - one) <= GRADIENT_TOLERANCE
        for name, gradient in gradients.items():
            assert float((gradient - ones[name]).norm()) <= GRADIENT_TOLERANCE * float(
                ones[name].norm()
            ), name
    for model in (gpt, *others):
        assert all(inside.in_flight(layer) == 0 for layer in balanced_layers(model))
        assert all(layer.num_replicas > 0 for layer in balanced_layers(model))


def _loss(gpt: Any) -> torch.Tensor:
    tokens = gpt.tokens(0, 0)
    positions = torch.arange(tokens.shape[1] - 1).expand(len(tokens), -1)
    logits = gpt.chunks[0](tokens[:, :-1], positions, None)
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def _loss_and_gradients(gpt: Any) -> tuple[float, dict[str, torch.Tensor]]:
    gpt.chunks[0].zero_grad_buffer()
    loss = _loss(gpt)
    loss.backward()
    return float(loss), gpt.gradients()


@pytest.mark.option("several_models")
def test_models_of_one_process_leave_each_other_alone() -> None:
    run_ranks(_policy_and_reference, 2)


def _freed_on_one_rank(rank: int) -> None:
    build = partial(balanced_gpt, dict(ep=2), BalanceConfig(tolerance=0.0), dtype=torch.float64)
    gpt = build()
    expected, gradients = _loss_and_gradients(gpt)
    kept = inside.slot_buffers(balanced_layers(gpt)[0]) if rank == 0 else None
    del gpt
    gc.collect()
    gpt = build()
    found, again = _loss_and_gradients(gpt)
    assert found == expected
    assert all(torch.equal(again[name], gradient) for name, gradient in gradients.items())
    assert inside.slot_buffers(balanced_layers(gpt)[0]) is not kept


def test_slots_that_one_rank_still_has_of_a_model_before_do_not_serve_the_next() -> None:
    run_ranks(_freed_on_one_rank, 2, timeout_s=60)
