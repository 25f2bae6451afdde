"""Training with balancing equals training without it for every pair of options.

A covering array: few trainings in which every two values of every two options come together, but
for the pairs that Megatron refuses. float64, against Megatron's own layers on the same ranks.
"""

from __future__ import annotations

from typing import Any

import pytest
from allpairspy import AllPairs

from megatron_ext.config import BalanceConfig
from tests.mcore.parity import gradient_difference
from tests.mcore.test_parity import GRADIENT_TOLERANCE
from tests.ranks import run_ranks

Settings = dict[str, Any]

OPTIONS: dict[str, dict[str, Settings]] = {
    "layout": {
        "ep2": dict(ep=2),
        "ep2 x edp2": dict(ep=2, world_size=4),
        "ep2 x pp2": dict(ep=2, pp=2, world_size=4),
        "ep2 x vpp2": dict(ep=2, pp=2, vpp=2, num_layers=4, world_size=4),
    },
    "optimizer": {
        "plain": {},
        "distributed": dict(distributed_optimizer=True, overlap_grad_reduce=True),
    },
    "dispatcher": {"alltoall": {}, "allgather": dict(dispatcher="allgather")},
    "recompute": {
        "none": {},
        "moe": dict(recompute="selective"),
        "full": dict(recompute="full"),
    },
    "shared experts": {
        "none": {},
        "before": dict(shared_ffn=24),
        "beside": dict(shared_ffn=24, moe_shared_expert_overlap=True),
    },
    "router": {
        "aux": dict(moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=0.01),
        "top-1": dict(topk=1, moe_z_loss_coeff=0.01),
        "bias": dict(moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True),
        "groups": dict(moe_router_num_groups=2, moe_router_group_topk=1),
        "sequence": dict(moe_router_load_balancing_type="seq_aux_loss", moe_aux_loss_coeff=0.01),
    },
    "experts": {
        "gated": dict(gated_linear_unit=True, bias_activation_fusion=False),
        "plain": {},
    },
    "strategy": {
        "quota": {},
        "exact": dict(balance=dict(strategy="exact", slots=0)),
        "libra": dict(balance=dict(strategy="libra")),
    },
    "transport": {
        "shared memory": {},
        "collective": dict(balance=dict(transport="collective")),
    },
}
"""By option and value: arguments of `build_gpt`, `balance` and `world_size` apart."""


def _is_possible(values: list[str]) -> bool:
    """Whether Megatron takes these values of the first options together."""
    chosen = dict(zip(OPTIONS, values, strict=False))
    overlaps = chosen.get("shared experts") == "beside"
    return not (overlaps and chosen.get("dispatcher") == "allgather")


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


def _difference(rank: int, case: Settings, balance: Settings) -> Any:
    return gradient_difference(case, num_microbatches=4, balance=BalanceConfig(**balance))


@pytest.mark.parametrize("combination", COMBINATIONS, ids=lambda each: ", ".join(each.values()))
def test_gradients_equal_unbalanced_megatron(combination: dict[str, str]) -> None:
    num_ranks, case, balance = _settings(combination)
    differences = run_ranks(_difference, num_ranks, case, balance)
    worst = max(differences, key=lambda difference: difference.worst)
    assert worst.worst <= GRADIENT_TOLERANCE, worst
    assert all(difference.replicas > 0 for difference in differences), "nothing was tested"
