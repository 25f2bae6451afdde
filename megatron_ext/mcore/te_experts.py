"""Transformer Engine's grouped experts: Megatron's `TEGroupedMLP`.

Each of its two `GroupedLinear`s has a weight, and maybe a bias, for each main. For the time of a
forward it is lent the slots' as further ones, so that mains and slots are one grouped product, in
forward and in backward. What autograd keeps are the slots' tensors themselves: their memory must
hold the forward's replicas again in backward, and a `main_grad` of theirs takes their gradients.

Legend: M mains per rank, S slots per rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from megatron.core.transformer.moe.experts import TEGroupedMLP
from torch import Tensor, nn

from megatron_ext.balance.main_weights import MainWeights, Segment

_LINEARS = ("linear_fc1", "linear_fc2")


class TEGroupedWeights:
    """`TEGroupedMLP`: parameters `weight0` to `weight{M - 1}`, and biases, in each linear."""

    def __init__(self, experts: TEGroupedMLP) -> None:
        self._experts = experts
        self.segments = tuple(
            Segment(f"{linear}.{kind}", tuple(getattr(getattr(experts, linear), f"{kind}0").shape))
            for linear in _LINEARS
            for kind in self._kinds
        )

    @property
    def _kinds(self) -> tuple[str, ...]:
        """Kinds of parameters that a linear has of each expert."""
        return ("weight", "bias") if self._experts.config.add_bias_linear else ("weight",)

    def mains(self) -> MainWeights:
        """See `ExpertWeights.mains`."""
        linears = [getattr(self._experts, linear) for linear in _LINEARS]
        mains = range(self._experts.num_local_experts)
        return MainWeights(
            tuple(
                [getattr(linear, f"{kind}{m}") for m in mains]
                for linear in linears
                for kind in self._kinds
            ),
            fused=self._experts.config.gradient_accumulation_fusion,
        )

    def run(
        self,
        slot_weights: Sequence[Any],
        tokens: Tensor,
        tokens_per_expert: Tensor,
        probs: Tensor,
    ) -> Tensor:
        """See `ExpertWeights.run`. The host reads the counts once, as Megatron does without us."""
        of_slots = iter(slot_weights)
        with ExitStack() as stack:
            for linear in _LINEARS:
                further = {kind: next(of_slots) for kind in self._kinds}
                stack.enter_context(_lent(getattr(self._experts, linear), further))
            output: Tensor
            output, bias = self._experts(tokens, tokens_per_expert, probs)
        assert bias is None, "Megatron adds expert biases inside the experts"
        return output


@contextmanager
def _lent(linear: Any, further: dict[str, Sequence[Tensor]]) -> Iterator[None]:
    """Let a `GroupedLinear` have further weights, and biases where it has any.

    Args:
        linear: It reads `weight{i}` and `bias{i}` for i below `num_gemms`, and nothing else that
            depends on their number without FP8.
        further: For each kind, one tensor a slot.
    """
    num_mains, num_slots = linear.num_gemms, len(further["weight"])
    if "bias" not in further:
        further = {**further, "bias": [linear.bias0] * num_slots}  # Stands for no bias.
    lent = {
        f"{kind}{num_mains + s}": tensor
        for kind, tensors in further.items()
        for s, tensor in enumerate(tensors)
    }
    # Past nn.Module, to which these would be parameters.
    vars(linear).update(lent, num_gemms=num_mains + num_slots)
    try:
        yield
    finally:
        linear.num_gemms = num_mains
        for name in lent:
            del vars(linear)[name]


def let_all_microbatches_accumulate(experts: nn.Module) -> None:
    """Have fused weight gradients added to `main_grad` from the first microbatch on.

    Transformer Engine's linears take their first forward for the first of a step, and its gradient
    overwrites `main_grad`, which DDP has zeroed already. Experts that are run in parts would lose
    the parts whose backward came before. Megatron says "first" again only where it quantizes.
    """
    module: Any
    for module in experts.modules():
        if hasattr(module, "is_first_microbatch"):
            module.is_first_microbatch = False
