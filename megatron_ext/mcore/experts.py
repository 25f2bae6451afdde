"""Stage 6: experts over main weights and slot weights.

Tokens arrive sorted by this rank's physical experts, mains first, then slots. The mains run through
their own module, unchanged; the slots run through the same computation with slot weights instead of
parameters.

A kind says how a module keeps its experts. Each kind is one file and one line of `EXPERT_KINDS`.

Legend: M mains per rank, S slots per rank, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor, nn

from megatron_ext.balance.main_weights import MainWeights, Segment
from megatron_ext.mcore.grouped_experts import GroupedExperts, GroupedWeights
from megatron_ext.mcore.sequential_experts import SequentialWeights


class ExpertWeights(Protocol):
    """How one kind of experts module keeps and uses its weights."""

    segments: tuple[Segment, ...]

    def mains(self) -> MainWeights:
        """This rank's main weights as they are now: wrappers may have moved them."""

    def run_slots(
        self, weights: Sequence[Any], tokens: Tensor, num_tokens: list[int], probs: Tensor
    ) -> Tensor:
        """Run the experts in the slots.

        Args:
            weights: Slot weights, one a segment: [S, *shape] or a list of S, as the mains are.
            tokens: [sum(num_tokens), H], sorted by slot.
            num_tokens: Tokens of each slot, S numbers.
            probs: Router probabilities of the tokens, [sum(num_tokens)].

        Returns:
            Expert outputs, [sum(num_tokens), H].
        """


EXPERT_KINDS: dict[type[nn.Module], Callable[[Any], ExpertWeights]] = {
    SequentialMLP: SequentialWeights,
    GroupedExperts: GroupedWeights,
}
"""By class of an experts module: what makes the `ExpertWeights` of such a module."""


def expert_weights(experts: nn.Module) -> ExpertWeights:
    """Return how `experts` keeps and uses its weights.

    Raises:
        ValueError: Experts of this kind cannot be balanced.
    """
    for module_class, kind in EXPERT_KINDS.items():
        if isinstance(experts, module_class):
            return kind(experts)
    raise ValueError(
        f"experts of type {type(experts).__name__} cannot be balanced; use SequentialMLP "
        "(moe_grouped_gemm=False) or GroupedExperts (megatron_ext.grouped_mm_spec)"
    )


def run_experts(
    experts: nn.Module,
    weights: ExpertWeights,
    slot_weights: Sequence[Any],
    tokens: Tensor,
    tokens_per_expert: Tensor,
    probs: Tensor,
) -> Tensor:
    """Run mains and slots on their tokens.

    Args:
        experts: Megatron's module with the M mains.
        weights: `expert_weights(experts)`.
        slot_weights: Slot weights, one entry a segment, which slot s indexes: [S, *shape], or a
            list of S.
        tokens: [N', H], sorted by this rank's physical experts.
        tokens_per_expert: [M + S].
        probs: [N'].

    Returns:
        Expert outputs, [N', H], in the order of `tokens`.
    """
    num_slots = len(slot_weights[0])
    if num_slots == 0:  # The host need not know the counts.
        return _run_mains(experts, tokens, tokens_per_expert, probs)
    num_mains = tokens_per_expert.numel() - num_slots
    main_counts, slot_counts = tokens_per_expert[:num_mains], tokens_per_expert[num_mains:].tolist()
    num_slot_tokens = sum(slot_counts)
    sizes = [tokens.shape[0] - num_slot_tokens, num_slot_tokens]
    main_tokens, slot_tokens = tokens.split(sizes)
    main_probs, slot_probs = probs.split(sizes)
    main_output = _run_mains(experts, main_tokens, main_counts, main_probs)
    if num_slot_tokens == 0:
        return main_output
    slot_output = weights.run_slots(slot_weights, slot_tokens, slot_counts, slot_probs)
    return torch.cat([main_output, slot_output])


def _run_mains(
    experts: nn.Module, tokens: Tensor, tokens_per_expert: Tensor, probs: Tensor
) -> Tensor:
    output: Tensor
    output, bias = experts(tokens, tokens_per_expert, probs)
    assert bias is None, "Megatron adds expert biases inside the experts"
    return output


def finish_parameter_gather(module: nn.Module) -> None:
    """Make sure that the module's parameters are this step's.

    With `overlap_param_gather`, Megatron's DDP finishes a parameter's all-gather in the forward
    pre-hook of the module that owns it. Replicas read the mains before that module runs, so its
    hooks are asked to run now; they do nothing the second time.
    """
    for part in module.modules():
        for hook in part._forward_pre_hooks.values():
            if hook.__qualname__.startswith("DistributedDataParallel."):
                hook(part)
