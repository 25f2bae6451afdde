"""Transformer Engine's grouped experts: Megatron's `TEGroupedMLP`.

Each of its two `GroupedLinear`s has a weight, and maybe a bias, for each main, or with
`moe_single_grouped_weight` one weight for all, of which products take rows. For the time of a
forward it is lent the slots' as further ones, so that mains and slots are one grouped product, in
forward and in backward. What autograd keeps are the slots' tensors themselves: their memory must
hold the forward's replicas again in backward, and a `main_grad` of theirs takes their gradients.

Legend: M mains per rank, S slots per rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

import torch
from megatron.core.transformer.moe.experts import TEGroupedMLP
from torch import Tensor, nn

from megatron_ext.balance.main_weights import MainWeights, Segment, Split
from megatron_ext.balance.replicas import kept_in_place
from megatron_ext.mcore.in_place import memory_of

_LINEARS = ("linear_fc1", "linear_fc2")


class TEGroupedWeights:
    """`TEGroupedMLP`: in each linear `weight0` to `weight{M - 1}` and biases, or one `weight`.

    Raises:
        ValueError: The op fuser is to compute experts with biases.
    """

    def __init__(self, experts: TEGroupedMLP) -> None:
        self._experts = experts
        # Megatron-Core before 0.17 has no such path.
        self._fused = _Fused(experts) if getattr(experts, "_with_fused_impl", False) else None
        if self._fused is not None and experts.config.add_bias_linear:
            raise ValueError(
                "add_bias_linear (True) must be False with use_transformer_engine_op_fuser: its "
                "sums of biases' gradients were never run with replicas (give "
                "--disable-bias-linear, or leave out --use-transformer-engine-op-fuser)"
            )
        self.segments = tuple(
            Segment(f"{name}.{kind}", _shape(getattr(experts, name), kind))
            for name in _LINEARS
            for kind in self._kinds
        )

    @property
    def _kinds(self) -> tuple[str, ...]:
        """Kinds of parameters that a linear has of each expert."""
        return ("weight", "bias") if self._experts.config.add_bias_linear else ("weight",)

    def mains(self) -> MainWeights:
        """See `ExpertWeights.mains`."""
        return MainWeights(
            tuple(
                _mains(getattr(self._experts, name), kind)
                for name in _LINEARS
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
        """See `ExpertWeights.run`. The host reads the counts once, as Megatron does without us.

        Raises:
            ValueError: Replicas of trained weights are on a rank whose own are frozen.
        """
        for name, of_slots in zip(_LINEARS, slot_weights[:: len(self._kinds)], strict=True):
            # Its products look at the first weight, whether all get gradients or none.
            is_trained = next(getattr(self._experts, name).parameters()).requires_grad
            if of_slots[0].requires_grad and not is_trained:
                raise ValueError(
                    f"experts.{name} of this rank is frozen, and that of another EP rank is not, "
                    "whose replicas would get no gradient from Transformer Engine: freeze the "
                    "linears of all experts of a layer, or leave out --moe-grouped-gemm"
                )
        if self._fused is not None:
            lent = self._fused.lent(slot_weights)
        else:
            of_slots = iter(slot_weights)
            lent = _lent(
                self._experts, [{kind: next(of_slots) for kind in self._kinds} for _ in _LINEARS]
            )
        with lent:
            output: Tensor
            output, bias = self._experts(tokens, tokens_per_expert, probs)
        assert bias is None, "Megatron adds expert biases inside the experts"
        return output


def _is_single(linear: Any) -> bool:
    """Whether a linear's experts are one parameter, `weight`, a `GroupedTensor`."""
    # Transformer Engine makes it only where NVTE_GROUPED_LINEAR_SINGLE_PARAM allows that.
    return getattr(linear, "single_grouped_weight", False)


def _shape(linear: Any, kind: str) -> tuple[int, ...]:
    if _is_single(linear):
        return tuple(linear.weight.shape[1:])
    return tuple(getattr(linear, f"{kind}0").shape)


