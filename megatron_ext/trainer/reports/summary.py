"""Compares runs of one model: as a table, and as a summary for programs.

Times and throughput are medians over the steps after `WARMUP_STEPS`, so that a moment in which the
machine did something else does not count; imbalances and replicas are means over all steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from megatron_ext.files.tables import markdown_table
from megatron_ext.trainer.reports.read import Metrics, Run, column, number

WARMUP_STEPS = 5
"""First steps, which allocate memory and load code: they do not count in timings."""

_PARTS = {"weights": "materialize", "gradients": "reduce"}
"""The parts that move, and how their metrics begin."""


def summarize(metrics: Metrics) -> dict[str, Any]:
    """Return the numbers of a run; NaN where no step knows one.

    Returns:
        `imbalance_before`, `imbalance_after`, `step_ms`, `tokens_per_s`, `final_loss`, `replicas`
        (per layer and microbatch) and `losses` (of every step).
    """
    timed = metrics[WARMUP_STEPS:] or metrics
    losses = column(metrics, "loss")
    return {
        "imbalance_before": _known(fmean, column(metrics, "imbalance_before")),
        "imbalance_after": _known(fmean, column(metrics, "imbalance_after")),
        "step_ms": _known(median, column(timed, "step_ms")),
        "tokens_per_s": _known(median, column(timed, "tokens_per_s")),
        "final_loss": losses[-1] if losses else math.nan,
        "replicas": _known(fmean, column(metrics, "replicas")),
        "losses": losses,
    }


def _known(average: Callable[[list[float]], float], values: Sequence[float]) -> float:
    """The average of what is known; NaN if nothing is."""
    known = [value for value in values if not math.isnan(value)]
    return average(known) if known else math.nan


@dataclass(frozen=True)
class Drift:
    """How far the losses of two runs are apart that differ by rounding."""

    steps_alike: int
    """Steps before the first in which a token chose another expert."""
    while_alike: float
    """Largest relative difference of the losses of these steps."""
    after: float | None
    """The same of the steps after them; None if there are none."""

    @classmethod
    def of(cls, losses: Sequence[float], others: Sequence[float], steps_alike: int) -> Drift:
        """Compare the losses of steps that both runs have.

        >>> Drift.of([4.0, 2.0, 1.0], [4.0, 2.1, 9.0], steps_alike=2)
        Drift(steps_alike=2, while_alike=0.05, after=8.0)
        """
        differences = [
            round(abs(other - loss) / loss, 12) for loss, other in zip(losses, others, strict=False)
        ]
        alike, after = differences[:steps_alike], differences[steps_alike:]
        return cls(steps_alike, max(alike, default=0.0), max(after, default=None))

    def text(self) -> str:
        """Say it in a line."""
        alike = f"{self.while_alike:.1e} in {self.steps_alike} steps of equal choices"
        return alike if self.after is None else f"{alike}, then {self.after:.1e}"


def differing_settings(runs: Mapping[str, Run]) -> dict[str, dict[str, str]]:
    """Return the settings in which runs differ, each by run; the run's directory does not count."""
    keys = dict.fromkeys(key for run in runs.values() for key in run.settings)
    values = {key: {name: run.settings.get(key, "") for name, run in runs.items()} for key in keys}
    differ = {key: each for key, each in values.items() if len(set(each.values())) > 1}
    differ.pop("run_dir", None)
    return differ


def table(summaries: Mapping[str, Mapping[str, Any]], against: Sequence[str]) -> str:
    """Return the runs as a Markdown table; `vs x` is the ratio of tokens/s to run x."""
    return markdown_table(*cells(summaries, against))


def cells(
    summaries: Mapping[str, Mapping[str, Any]], against: Sequence[str]
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return header and rows of `table`; what is not known is an empty cell."""
    header = (
        *("run", "imbalance before", "after", "step ms", "tokens/s"),
        *(f"vs {other}" for other in against),
        *("final loss", "replicas per layer"),
    )
    rows = [
        (
            name,
            _cell(run["imbalance_before"], ".2f"),
            _cell(run["imbalance_after"], ".2f"),
            _cell(run["step_ms"], ".0f"),
            _cell(run["tokens_per_s"], ".0f"),
            *(
                _cell(run["tokens_per_s"] / (summaries[other]["tokens_per_s"] or math.nan), ".2f")
                for other in against
            ),
            _cell(run["final_loss"], ".4f"),
            _cell(run["replicas"], ".1f"),
        )
        for name, run in summaries.items()
    ]
    return header, rows


def _cell(value: float, form: str) -> str:
    return "" if math.isnan(value) else f"{value:{form}}"


def steps_line(steps: Mapping[str, int]) -> str:
    """Return a line with each run's number of steps; its final loss is the last step's.

    >>> steps_line({"none": 6, "quota": 40})
    'Steps: none 6, quota 40. Times are medians after the first 5.'
    """
    each = ", ".join(f"{name} {number}" for name, number in steps.items())
    return f"Steps: {each}. Times are medians after the first {WARMUP_STEPS}."


def cost_shares(run: Run) -> dict[str, float]:
    """Return parts of a step's time, means over the steps after the first; empty if not known.

    Returns:
        `planning`, and of weights and gradients that move `weights_exposed`, `weights_hidden` and
        so on: exposed is what a rank waits for, hidden what happens behind other work.
    """
    timed = run.metrics[WARMUP_STEPS:] or run.metrics
    shares: dict[str, list[float]] = {}
    for step in timed:
        of_step = number(step.get("step_ms")) or math.nan
        shares.setdefault("planning", []).append(number(step.get("plan_ms")) / of_step)
        for part, metric in _PARTS.items():
            exposed = number(step.get(f"{metric}_exposed_ms"))
            hidden = max(number(step.get(f"{metric}_ms")) - exposed, 0.0)
            shares.setdefault(f"{part}_exposed", []).append(exposed / of_step)
            shares.setdefault(f"{part}_hidden", []).append(hidden / of_step)
    means = {
        name: fmean(known)
        for name, values in shares.items()
        if (known := [value for value in values if not math.isnan(value)])
    }
    return means if "planning" in means else {}
