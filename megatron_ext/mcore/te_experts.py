"""Runs replicas in Transformer Engine's grouped experts, Megatron's `TEGroupedMLP`.

`TEGroupedMLP` has two `GroupedLinear`s, with a weight, and maybe a bias, for each main. With
`moe_single_grouped_weight` a linear has one weight for all mains, and products take its rows.
During a forward the linear has the slots' weights as further weights, so that mains and slots are
one grouped product, in forward and in backward. Autograd keeps the slots' tensors themselves: in
backward the slots must hold the forward's replicas again, and the tensors' `main_grad` takes the
gradients. What is different in FP8 and FP4 is in quantized.py.

Legend: M mains per rank, S slots per rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from megatron.core.transformer.moe.experts import TEGroupedMLP
from torch import Tensor, nn

from megatron_ext.balance.autograd import kept_in_place
from megatron_ext.balance.main_weights import (
    Held,
    MainWeights,
    Segment,
    SeparateMains,
    StackedMains,
    is_sharded,
)
from megatron_ext.mcore.experts import ExpertWeights, lent_to
from megatron_ext.mcore.in_place import memory_of
from megatron_ext.mcore.quantized import (
    Precision,
    QuantizedMains,
    SlotQuantizers,
    padding_for_slots,
    precision_of,
    quantized_mains,
)
from megatron_ext.mcore.sharded import LedSlots, ShardedMains, Whole, leader_of

LINEARS = ("linear_fc1", "linear_fc2")

_HELD = re.compile(rf"({'|'.join(LINEARS)})\.(weight|bias)\d*")
"""Names of the parameters that replicas are made of."""


class TEGroupedWeights(ExpertWeights):
    """Mains and slots of `TEGroupedMLP`, whose linears may compute in FP8 or FP4.

    Each linear has parameters `weight0` to `weight{M - 1}` and biases, or one `weight`. Not all
    layers and linears of a model that quantizes do; the others have slots of their parameters'
    dtype.

    Raises:
        ValueError: The op fuser is on, and the experts have biases.
    """

    def __init__(self, experts: TEGroupedMLP) -> None:
        super().__init__(experts)
        # Megatron-Core before 0.17 has no such path.
        self._op_fuser = _OpFuser(experts) if getattr(experts, "_with_fused_impl", False) else None
        if self._op_fuser is not None and experts.config.add_bias_linear:
            raise ValueError(
                "add_bias_linear (True) must be False with use_transformer_engine_op_fuser: its "
                "sums of biases' gradients were never run with replicas (give "
                "--disable-bias-linear, or leave out --use-transformer-engine-op-fuser)"
            )
        self._precisions: dict[str, Precision] = {}
        """By linear, from the layer's first forward on."""
        self._quantizers: dict[str, SlotQuantizers] = {}

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """See `ExpertWeights.segments`. Only in a forward is it known what quantizes."""
        linears = {name: getattr(self.experts, name) for name in LINEARS}
        fuses = self._op_fuser is not None
        self._precisions = {
            name: Precision.of(linear, for_op_fuser=fuses) for name, linear in linears.items()
        }
        return tuple(
            Segment(f"{name}.{kind}", _shape(linear, kind), like.parts, like.form)
            for name, linear in linears.items()
            for kind, like in zip(self._kinds, (self._precisions[name], Precision()), strict=False)
        )

    @property
    def _kinds(self) -> tuple[str, ...]:
        """Kinds of parameters that a linear has for each expert."""
        return ("weight", "bias") if self.experts.config.add_bias_linear else ("weight",)

    def mains(self) -> MainWeights:
        """See `ExpertWeights.mains`.

        Raises:
            ValueError: A linear has another precision than in the layer's first forward.
        """
        for name, precision in self._precisions.items():
            with precision_of(getattr(self.experts, name)) as recipe:
                if recipe != precision.recipe:
                    raise ValueError(
                        f"experts.{name} computes by {recipe or 'no recipe of quantization'}, and "
                        f"in its layer's first forward by {precision.recipe or 'none'}: a layer's "
                        "slots have one precision (keep it, or build the model anew)"
                    )
        return MainWeights(
            tuple(self._held(name, kind) for name in LINEARS for kind in self._kinds),
            fused=self.experts.config.gradient_accumulation_fusion,
        )

    def _held(self, name: str, kind: str) -> Held:
        """Return a linear's weights, or biases."""
        linear = getattr(self.experts, name)
        if _is_single(linear):
            return StackedMains(linear.weight, _values(linear.weight), is_split=True)
        mains = [getattr(linear, f"{kind}{m}") for m in range(linear.num_gemms)]
        if is_sharded(mains[0]):
            return ShardedMains(mains, Whole(mains[0]), are_trained_alike=True)
        precision = self._precisions.get(name)
        if kind == "weight" and precision is not None and precision.parts:
            return QuantizedMains(mains, linear, precision, are_trained_alike=True)
        return SeparateMains(mains, are_trained_alike=kind == "weight")

    def forget_step(self) -> None:
        """See `ExpertWeights.forget_step`. The linears are Megatron's; see `reset_after_abort`."""
        if self._op_fuser is not None:
            self._op_fuser = _OpFuser(self.experts)

    def run_delayed(self, compute: Callable[[], None], num_slots: int) -> list[Any]:
        """See `ExpertWeights.run_delayed`."""
        if self._op_fuser is not None:
            with self._op_fuser.in_use():
                return super().run_delayed(compute, num_slots)
        # Transformer Engine sets the `.grad` of biases, and reads no weight.
        stand_ins = [
            [torch.empty_like(getattr(self.experts, name).bias0) for _ in range(num_slots)]
            for name in LINEARS
        ]
        with _lent(self.experts, [{"weight": each, "bias": each} for each in stand_ins]):
            compute()
        return [
            [bias.grad for bias in of_linear] if kind == "bias" else None
            for of_linear in stand_ins
            for kind in self._kinds
        ]

    @contextmanager
    def lent(self, slots: Sequence[Any]) -> Iterator[None]:
        """See `ExpertWeights.lent`. The host reads the counts once, as in Megatron."""
        of_linears = slots[:: len(self._kinds)]  # Without biases.
        num_slots = len(slots[0])
        with ExitStack() as stack:
            for name, of_slots in zip(LINEARS, of_linears, strict=True):
                linear = getattr(self.experts, name)
                precision = self._precisions.get(name)
                if precision is not None and not precision.parts:
                    # A push says so to quantized ones. Experts may run in parts, and the part that
                    # took itself for the first microbatch would overwrite the others' gradients.
                    linear.is_first_microbatch = False
                quantizers = self._quantizers.setdefault(name, SlotQuantizers(linear, num_slots))
                stack.enter_context(quantizers.lent())
                if isinstance(of_slots, LedSlots):  # This rank has shards of the mains.
                    stack.enter_context(lent_to(linear, {"weight0": leader_of(of_slots)}))
            stack.enter_context(padding_for_slots(self.experts, num_slots))
            stack.enter_context(self._lending(slots))
            yield

    def _lending(self, slots: Sequence[Any]) -> AbstractContextManager[None]:
        """Let the experts compute with the slots' weights, too."""
        if self._op_fuser is not None:
            return self._op_fuser.lent(slots)
        each = iter(slots)
        further = [{kind: next(each) for kind in self._kinds} for _ in LINEARS]
        return _lent(self.experts, further)

    def require_plain(self) -> None:
        """See `ExpertWeights.require_plain`."""
        experts = self.experts
        of_experts = chain(experts.named_parameters(), experts.named_buffers())
        if others := [name for name, _ in of_experts if not _HELD.fullmatch(name)]:
            raise ValueError(
                f"experts have further parameters or buffers ({', '.join(others)}), and another "
                "rank computes with its own where it has their replicas: leave experts with their "
                "weights and biases alone"
            )


