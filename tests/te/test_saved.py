"""What backward of Transformer Engine's experts needs: recomputed, or sent to the host meanwhile.

Layer 2. Gradients are compared with those of Megatron's own layers in float64, or bit by bit with
those of balanced layers that offload nothing.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch

from tests.mcore import inside
from tests.mcore.parity import balanced_gpt, balanced_layers
from tests.mcore.test_recompute import in_a_checkpoint
from tests.ranks import run_ranks
from tests.te.test_experts import EXACT, GATED, HAS_BLOCKS, TE


def test_transformer_engines_checkpoint_finds_its_plan() -> None:
    """Megatron takes it for quantized layers, which are refused; a user may take it for others."""
    # The inner checkpoint has a first pass in both passes of the outer one.
    settings = TE | dict(moe_grouped_gemm=True)
    assert run_ranks(in_a_checkpoint, 2, settings) == [[1, 2], [1, 2]]


OFFLOADED: list[dict[str, Any]] = [dict(offload_modules=["expert_fc1", "moe_act"])]
if HAS_BLOCKS:
    OF_FUSER = dict(moe_mlp_glu_interleave_size=4, use_transformer_engine_op_fuser=True)
    OFFLOADED.append(OF_FUSER | dict(offload_modules=["fused_group_mlp"]))


class ToHost:
    """In place of Megatron's, which leaves alone what is on a CPU: it copies at once."""

    copied: ClassVar[list[int]] = []

    def __init__(self, offload: bool, tensor: torch.Tensor, name: str) -> None:
        self._tensor, self._context = tensor, nullcontext()
        if offload:
            self._context = torch.autograd.graph.saved_tensors_hooks(self._copy, torch.clone)

    def _copy(self, saved: torch.Tensor) -> torch.Tensor:
        self.copied.append(saved.untyped_storage().data_ptr())
        return saved.clone()

    def __enter__(self) -> torch.Tensor:
        self._context.__enter__()
        return self._tensor

    def __exit__(self, *error: object) -> None:
        self._context.__exit__(*error)

    def group_offload(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return tensor

    @staticmethod
    def group_commit(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return tensor  # before megatron-core 0.17


@mock.patch.dict(os.environ, NVTE_CUTEDSL_FUSED_GROUPED_MLP="1")
def _offloaded(rank: int) -> None:
    from megatron.core.transformer.moe import experts

    for case in OFFLOADED:
        ToHost.copied.clear()
        gradients = []
        offload = case | dict(fine_grained_activation_offloading=True)
        kept = {name: value for name, value in case.items() if name != "offload_modules"}
        with mock.patch.object(experts, "off_interface", ToHost):
            for settings in (kept, offload):
                assert ToHost.copied == []
                gpt = balanced_gpt(TE | GATED | settings, EXACT)
                gpt.forward_backward(num_microbatches=2)
                gradients.append(gpt.gradients())
        differ = [n for n, value in gradients[0].items() if not torch.equal(gradients[1][n], value)]
        assert differ == []
        first, *others = balanced_layers(gpt)
        assert all(layer.num_replicas > 0 for layer in (first, *others))
        slots = {weights.untyped_storage().data_ptr() for weights in inside.slot_weights(first)}
        assert ToHost.copied
        assert not slots & set(ToHost.copied)


@pytest.mark.option("activation_offload")
def test_offload_of_activations_leaves_the_slots_where_they_are() -> None:
    run_ranks(_offloaded, 2)
