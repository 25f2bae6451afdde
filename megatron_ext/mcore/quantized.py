"""Quantized experts of Transformer Engine: what a push moves of a main, and what a slot is.

A `GroupedLinear` that computes in FP8 or FP4 reads quantized tensors. Parameters may be such
tensors (`--fp8-param-gather`); otherwise the linear quantizes them in the first microbatch of a
step and keeps the results. This file asks for the same results before the linear runs, because a
push comes earlier, and makes slots that the linear takes for parameters of the first kind.

A forward's products read the row-wise parts of a weight, those of a backward the column-wise parts.
Where both exist, a push moves the parts of one direction, and they take turns in a slot.

Legend: M mains per rank, S slots per rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_ext.balance.main_weights import Part, SeparateMains
from megatron_ext.mcore.experts import lent_to

_ROW_NAMES = ("_data", "_rowwise_data", "_scale_inv", "_rowwise_scale_inv", "_amax_rowwise")
"""Attributes with what a forward reads, of all classes of quantized tensors."""


@contextmanager
def precision_of(linear: Any) -> Iterator[str]:
    """Enter the precision that a linear computes in; the class of its recipe, or "".

    Megatron's recipe of quantization (`--te-precision-config-file`) sets it in the linear's own
    forward, apart from the layer's.
    """
    from megatron.core.extensions.transformer_engine import _get_fp8_autocast_for_quant_params
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager

    with _get_fp8_autocast_for_quant_params(linear.te_quant_params, linear.training):
        if not FP8GlobalStateManager.is_fp8_enabled():
            yield ""
            return
        # As the linear does in its forward; the slots are not lent to it yet.
        linear.init_fp8_metadata(num_gemms=linear.num_gemms)
        yield type(FP8GlobalStateManager.get_fp8_recipe()).__name__


@dataclass(frozen=True)
class Precision:
    """How a linear holds the weights that its products read."""

    parts: tuple[Part, ...] = ()
    """Empty if it does not quantize."""
    form: str = ""
    """Class and flags of its quantized weights."""
    recipe: str = ""
    """Class of Transformer Engine's recipe."""
    for_op_fuser: bool = False
    """Whether the op fuser computes: it wants scales in rows, and quantizes in each forward."""

    @classmethod
    def of(cls, linear: Any, *, for_op_fuser: bool = False) -> Precision:
        """Return a linear's precision, in the context of its layer's forward.

        Raises:
            ValueError: Replicas cannot be quantized as the linear quantizes its weights.
        """
        params = linear.te_quant_params
        if params is not None and params.evaluation_recipe not in (None, params.training_recipe):
            raise ValueError(
                f"evaluation_recipe ({params.evaluation_recipe}) must be the training_recipe: a "
                "layer's slots have one precision (change --te-precision-config-file)"
            )
        with precision_of(linear) as recipe:
            if not recipe:
                return cls()
            _refuse_recipe()
            quantizer = _weight_quantizers(linear, for_op_fuser)[0].copy()
            quantizer.internal = False
            weight = linear.weight0
            # Made to look at: values, and the parameters' memory, are not needed for that.
            like = quantizer.make_empty(weight.shape, dtype=weight.dtype, device=weight.device)
        parts = tuple(_part(like, row, column) for row, column in _names(like))
        flags = [
            f"{name}={value}"
            for name, value in like.get_metadata().items()
            if not isinstance(value, Tensor) and value is not None and name != "quantizer"
        ]
        kind = "native" if linear.primary_weights_in_fp8 else "cached"
        form = " ".join([type(like).__name__, kind, *sorted(flags)])
        return cls(parts, form, recipe, for_op_fuser)


def _refuse_recipe() -> None:
    """Refuse a recipe of Transformer Engine whose backward reads other bytes than are pushed."""
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager

    recipe = FP8GlobalStateManager.get_fp8_recipe()
    if recipe.delayed() or recipe.custom():
        raise ValueError(
            f"fp8_recipe ({type(recipe).__name__}) must be tensorwise, blockwise, mxfp8 or nvfp4: "
            "a replica has no history of scales, and no factory of quantizers "
            "(set --fp8-recipe tensorwise)"
        )
    if override := getattr(recipe, "backward_override", None):
        raise ValueError(
            f"NVTE_BACKWARD_OVERRIDE ({override}) must not be set: in backward, replicas have the "
            "quantized bytes that products of gradients read"
        )


def _weight_quantizers(linear: Any, for_op_fuser: bool) -> list[Any]:
    """Return the mains' weight quantizers, set to make what both directions read."""
    quantizers: list[Any] = linear._get_weight_quantizers()
    swizzles = linear._enable_weight_preswizzle(quantizers[0], linear.weight0) and not for_op_fuser
    for quantizer in quantizers:
        quantizer.set_usage(rowwise=True, columnwise=True)
        quantizer.optimize_for_gemm = swizzles
    return quantizers


def _names(weight: Any) -> list[tuple[str, str | None]]:
    """Return the attributes with a weight's parts, by direction; None if both read the same."""
    pairs = []
    for row in _ROW_NAMES:
        if getattr(weight, row, None) is not None:
            column = "_transpose" if row == "_data" else row.replace("rowwise", "columnwise")
            has_column = column != row and getattr(weight, column, None) is not None
            pairs.append((row, column if has_column else None))
    return pairs


def _part(weight: Any, row: str, column: str | None) -> Part:
    in_row = getattr(weight, row)
    in_column = tuple(getattr(weight, column).shape) if column is not None else None
    return Part(in_row.dtype, tuple(in_row.shape), in_column)


