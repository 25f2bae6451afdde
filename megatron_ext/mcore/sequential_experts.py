"""Runs replicas in Megatron's `SequentialMLP`, which has one module for each expert."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import chain
from typing import Any

import torch
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor, nn

from megatron_ext.balance.main_weights import MainWeights, Segment, SeparateMains
from megatron_ext.mcore.experts import ExpertWeights, lent_to


class SlotsBehindMains(ExpertWeights):
    """Runs the mains with Megatron's module, then the slots."""

    def lent(self, slots: Sequence[Any]) -> AbstractContextManager[None]:
        """See `ExpertWeights.lent`. Hooks on the module get the tokens of mains and slots."""
        SlotsBehindMains.require_plain(self)  # A program may have replaced its forward since.
        return lent_to(self.experts, {"forward": partial(self._run, slots)})

    def require_plain(self) -> None:
        """See `ExpertWeights.require_plain`."""
        if "forward" in vars(self.experts):
            raise ValueError("experts.forward was replaced, and replicas run without: use a hook")

    def _run(
        self, slots: Sequence[Any], tokens: Tensor, counts: Tensor, probs: Tensor, **buffers: Tensor
    ) -> tuple[Tensor, Any]:
        """Run mains and slots in the place of the module's forward."""
        counts = counts.cpu()  # The mains' module reads them on the host, too.
        num_mains = counts.numel() - len(slots[0])
        slot_counts = counts[num_mains:].tolist()
        num_slot_tokens = sum(slot_counts)
        sizes = [tokens.shape[0] - num_slot_tokens, num_slot_tokens]
        main_tokens, slot_tokens = tokens.split(sizes)
        main_probs, slot_probs = probs.split(sizes)
        run = type(self.experts).forward
        output, bias = run(self.experts, main_tokens, counts[:num_mains], main_probs, **buffers)
        if num_slot_tokens > 0:
            of_slots = self.run_slots(slots, slot_tokens, slot_counts, slot_probs)
            output = torch.cat([output, of_slots])
        return output, bias

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
        per_expert = [dict(expert.named_parameters()) for expert in self.experts.local_experts]
        return MainWeights(
            [
                SeparateMains([weights[segment.name] for weights in per_expert])
                for segment in self.segments
            ],
            fused=self.experts.config.gradient_accumulation_fusion,
        )

    def require_plain(self) -> None:
        """See `ExpertWeights.require_plain`: slots run in main 0's module."""
        super().require_plain()
        names = [segment.name for segment in self.segments]
        for m, expert in enumerate(self.experts.local_experts):
            if own := _own(expert, names):
                raise ValueError(
                    f"experts.local_experts.{m} has {own}, and its replicas would compute without: "
                    f"leave experts with {' and '.join(names)} alone (hooks may be on `experts`)"
                )

    def run_slots(
        self, weights: Sequence[Any], tokens: Tensor, num_tokens: list[int], probs: Tensor
    ) -> Tensor:
        """Run main 0's module with each slot's weights in turn."""
        if self.experts.config.moe_apply_probs_on_input:
            tokens = (tokens * probs.unsqueeze(-1)).to(tokens.dtype)
            probs = torch.ones_like(probs)
        names = [segment.name for segment in self.segments]
        rows = zip(*weights, strict=True)
        of_slots = zip(rows, tokens.split(num_tokens), probs.split(num_tokens), strict=True)
        outputs = [
            torch.func.functional_call(
                self.experts.local_experts[0],
                dict(zip(names, row, strict=True)),
                (slot_tokens, slot_probs),
            )[0]
            for row, slot_tokens, slot_probs in of_slots
            if slot_tokens.shape[0] > 0
        ]
        return torch.cat(outputs)


def _own(expert: nn.Module, names: Sequence[str]) -> str:
    """Name what an expert has besides the named weights; "" for nothing."""
    of_expert = chain(expert.named_parameters(), expert.named_buffers())
    if others := [name for name, _ in of_expert if name not in names]:
        return f"further parameters or buffers ({', '.join(others)})"
    for module in expert.modules():
        if "forward" in vars(module):
            return "a replaced forward"
        kinds = "forward_pre", "forward", "backward_pre", "backward"
        for hook in chain(*(getattr(module, f"_{kind}_hooks").values() for kind in kinds)):
            home = inspect.getmodule(getattr(hook, "func", hook))
            # Megatron gathers parameters by hooks.
            if home is None or not home.__name__.startswith("megatron.core.distributed."):
                return f"a hook ({getattr(hook, '__qualname__', hook)!s:.80})"
    return ""
