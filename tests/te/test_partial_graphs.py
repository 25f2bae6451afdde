"""Partial CUDA graphs with Transformer Engine's layers, fused router and permutation. Layer 2."""

from __future__ import annotations

import pytest

from tests.mcore.test_partial_graphs import Case, train_with_and_without
from tests.ranks import run_ranks
from tests.te.test_combinations import GATED, TE

FUSED = dict(moe_router_fusion=True, moe_permute_fusion=True, bias_activation_fusion=False)
CASES = {
    "fused": Case(TE | GATED | FUSED),
    "shared experts": Case(TE | GATED | dict(bias_activation_fusion=False, shared_ffn=24)),
}


@pytest.mark.option("partial_graphs")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_training_is_the_same(case: Case) -> None:
    for replicas, num_operations in run_ranks(train_with_and_without, 2, case):
        assert num_operations > 0
        assert replicas > 0
