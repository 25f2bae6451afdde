"""Runs replicas in Megatron's `SequentialMLP`, which has one module for each expert."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor, nn

from megatron_ext.balance.main_weights import MainWeights, Segment


def run_mains(
    experts: nn.Module, tokens: Tensor, counts: Tensor, probs: Tensor, **buffers: Tensor
) -> Tensor:
    """Run Megatron's module on tokens [N', H] sorted by main, counts [M], probabilities [N'].

    `buffers` are those of `ExpertWeights.run`; only `TEGroupedMLP` takes any.
    """
    output: Tensor
    output, bias = experts(tokens, counts, probs, **buffers)
    assert bias is None, "Megatron adds expert biases inside the experts"
    return output


class SlotsBehindMains:
    """Runs the mains with Megatron's module, then the slots: a base of `ExpertWeights`."""

    segments: tuple[Segment, ...]

    def __init__(self, experts: Any) -> None:
        self._experts = experts

    def forget_step(self) -> None:
        """Do nothing: these experts delay no gradients."""

    def run_delayed(self, compute: Callable[[], None], num_slots: int) -> list[Any]:
        """See `ExpertWeights.run_delayed`."""
        compute()
        return [None] * len(self.segments)

    def run(
        self, slots: Sequence[Any], tokens: Tensor, counts: Tensor, probs: Tensor, **buffers: Tensor
    ) -> Tensor:
        """See `ExpertWeights.run`."""
        counts = counts.cpu()  # The mains' module reads them on the host, too.
        num_mains = counts.numel() - len(slots[0])
        slot_counts = counts[num_mains:].tolist()
        num_slot_tokens = sum(slot_counts)
        sizes = [tokens.shape[0] - num_slot_tokens, num_slot_tokens]
        main_tokens, slot_tokens = tokens.split(sizes)
        main_probs, slot_probs = probs.split(sizes)
        output = run_mains(self._experts, main_tokens, counts[:num_mains], main_probs, **buffers)
        if num_slot_tokens == 0:
            return output
        return torch.cat([output, self.run_slots(slots, slot_tokens, slot_counts, slot_probs)])

    def run_slots(
        self, weights: Sequence[Any], tokens: Tensor, num_tokens: list[int], probs: Tensor
    ) -> Tensor:
        """Run the slots on tokens sorted by slot, with their counts by slot."""
        raise NotImplementedError


class SequentialWeights(SlotsBehindMains):
    """Mains and slots of `SequentialMLP`: M modules, each with the same named parameters.

    Raises:
        ValueError: Weight gradients are delayed.
    """

    def __init__(self, experts: SequentialMLP) -> None:
        super().__init__(experts)
        # Main 0's module runs the slots, too, and Megatron asks it for one run's gradients.
        stores = [getattr(module, "wgrad_store", None) for module in experts.modules()]
        if any(store is not None and store.delay_wgrad_compute() for store in stores):
            raise ValueError(
                "delay_wgrad_compute (True) must be False with SequentialMLP of Transformer "
                "Engine's linears (give --moe-grouped-gemm)"
            )
        self.segments = tuple(
            Segment(name, tuple(parameter.shape))
            for name, parameter in experts.local_experts[0].named_parameters()
        )

    def mains(self) -> MainWeights:
        """See `ExpertWeights.mains`."""
        per_expert = [dict(expert.named_parameters()) for expert in self._experts.local_experts]
        return MainWeights(
            tuple([weights[segment.name] for weights in per_expert] for segment in self.segments),
            fused=self._experts.config.gradient_accumulation_fusion,
        )

    def run_slots(
        self, weights: Sequence[Any], tokens: Tensor, num_tokens: list[int], probs: Tensor
    ) -> Tensor:
        """Run main 0's module with each slot's weights in turn."""
        if self._experts.config.moe_apply_probs_on_input:
            tokens = (tokens * probs.unsqueeze(-1)).to(tokens.dtype)
            probs = torch.ones_like(probs)
        names = [segment.name for segment in self.segments]
        rows = zip(*weights, strict=True)
        of_slots = zip(rows, tokens.split(num_tokens), probs.split(num_tokens), strict=True)
        outputs = [
            torch.func.functional_call(
                self._experts.local_experts[0],
                dict(zip(names, row, strict=True)),
                (slot_tokens, slot_probs),
            )[0]
            for row, slot_tokens, slot_probs in of_slots
            if slot_tokens.shape[0] > 0
        ]
        return torch.cat(outputs)
