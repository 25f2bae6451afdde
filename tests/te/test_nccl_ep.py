"""NCCL EP with Transformer Engine's experts: quantized ones, and those that write to its memory.

Layer 2, over stand-ins for NCCL EP and for Transformer Engine's kernels. As in
`tests/mcore/test_nccl_ep.py`. Without copies, experts write their outputs and their inputs'
gradients where peers read them; Megatron allows that with the op fuser only.
"""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest
import torch

from tests.mcore.test_nccl_ep import BF16, differs_from_alltoall, pytestmark
from tests.ranks import run_ranks
from tests.te import quantized
from tests.te.test_experts import TE
from tests.te.test_overlap import FUSED, FUSER, OVERLAP
from tests.te_quantized_on_cpu import answer_like

__all__ = ["pytestmark"]

EXPERTS = TE | BF16 | FUSED | FUSER
MXFP8 = quantized.EXPERTS | BF16 | quantized.in_format("mxfp8")
STATIC = dict(moe_ncclep_static_shape=True, moe_expert_rank_capacity_factor=16.0)
"""With the op fuser, NCCL EP fills each expert's rows up to a multiple of 256."""
NO_COPIES = STATIC | dict(moe_ncclep_zero_copy=True)


def _training(rank: int, settings: dict[str, Any], nccl_ep: dict[str, Any]) -> Any:
    answer_like("blackwell")
    with (
        mock.patch.dict(os.environ, NVTE_CUTEDSL_FUSED_GROUPED_MLP="1"),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(10, 0)),
    ):
        return differs_from_alltoall(settings, **nccl_ep)


CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "latent": (2, TE | BF16 | dict(moe_latent_size=32), {}),
    "MXFP8": (2, MXFP8, dict(moe_expert_rank_capacity_factor=4.0)),
    "all rows": (2, EXPERTS, STATIC),
    "all rows, MXFP8": (2, MXFP8 | FUSED | FUSER, STATIC),
}
WITHOUT_COPIES: dict[str, tuple[int, dict[str, Any]]] = {
    "2 ranks": (2, {}),
    "4 ranks": (4, dict(ep=4, experts=8, num_layers=3)),
    "layer recomputed": (2, dict(recompute="selective")),
    "all recomputed": (2, dict(recompute="full")),
    "overlapped": (2, OVERLAP),
    "delayed": (2, OVERLAP | dict(delay_wgrad_compute=True)),
    "latent": (2, dict(moe_latent_size=32, num_layers=1)),
    "MXFP8": (2, MXFP8),
}


@pytest.mark.option("nccl_ep")
@pytest.mark.parametrize(("world_size", "settings", "nccl_ep"), CASES.values(), ids=CASES.keys())
def test_training_is_the_same_as_with_alltoall(
    world_size: int, settings: dict[str, Any], nccl_ep: dict[str, Any]
) -> None:
    for differ, replicas in run_ranks(_training, world_size, settings, nccl_ep):
        assert differ == []
        assert replicas > 0


@pytest.mark.option("nccl_ep_zero_copy")
@pytest.mark.parametrize(
    ("world_size", "settings"), WITHOUT_COPIES.values(), ids=WITHOUT_COPIES.keys()
)
def test_training_without_copies_is_the_same(world_size: int, settings: dict[str, Any]) -> None:
    for differ, replicas in run_ranks(_training, world_size, EXPERTS | settings, NO_COPIES):
        assert differ == []
        assert replicas > 0
