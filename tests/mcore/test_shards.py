"""Training with balancing equals training without it where experts or layers are cut. Layer 2.

Cut are: experts (expert tensor parallelism), dense layers (tensor parallelism with sequence
parallelism), and the model into stages of unequal length. Shards start with different values, so
that a replica of another rank's shard would show.
"""

from __future__ import annotations

from typing import Any

import pytest

from megatron_ext.balance.strategies.settings import BalanceConfig
from tests.mcore.parity import GRADIENT_TOLERANCE, gradient_difference
from tests.ranks import run_ranks

Case = tuple[dict[str, Any], int, dict[str, Any]]
"""Arguments of `build_gpt`, microbatches, differences of `BalanceConfig`."""

CASES: list[Case] = [
    (dict(ep=2, etp=2, tp=2, shared_ffn=24, recompute="selective"), 2, dict(check_plans=True)),
    (dict(ep=2, etp=2, dispatcher="allgather", topk=1), 2, dict(transport="collective")),
    (dict(ep=2, etp=2, num_layers=3, overlap_grad_reduce=True), 2, dict(strategy="libra")),
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
    return [
        gradient_difference(
            case, num_microbatches=n, balance=BalanceConfig(tolerance=0.0, **differences)
        )
        for case, n, differences in CASES
    ]


@pytest.mark.slow
def test_gradients_equal_unbalanced_megatron() -> None:
    differences = run_ranks(_gradients, 4, timeout_s=400)
    for index, case in enumerate(CASES):
        worst = max((of_rank[index] for of_rank in differences), key=lambda each: each.worst)
        assert worst.worst <= GRADIENT_TOLERANCE, f"{case}: {worst}"
        assert all(of_rank[index].replicas > 0 for of_rank in differences), f"{case}: no replica"
