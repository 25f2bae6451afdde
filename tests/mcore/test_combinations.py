"""Training with balancing equals training without it for every pair of options.

Layer 2, with Megatron's own experts; `covering.py` says how.
"""

from __future__ import annotations

import pytest

from tests.mcore.covering import (
    OPTIONS,
    Combination,
    assert_each_version_has_each_value,
    assert_equals_unbalanced_megatron,
    combinations,
    covering,
    possible_pairs,
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
    "overlapped": "overlap",
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
    # Own tokens first is a way of the all-to-all dispatcher, and of ranks with whole experts.
    {"own first", "allgather"},
    {"own first", "beside"},
    {"own first", "etp2"},
    # Megatron's combined schedule takes no such recompute, dispatcher or stages, and not the
    # prediction and the parts of Libra's.
    *({"overlapped", other} for other in ("moe", "full", "block", "allgather", "beside")),
    *({"overlapped", other} for other in ("pp2", "mtp", "libra", "own first")),
)
"""What Megatron, or the plug-in, does not take together."""


def test_every_possible_pair_is_trained() -> None:
    trainings = covering(OPTIONS, IMPOSSIBLE)
    trained = [set(combination.values()) for combination in trainings]
    pairs = possible_pairs(OPTIONS, IMPOSSIBLE)
    assert len(set(pairs)) == len(pairs), "a value is of one option"
    assert [pair for pair in pairs if not any(pair <= values for values in trained)] == []
    assert not any(pair <= values for pair in IMPOSSIBLE for values in trained)
    # Every two of these come together, so fewer would not do.
    least = len(OPTIONS["layout"]) * len(OPTIONS["router"])
    assert least <= len(trained) <= least + 1
    assert_each_version_has_each_value(OPTIONS, trainings)


@pytest.mark.parametrize("combination", combinations(OPTIONS, IMPOSSIBLE, SHOWN))
def test_gradients_equal_unbalanced_megatron(combination: Combination) -> None:
    assert_equals_unbalanced_megatron(OPTIONS, combination)
