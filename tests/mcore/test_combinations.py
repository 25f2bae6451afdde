"""Training with balancing equals training without it for every pair of options.

Layer 2, with Megatron's own experts; `covering.py` says how.
"""

from __future__ import annotations

import pytest

from tests.mcore.covering import (
    OPTIONS,
    Combination,
    assert_equals_unbalanced_megatron,
    combinations,
)

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

IMPOSSIBLE = (
    {"beside", "allgather"},
    {"capacity", "allgather"},
    {"biased", "before"},
    {"biased", "beside"},
    {"biased", "etp2"},
    # PyTorch's norm, which multi-token prediction has without Transformer Engine.
    {"mtp", "tp2"},
    {"mtp", "etp2"},
)
"""What Megatron does not take together."""


@pytest.mark.parametrize("combination", combinations(OPTIONS, IMPOSSIBLE, SHOWN))
def test_gradients_equal_unbalanced_megatron(combination: Combination) -> None:
    assert_equals_unbalanced_megatron(OPTIONS, combination)
