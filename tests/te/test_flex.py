"""Quantized experts over DeepEP, whose rows are filled up to what quantized products need.

Layer 2; `quantized.py` says what is compared. Behind the exchange, experts fill up the rows of each
main and each slot; before the experts, Megatron's dispatcher gives experts further tokens. Over
NCCL EP: `test_nccl_ep.py`.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks import run_ranks
from tests.te.quantized import LOSSES, Apart, Case, balanced_and_not

# So many tokens that each expert's rows can be filled up with a rank's other tokens.
DEEPEP: dict[str, Any] = dict(
    dispatcher="flex",
    moe_flex_dispatcher_backend="deepep",
    moe_router_dtype="fp32",
    micro_batch_size=16,
)
PADDED = dict(moe_router_padding_for_quantization=True)


def _over_deepep(rank: int, case: Case) -> Apart:
    from tests.flex_on_cpu import flex_on_cpu

    with flex_on_cpu():
        return balanced_and_not(rank, case)


@pytest.mark.option("quantized_padding")
@pytest.mark.parametrize("padding", [{}, PADDED], ids=["behind", "before"])
def test_training_is_the_same_over_deepep(padding: dict[str, Any]) -> None:
    for found in run_ranks(_over_deepep, 2, Case("mxfp8", DEEPEP | padding)):
        assert found.forwards == []
        assert found.gradients <= 1, found
        assert found.losses <= LOSSES, found
        assert found.replicas > 0
