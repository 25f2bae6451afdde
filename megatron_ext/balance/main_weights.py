"""This rank's main expert weights, in the three ways in which experts keep them.

A segment's weights are a parameter for each main (`SeparateMains`), or one stacked parameter for
all, which products take whole (`StackedMains`) or main by main (`SplitMains`). Slot weights are
held as products take the mains, so the same classes group them.

Legend: M mains per rank, S slots per rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Segment:
    """One named part of an expert's state."""

    name: str
    shape: tuple[int, ...]


class SegmentMains(Protocol):
    """How one segment of the mains is held."""

    def parameters(self) -> list[Tensor]:
        """The parameters in a fixed order."""

    def rows(self) -> list[Tensor]:
        """The values of each main, M tensors [*shape] without gradient."""

    def views(self, buffer: Tensor) -> list[Tensor]:
        """Views of slot weights [S, *shape] as autograd outputs; see `MainWeights.slot_views`."""

    def take(self, values: Iterator[Any], num_slots: int) -> Any:
        """Take as many of `values`, from the front, as there are `views`; slot s indexes them."""

    def main_grad(self, m: int) -> Tensor | None:
        """Main m's part [*shape] of `main_grad`, where there is one."""

    def hand_over(self, sums: dict[int, Tensor]) -> list[Tensor | None]:
        """Give the mains their sums [*shape] by main; see `MainWeights.hand_over`."""


@dataclass(frozen=True)
class SeparateMains:
    """A parameter [*shape] for each of the M mains. An unused slot costs no gradient."""

    mains: list[Tensor]
    fused: bool

    def parameters(self) -> list[Tensor]:
        """See `SegmentMains.parameters`."""
        return self.mains

    def rows(self) -> list[Tensor]:
        """See `SegmentMains.rows`."""
        return [main.detach() for main in self.mains]

    def views(self, buffer: Tensor) -> list[Tensor]:
        """See `SegmentMains.views`: one view a slot."""
        return list(buffer.unbind())

    def take(self, values: Iterator[Any], num_slots: int) -> list[Any]:
        """See `SegmentMains.take`: one value a slot."""
        return [next(values) for _ in range(num_slots)]

    def main_grad(self, m: int) -> Tensor | None:
        """See `SegmentMains.main_grad`."""
        return _main_grad(self.mains[m])

    def hand_over(self, sums: dict[int, Tensor]) -> list[Tensor | None]:
        """See `SegmentMains.hand_over`: None for a main without replicas."""
        return [self._hand_over(m, sums[m]) if m in sums else None for m in range(len(self.mains))]

    def _hand_over(self, m: int, total: Tensor) -> Tensor | None:
        main = self.mains[m]
        if not main.requires_grad:
            return None
        main_grad = _takes_sums(main, self.fused)
        if main_grad is None:
            return total.to(main.dtype)
        main_grad.add_(total)
        return None


@dataclass(frozen=True)
class StackedMains:
    """One parameter [M, *shape] for all mains, and the memory with its values, as tensor."""

    mains: Tensor
    values: Tensor
    fused: bool

    def parameters(self) -> list[Tensor]:
        """See `SegmentMains.parameters`."""
        return [self.mains]

    def rows(self) -> list[Tensor]:
        """See `SegmentMains.rows`."""
        return list(self.values.detach().unbind())

    def views(self, buffer: Tensor) -> list[Tensor]:
        """See `SegmentMains.views`: one view for all slots."""
        return [buffer]

    def take(self, values: Iterator[Any], num_slots: int) -> Any:
        """See `SegmentMains.take`: one value for all slots."""
        return next(values)

    def main_grad(self, m: int) -> Tensor | None:
        """See `SegmentMains.main_grad`."""
        main_grad = _main_grad(self.mains)
        return None if main_grad is None else main_grad[m]

    def hand_over(self, sums: dict[int, Tensor]) -> list[Tensor | None]:
        """See `SegmentMains.hand_over`: None if no main has replicas, else zero for the others."""
        if not sums or not self.mains.requires_grad:
            return [None]
        main_grad = _takes_sums(self.mains, self.fused)
        gradient = torch.zeros_like(self.values) if main_grad is None else main_grad
        for m, total in sums.items():
            gradient[m].add_(total)
        return [gradient if main_grad is None else None]


class SplitMains(StackedMains):
    """The same where products take a weight for each main. An unused slot costs no gradient."""

    def views(self, buffer: Tensor) -> list[Tensor]:
        """See `SegmentMains.views`: one view a slot."""
        return list(buffer.unbind())

    def take(self, values: Iterator[Any], num_slots: int) -> list[Any]:
        """See `SegmentMains.take`: one value a slot."""
        return [next(values) for _ in range(num_slots)]


class Split(NamedTuple):
    """A parameter of all mains of which products take a weight for each main."""

    parameter: Tensor
    """[M, *shape]. It may keep its values in another tensor."""
    values: Tensor
    """The memory with its values, [M, *shape]."""


def _main_grad(main: Tensor) -> Tensor | None:
    """Where data-parallel training accumulates the gradient of a main, if it has such a place.

    A main that was frozen since may have one, and gets nothing.
    """
    return getattr(main, "main_grad", None) if main.requires_grad else None


