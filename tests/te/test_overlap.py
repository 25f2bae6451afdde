"""Delayed weight gradients of Transformer Engine's experts, balanced. Layer 2.

With the combined schedule they are delayed by `delay_wgrad_compute`, without it by
`overlap_dispatch_backward_with_experts_wgrad`. What is compared differs only in that; pairs with
other options are in `test_combinations.py`.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_ext.balance import held_back
from megatron_ext.config import BalanceConfig
from tests.mcore import inside
from tests.mcore.covering import WITH_ONE_VERSION, of_this_version
from tests.mcore.parity import balanced_gpt
from tests.mcore.test_overlap import (
    EARLY,
    FUSED,
    IN_BACKWARD,
    OVERLAP,
    Case,
    repeat_a_failed_step,
    train_with_and_without,
    train_with_graphs,
    watched_step,
    without_a_join,
)
from tests.mcore.test_partial_graphs import ALL
from tests.ranks import run_ranks
from tests.te.test_combinations import GATED, TE
from tests.te.test_experts import HAS_BLOCKS

DELAY = OVERLAP | dict(delay_wgrad_compute=True)
BESIDE = dict(overlap_dispatch_backward_with_experts_wgrad=True)
EXPERTS = TE | FUSED
FUSER = GATED | dict(
    moe_mlp_glu_interleave_size=32,
    ffn=64,
    bias_activation_fusion=False,
    use_transformer_engine_op_fuser=True,
)


def delayed(settings: dict[str, Any], **case: Any) -> Case:
    """Training with delayed gradients, compared with training without them."""
    return Case(**dict(settings=EXPERTS | settings, schedule=DELAY, before=OVERLAP) | case)


CASES = {
    "alone": delayed({}),
    "reduced in backward": delayed(IN_BACKWARD, world_size=4),
}
"""With each version of Megatron-Core."""
CASES |= of_this_version(
    {
        "DDP does not know": delayed(IN_BACKWARD | dict(ddp=dict(delay_wgrad_compute=False))),
        "biases": delayed(IN_BACKWARD | dict(add_bias_linear=True), world_size=4),
        "shared experts": delayed(IN_BACKWARD | dict(num_layers=3, shared_ffn=16)),
        "multi-token prediction": delayed(IN_BACKWARD | dict(mtp_num_layers=1)),
        "recomputed norms": delayed(
            dict(recompute_granularity="selective", recompute_modules=["layernorm", "moe_act"])
        ),
        "HybridEP": delayed(dict(dispatcher="flex", moe_flex_dispatcher_backend="hybridep")),
        "early release": delayed(IN_BACKWARD, schedule=DELAY | EARLY),
        "interleaved": delayed(
            IN_BACKWARD | dict(num_layers=4, pp=2, vpp=2), world_size=4, num_microbatches=4
        ),
        "gradients in 16 bits": delayed(
            IN_BACKWARD | dict(ddp=dict(grad_reduce_in_fp32=False)), dtype=torch.bfloat16
        ),
    }
)
BESIDE_DISPATCH = {
    "alone": delayed({}, schedule=BESIDE, before={}),
    "recomputed": delayed(
        IN_BACKWARD | dict(recompute="selective"), schedule=BESIDE, before={}, world_size=4
    ),
    "reduced in backward": delayed(IN_BACKWARD, schedule=BESIDE, before={}, world_size=4),
    "shared experts beside": delayed(
        dict(shared_ffn=16, moe_shared_expert_overlap=True), schedule=BESIDE, before={}
    ),
    "op fuser": delayed(IN_BACKWARD | FUSER, schedule=BESIDE, before={}, dtype=torch.bfloat16),
}
if HAS_BLOCKS:
    CASES["op fuser"] = delayed(IN_BACKWARD | FUSER, dtype=torch.bfloat16)


def _train(rank: int, case: Case) -> tuple[int, list[str]]:
    with mock.patch.dict(os.environ, NVTE_CUTEDSL_FUSED_GROUPED_MLP="1"):
        return train_with_and_without(rank, case)


@pytest.mark.option("delayed_gradients")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_training_is_the_same(case: Case) -> None:
    for replicas, different in run_ranks(_train, case.world_size, case):
        assert replicas > 0
        assert different == []


@pytest.mark.option("beside_dispatch")
@pytest.mark.skipif(not HAS_BLOCKS, reason="Megatron-Core 0.16.1 has no such overlap")
@pytest.mark.parametrize("case", BESIDE_DISPATCH.values(), ids=BESIDE_DISPATCH.keys())
def test_training_with_gradients_beside_dispatch_is_the_same(case: Case) -> None:
    for replicas, different in run_ranks(_train, case.world_size, case):
        assert replicas > 0
        assert different == []


FUSED_ROUTER = dict(moe_router_fusion=True, moe_permute_fusion=True)
ALL_TOGETHER = {"all scopes": (ALL, {}, 2)} | of_this_version(
    {
        "shared experts": (ALL, dict(shared_ffn=16), 2),
        "fused router": (ALL, GATED | FUSED_ROUTER | dict(bias_activation_fusion=False), 2),
        "reduced in backward": (ALL, IN_BACKWARD, 4),
        "EP x PP x DP": (ALL, IN_BACKWARD | dict(pp=2, vpp=2), 8),
        "attention": (("attn",), {}, 2),
        "router": (("moe_router", "moe_preprocess"), dict(shared_ffn=16), 2),
    }
)


@pytest.mark.option("delayed_gradients")
@pytest.mark.parametrize(
    ("scopes", "settings", "num_ranks"), ALL_TOGETHER.values(), ids=ALL_TOGETHER.keys()
)
def test_training_with_partial_graphs_is_the_same(
    scopes: tuple[str, ...], settings: dict[str, Any], num_ranks: int
) -> None:
    case = (scopes, EXPERTS | settings, DELAY)
    for replicas, different in run_ranks(train_with_graphs, num_ranks, *case):
        assert replicas > 0
        assert different == []


def _train_without_a_join(rank: int, case: Case) -> tuple[int, list[str]]:
    with without_a_join():
        return train_with_and_without(rank, case)


@pytest.mark.option("delayed_gradients")
def test_training_without_a_join_is_the_same() -> None:
    for replicas, different in run_ranks(_train_without_a_join, 4, CASES["reduced in backward"]):
        assert replicas > 0
        assert different == []


def _repeat_a_failed_step(rank: int, settings: dict[str, Any]) -> list[str]:
    with mock.patch.dict(os.environ, NVTE_CUTEDSL_FUSED_GROUPED_MLP="1"):
        return repeat_a_failed_step(rank, EXPERTS | DELAY | settings)


@pytest.mark.parametrize(
    "settings", [{}, *[FUSER] * HAS_BLOCKS], ids=["linears", "op fuser"][: 1 + HAS_BLOCKS]
)
def test_a_failed_step_can_be_repeated(settings: dict[str, Any]) -> None:
    assert run_ranks(_repeat_a_failed_step, 2, settings) == [[], []]


def _build_sequential(rank: int) -> None:
    balanced_gpt(EXPERTS | dict(ep=2, moe_grouped_gemm=False), BalanceConfig(), **DELAY)


def test_experts_one_by_one_cannot_delay() -> None:
    with pytest.raises(RuntimeError, match=r"delay_wgrad_compute \(True\) .*--moe-grouped-gemm"):
        run_ranks(_build_sequential, 2)


def _weight_gradients_too_late(rank: int) -> None:
    gpt = balanced_gpt(EXPERTS | dict(ep=2), BalanceConfig(), **DELAY)
    tokens = gpt.tokens(0, 0)[:, :-1]
    positions = torch.arange(tokens.shape[1]).expand(len(tokens), -1)
    output = gpt.chunks[0].module(tokens, positions, None)
    with pytest.raises(RuntimeError, match=r"layer 2, .* call the MoE layer's backward_dw\(\)"):
        output.square().mean().backward()


def test_weight_gradients_that_come_too_late_are_refused() -> None:
    run_ranks(_weight_gradients_too_late, 2)


def _train_with_hooks_at_once(rank: int, case: Case) -> list[str]:
    with mock.patch.object(held_back, "call_when_complete", lambda main, call: call()):
        return train_with_and_without(rank, case)[1]


def _train_with_early_reduction(rank: int, case: Case) -> list[str]:
    """Reduce where the experts' backward ends, before the weight gradients are there."""
    start = inside.original(inside.START_REDUCTION)

    def start_now(forward: Any, *grads: Any) -> Any:
        forward.delayed = None
        return start(forward, *grads)

    with mock.patch(inside.START_REDUCTION, start_now):
        return train_with_and_without(rank, case)[1]


@WITH_ONE_VERSION
@pytest.mark.parametrize("broken", [_train_with_hooks_at_once, _train_with_early_reduction])
def test_a_broken_order_changes_gradients(broken: Any) -> None:
    # Compared with a training in turn, which holds nothing back.
    assert any(run_ranks(broken, 4, replace(CASES["reduced in backward"], before={})))


@pytest.mark.option("delayed_gradients")
@pytest.mark.parametrize("schedule", [DELAY, *[BESIDE] * HAS_BLOCKS], ids=str)
def test_streams_use_the_slots_in_order(schedule: dict[str, Any]) -> None:
    for watched in run_ranks(watched_step, 2, EXPERTS | schedule, torch.float32):
        assert watched.num_checks >= 12
        assert watched.errors == []
