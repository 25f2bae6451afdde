"""A clock for measured costs that says what a test wants: no test depends on how fast a machine is.

`megatron_ext.mcore.measure.slowest_s` reads the clock before and after each round.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from unittest import mock

from megatron_ext.mcore import measure

ROUNDS = 9
"""Of one measurement, if they are short."""

DEAR_EXPERTS_MS = [1e-3] * ROUNDS + [1.0] * ROUNDS
"""Rounds of the two measurements in their order: replicas come at once, and experts take long."""


class Clock:
    """Has every round take the next of the given milliseconds, which start over at the end.

    Attributes:
        rounds: How many there were.
    """

    def __init__(self, rounds_ms: Iterable[float]) -> None:
        self._rounds_ms = itertools.cycle(rounds_ms)
        self._is_in_round = False
        self.rounds = 0

    def __call__(self) -> float:
        """Begin a round, at time 0, or end it; return the time in seconds."""
        self._is_in_round = not self._is_in_round
        if self._is_in_round:
            return 0.0
        self.rounds += 1
        return next(self._rounds_ms) / 1e3


@contextmanager
def rounds_take(rounds_ms: Iterable[float]) -> Iterator[Clock]:
    """Have the rounds of measurements take so many milliseconds on this rank, each its own."""
    clock = Clock(rounds_ms)
    with mock.patch.object(measure, "perf_counter", clock):
        yield clock
