"""Covering arrays: few trainings in which every two values of every two options come together.

A pair that Megatron refuses is left out. Each training is compared with Megatron's own layers on
the same ranks, in float64; in float32 where what computes knows no float64.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from allpairspy import AllPairs

from megatron_ext.config import BalanceConfig
from tests.mcore.parity import (
    GRADIENT_TOLERANCE,
    STEP_TOLERANCE,
    Difference,
    gradient_difference,
    step_difference,
)
from tests.ranks import run_ranks

Settings = dict[str, Any]

Options = Mapping[str, Mapping[str, Settings]]
"""By option and value: arguments of `build_gpt`, `balance` and `world_size` apart."""

Combination = dict[str, str]
"""The value of each option."""

OPTIONS: dict[str, dict[str, Settings]] = {
    "layout": {
        "ep2": dict(ep=2),
        "etp2": dict(ep=2, etp=2, tp=2, world_size=4),
        "tp2": dict(ep=2, tp=2, world_size=4),
        "edp2": dict(ep=2, world_size=4),
        "pp2": dict(ep=2, pp=2, world_size=4),
        "vpp2": dict(ep=2, pp=2, vpp=2, num_layers=4, world_size=4),
    },
    "router": {
        "aux": dict(moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=0.01),
        "top-1": dict(topk=1, moe_z_loss_coeff=0.01),
        "bias": dict(moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True),
        "groups": dict(moe_router_num_groups=2, moe_router_group_topk=1),
        "sequence": dict(moe_router_load_balancing_type="seq_aux_loss", moe_aux_loss_coeff=0.01),
        "capacity": dict(moe_expert_capacity_factor=1.0),
    },
    "recompute": {
        "kept": {},
        "moe": dict(recompute="selective"),
        "full": dict(recompute="full"),
        "block": dict(
            recompute="full", recompute_method="block", recompute_num_layers=1, num_layers=4
        ),
    },
    "shared experts": {
        "no shared": {},
        "before": dict(shared_ffn=24),
        "beside": dict(shared_ffn=24, moe_shared_expert_overlap=True),
    },
    "layers": {
        "all": {},
        "dense": dict(moe_layer_freq=[1, 0, 1, 1], num_layers=4),
        "mtp": dict(mtp_num_layers=1),
    },
    "strategy": {
        "quota": {},
        "exact": dict(balance=dict(strategy="exact", slots=0)),
        "libra": dict(balance=dict(strategy="libra")),
    },
    "gradients": {"autograd": {}, "fused": dict(gradient_accumulation_fusion=True)},
    "optimizer": {
        "plain": {},
        "distributed": dict(distributed_optimizer=True, overlap_grad_reduce=True),
    },
    "dispatcher": {"alltoall": {}, "allgather": dict(dispatcher="allgather")},
    "experts": {
        "gated": dict(gated_linear_unit=True, bias_activation_fusion=False),
        "biased": dict(add_bias_linear=True),
    },
    "transport": {
        "shared memory": {},
        "collective": dict(balance=dict(transport="collective")),
    },
}

IN_FLOAT32 = (
    *("gradient_accumulation_fusion", "moe_router_fusion", "use_transformer_engine_op_fuser"),
)
"""Settings of what knows no float64."""


def combinations(
    options: Options, impossible: Iterable[set[str]], shown: Mapping[str, str]
) -> list[Any]:
    """The trainings as parameters of a test.

    Args:
        options: What to combine.
        impossible: Pairs of values that Megatron refuses.
        shown: Rows of docs/compatibility.md by value.
    """
    impossible = list(impossible)

    def is_possible(of_first_options: list[str]) -> bool:
        return not any(pair <= set(of_first_options) for pair in impossible)

    return [
        pytest.param(
            dict(zip(options, values, strict=True)),
            marks=[pytest.mark.option(shown[value]) for value in values if value in shown],
            id=", ".join(values),
        )
        for values in AllPairs([list(each) for each in options.values()], filter_func=is_possible)
    ]


def assert_equals_unbalanced_megatron(options: Options, combination: Combination) -> None:
    """Train by a combination, balanced and not, and compare."""
    case: Settings = {}
    balance: Settings = dict(tolerance=0.0)
    for option, value in combination.items():
        chosen = dict(options[option][value])
        balance |= chosen.pop("balance", {})
        case |= chosen
    num_ranks = case.pop("world_size", 2)
    is_float32 = any(name in case for name in IN_FLOAT32)
    differences = run_ranks(_difference, num_ranks, case, balance, is_float32)
    worst = max(differences, key=lambda difference: difference.worst)
    assert worst.worst <= (STEP_TOLERANCE if is_float32 else GRADIENT_TOLERANCE), worst
    assert all(difference.replicas > 0 for difference in differences), "nothing was tested"


def _difference(rank: int, case: Settings, balance: Settings, is_float32: bool) -> Difference:
    settings = BalanceConfig(**balance)
    if is_float32:
        # One step: in a later one, a rounded score may drop another token at the capacity.
        return step_difference(case, num_steps=1, num_microbatches=4, balance=settings)
    return gradient_difference(case, num_microbatches=4, balance=settings)