def _mains(linear: Any, kind: str) -> list[Tensor] | Split:
    if _is_single(linear):
        return Split(linear.weight, _values(linear.weight))
    return [getattr(linear, f"{kind}{m}") for m in range(linear.num_gemms)]


def _values(single_weight: Tensor) -> Tensor:
    """The memory with a single weight's values, [M, *shape]."""
    return memory_of(single_weight).view(single_weight.shape)


def _rows(linear: Any) -> list[Tensor]:
    """A single weight as one weight for each main, part of the autograd graph; else none."""
    if not _is_single(linear):
        return []
    rows = SplitFunction.apply(linear.weight, linear.fuse_wgrad_accumulation)
    if hasattr(linear.weight, "main_grad"):
        for row, main_grad in zip(rows, linear.weight.main_grad, strict=True):
            row.main_grad = main_grad
    return list(rows)


class SplitFunction(torch.autograd.Function):
    """A single weight -> a weight for each main; its backward gives the one parameter its gradient.

    So DDP hears of the parameter once, after all that was computed with its rows.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, fused: bool) -> tuple[Tensor, ...]:
        """Return the rows of `weight` [M, *shape]; fused, products add to rows of `main_grad`."""
        ctx.weight, ctx.fused = weight, fused
        ctx.set_materialize_grads(False)
        # As with parameters of each, changes elsewhere in DDP's buffer are none of these.
        return _values(weight).data.unbind()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None]:
        """Return the rows' gradients as one, or what stands for it where they are fused."""
        if not ctx.fused:
            return torch.stack([_required(grad) for grad in grads]), None
        # Here, as nothing else needs Transformer Engine to be there.
        from transformer_engine.pytorch.ops._common import get_dummy_wgrads_for_params

        # Tells DDP, by a mark on the parameter, that its gradient is in `main_grad`.
        (stands_for_it,) = get_dummy_wgrads_for_params([ctx.weight])
        return stands_for_it, None


def _required(grad: Tensor | None) -> Tensor:
    assert grad is not None, "Transformer Engine gave a main no gradient"
    return grad


Further = Sequence[Mapping[str, Sequence[Tensor]]]
"""Of each linear, what it shall have further: for each kind of parameters, one tensor a slot."""


@contextmanager
def _lent(experts: TEGroupedMLP, further: Further) -> Iterator[None]:
    """Let the linears of `experts` have further weights, and biases if they have any."""
    with ExitStack() as stack:
        for name, of_linear in zip(_LINEARS, further, strict=True):
            stack.enter_context(_lent_to(getattr(experts, name), of_linear))
        yield


