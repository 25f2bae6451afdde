"""Sums the times of the stages of this rank's layers, for the metrics of a step.

Without a reader of the times nothing is noted. On a GPU a time lies between two events on the
current stream, which are read after the device has passed them: the host waits for nothing
meanwhile. On a CPU a time is the host's. Evaluation is not timed.

The time of a transfer goes from its start to the end of the wait for it. The time of the wait is
*exposed*. During the rest the rank computes; the transfer may end before the wait.
"""

from __future__ import annotations

from collections import defaultdict
from time import perf_counter
from typing import TypeAlias, cast

import torch

Mark: TypeAlias = "torch.cuda.Event | float | None"
"""A point in time; None without a reader of the times."""

STAGES = ("plan", "materialize", "materialize_exposed", "reduce", "reduce_exposed")


class StageTimes:
    """Sums of times by stage. All layers of a process share `TIMES`."""

    def __init__(self) -> None:
        self.readers = 0
        """The number of readers that call `take`; without readers nothing is noted."""
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
        """Return the milliseconds of each stage since the last call; called after a step.

        On a GPU the host waits until the device has passed the marks.
        """
        sums: defaultdict[str, float] = defaultdict(float)
        for stage, start, end in self._spans:
            if isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
                end.synchronize()
                sums[stage] += start.elapsed_time(end)
            else:
                sums[stage] += 1e3 * (cast("float", end) - cast("float", start))
        marks = {id(mark): mark for _, *ends in self._spans for mark in ends}.values()
        self._free += [mark for mark in marks if isinstance(mark, torch.cuda.Event)]
        self._spans.clear()
        return dict(sums)


TIMES = StageTimes()
"""The times of this process."""
