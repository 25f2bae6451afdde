"""Transformer Engine's grouped experts: Megatron's `TEGroupedMLP`.

Each of its two `GroupedLinear`s has a weight, and maybe a bias, for each main. For the time of a
forward it is lent the slots' as further ones, so that mains and slots are one grouped product, in
forward and in backward. What autograd keeps are the slots' tensors themselves: their memory must
hold the forward's replicas again in backward, and a `main_grad` of theirs takes their gradients.

Legend: M mains per rank, S slots per rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from megatron.core.transformer.moe.experts import TEGroupedMLP
from torch import Tensor, nn

from megatron_ext.balance.main_weights import MainWeights, Segment

_LINEARS = ("linear_fc1", "linear_fc2")


class TEGroupedWeights:
    """`TEGroupedMLP`: parameters `weight0` to `weight{M - 1}`, and biases, in each linear.

    Raises:
        ValueError: The op fuser is to compute experts with biases.
    """

    def __init__(self, experts: TEGroupedMLP) -> None:
        self._experts = experts
        # Megatron-Core before 0.17 has no such path.
        self._is_fused = getattr(experts, "_with_fused_impl", False)
        if self._is_fused and experts.config.add_bias_linear:
            raise ValueError(
                "add_bias_linear (True) must be False with use_transformer_engine_op_fuser: its "
                "sums of biases' gradients were never run with replicas (give "
                "--disable-bias-linear, or leave out --use-transformer-engine-op-fuser)"
            )
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
        further = [{kind: next(of_slots) for kind in self._kinds} for _ in _LINEARS]
        with (_fused_with if self._is_fused else _lent)(self._experts, further):
            output: Tensor
            output, bias = self._experts(tokens, tokens_per_expert, probs)
        assert bias is None, "Megatron adds expert biases inside the experts"
        return output


Further = Sequence[Mapping[str, Sequence[Tensor]]]
"""Of each linear, what it shall have further: for each kind of parameters, one tensor a slot."""


@contextmanager
def _lent(experts: TEGroupedMLP, further: Further) -> Iterator[None]:
    """Let the linears of `experts` have further weights, and biases if they have any."""
    with ExitStack() as stack:
        for name, of_linear in zip(_LINEARS, further, strict=True):
            stack.enter_context(_lent_to(getattr(experts, name), of_linear))
        yield


@contextmanager
def _fused_with(experts: Any, further: Further) -> Iterator[None]:
    """The same where Transformer Engine's op fuser computes the experts.

    Its operations take parameters only, and read them again in backward: each forward has
    operations of its own, made as Megatron makes them, and then given the slots' tensors.
    """
    parameters = [
        {
            kind: [nn.Parameter(tensor.detach()) for tensor in of_kind]
            for kind, of_kind in of.items()
        }
        for of in further
    ]
    with _lent(experts, parameters):
        operations = experts._make_fused_ops()
    fc1, _, fc2 = operations
    for operation, of_linear in zip((fc1, fc2), further, strict=True):
        _give_slots(operation, of_linear, experts.num_local_experts)
    before, experts._fused_ops = experts._fused_ops, (operations,)
    try:
        yield
    finally:
        experts._fused_ops = before


def _give_slots(operation: Any, further: Mapping[str, Sequence[Tensor]], num_mains: int) -> None:
    """Put slots' tensors in the place of an operation's last parameters."""
    for kind, tensors in further.items():
        for index, tensor in enumerate(tensors, start=num_mains):
            del operation._parameters[f"{kind}{index}"]
            vars(operation)[f"{kind}{index}"] = _as_trainable_as(
                getattr(operation, f"{kind}0"), tensor
            )
    # What autograd sees as inputs, in the order in which the operation returns their gradients.
    inputs = [
        getattr(operation, f"{kind}{index}")
        for kind, tensors in further.items()
        for index in range(num_mains + len(tensors))
    ]
    operation.parameters = lambda: inputs


def _as_trainable_as(main: Tensor, slot: Tensor) -> Tensor:
    """Return the slot's tensor, which needs a gradient if the main does: all shall, or none.

    They differ in a forward without gradients, and where mains are frozen.
    """
    if slot.requires_grad == main.requires_grad:
        return slot
    return slot.detach().requires_grad_(main.requires_grad)


@contextmanager
def _lent_to(linear: Any, further: Mapping[str, Sequence[Tensor]]) -> Iterator[None]:
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
