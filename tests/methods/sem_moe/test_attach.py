"""Token re-batching: the same training, with more of the choices on the token's rank.

Layer 2 (2 and 4 gloo ranks, tensor-parallel group = EP group). Logits, losses and all gradients of
one pipeline schedule are compared in float64 with those of the same model without re-batching;
exchanges and where tokens go are compared exactly.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_ext.config import BalanceConfig
from megatron_ext.methods.sem_moe.semantics import Semantics
from megatron_ext.methods.sem_moe.tokens import predict, rebatch, resume
from tests.gpt import VOCAB, TinyGPT, TransformerConfig, build_gpt  # first: the CPU platform
from tests.mcore.parity import balanced_gpt
from tests.mcore.test_routers import give_ids
from tests.ranks import run_ranks

from megatron_ext.methods.sem_moe import attach  # isort: skip
from megatron_ext.methods.sem_moe.attach import Dealing, rebatch_tokens, validate_for_rebatching  # isort: skip

TOLERANCE = 1e-12
HIDDEN = 16
LAYERS = 4
MICROBATCHES = 4


def any_semantics(ranks: int, experts: int, *, layers: int = LAYERS) -> Semantics:
    """Tables from a seed: now the id is surer, now the path, now neither knows."""
    rng = np.random.default_rng(0)
    confidence = np.maximum(1 / ranks, rng.random((layers, VOCAB)))
    return Semantics(
        tuple(range(1, layers + 1)),
        np.tile(np.arange(experts), (layers, 1)),
        np.full((VOCAB, ranks), 1 / ranks, np.float32),
        rng.integers(ranks, size=(layers, VOCAB)).astype(np.int16),
        confidence.astype(np.float32),
        rng.dirichlet(np.ones(ranks), (layers - 2, ranks, ranks)).astype(np.float32),
    )


def build(case: dict[str, Any], strategy: str) -> TinyGPT:
    if strategy == "none":
        return build_gpt(**case, dtype=torch.float64)
    balance = BalanceConfig(strategy=strategy, tolerance=0.0)
    return balanced_gpt(case, balance, dtype=torch.float64)


def outcome(gpt: TinyGPT, num_microbatches: int) -> dict[str, torch.Tensor]:
    reports = gpt.forward_backward(num_microbatches=num_microbatches)
    outputs = {
        f"{name} {number}": value
        for number, report in enumerate(reports)
        for name, value in report.items()
    }
    return outputs | gpt.gradients()


def layer_outcome(gpt: TinyGPT, layer: Any, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
    """Output and all gradients of one MoE layer; a router's is a sum over the sequence."""
    gpt.chunks[0].zero_grad_buffer()
    hidden = hidden.clone().requires_grad_()
    output, _ = layer(hidden)
    output.backward(hidden.detach().cos())
    gradients = {name: value for name, value in gpt.gradients().items() if "layers.0.mlp" in name}
    dist.all_reduce(gradients["decoder.layers.0.mlp.router.weight"])
    return {"output": output.detach(), "input grad": hidden.grad} | gradients


