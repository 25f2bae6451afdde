"""This rank's main expert weights, in the two ways in which experts keep them.

Two small classes, of which each segment has one, know how its weights are held: a parameter for
each main, or one stacked parameter for all. Slots are held as the mains are, so these classes group
what belongs to slots as well.

Legend: M mains per rank, S slots per rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

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
        """Slot weights [S, *shape] as autograd outputs; see `MainWeights.slot_views`."""

    def take(self, values: Iterator[Any], num_slots: int) -> Any:
        """Take what goes with `views` from the front of `values`; slot s indexes the result."""

    def gradients(self, sums: dict[int, Tensor]) -> list[Tensor | None]:
        """Gradients of `parameters()` from the sums [*shape] of mains with replicas, by main."""


@dataclass(frozen=True)
class SeparateMains:
    """A parameter [*shape] for each of the M mains. An unused slot costs no gradient."""

    mains: list[Tensor]

    def parameters(self) -> list[Tensor]:
        """See `SegmentMains.parameters`."""
        return self.mains

    def rows(self) -> list[Tensor]:
        """See `SegmentMains.rows`."""
        return [main.detach() for main in self.mains]

    def views(self, buffer: Tensor) -> list[Tensor]:
        """See `SegmentMains.views`: one a slot."""
        return list(buffer.unbind())

    def take(self, values: Iterator[Any], num_slots: int) -> list[Any]:
        """See `SegmentMains.take`: one a slot."""
        return [next(values) for _ in range(num_slots)]

    def gradients(self, sums: dict[int, Tensor]) -> list[Tensor | None]:
        """See `SegmentMains.gradients`: none for a main without replicas."""
        return [sums[m].to(main.dtype) if m in sums else None for m, main in enumerate(self.mains)]


@dataclass(frozen=True)
class StackedMains:
    """One parameter [M, *shape] for all mains."""

    mains: Tensor

    def parameters(self) -> list[Tensor]:
        """See `SegmentMains.parameters`."""
        return [self.mains]

    def rows(self) -> list[Tensor]:
        """See `SegmentMains.rows`."""
        return [main.detach() for main in self.mains]

    def views(self, buffer: Tensor) -> list[Tensor]:
        """See `SegmentMains.views`: one for all slots."""
        return [buffer]

    def take(self, values: Iterator[Any], num_slots: int) -> Any:
        """See `SegmentMains.take`: one for all slots."""
        return next(values)

    def gradients(self, sums: dict[int, Tensor]) -> list[Tensor | None]:
        """See `SegmentMains.gradients`: zero for a main without replicas, if one has any."""
        if not sums:
            return [None]
        gradient = torch.zeros_like(self.mains)
        for m, total in sums.items():
            gradient[m].copy_(total)
        return [gradient]


class MainWeights:
    """This rank's main expert weights, segment by segment.

    Args:
        per_segment: Of each segment the M parameters [*shape], or one stacked parameter [M,
            *shape].
    """

    def __init__(self, per_segment: Sequence[Tensor | list[Tensor]]) -> None:
        self._segments: list[SegmentMains] = [
            StackedMains(held) if isinstance(held, Tensor) else SeparateMains(held)
            for held in per_segment
        ]

    def parameters(self) -> list[Tensor]:
        """The parameters in a fixed order: what autograd must see as inputs."""
        return [parameter for segment in self._segments for parameter in segment.parameters()]

    def rows(self) -> list[list[Tensor]]:
        """`rows()[g][m]`: the values of segment g of main m, without gradient."""
        return [segment.rows() for segment in self._segments]

    def slot_views(self, buffers: Sequence[Tensor]) -> list[Tensor]:
        """Slot weights as autograd outputs, held as the parameters are: slot by slot, or stacked.

        Args:
            buffers: One a segment, [S, *shape].
        """
        # `.data` has a version counter of its own: other layers overwrite these buffers before this
        # layer's backward reads them, which is right, because RematerializeFunction restores them.
        pairs = zip(self._segments, buffers, strict=True)
        return [view for segment, buffer in pairs for view in segment.views(buffer.data)]

    def by_segment(self, flat: Sequence[Any], num_slots: int) -> list[Any]:
        """Group what goes with `slot_views` again: for each segment, indexed by slot."""
        values = iter(flat)
        return [segment.take(values, num_slots) for segment in self._segments]

    def gradients(self, sums: dict[int, list[Tensor]]) -> list[Tensor | None]:
        """Gradients of `parameters()` from the sums over replicas; None where none was made.

        Args:
            sums: Of each main with replicas, one tensor a segment.
        """
        return [
            gradient
            for segment_idx, segment in enumerate(self._segments)
            for gradient in segment.gradients({m: total[segment_idx] for m, total in sums.items()})
        ]
