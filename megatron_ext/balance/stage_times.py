"""How long the stages of this rank's layers take, summed up until somebody asks.

Nothing is noted until somebody wants to know. On a GPU times are between events on the current
stream, which are read once the device is done: the host waits for nothing meanwhile. On a CPU they
are the host's. Evaluation is not timed.

A transfer is under way from its start to the end of the wait for it. The wait is exposed; in the
rest of that time the rank computes, and the transfer may have ended before.
"""

from __future__ import annotations

from collections import defaultdict
from time import perf_counter
from typing import TypeAlias, cast

import torch

Mark: TypeAlias = "torch.cuda.Event | float | None"
"""A point in time; None while nobody wants to know."""

STAGES = ("plan", "materialize", "materialize_exposed", "reduce", "reduce_exposed")


class StageTimes:
    """Sums of times by stage. All layers of a process share `TIMES`."""

    def __init__(self) -> None:
        self.readers = 0
        """Those that take the times; without any, none are noted."""
        self._spans: list[tuple[str, Mark, Mark]] = []
        self._free: list[torch.cuda.Event] = []

    def mark(self) -> Mark:
        """Return this point in time, on the current stream of a GPU."""
        if not self.readers:
            return None
        if not torch.cuda.is_available():
            return perf_counter()
        if torch.cuda.is_current_stream_capturing():
            return None
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def add(self, stage: str, start: Mark, end: Mark) -> None:
        """Add the time between two marks to a stage of `STAGES`."""
        if start is not None and end is not None:
            self._spans.append((stage, start, end))

    def take(self) -> dict[str, float]:
        """Return the milliseconds of each stage since the last call; for after a step.

        On a GPU the device has done what was marked, or the host waits for it.
        """
        sums: defaultdict[str, float] = defaultdict(float)
        for stage, start, end in self._spans:
            sums[stage] += _between_ms(start, end)
        marks = {id(mark): mark for _, *ends in self._spans for mark in ends}.values()
        self._free += [mark for mark in marks if isinstance(mark, torch.cuda.Event)]
        self._spans.clear()
        return dict(sums)


def _between_ms(start: Mark, end: Mark) -> float:
    if isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        end.synchronize()
        return float(start.elapsed_time(end))
    return 1e3 * (cast("float", end) - cast("float", start))


TIMES = StageTimes()
"""The times of this process."""