def _is_single(linear: Any) -> bool:
    """Whether all experts of a linear are one parameter, `weight`, a `GroupedTensor`."""
    # Transformer Engine has the attribute only if NVTE_GROUPED_LINEAR_SINGLE_PARAM allows it.
    return getattr(linear, "single_grouped_weight", False)


def _shape(linear: Any, kind: str) -> tuple[int, ...]:
    if _is_single(linear):
        return tuple(linear.weight.shape[1:])
    parameter = getattr(linear, f"{kind}0")
    return tuple(parameter._unsharded_shape if is_sharded(parameter) else parameter.shape)


def _values(single_weight: Tensor) -> Tensor:
    """Return the memory with a single weight's values, [M, *shape]."""
    return memory_of(single_weight).view(single_weight.shape)


def _rows(linear: Any) -> list[Tensor]:
    """Return a single weight's rows, one for each main, in the autograd graph; otherwise []."""
    if not _is_single(linear):
        return []
    rows = SplitFunction.apply(linear.weight, linear.fuse_wgrad_accumulation)
    if hasattr(linear.weight, "main_grad"):
        for row, main_grad in zip(rows, linear.weight.main_grad, strict=True):
            row.main_grad = main_grad
    return list(rows)


class SplitFunction(torch.autograd.Function):
    """Splits a single weight into one weight for each main; its backward joins the gradients.

    So DDP's hook on the parameter runs once, after the backward of everything that used the rows.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, fused: bool) -> tuple[Tensor, ...]:
        """Return the rows of `weight` [M, *shape]; fused, products add to rows of `main_grad`."""
        ctx.weight, ctx.fused = weight, fused
        ctx.set_materialize_grads(False)
        # `.data` has a version counter of its own: changes elsewhere in DDP's buffer do not count
        # as changes of these rows.
        return _values(weight).data.unbind()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None]:
        """Return the rows' gradients as one; with fused gradients, Megatron's placeholder."""
        if not ctx.fused:
            of_mains = [grad for grad in grads if grad is not None]
            assert len(of_mains) == len(grads), "Transformer Engine gave a main no gradient"
            return torch.stack(of_mains), None
        # Imported here, because the rest of the file works without Transformer Engine.
        from transformer_engine.pytorch.ops._common import get_dummy_wgrads_for_params

        # Marks the parameter, so that DDP knows that the gradient is in `main_grad`.
        (stands_for_it,) = get_dummy_wgrads_for_params([ctx.weight])
        return stands_for_it, None


@contextmanager
def _lent(
    experts: TEGroupedMLP, further: Sequence[Mapping[str, Sequence[Tensor]]]
) -> Iterator[None]:
    """Add the slots' weights, and biases if there are any, to each linear: by kind and slot."""
    with ExitStack() as stack:
        for name, of_linear in zip(LINEARS, further, strict=True):
            stack.enter_context(_with_slots(getattr(experts, name), of_linear))
        yield


