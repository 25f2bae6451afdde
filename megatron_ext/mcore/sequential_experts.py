"""Megatron's `SequentialMLP`: one module for each expert."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor

from megatron_ext.balance.main_weights import MainWeights, Segment


class SequentialWeights:
    """`SequentialMLP`: M modules, each with the same named parameters."""

    def __init__(self, experts: SequentialMLP) -> None:
        self._experts = experts
        self.segments = tuple(
            Segment(name, tuple(parameter.shape))
            for name, parameter in experts.local_experts[0].named_parameters()
        )

    def mains(self) -> MainWeights:
        """See `ExpertWeights.mains`."""
        per_expert = [dict(expert.named_parameters()) for expert in self._experts.local_experts]
        return MainWeights(
            tuple([weights[segment.name] for weights in per_expert] for segment in self.segments)
        )

    def run_slots(
        self, weights: Sequence[Any], tokens: Tensor, num_tokens: list[int], probs: Tensor
    ) -> Tensor:
        """See `ExpertWeights.run_slots`. Runs main 0's module with each slot's weights in turn."""
        if self._experts.config.moe_apply_probs_on_input:
            tokens = (tokens * probs.unsqueeze(-1)).to(tokens.dtype)
            probs = torch.ones_like(probs)
        names = [segment.name for segment in self.segments]
        rows = zip(*weights, strict=True)
        slots = zip(rows, tokens.split(num_tokens), probs.split(num_tokens), strict=True)
        outputs = [
            torch.func.functional_call(
                self._experts.local_experts[0],
                dict(zip(names, row, strict=True)),
                (slot_tokens, slot_probs),
            )[0]
            for row, slot_tokens, slot_probs in slots
            if slot_tokens.shape[0] > 0
        ]
        return torch.cat(outputs)