def _takes_sums(main: Tensor, fused: bool) -> Tensor | None:
    """The `main_grad` to which sums over replicas are added; None where autograd adds them.

    One that rounds would lose something by each part of a microbatch's gradient, at the full size
    of all microbatches' sum. Autograd adds both parts before.
    """
    main_grad = _main_grad(main)
    return None if main_grad is None or (_rounds(main_grad) and not fused) else main_grad


def _grad_dtype(mains: list[Tensor], fused: bool) -> torch.dtype | None:
    """Dtype in which gradients of some mains are computed; None if none of them gets one."""
    for main in mains:
        holder = _main_grad(main) if fused else main
        if main.requires_grad and holder is not None:
            return holder.dtype
    return None


def _rounds(main_grad: Tensor) -> bool:
    """Whether adding to it loses more than float32 would: its error grows with every addition."""
    return main_grad.element_size() < torch.float32.itemsize


def _emptied(main_grad: Tensor | None) -> Tensor | None:
    if main_grad is None or not _rounds(main_grad):
        return None
    before = main_grad.clone()
    main_grad.zero_()
    return before


def _segment_mains(held: Tensor | list[Tensor] | Split, fused: bool) -> SegmentMains:
    if isinstance(held, Split):
        return SplitMains(held.parameter, held.values, fused)
    if isinstance(held, Tensor):
        return StackedMains(held, held, fused)
    return SeparateMains(held, fused)


Aside = dict[int, list[Tensor | None]]
"""What mains had in `main_grad`, by main and segment; None where it stayed there."""


class MainWeights:
    """This rank's main expert weights, segment by segment.

    Args:
        per_segment: For each segment, the M parameters [*shape], or one stacked parameter [M,
            *shape], alone or as a `Split`.
        fused: Whether what computes a weight's gradient adds it to the weight's `main_grad`, and
            gives autograd none that counts: Megatron's gradient accumulation fusion.
    """

    def __init__(
        self, per_segment: Sequence[Tensor | list[Tensor] | Split], *, fused: bool
    ) -> None:
        self.fused = fused
        self._segments = [_segment_mains(held, fused) for held in per_segment]

    def parameters(self) -> list[Tensor]:
        """The parameters in a fixed order: what autograd must see as inputs."""
        return [parameter for segment in self._segments for parameter in segment.parameters()]

    @property
    def grad_dtypes(self) -> tuple[torch.dtype | None, ...]:
        """By segment, the dtype in which gradients are computed; None if no main here gets one.

        It is that of `main_grad` if gradients are fused: then mains without one get none. Slots'
        gradients have the same: a grouped product may take the first output's for all.
        """
        return tuple(_grad_dtype(each.parameters(), self.fused) for each in self._segments)

    def rows(self) -> list[list[Tensor]]:
        """`rows()[g][m]`: the values of segment g of main m, without gradient."""
        return [segment.rows() for segment in self._segments]

    def slot_views(self, buffers: Sequence[Tensor | None]) -> list[Tensor]:
        """Slot weights as autograd outputs, held as the parameters are: slot by slot, or stacked.

        Args:
            buffers: One a segment, [S, *shape]; None for a segment that is left out.
        """
        # `.data` has a version counter of its own: other layers overwrite these buffers before this
        # layer's backward reads them, which is right, because RematerializeFunction restores them.
        pairs = zip(self._segments, buffers, strict=True)
        return [
            view
            for segment, buffer in pairs
            if buffer is not None
            for view in segment.views(buffer.data)
        ]

    def by_segment(self, flat: Sequence[Any], buffers: Sequence[Tensor | None]) -> list[Any]:
        """Group values, one for each of `slot_views(buffers)`: for each segment, indexed by slot.

        None for a segment that is left out.
        """
        values = iter(flat)
        return [
            segment.take(values, len(buffer)) if buffer is not None else None
            for segment, buffer in zip(self._segments, buffers, strict=True)
        ]

    def set_aside(self, mains: Iterable[int]) -> Aside:
        """Empty the mains' `main_grad` where it rounds; return what was in it, segment by segment.

        A fused gradient is added to `main_grad`, and so are the sums over replicas: two additions
        where Megatron has one. The first of them then meets nothing that it could round, and what
        was set aside, a copy in the dtype of `main_grad`, comes back with the second.

        Args:
            mains: Those with replicas in the microbatch whose backward begins.
        """
        return {m: [_emptied(segment.main_grad(m)) for segment in self._segments] for m in mains}

    def hand_over(self, sums: dict[int, list[Tensor | None]]) -> list[Tensor | None]:
        """Give the mains their sums over replicas; return what autograd shall add, by parameter.

        Where a parameter has a `main_grad`, the sums are added to it here: they are rounded once,
        to its dtype, and autograd adds nothing. Elsewhere they are rounded to the weights' dtype;
        so are those of mains without fusion whose `main_grad` is narrower than float32. What is
        frozen gets nothing.

        Args:
            sums: For each main with replicas, one tensor a segment, or None.
        """
        gradients: list[Tensor | None] = []
        for segment_idx, segment in enumerate(self._segments):
            of_mains = ((m, totals[segment_idx]) for m, totals in sums.items())
            gradients += segment.hand_over({m: each for m, each in of_mains if each is not None})
        return gradients