class _OpFuser:
    """Operations of Transformer Engine's op fuser over mains and slots, without biases.

    The operations take parameters only. Megatron's own function makes the operations with
    stand-ins: parameters in the slots' memory, and parameters for the rows of a single weight.
    During a forward the tensors of the microbatch replace the stand-ins, for autograd. Backward
    reads the stand-ins, and needs their memory and `main_grad` only.
    """

    def __init__(self, experts: Any) -> None:
        self._experts = experts
        self._operations: Any = None

    @contextmanager
    def lent(self, slot_weights: Sequence[Sequence[Tensor]]) -> Iterator[None]:
        """Let the experts compute with the slots' weights, one tensor a slot for each linear.

        Operations want all weights of one kind. So they read what a push has made of mains in
        bf16; autograd sees the mains all the same.
        """
        if self._operations is None:
            # In the first forward, as in Megatron: parameters may move before that.
            self._operations = self._make(slot_weights)
        lent: list[Tensor] = []
        with self.in_use(), ExitStack() as stack:
            for index, name, slots in zip(_FUSED_LINEARS, LINEARS, slot_weights, strict=True):
                linear = getattr(self._experts, name)
                read = quantized_mains(linear)
                tensors = [*_rows(linear), *read, *slots]
                # A linear without biases has weights only: all are trained, or none.
                trained = next(linear.parameters()).requires_grad
                stack.enter_context(self._replacing(index, tensors, len(read), trained))
                lent += tensors
            stack.enter_context(_in_place(self._operations, lent))
            yield

    def in_use(self) -> AbstractContextManager[None]:
        """Let the experts' module have these operations in the place of its own."""
        return lent_to(self._experts, {"_fused_ops": (self._operations,)})

    def _make(self, slot_weights: Sequence[Sequence[Tensor]]) -> Any:
        stand_ins = [
            {"weight": [nn.Parameter(tensor.detach()) for tensor in tensors]}
            for tensors in slot_weights
        ]
        with ExitStack() as stack:
            for name in LINEARS:
                stack.enter_context(_split(getattr(self._experts, name)))
            stack.enter_context(_lent(self._experts, stand_ins))
            operations = self._experts._make_fused_ops()
        # Made here, because `_take_for_inputs` changes its lists of parameters.
        operations._module_groups = operations._make_module_groups(operations._modules.values())
        return operations

    @contextmanager
    def _replacing(
        self, index: int, tensors: Sequence[Tensor], num_read: int, trained: bool
    ) -> Iterator[None]:
        """Replace an operation's stand-ins, which are its last parameters, by tensors.

        For autograd, the first `num_read` tensors do not replace their parameters.
        """
        operation = self._operations[index]
        parameters = list(operation.parameters())
        first = len(parameters) - len(tensors)
        pairs = [*zip(parameters[first:], tensors, strict=True)]
        for parameter, tensor in pairs[num_read:]:
            if hasattr(tensor, "main_grad"):
                parameter.main_grad = tensor.main_grad
        lent: list[Any] = [_trained_or_not(tensor, trained) for tensor in tensors]
        for (parameter, _), tensor in zip(pairs[:num_read], lent, strict=False):
            tensor.main_grad = getattr(parameter, "main_grad", None)
        with lent_to(operation, {f"weight{i}": each for i, each in enumerate(lent, first)}):
            self._take_for_inputs(index, [*parameters[: first + num_read], *lent[num_read:]])
            try:
                yield
            finally:
                self._take_for_inputs(index, parameters)

    def _take_for_inputs(self, index: int, tensors: list[Tensor]) -> None:
        """Set the tensors that autograd sees as an operation's inputs."""
        (fuser,) = self._operations._module_groups
        fuser._basic_op_params[index][:] = tensors
        fuser._flat_basic_op_params[:] = chain(*fuser._basic_op_params)


