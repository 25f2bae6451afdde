"""Takes back what a run of a step has left, where Megatron runs the step again.

With a rank capacity factor, Megatron's programs run the forwards and backwards of a step once more,
without limit, if a rank has dropped tokens or the paged stash was full. The first run has ended by
then: every plan is given back, and all replicas' gradients are in the mains, which Megatron sets to
zero. What is left are counts: the history of loads by which some strategies plan, and the forwards
that were reported. So the second run plans the same loads from the same history.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Protocol

TakeBack = Callable[[], None]
"""Takes one holder of counts back to an earlier state."""


class HoldsCounts(Protocol):
    """An object that counts the forwards of a step."""

    def mark(self) -> TakeBack:
        """Return a function that takes the object back to its present state."""


_holders: weakref.WeakSet[HoldsCounts] = weakref.WeakSet()


def can_take_back(holder: HoldsCounts) -> None:
    """Include an object in the marks from now on, as long as it lives."""
    _holders.add(holder)


def mark() -> list[TakeBack]:
    """Mark the present state of all objects that count: before a step that may be run again."""
    return [holder.mark() for holder in _holders]