def assert_close(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> None:
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        distance, scale = float((found[name] - value).norm()), float(value.norm())
        assert distance <= TOLERANCE * scale, f"{name}: {distance} of {scale}"


@dataclasses.dataclass
class Seen:
    """What re-batching did on a rank, one entry a layer's forward."""

    by_path: list[bool]
    permutations: list[torch.Tensor]

    def moved(self, ranks: int) -> int:
        """Tokens that changed their rank."""
        size = len(self.permutations[0]) // ranks
        place = torch.arange(ranks * size)
        return sum(int((p // size != place // size).sum()) for p in self.permutations)


@contextmanager
def watch() -> Iterator[Seen]:
    seen = Seen([], [])

    def predict_seen(tables: Any, ids: Any, ranks: int, went: Any) -> Any:
        seen.by_path.append(went is not None)
        return predict(tables, ids, ranks, went)

    def rebatch_seen(guess: Any, ranks: int) -> torch.Tensor:
        seen.permutations.append(rebatch(guess, ranks))
        return seen.permutations[-1]

    with (
        mock.patch.object(attach, "predict", predict_seen),
        mock.patch.object(attach, "rebatch", rebatch_seen),
    ):
        yield seen


def _parity(rank: int, strategy: str, case: dict[str, Any]) -> tuple[int, list[bool]]:
    case = dict(num_layers=LAYERS, experts=8) | case
    expected = outcome(build(case, strategy), MICROBATCHES)
    gpt = build(case, strategy)
    for chunk in gpt.chunks:
        rebatch_tokens(chunk.module, any_semantics(case["tp"], 8))
    with watch() as seen:
        found = outcome(gpt, MICROBATCHES)
    assert_close(expected, found)
    return seen.moved(case["tp"]), seen.by_path


@pytest.mark.parametrize("strategy", ["none", "quota"])
@pytest.mark.parametrize(
    ("case", "forwards"),
    [
        (dict(ep=2, tp=2), 1),
        (dict(ep=2, tp=2, shared_ffn=16, dispatcher="allgather"), 1),
        (dict(ep=2, tp=2, recompute="selective"), 1),
        (dict(ep=2, tp=2, recompute="full"), 2),
        (dict(ep=4, tp=4, hidden=32, num_attention_heads=4), 1),
    ],
)
def test_training_is_the_same(strategy: str, case: dict[str, Any], forwards: int) -> None:
    """Layers 3 and 4 also look at where tokens went, as recomputed layers do again."""
    for moved, by_path in run_ranks(_parity, case["tp"], strategy, case):
        assert moved > 0
        assert len(by_path) == forwards * MICROBATCHES * LAYERS
        assert sum(by_path) == forwards * MICROBATCHES * (LAYERS - 2)


def _noted(rank: int, gives_ids: bool) -> None:
    case = dict(ep=2, tp=2, num_layers=LAYERS, experts=8)
    plain, gpt = build(case, "none"), build(case, "none")
    if gives_ids:
        give_ids(gpt)
    rebatcher = rebatch_tokens(gpt.chunks[0].module, any_semantics(2, 8))
    chosen: list[torch.Tensor] = []
    for layer in plain.chunks[0].module.decoder.layers:
        layer.mlp.router.register_forward_hook(lambda *call: chosen.append(call[2][1]))
    plain.forward_backward()
    gpt.forward_backward()
    assert sorted(rebatcher._went) == [0, 1, 2]
    for layer, went in rebatcher._went.items():
        on_rank_1 = chosen[layer][:, 4:].sum(1) > 1  # Of two choices; rank 0 if each has one.
        assert torch.equal(went.view(2, -1)[rank], on_rank_1.long())


@pytest.mark.parametrize("gives_ids", [False, True], ids=["map", "ids"])
def test_layers_after_are_told_where_each_token_of_the_sequence_went(gives_ids: bool) -> None:
    run_ranks(_noted, 2, gives_ids)


def test_several_microbatches_in_a_pipeline() -> None:
    """The second stage has no embedding; no layer of two on a stage knows the two before it."""
    case = dict(ep=2, tp=2, pp=2)
    for moved, by_path in run_ranks(_parity, 4, "quota", case):
        assert moved > 0
        assert by_path == [False] * (MICROBATCHES * LAYERS // 2)


def test_virtual_stages_and_data_parallel_replicas() -> None:
    for case in (dict(ep=2, tp=2, pp=2, vpp=2), dict(ep=2, tp=2)):
        assert all(moved > 0 for moved, _ in run_ranks(_parity, 4, "none", case))


def _evaluate_in_between(rank: int) -> None:
    gpts = [build(dict(ep=2, tp=2, num_layers=LAYERS), "quota") for _ in range(2)]
    for gpt in gpts:
        rebatch_tokens(gpt.chunks[0].module, any_semantics(2, 4))
    expected = outcome(gpts[0], 1)
    with torch.no_grad():
        gpts[1].forward_backward(7, forward_only=True)
    found = outcome(gpts[1], 1)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_evaluation_leaves_nothing_behind() -> None:
    run_ranks(_evaluate_in_between, 2)


def _exchange(rank: int, permutation: list[int]) -> None:
    order = torch.tensor(permutation)
    ranks = dist.get_world_size()
    size = len(order) // ranks
    own = slice(rank * size, (rank + 1) * size)
    dealing = Dealing(order, dist.group.WORLD)
    # Two tokens of the sequence by half as many samples; every element another number.
    tokens = torch.arange(len(order) * 3.0).view(-1, 3)
    mine = tokens[own].view(2, -1, 3).requires_grad_()
    dealt = dealing.deal(mine)
    assert torch.equal(dealt.detach().flatten(0, 1), tokens[order][own])
    assert torch.equal(dealing.put_back(dealt), mine)
    # The adjoint brings gradients to where the tokens came from.
    upstream = tokens + 100
    dealt.backward(upstream[own].view_as(dealt))
    assert torch.equal(mine.grad.flatten(0, 1), upstream[resume(order)][own])


@pytest.mark.parametrize(
    "permutation",
    [
        [0, 1, 2, 3, 4, 5, 6, 7],
        [4, 5, 6, 7, 0, 1, 2, 3],
        [1, 5, 6, 7, 0, 2, 3, 4],
        [7, 2, 0, 4, 5, 6, 3, 1],
    ],
)
def test_exchange(permutation: list[int]) -> None:
    run_ranks(_exchange, 2, permutation)


def _topical(rank: int) -> tuple[float, float]:
    """Local activation rate of one layer whose router goes by token id, without and with."""
    experts = 4
    gpt = build(dict(ep=2, tp=2, num_layers=2, topk=2), "quota")
    model = gpt.chunks[0].module
    layer = model.decoder.layers[0].mlp
    ids = gpt.tokens(0, 0)[:, :-1]
    # Ids below VOCAB / 2 choose experts 0 and 1, the others 2 and 3.
    wanted = (ids.t().flatten() >= VOCAB // 2).long()
    semantics = dataclasses.replace(
        any_semantics(2, experts, layers=2),
        token_rank=np.tile(np.arange(VOCAB) >= VOCAB // 2, (2, 1)).astype(np.int16),
        token_confidence=np.ones((2, VOCAB), np.float32),
    )
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(len(wanted), HIDDEN, generator=generator, dtype=torch.float64)
    hidden[:, 0] = 100.0 * (2 * wanted - 1)
    layer.router.weight.data[:, 0] = torch.tensor([-1.0, -1.0, 1.0, 1.0])
    own = slice(rank * len(wanted) // 2, (rank + 1) * len(wanted) // 2)
    mine = hidden[own].view(-1, len(ids), HIDDEN)
    reports: list[Any] = []
    layer.observers.append(reports.append)
    expected = layer_outcome(gpt, layer, mine)
    rebatcher = rebatch_tokens(model, semantics)
    rebatcher._keep_ids(model, (ids,), {})
    assert_close(expected, layer_outcome(gpt, layer, mine))
    rates = []
    for report in reports:
        by_rank = report.load.view(2, 2, experts // 2).sum(-1)
        rates.append(float(by_rank.trace() / by_rank.sum()))
    return rates[0], rates[1]


def test_more_choices_are_local_on_a_constructed_example() -> None:
    """As many as equal counts allow: of the 32 tokens, all but the surplus of the larger group."""
    tokens = run_ranks(_tokens, 2)[0]
    larger = max(sum(tokens), len(tokens) - sum(tokens))
    surplus = larger - len(tokens) // 2
    for before, after in run_ranks(_topical, 2):
        assert after == 1 - surplus / len(tokens)
        assert after > before + 0.2


def _tokens(rank: int) -> list[int]:
    gpt = build_gpt(ep=2, tp=2, dtype=torch.float64)
    return (gpt.tokens(0, 0)[:, :-1].flatten() >= VOCAB // 2).long().tolist()


def _refused(rank: int, case: dict[str, Any], changed: dict[str, Any], message: str) -> None:
    gpt = build_gpt(**case, num_layers=LAYERS, dtype=torch.float64)
    semantics = dataclasses.replace(any_semantics(2, 4), **changed)
    with pytest.raises(ValueError, match=re.escape(message)):
        rebatch_tokens(gpt.chunks[0].module, semantics)


@pytest.mark.parametrize(
    ("case", "changed", "message"),
    [
        (dict(ep=2), {}, "tensor_model_parallel_size (1) must be expert_model_parallel_size (2)"),
        (dict(tp=2), {}, "tensor_model_parallel_size (2) must be expert_model_parallel_size (1)"),
        (dict(ep=2, tp=2), {"layers": (1, 2, 3, 5)}, "know layers (1, 2, 3, 5), not [4]"),
        (
            dict(ep=2, tp=2, experts=8),
            {},
            "semantics of 4 experts on 2 ranks do not fit 8 experts on 2 ranks",
        ),
    ],
)
def test_refused(case: dict[str, Any], changed: dict[str, Any], message: str) -> None:
    run_ranks(_refused, 2, case, changed, message)


def _predicting(rank: int) -> None:
    gpt = build(dict(ep=2, tp=2, num_layers=LAYERS), "libra")
    with pytest.raises(ValueError, match=r"balance\.strategy \(libra\) must not predict"):
        rebatch_tokens(gpt.chunks[0].module, any_semantics(2, 4))


def test_layers_that_predict_each_other_are_refused() -> None:
    """A layer's routing would be compared with that of other tokens."""
    run_ranks(_predicting, 2)


def _without_ids(rank: int) -> None:
    gpt = build_gpt(ep=2, tp=2, num_layers=LAYERS, dtype=torch.float64)
    rebatch_tokens(gpt.chunks[0].module, any_semantics(2, 4))
    with pytest.raises(ValueError, match=r"input_ids \(None\) must be given"):
        gpt.chunks[0](None, None, None)


def test_ids_that_are_not_given() -> None:
    run_ranks(_without_ids, 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            dict(
                recompute_granularity="full",
                recompute_method="uniform",
                recompute_num_layers=1,
                pipeline_model_parallel_size=2,
                pipeline_dtype=torch.float32,
            ),
            "recompute_granularity ('full') must not be 'full' with token re-batching",
        ),
        (
            dict(moe_router_load_balancing_type="seq_aux_loss"),
            "moe_router_load_balancing_type ('seq_aux_loss') must be 'none' or 'aux_loss'",
        ),
        (
            dict(moe_expert_capacity_factor=1.0, moe_router_load_balancing_type="aux_loss"),
            "moe_expert_capacity_factor (1.0) must be None",
        ),
    ],
)
def test_settings_that_exclude_it_are_named(settings: dict[str, Any], message: str) -> None:
    defaults: dict[str, Any] = dict(
        num_layers=2,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        num_moe_experts=4,
        add_bias_linear=False,
        expert_model_parallel_size=2,
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        expert_tensor_parallel_size=1,
        moe_router_load_balancing_type="none",
    )
    assert validate_for_rebatching(TransformerConfig(**defaults), None) == []
    (problem,) = validate_for_rebatching(TransformerConfig(**(defaults | settings)), None)
    assert problem.startswith(message)
