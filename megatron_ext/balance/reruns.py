"""Takes back what a run of a step has left, where Megatron runs the step again.

With a rank capacity factor, Megatron's programs run the forwards and backwards of a step once more,
without limit, if a rank has dropped tokens or the paged stash was full. They also run a step again
to see whether a strange result comes again (`--rerun-mode`). The first run has ended by then: every
plan is given back, and all replicas' gradients are in the mains, which Megatron sets to zero. What
is left are counts: the history of loads by which some strategies plan, and the forwards that were
reported. So the second run plans the same loads from the same history.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol


class HoldsCounts(Protocol):
    """An object that counts the forwards of a step."""

    def mark(self) -> Any:
        """Return the present counts, without a reference to the object."""

    def take_back(self, mark: Any) -> None:
        """Go back to the counts of a mark."""


_marks: weakref.WeakKeyDictionary[HoldsCounts, Any] = weakref.WeakKeyDictionary()
"""The last mark of each object: of its beginning, where that was later than the step's."""


is_capturing = False
"""Whether a whole step is captured in a CUDA graph, and so does not run; `replays.py` sets it."""


def holders() -> list[HoldsCounts]:
    """Return the objects that hold counts now."""
    return [*_marks]


def can_take_back(holder: HoldsCounts) -> None:
    """Take an object that begins back with the others, as long as it lives."""
    _marks[holder] = holder.mark()


def mark() -> None:
    """Mark the present counts: before a step that may be run again."""
    for holder in holders():
        can_take_back(holder)


def take_back() -> None:
    """Take all counts back to their marks, before the second run of a step."""
    for holder, counts in [*_marks.items()]:
        holder.take_back(counts)
