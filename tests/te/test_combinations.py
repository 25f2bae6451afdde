"""Training with Transformer Engine's experts, balanced, equals training without balancing.

Layer 2, for every pair of options; `tests/mcore/covering.py` says how.
"""

from __future__ import annotations

import pytest
import torch

from tests.mcore.covering import (
    OPTIONS,
    Combination,
    Options,
    assert_each_version_has_each_value,
    assert_equals_unbalanced_megatron,
    combinations,
    covering,
)

TE = dict(transformer_engine=True, moe_grouped_gemm=True)
GATED = dict(gated_linear_unit=True, activation_func=torch.nn.functional.silu)

TE_OPTIONS: Options = {
    "layout": {name: OPTIONS["layout"][name] for name in ("ep2", "etp2", "edp2", "pp2", "vpp2")},
    "recompute": {
        **{name: OPTIONS["recompute"][name] for name in ("kept", "moe", "full")},
        "moe_act": dict(recompute_granularity="selective", recompute_modules=["moe_act"]),
    },
    "experts": {
        "gated": TE | GATED | dict(bias_activation_fusion=False),
        "biased": TE | dict(add_bias_linear=True),
        "latent": TE | GATED | dict(moe_latent_size=8),
    },
    "layers": {name: OPTIONS["layers"][name] for name in ("all", "mtp")},
    "strategy": {name: OPTIONS["strategy"][name] for name in ("quota", "libra")},
    "router": {
        "plain router": {},
        "fused router": OPTIONS["router"]["aux"] | dict(moe_router_fusion=True),
    },
    "dispatcher": OPTIONS["dispatcher"]
    | {
        "fused permute": dict(moe_permute_fusion=True),
    },
    "schedule": {
        "in turn": {},
        "delayed": dict(overlap_moe_expert_parallel_comm=True, delay_wgrad_compute=True),
    },
    **{name: OPTIONS[name] for name in ("gradients", "optimizer")},
}

SHOWN = {
    "fused router": "fused_router",
    "fused permute": "fused_permute",
    "etp2": "expert_tp",
    "pp2": "pipeline",
    "mtp": "mtp",
    "delayed": "delayed_gradients",
}
"""Rows of the compatibility page, by value."""

IMPOSSIBLE = (
    {"biased", "etp2"},
    *({"delayed", other} for other in ("moe", "full", "allgather", "pp2", "libra")),
    # Gradients that are not set, with and without balancing; of 0.16.1's latent MoE, too.
    *({"delayed", other} for other in ("autograd", "latent")),
)
"""What Megatron, or the plug-in, does not take together."""


def test_each_version_trains_each_value() -> None:
    assert_each_version_has_each_value(TE_OPTIONS, covering(TE_OPTIONS, IMPOSSIBLE))


@pytest.mark.parametrize("combination", combinations(TE_OPTIONS, IMPOSSIBLE, SHOWN))
def test_gradients_equal_unbalanced_megatron(combination: Combination) -> None:
    assert_equals_unbalanced_megatron(TE_OPTIONS, combination)
