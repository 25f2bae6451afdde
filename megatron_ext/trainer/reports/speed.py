"""How fast runs are, with intervals: medians over steps, and a bootstrap of the steps.

What else a machine does slows steps that follow each other, so the bootstrap draws blocks of steps.
Its seed is fixed: equal files give equal numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_ext.trainer.reports.read import Metrics, number

WARMUP_STEPS = 5
"""First steps, which allocate memory and load code: they do not count in timings."""

MIN_STEPS = 20
"""Nothing is said about the speed of fewer steps than these after the first `WARMUP_STEPS`."""

_RESAMPLES = 1000

_MOST_NUMBERS = 1 << 20
"""Numbers that are drawn at once, which bounds the memory of long runs."""


@dataclass(frozen=True)
class Interval:
    """A number and its 95 % interval over the steps of a run."""

    value: float
    low: float
    high: float

    @property
    def is_clear(self) -> bool:
        """Whether a ratio differs from 1 by more than noise, in the two digits that are shown."""
        return round(self.low, 2) > 1 or round(self.high, 2) < 1


def speed(metrics: Metrics) -> Interval | None:
    """Return the median tokens per second of a run; None below `MIN_STEPS`."""
    return _interval(np.array(list(_timed(metrics).values()))[None])


def speed_ratio(metrics: Metrics, others: Metrics) -> Interval | None:
    """Return the median tokens per second of a run over those of another one.

    Only steps count that both have, and steps are drawn for both alike: runs that take turns on one
    machine share its noise. None below `MIN_STEPS`.
    """
    of_run, of_other = _timed(metrics), _timed(others)
    steps = sorted(of_run.keys() & of_other.keys())
    return _interval(np.array([[of[step] for step in steps] for of in (of_run, of_other)]))


def _timed(metrics: Metrics) -> dict[int, float]:
    """The known tokens per second after the first steps, by step."""
    speeds = {step["step"]: number(step.get("tokens_per_s")) for step in metrics[WARMUP_STEPS:]}
    return {step: speed for step, speed in speeds.items() if speed > 0}


def _interval(speeds: np.ndarray) -> Interval | None:
    """Return the first row's median, over the second's if there is one; `speeds` is [1 or 2, T]."""
    count = speeds.shape[1]
    if count < MIN_STEPS:
        return None
    random = np.random.default_rng(0)
    block = round(count ** (1 / 3))
    at_once = max(1, _MOST_NUMBERS // count)
    drawn: list[float] = []
    for first in range(0, _RESAMPLES, at_once):
        shape = (min(at_once, _RESAMPLES - first), -(-count // block), 1)
        steps = (random.integers(count, size=shape) + np.arange(block)) % count
        drawn += _ratio(speeds[:, steps.reshape(shape[0], -1)[:, :count]]).tolist()
    low, high = np.quantile(drawn, (0.025, 0.975))
    return Interval(float(_ratio(speeds)), float(low), float(high))


def _ratio(speeds: np.ndarray) -> np.ndarray:
    medians = np.median(speeds, axis=-1)
    return medians[0] / medians[1] if len(medians) == 2 else medians[0]