_FUSED_LINEARS = (0, 2)
"""Indices of the two linears in the op fuser's operations; the activation is between them."""


def _trained_or_not(tensor: Tensor, trained: bool) -> Tensor:
    """Return the tensor, or a copy that needs a gradient exactly if the parameters do.

    Tensor and parameters differ in a forward without gradients, and if mains are frozen. Operations
    with fused gradients look for the first weight's `main_grad` in these cases, too.
    """
    if tensor.requires_grad == trained:
        return tensor
    alike: Any = tensor.detach().requires_grad_(trained)
    if hasattr(tensor, "main_grad"):
        alike.main_grad = tensor.main_grad
    return alike


@contextmanager
def _split(linear: Any) -> Iterator[None]:
    """Give a linear with a single weight one parameter for each main, in the weight's memory."""
    if not _is_single(linear):
        yield
        return
    rows = enumerate(_values(linear.weight).detach())
    stand_ins = {f"weight{m}": nn.Parameter(row) for m, row in rows}
    with lent_to(linear, {**stand_ins, "single_grouped_weight": False}):
        yield


@contextmanager
def _with_slots(linear: Any, further: Mapping[str, Sequence[Tensor]]) -> Iterator[None]:
    """Add the slots' weights, and biases if there are any, to a `GroupedLinear`.

    The linear reads `weight{i}` and `bias{i}` for i below `num_gemms`. Besides these, only its
    quantizers are as many.
    """
    num_mains, num_slots = linear.num_gemms, len(further["weight"])
    if "bias" not in further:
        further = {**further, "bias": [linear.bias0] * num_slots}  # Stands for no bias.
    lent: dict[str, Any] = {
        f"{kind}{num_mains + s}": tensor
        for kind, tensors in further.items()
        for s, tensor in enumerate(tensors)
    }
    lent["num_gemms"] = num_mains + num_slots
    with lent_to(linear, lent), _in_place(linear, further["weight"]):
        yield


def _in_place(module: nn.Module, slot_weights: Sequence[Tensor]) -> AbstractContextManager[None]:
    """Let a module's forwards hide slots from hooks on saved tensors; see `kept_in_place`.

    Megatron's offload of activations begins inside the experts, around a linear. A copied tensor
    may still be on its way to the host when the next layer's replicas come into the slots.
    """
    forward = module.forward

    def forward_in_place(*args: Any, **kwargs: Any) -> Any:
        with kept_in_place(slot_weights):
            return forward(*args, **kwargs)

    return lent_to(module, {"forward": forward_in_place})