@dataclass(frozen=True)
class QuantizedMains(SeparateMains):
    """A parameter [*shape] for each main of a linear that quantizes, or has quantized ones.

    One forward's. What its push finds is kept for its backward, which runs outside of the context
    that says how to quantize.
    """

    linear: Any
    precision: Precision
    _found: list[Any] = field(default_factory=list, init=False)

    def rows(self, *, columnwise: bool) -> list[list[Tensor]]:
        """Return the parts' bytes, uint8 [n]; see `MainWeights.rows`."""
        if not self._found:
            self._found.extend(_quantized(self.linear, self.mains, self.precision.for_op_fuser))
        return [
            [
                _bytes(getattr(main, column if columnwise and column else row))
                for main in self._found
            ]
            for row, column in _names(self._found[0])
        ]

    def weights(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Return a quantized tensor for each slot, over its bytes, uint8 [S, n] a part."""
        return [self._in_slot([buffer[s] for buffer in parts]) for s in range(len(parts[0]))]

    def _in_slot(self, memory: Sequence[Tensor]) -> Any:
        """Return a quantized tensor like the mains, in whose memory the directions take turns."""
        like = self._found[0]
        views: dict[str, Tensor] = {}
        of_parts = zip(self.precision.parts, _names(like), memory, strict=True)
        for part, (row, column), slot in of_parts:
            views[row] = part.view(slot, columnwise=False)
            if column is not None:
                views[column] = part.view(slot, columnwise=True)
        # Constructors name the parts otherwise than attributes: they are found by what they hold.
        of_argument = {id(getattr(like, name)): view for name, view in views.items()}
        arguments = {
            name: of_argument.get(id(value)) if isinstance(value, Tensor) else value
            for name, value in like.get_metadata().items()
        }
        slot = type(like)(shape=like.shape, dtype=like.dtype, device=like.device, **arguments)
        if hasattr(slot, "_transpose_invalid"):
            slot._transpose_invalid = slot._transpose is None
        return slot


def _bytes(part: Tensor) -> Tensor:
    flat = part.view(-1)
    return flat if flat.dtype == torch.uint8 else flat.view(torch.uint8)


@torch.inference_mode(False)  # The linear keeps the results for training.
@torch.no_grad()
def _quantized(linear: Any, mains: Sequence[Tensor], for_op_fuser: bool) -> list[Any]:
    """Return the mains as products read them; quantize anew where the linear or operation would.

    The linear then finds the results, and no first microbatch: that would overwrite `main_grad`.
    """
    from transformer_engine.pytorch.module.base import quantize_weight
    from transformer_engine.pytorch.quantized_tensor import QuantizedTensor

    # The linear may keep nothing, but a push is fast from memory that stays.
    kept = linear._fp8_workspaces
    quantizes_always = for_op_fuser or linear.disable_parameter_transpose_cache
    with precision_of(linear):
        is_first, linear.is_first_microbatch = linear.is_first_microbatch, False
        found = []
        quantizers = _weight_quantizers(linear, for_op_fuser)
        for m, (main, quantizer) in enumerate(zip(mains, quantizers, strict=True)):
            weight: Any = main
            if isinstance(main, QuantizedTensor):
                weight.update_usage(rowwise_usage=True, columnwise_usage=True)
            else:
                workspace = kept.get(f"weight{m}")
                # What a forward without gradients has made has one direction for good: in each step
                # the other would get new memory.
                if workspace is not None and not all(workspace.get_usages().values()):
                    workspace = None
                weight, new = quantize_weight(
                    tensor=main.detach(),
                    quantizer=quantizer,
                    workspace=workspace,
                    update_workspace=is_first or quantizes_always,
                    workspace_dtype=main.dtype,
                    cache=True,
                )
                if new is not None:
                    kept[f"weight{m}"] = new.detach()
            found.append(weight)
    return found


def quantized_mains(linear: Any) -> list[Tensor]:
    """Return what a push has made of a linear's mains; empty if it reads the parameters."""
    kept = linear._fp8_workspaces
    return [kept[key] for key in sorted(kept, key=lambda key: int(key[len("weight") :]))]


class SlotQuantizers:
    """Quantizers of one linear for what slots compute: inputs, and gradients of outputs.

    Slots need their own: some kernels keep an amax or a scale in a quantizer, for several experts
    at a time.
    """

    def __init__(self, linear: Any, num_slots: int) -> None:
        self._linear = linear
        self._num_slots = num_slots
        self._of_mains: list[Any] = []
        self._lent: dict[str, list[Any]] = {}

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Let the linear have them behind the mains' for the block, if it quantizes."""
        with precision_of(self._linear) as recipe:
            own = self._linear.quantizers
        if not recipe:
            yield
            return
        of_mains = [*own.values()]
        # A change of the recipe makes new lists.
        if [*map(id, self._of_mains)] != [*map(id, of_mains)]:
            self._of_mains = of_mains
            self._lent = {key: self._with_slots(each) for key, each in own.items()}
        with lent_to(self._linear, {"quantizers": self._lent}):
            yield

    def _with_slots(self, of_mains: list[Any]) -> list[Any]:
        of_one = of_mains[: len(of_mains) // self._linear.num_gemms]
        return of_mains + [each.copy() for _ in range(self._num_slots) for each in of_one]


@contextmanager
def padding_for_slots(experts: Any, num_slots: int) -> Iterator[None]:
    """Let the experts pad the rows of slots, too, to what quantized products need."""
    with ExitStack() as stack:
        for name in ("quantization_padding", "quantization_unpadding"):
            if (padding := getattr(experts, name, None)) is not None:
                number = {"num_gemms": padding.num_gemms + num_slots}
                stack.enter_context(lent_to(padding, number))
        yield