class _Fused:
    """Operations of Transformer Engine's op fuser over mains and slots, without biases.

    They take parameters only: made as Megatron makes them, they have parameters that stand for the
    slots, in the slots' memory, and for the rows of a single weight. A forward has the tensors of
    its microbatch in their places, for autograd. Backward reads them again, and needs the memory
    and its `main_grad` only.
    """

    def __init__(self, experts: Any) -> None:
        self._experts = experts
        self._operations: Any = None

    @contextmanager
    def lent(self, slot_weights: Sequence[Sequence[Tensor]]) -> Iterator[None]:
        """Let the experts compute with slots' weights, of each linear one tensor a slot."""
        experts = self._experts
        if self._operations is None:
            # In the first forward, as Megatron does: parameters may be moved until then.
            self._operations = self._make(slot_weights)
        before, experts._fused_ops = experts._fused_ops, (self._operations,)
        linears = [getattr(experts, name) for name in _LINEARS]
        of_linears = zip(linears, slot_weights, strict=True)
        lent = [[*_rows(linear), *tensors] for linear, tensors in of_linears]
        try:
            with ExitStack() as stack:
                for index, linear, tensors in zip(_FUSED_LINEARS, linears, lent, strict=True):
                    # Without biases a linear has weights only: all are trained, or none.
                    trained = next(linear.parameters()).requires_grad
                    stack.enter_context(self._lent_to(index, tensors, trained))
                stack.enter_context(_in_place(self._operations, [*chain(*lent)]))
                yield
        finally:
            experts._fused_ops = before

    def _make(self, slot_weights: Sequence[Sequence[Tensor]]) -> Any:
        stand_ins = [
            {"weight": [nn.Parameter(tensor.detach()) for tensor in tensors]}
            for tensors in slot_weights
        ]
        with ExitStack() as stack:
            for name in _LINEARS:
                stack.enter_context(_split(getattr(self._experts, name)))
            stack.enter_context(_lent(self._experts, stand_ins))
            operations = self._experts._make_fused_ops()
        # Made here, so that its lists of parameters are there to be changed.
        operations._module_groups = operations._make_module_groups(operations._modules.values())
        return operations

    @contextmanager
    def _lent_to(self, index: int, tensors: Sequence[Tensor], trained: bool) -> Iterator[None]:
        """Put tensors in the place of an operation's last parameters, which stand for them."""
        operation = self._operations[index]
        parameters = list(operation.parameters())
        first = len(parameters) - len(tensors)
        for stand_in, tensor in zip(parameters[first:], tensors, strict=True):
            if hasattr(tensor, "main_grad"):
                stand_in.main_grad = tensor.main_grad
        lent = [_trained_or_not(tensor, trained) for tensor in tensors]
        names = [f"weight{i}" for i in range(first, len(parameters))]
        # Past nn.Module, whose parameters they hide.
        vars(operation).update(zip(names, lent, strict=True))
        self._take_for_inputs(index, [*parameters[:first], *lent])
        try:
            yield
        finally:
            # What stays would keep the microbatch's graph alive.
            for name in names:
                del vars(operation)[name]
            self._take_for_inputs(index, parameters)

    def _take_for_inputs(self, index: int, tensors: list[Tensor]) -> None:
        """Set what autograd sees as an operation's inputs."""
        (fuser,) = self._operations._module_groups
        fuser._basic_op_params[index][:] = tensors
        fuser._flat_basic_op_params[:] = chain(*fuser._basic_op_params)


_FUSED_LINEARS = (0, 2)
"""Where the two linears are among the op fuser's operations: the activation is between them."""


def _trained_or_not(tensor: Tensor, trained: bool) -> Tensor:
    """Return the tensor, which needs a gradient if the parameters do: all shall, or none.

    They differ in a forward without gradients, and where mains are frozen. Operations with fused
    gradients look for the first weight's `main_grad` even so.
    """
    if tensor.requires_grad == trained:
        return tensor
    alike: Any = tensor.detach().requires_grad_(trained)
    if hasattr(tensor, "main_grad"):
        alike.main_grad = tensor.main_grad
    return alike


@contextmanager
def _split(linear: Any) -> Iterator[None]:
    """Let a linear with a single weight have a parameter for each main instead, in its memory."""
    if not _is_single(linear):
        yield
        return
    names = [f"weight{m}" for m in range(linear.num_gemms)]
    stand_ins = map(nn.Parameter, _values(linear.weight).detach())
    # Past nn.Module, which has these names with nothing behind them.
    vars(linear).update(zip(names, stand_ins, strict=True), single_grouped_weight=False)
    try:
        yield
    finally:
        linear.single_grouped_weight = True
        for name in names:
            del vars(linear)[name]


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
        with _in_place(linear, further["weight"]):
            yield
    finally:
        linear.num_gemms = num_mains
        for name in lent:
            del vars(linear)[name]


@contextmanager
def _in_place(module: nn.Module, slots: Sequence[Tensor]) -> Iterator[None]:
    """Let a module's forwards hide slots from hooks on saved tensors; see `kept_in_place`.

    Megatron's offload of activations begins inside the experts, around a linear. What it copies may
    be on its way to the host when the next layer's replicas come into the slots.
    """
    forward, own = module.forward, vars(module).get("forward")

    def forward_in_place(*args: Any, **kwargs: Any) -> Any:
        with kept_in_place(slots):
            return forward(*args, **kwargs)

    vars(module)["forward"] = forward_in_place
    try:
        yield
    finally:
        del vars(module)["forward"]
        if own is not None:
            vars(module)["forward"] = own


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
