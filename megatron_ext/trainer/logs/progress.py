"""The display of a run: a progress bar in a terminal, plain lines elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

logger = logging.getLogger(__name__)

_SILENCE_S = 30
"""Seconds after a plain line, or the start, after which the next step has one in any case."""

_BAR_WIDTH = 8
"""So narrow that the line of a step fits into 100 columns."""


class TrainingProgress:
    """The display of one run; a context manager."""

    def __init__(self, title: str, *, start_step: int, steps: int, every: int) -> None:
        self._start_step = start_step
        self._steps = steps
        self._every = every
        self._started = self._said = time.monotonic()
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(_BAR_WIDTH),
            MofNCompleteColumn(),
            TextColumn("{task.fields[line]}"),
            console=Console(stderr=True),
            disable=not sys.stderr.isatty(),
        )
        self._task = self._bar.add_task(title, total=steps, completed=start_step, line="")

    def __enter__(self) -> TrainingProgress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, metrics: dict[str, Any]) -> None:
        """Show a finished step; `metrics` is its line of `metrics.jsonl`."""
        line = (
            f"loss {metrics['loss']:.4f}  imbalance {metrics['imbalance_before']:.2f} -> "
            f"{metrics['imbalance_after']:.2f}  {metrics['tokens_per_s']:,.0f} tokens/s"
        )
        if "eval_loss" in metrics:
            line += f"  evaluation {metrics['eval_loss']:.4f}"
        step = metrics["step"]
        if not self._bar.disable:
            self._bar.update(self._task, completed=step, line=line + self._left(step))
        elif (
            time.monotonic() - self._said >= _SILENCE_S
            or step in (self._start_step + 1, self._steps)
            or step % self._every == 0
        ):
            self._said = time.monotonic()
            logger.info("step %d/%d  %s%s", step, self._steps, line, self._left(step))

    def _left(self, step: int) -> str:
        """Return how long the rest takes if its steps are as slow as those since this start."""
        if step == self._steps:
            return ""
        seconds_a_step = (time.monotonic() - self._started) / (step - self._start_step)
        return f"  {timedelta(seconds=round(seconds_a_step * (self._steps - step)))} left"
