"""Holds this rank's main expert weights, in the forms that expert modules keep them in.

The weights of a segment are one parameter for each main (`SeparateMains`), or one stacked parameter
for all mains (`StackedMains`). Slot weights have the form of the mains, so the same classes group
them.

Products of quantized weights read parts: data, scales, maybe an amax. A forward reads the row-wise
parts and a backward the column-wise ones, and a push moves the parts of one direction. Weights that
are not quantized are one part, the same in both directions.

Legend: M mains per rank, S slots per rank, p part of a segment.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Part:
    """One tensor that products read of a quantized weight; the directions take turns in a slot."""

    dtype: torch.dtype
    row: tuple[int, ...]
    """Shape of the part that a forward reads."""
    column: tuple[int, ...] | None
    """Shape of the part that a backward reads; None if that is the same tensor."""

    @property
    def num_bytes(self) -> int:
        """Bytes of a slot: the larger direction's, aligned for products and for copies."""
        numel = max(math.prod(shape) for shape in (self.row, self.column) if shape is not None)
        return -(-numel * self.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT

    def view(self, slot: Tensor, *, columnwise: bool) -> Tensor:
        """Return what a slot, uint8 [num_bytes], holds after a push in this direction."""
        shape = self.row if self.column is None or not columnwise else self.column
        return slot[: math.prod(shape) * self.dtype.itemsize].view(self.dtype).view(shape)


_ALIGNMENT = 16
"""Bytes. Scales of blocks must be aligned so, and such copies take the fast path."""


@dataclass(frozen=True)
class Segment:
    """One named part of an expert's state that is trained."""

    name: str
    shape: tuple[int, ...]
    """Of the weight, and so of its gradient."""
    parts: tuple[Part, ...] = ()
    """What is pushed of a quantized weight; empty for weights as they are."""
    form: str = ""
    """What else products must know of the parts: class and flags of a quantized weight."""

    @property
    def has_directions(self) -> bool:
        """Whether a backward reads other parts than a forward."""
        return any(part.column is not None for part in self.parts)

    def described(self, dtype: torch.dtype) -> str:
        """Name what must be alike on all ranks, where weights as they are have `dtype`."""
        parts = [f"{list(part.row)}/{list(part.column or part.row)}" for part in self.parts]
        return " ".join([self.name, str(list(self.shape)), self.form or str(dtype), *parts])

    def slot_shapes(self, dtype: torch.dtype) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and dtype of each part of a slot, where weights as they are have `dtype`."""
        if not self.parts:
            return [(self.shape, dtype)]
        return [((part.num_bytes,), torch.uint8) for part in self.parts]


InPlace = Callable[[Tensor], bool]
"""Whether sums may be added to a parameter's `main_grad` itself."""


def everywhere(_: Tensor) -> bool:
    """Say yes, as an `InPlace`."""
    return True


def by_products(main: Tensor) -> bool:
    """Say yes for weights, to which fused products add, and not for biases, as an `InPlace`.

    DDP adds a bias's own gradient, on a stream for which no reduction waits.
    """
    return main.dim() > 1


TakesSums = Callable[[Tensor], Tensor | None]
"""`_takes_sums` of a parameter."""


@dataclass(frozen=True)
class SeparateMains:
    """A parameter [*shape] for each of the M mains. An unused slot costs no gradient."""

    mains: list[Tensor]
    are_trained_alike: bool = field(default=False, kw_only=True)
    """Whether products give all mains and slots gradients, or none, as the first main asks."""

    def parameters(self) -> list[Tensor]:
        """Return the parameters in a fixed order."""
        return self.mains

    def rows(self, *, columnwise: bool) -> list[list[Tensor]]:
        """Return part p of main m as `rows()[p][m]`, without gradient; see `MainWeights.rows`."""
        return [[main.detach() for main in self.mains]]

    def weights(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Return slot weights as autograd outputs: see `MainWeights.slot_weights`."""
        return self.views(parts[0])

    def views(self, buffer: Tensor) -> list[Tensor]:
        """Return a tensor of slots, [S, *shape], slot by slot or stacked, as `weights` are."""
        return list(buffer.unbind())

    def take(self, values: Iterator[Any], num_slots: int) -> list[Any]:
        """Take one of `values` for each of `views`, from the front; slot s indexes the result."""
        return [next(values) for _ in range(num_slots)]

    def main_grads(self) -> list[Tensor | None]:
        """Return the `main_grad` [*shape] of each main, or None."""
        return [_main_grad(main) for main in self.mains]

    def totals(self, dtype: torch.dtype, takes_sums: TakesSums) -> list[Tensor]:
        """Return what the gradients of main m's replicas are added to, [*shape]; see `Totals`."""
        totals: list[Any] = [takes_sums(main) for main in self.mains]
        # Transport `cuda` adds a segment in one dtype. Nobody reads a frozen main's sums, so they
        # take the dtype of the others.
        frozen = next((total.dtype for total in totals if total is not None), dtype)
        for m, main in enumerate(self.mains):
            if totals[m] is None:
                kind = dtype if main.requires_grad else frozen
                totals[m] = torch.zeros(main.shape, dtype=kind, device=main.device)
        return totals

    def hand_over(self, totals: list[Tensor], takes_sums: TakesSums) -> list[Tensor | None]:
        """Return the totals that autograd adds, by parameter; see `MainWeights.hand_over`.

        A main without replicas gets zeros.
        """
        return [
            total.to(main.dtype) if main.requires_grad and takes_sums(main) is None else None
            for main, total in zip(self.mains, totals, strict=True)
        ]


@dataclass(frozen=True)
class StackedMains:
    """One parameter [M, *shape] for all mains."""

    mains: Tensor
    values: Tensor
    """The memory with the parameter's values, [M, *shape]: the parameter itself, or another."""
    is_split: bool = False
    """Whether products take one weight for each main. An unused slot then costs no gradient."""

    @property
    def are_trained_alike(self) -> bool:
        """See `SeparateMains.are_trained_alike`."""
        return self.is_split

    def parameters(self) -> list[Tensor]:
        """See `SeparateMains.parameters`."""
        return [self.mains]

    def rows(self, *, columnwise: bool) -> list[list[Tensor]]:
        """See `SeparateMains.rows`."""
        return [list(self.values.detach().unbind())]

    def weights(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """See `SeparateMains.weights`."""
        return self.views(parts[0])

    def views(self, buffer: Tensor) -> list[Tensor]:
        """See `SeparateMains.views`."""
        return list(buffer.unbind()) if self.is_split else [buffer]

    def take(self, values: Iterator[Any], num_slots: int) -> Any:
        """See `SeparateMains.take`."""
        return [next(values) for _ in range(num_slots)] if self.is_split else next(values)

    def main_grads(self) -> list[Tensor | None]:
        """See `SeparateMains.main_grads`."""
        main_grad = _main_grad(self.mains)
        return list(main_grad.unbind() if main_grad is not None else [None] * len(self.values))

    def totals(self, dtype: torch.dtype, takes_sums: TakesSums) -> list[Tensor]:
        """See `SeparateMains.totals`."""
        total = takes_sums(self.mains)
        if total is None:
            total = torch.zeros(self.values.shape, dtype=dtype, device=self.values.device)
        return list(total.unbind())

    def hand_over(self, totals: list[Tensor], takes_sums: TakesSums) -> list[Tensor | None]:
        """See `SeparateMains.hand_over`."""
        if not self.mains.requires_grad or takes_sums(self.mains) is not None:
            return [None]
        return [torch.stack(totals).to(self.values.dtype)]


def _main_grad(main: Tensor) -> Tensor | None:
    """Return the buffer in which data-parallel training accumulates a main's gradient, or None.

    A main that was frozen after its buffer was made gets None.
    """
    if main.requires_grad and is_fsdp(main):
        # For one microbatch: a product overwrites it, and then Megatron-FSDP takes it.
        return main.get_main_grad()  # type: ignore[attr-defined]
    return getattr(main, "main_grad", None) if main.requires_grad else None


def is_fsdp(main: Any) -> bool:
    """Whether Megatron-FSDP keeps shards of a main, and gathers it for its layer."""
    return getattr(main, "__fsdp_param__", False)


def is_sharded(weight: Any) -> bool:
    """Whether this rank has a shard of a weight by generalized tensor parallelism."""
    # Megatron-Core before 0.19 has none.
    return getattr(weight, "is_gtp_weight_remat", False)


def _takes_sums(main: Tensor, fused: bool, in_place: InPlace) -> Tensor | None:
    """Return the `main_grad` that gets the sums over replicas; None if autograd adds the sums.

    A `main_grad` narrower than float32 would round each part of a microbatch's gradient at the size
    of all microbatches' sum. So autograd adds both parts first.
    """
    # Megatron-FSDP takes unfused gradients from autograd.
    takes = in_place(main) and (fused or not is_fsdp(main))
    main_grad = _main_grad(main) if takes else None
    return None if main_grad is None or (_rounds(main_grad) and not fused) else main_grad


def _grad_dtype(mains: list[Tensor], fused: bool) -> torch.dtype | None:
    """Return the dtype of the gradients of these mains; None if none of the mains gets one."""
    for main in mains:
        if fused and main.requires_grad and is_fsdp(main):
            return _fsdp_grad_dtype(main)
        holder = _main_grad(main) if fused else main
        if main.requires_grad and holder is not None:
            return holder.dtype
    return None


def _fsdp_grad_dtype(main: Any) -> torch.dtype:
    """Return the dtype of `get_main_grad()`, which would allocate memory that nobody needs yet."""
    buffer = main._gbuf
    # Megatron-Core before 0.19 sends gradients in the dtype that they are kept in.
    policy = getattr(getattr(main, "_megatron_fsdp_model", None), "mp_policy", None)
    sent = getattr(policy, "grad_comm_dtype", None) if buffer.is_data_distributed else None
    return sent or buffer.dtype


def _rounds(main_grad: Tensor) -> bool:
    """Whether an addition to `main_grad` rounds more than in float32."""
    return main_grad.element_size() < torch.float32.itemsize


def _set_aside(
    main_grads: list[Tensor | None], experts_in_slots: Tensor, ep_rank: int
) -> list[Tensor | None] | None:
    narrow = {m: grad for m, grad in enumerate(main_grads) if grad is not None and _rounds(grad)}
    if not narrow:
        return None
    experts = [ep_rank * len(main_grads) + m for m in narrow]
    copies = torch.ops.megatron_ext.set_aside(list(narrow.values()), experts_in_slots, experts)
    by_main = dict(zip(narrow, copies, strict=True))
    return [by_main.get(m) for m in range(len(main_grads))]


Held = SeparateMains | StackedMains
"""How a module holds the weights of one segment."""

Totals = list[list[Tensor] | None]
"""By segment and main, [*shape]: what the gradients of a main's replicas are added to. None for a
segment that is not trained."""

Aside = list[list[Tensor | None] | None]
"""By segment and main: copies of `main_grad`, without values for a main without replicas. None
where `main_grad` was left as it is, or is not there."""


class MainWeights:
    """This rank's main expert weights, segment by segment.

    Args:
        segments: The mains of each segment.
        fused: Whether Megatron's gradient accumulation fusion is on: the matrix product adds a
            weight's gradient to `main_grad`, and autograd's gradient of the weight does not count.
    """

    def __init__(self, segments: Sequence[Held], *, fused: bool) -> None:
        self.fused = fused
        self._segments = segments

    def parameters(self) -> list[Tensor]:
        """Return the parameters in a fixed order, as inputs for autograd."""
        return [parameter for segment in self._segments for parameter in segment.parameters()]

    @cached_property
    def grad_dtypes(self) -> tuple[torch.dtype | None, ...]:
        """Return the gradients' dtype by segment; None if no main of the segment gets a gradient.

        With fused gradients the dtype is that of `main_grad`, and mains without `main_grad` get no
        gradient. Slots' gradients have the same dtype: a grouped product may use the dtype of its
        first output for all outputs.
        """
        return tuple(
            _grad_dtype(each.parameters()[: 1 if alike else None], self.fused)
            for each, alike in zip(self._segments, self.are_trained_alike, strict=True)
        )

    @property
    def are_trained_alike(self) -> list[bool]:
        """Return for each segment whether all ranks must train it, or none."""
        return [segment.are_trained_alike for segment in self._segments]

    @cached_property
    def stay(self) -> bool:
        """Whether the weights are whole at all times, and not gathered for their layer's."""
        return not any(is_fsdp(main) or is_sharded(main) for main in self.parameters())

    def rows(self, *, columnwise: bool = False) -> list[list[Tensor]]:
        """Return what a push moves: part p of main m as `rows()[p][m]`, without gradient.

        The parts of all segments follow each other. Parts of quantized weights are uint8 [n].
        """
        return [part for each in self._segments for part in each.rows(columnwise=columnwise)]

    def slot_weights(self, parts: Sequence[Sequence[Tensor] | None]) -> list[Tensor]:
        """Return slot weights as autograd outputs: slot by slot or stacked, like the parameters.

        `parts` are the slots' buffers by segment and part; None for a segment that is left out.
        """
        # `.data` has a version counter of its own: other layers overwrite these buffers before this
        # layer's backward reads them, and the backward restores the buffers before it reads them.
        return [
            weight
            for segment, of_segment in zip(self._segments, parts, strict=True)
            if of_segment is not None
            for weight in segment.weights([part.data for part in of_segment])
        ]

    def slot_grads(self, buffers: Sequence[Tensor | None]) -> list[Tensor]:
        """Return the slots' gradients, [S, *shape] a segment, like `slot_weights`."""
        pairs = zip(self._segments, buffers, strict=True)
        return [
            view for each, buffer in pairs if buffer is not None for view in each.views(buffer.data)
        ]

    def by_segment(
        self, flat: Sequence[Any], there: Sequence[object | None], num_slots: int
    ) -> list[Any]:
        """Group values, one for each of `slot_weights(there)`, by segment and slot.

        A segment that is left out, None in `there`, gets None.
        """
        values = iter(flat)
        return [
            segment.take(values, num_slots) if each is not None else None
            for segment, each in zip(self._segments, there, strict=True)
        ]

    def set_aside(self, experts_in_slots: Tensor, ep_rank: int, *, in_place: InPlace) -> Aside:
        """Empty those `main_grad` that are narrower than float32; return copies.

        With fused gradients, a matrix product adds the main's own part to `main_grad`, and the sums
        over replicas are added after it: two rounded additions, where Megatron has one. The first
        addition to an empty `main_grad` rounds nothing away, and the copies, in the dtype of
        `main_grad`, are added with the second.

        Only mains with replicas in the slots, int32 [R, S], of the microbatch whose backward begins
        are touched; the host does not know them. Nor are those that get no sums `in_place`.
        """
        return [
            None
            # With Megatron-FSDP the products overwrite `main_grad`.
            if any(is_fsdp(main) or not in_place(main) for main in each.parameters())
            else _set_aside(each.main_grads(), experts_in_slots, ep_rank)
            for each in self._segments
        ]

    def totals(self, slot_grads: Sequence[Tensor | None], *, in_place: InPlace) -> Totals:
        """Return what replicas' gradients are added to, where a segment has `slot_grads`.

        That is `main_grad` itself. Zeros for `hand_over`, float32 (float64 for float64 gradients),
        where `in_place` says no, and where adding there would round too much.
        """
        takes_sums = partial(_takes_sums, fused=self.fused, in_place=in_place)
        return [
            segment.totals(torch.promote_types(grad.dtype, torch.float32), takes_sums)
            if grad is not None
            else None
            for segment, grad in zip(self._segments, slot_grads, strict=True)
        ]

    def add_late(self, totals: Totals, *, in_place: InPlace) -> None:
        """Add the finished `totals` to `main_grad` where they are others, because of `in_place`."""
        for segment, of_segment in zip(self._segments, totals, strict=True):
            for main, total in zip(segment.parameters(), of_segment or (), strict=False):
                if not in_place(main) and (main_grad := _main_grad(main)) is not None:
                    main_grad.add_(total)

    def hand_over(self, totals: Totals, *, in_place: InPlace) -> list[Tensor | None]:
        """Return the gradients that autograd adds, by parameter, from the finished `totals`.

        A parameter whose `main_grad` has the sums already gets None, and so does a frozen one. Else
        the sums are rounded to the weights' dtype.
        """
        takes_sums = partial(_takes_sums, fused=self.fused, in_place=in_place)
        return [
            gradient
            for segment, of_segment in zip(self._segments, totals, strict=True)
            for gradient in (
                segment.hand_over(of_segment, takes_sums)
                if of_segment is not None
                else [None for _ in segment.parameters()]
            )
        ]
