"""NCCL EP without copies: experts write to the dispatcher's memory, slots as mains.

Layer 2, over stand-ins for NCCL EP and for Transformer Engine's kernels. As in
`tests/mcore/test_nccl_ep.py`, but over the op fuser's experts, which this way of NCCL EP demands.
"""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest

from tests.mcore.test_nccl_ep import BF16, differs_from_alltoall, pytestmark
from tests.ranks import run_ranks
from tests.te.test_experts import TE
from tests.te.test_overlap import FUSED, FUSER, OVERLAP

__all__ = ["pytestmark"]

EXPERTS = TE | BF16 | FUSED | FUSER
STATIC = dict(moe_ncclep_static_shape=True, moe_expert_rank_capacity_factor=16.0)
ZERO_COPY = dict(moe_ncclep_zero_copy=True)


def _training(rank: int, settings: dict[str, Any], nccl_ep: dict[str, Any]) -> Any:
    with mock.patch.dict(os.environ, NVTE_CUTEDSL_FUSED_GROUPED_MLP="1"):
        return differs_from_alltoall(settings, **nccl_ep)


CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "all rows": (2, {}, {}),
    "without copies": (2, {}, ZERO_COPY),
    "without copies, 4 ranks": (4, dict(ep=4, experts=8, num_layers=3), ZERO_COPY),
    "without copies, layer recomputed": (2, dict(recompute="selective"), ZERO_COPY),
    "without copies, all recomputed": (2, dict(recompute="full"), ZERO_COPY),
    "without copies, overlapped": (2, OVERLAP, ZERO_COPY),
    "without copies, delayed": (2, OVERLAP | dict(delay_wgrad_compute=True), ZERO_COPY),
    "without copies, latent": (2, dict(moe_latent_size=32, num_layers=1), ZERO_COPY),
}


@pytest.mark.option("nccl_ep_zero_copy")
@pytest.mark.parametrize(("world_size", "settings", "nccl_ep"), CASES.values(), ids=CASES.keys())
def test_training_is_the_same_as_with_alltoall(
    world_size: int, settings: dict[str, Any], nccl_ep: dict[str, Any]
) -> None:
    for differ, replicas in run_ranks(_training, world_size, EXPERTS | settings, STATIC | nccl_ep):
        assert differ == []
        assert replicas > 0
