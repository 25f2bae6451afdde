"""Training with balancing equals training without it for every pair of options.

A covering array: few trainings in which every two values of every two options come together, but
for the pairs that Megatron refuses. Layer 2, against Megatron's own layers on the same ranks, in
float64; with fused gradients in float32.
"""

from __future__ import annotations

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
"""By option and value: arguments of `build_gpt`, `balance` and `world_size` apart."""

SHOWN = {
    "etp2": "expert_tp",
    "tp2": "sequence_parallel",
    "edp2": "expert_dp",
    "pp2": "pipeline",
    "aux": "aux_loss",
    "bias": "expert_bias",
    "groups": "group_limited",
    "capacity": "capacity",
    "moe": "recompute_moe",
    "full": "recompute_full",
    "before": "shared_experts",
    "beside": "shared_overlap",
    "dense": "dense_layers",
    "mtp": "mtp",
    "fused": "fusion",
    "distributed": "distributed_optimizer",
    "alltoall": "alltoall",
    "allgather": "allgather",
    "gated": "sequential",
    "biased": "expert_bias_terms",
}
"""Rows of docs/compatibility.md by value."""


def _is_possible(values: list[str]) -> bool:
    """Whether Megatron takes these values of the first options together."""
    chosen = set(values)
    return not any(
        pair <= chosen
        for pair in (
            {"beside", "allgather"},
            {"capacity", "allgather"},
            {"biased", "before"},
            {"biased", "beside"},
            {"biased", "etp2"},
            # PyTorch's norm, which multi-token prediction has without Transformer Engine.
            {"mtp", "tp2"},
            {"mtp", "etp2"},
        )
    )


COMBINATIONS = [
    dict(zip(OPTIONS, values, strict=True))
    for values in AllPairs([list(values) for values in OPTIONS.values()], filter_func=_is_possible)
]


def _settings(combination: dict[str, str]) -> tuple[int, Settings, Settings]:
    """The number of ranks, the arguments of `build_gpt`, and those of `BalanceConfig`."""
    case: Settings = {}
    balance: Settings = dict(tolerance=0.0)
    for option, value in combination.items():
        chosen = dict(OPTIONS[option][value])
        balance |= chosen.pop("balance", {})
        case |= chosen
    return case.pop("world_size", 2), case, balance


def _difference(rank: int, case: Settings, balance: Settings) -> Difference:
    settings = BalanceConfig(**balance)
    if "gradient_accumulation_fusion" in case:
        # One step: in a later one, a rounded score may drop another token at the capacity.
        return step_difference(case, num_steps=1, num_microbatches=4, balance=settings)
    return gradient_difference(case, num_microbatches=4, balance=settings)


@pytest.mark.parametrize(
    "combination",
    [
        pytest.param(
            combination,
            marks=[pytest.mark.option(SHOWN[v]) for v in combination.values() if v in SHOWN],
            id=", ".join(combination.values()),
        )
        for combination in COMBINATIONS
    ],
)
def test_gradients_equal_unbalanced_megatron(combination: dict[str, str]) -> None:
    num_ranks, case, balance = _settings(combination)
    differences = run_ranks(_difference, num_ranks, case, balance)
    worst = max(differences, key=lambda difference: difference.worst)
    # Megatron's fused gradients know no float64.
    is_fused = combination["gradients"] == "fused"
    assert worst.worst <= (STEP_TOLERANCE if is_fused else GRADIENT_TOLERANCE), worst
    assert all(difference.replicas > 0 for difference in differences), "nothing was tested"
