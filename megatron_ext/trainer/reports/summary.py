"""Compares runs of one model: as a table, and as a summary for programs.

Times and throughput are medians over the steps after `WARMUP_STEPS`, so that a moment in which the
machine did something else does not count (of a shorter run, over all its steps); imbalances and
replicas are means over all steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any, NamedTuple

from megatron_ext.files.tables import Cells, markdown_table
from megatron_ext.trainer.reports.read import Metrics, Run, column, number
from megatron_ext.trainer.reports.speed import MIN_STEPS, WARMUP_STEPS, speed_ratio

_PARTS = {"weights": "materialize", "gradients": "reduce"}
"""The parts that move, and how their metrics begin."""


def summarize(metrics: Metrics) -> dict[str, Any]:
    """Return the numbers of a run; NaN where no step knows one.

    Returns:
        `imbalance_before`, `imbalance_after`, `step_ms`, `tokens_per_s`, `tflops_per_gpu`,
        `final_loss`, `replicas` (per layer and microbatch) and `losses` (of every step).
    """
    timed = metrics[WARMUP_STEPS:] or metrics
    losses = column(metrics, "loss")
    return {
        "imbalance_before": _known(fmean, column(metrics, "imbalance_before")),
        "imbalance_after": _known(fmean, column(metrics, "imbalance_after")),
        "step_ms": _known(median, column(timed, "step_ms")),
        "tokens_per_s": _known(median, column(timed, "tokens_per_s")),
        "tflops_per_gpu": _known(median, column(timed, "tflops_per_gpu")),
        "final_loss": losses[-1] if losses else math.nan,
        "replicas": _known(fmean, column(metrics, "replicas")),
        "losses": losses,
    }


def summarize_runs(
    metrics: Mapping[str, Metrics], against: Sequence[str] = ()
) -> dict[str, dict[str, Any]]:
    """Return `summarize` of each run, and in `vs` how fast it is beside each run in `against`.

    Returns:
        By run. `vs` is by the other run's name: None if too few steps are timed in both, else
        `value`, `low` and `high`, the ratio of tokens/s and its interval.
    """
    return {
        name: summarize(steps) | {"vs": {other: _vs(steps, metrics[other]) for other in against}}
        for name, steps in metrics.items()
    }


def summarize_read(runs: Mapping[str, Run]) -> dict[str, dict[str, Any]]:
    """Return `summarize_runs` of run directories, compared with the first, and what they took.

    Returns:
        By run, with two more numbers, NaN where the run's files do not say: `rank_hours`, ranks x
        the time of all steps, and `mfu`, `tflops_per_gpu` over the peak of the recipe's machine.
    """
    against = list(runs)[:1] if len(runs) > 1 else []
    summaries = summarize_runs({name: run.metrics for name, run in runs.items()}, against)
    for name, of in summaries.items():
        run = runs[name]
        # Steps of an older version do not name their ranks.
        rank_ms = [
            number(step.get("num_ranks", run.num_ranks)) * ms
            for step, ms in zip(run.metrics, column(run.metrics, "step_ms"), strict=True)
            if not math.isnan(ms)
        ]
        of["rank_hours"] = sum(rank_ms) / 3.6e6 if rank_ms else math.nan
        of["mfu"] = 1e12 * of["tflops_per_gpu"] / run.peak_flops_per_s
    return summaries


def _vs(metrics: Metrics, others: Metrics) -> dict[str, float] | None:
    ratio = speed_ratio(metrics, others)
    return None if ratio is None else asdict(ratio)


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
    """Return the settings in which runs differ, each by run, but for the run's directory."""
    keys = dict.fromkeys(key for run in runs.values() for key in run.settings)
    values = {key: {name: run.settings.get(key, "") for name, run in runs.items()} for key in keys}
    differ = {key: each for key, each in values.items() if len(set(each.values())) > 1}
    for no_difference in "run_dir", "defaults":
        differ.pop(no_difference, None)
    return differ


class _Column(NamedTuple):
    """A column of `table`."""

    title: str
    form: str
    note: str


_OPTIONAL = {
    "tflops_per_gpu": _Column("TFLOP/s a rank", ".3g", ""),
    "mfu": _Column(
        "MFU", ".1%", "MFU: TFLOP/s a rank over hardware.constants.peak_flops_per_s of the recipe."
    ),
    "rank_hours": _Column(
        "rank hours",
        ".3g",
        "Rank hours, on GPUs GPU hours: ranks x the time of all steps. Checkpoints and evaluation "
        "between steps count only in runs of your own program, whose steps last until the next.",
    ),
}


def _optional(summaries: Mapping[str, Mapping[str, Any]]) -> dict[str, _Column]:
    """Return the columns of `_OPTIONAL` that a run knows.

    Programs with logs of their own do not count operations, and a machine's peak may be unknown.
    """
    return {
        name: column
        for name, column in _OPTIONAL.items()
        if not all(math.isnan(run.get(name, math.nan)) for run in summaries.values())
    }


def table(summaries: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the runs of `summarize_runs` as a Markdown table."""
    return markdown_table(*cells(summaries))


def cells(summaries: Mapping[str, Mapping[str, Any]]) -> Cells:
    """Return header and rows of `table`; what is not known is an empty cell."""
    against = next(iter(summaries.values()))["vs"]
    optional = _optional(summaries)
    header = (
        *("run", "imbalance before", "after", "step ms", "tokens/s"),
        *(column.title for column in optional.values()),
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
            *(_cell(run[name], column.form) for name, column in optional.items()),
            *("" if other == name else _vs_cell(run["vs"][other]) for other in against),
            _cell(run["final_loss"], ".4f"),
            _cell(run["replicas"], ".1f"),
        )
        for name, run in summaries.items()
    ]
    return header, rows


def _cell(value: float, form: str) -> str:
    return "" if math.isnan(value) else f"{value:{form}}"


def _vs_cell(ratio: Mapping[str, float] | None) -> str:
    return "" if ratio is None else "{value:.2f} ({low:.2f}-{high:.2f})".format(**ratio)


def notes(summaries: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return what the table does not say: each run's steps, and what its times are."""
    steps = {name: len(run["losses"]) for name, run in summaries.items()}
    each = [f"{name}: {count}" for name, count in steps.items()]
    counts = set(steps.values())
    said = [f"Steps: {'; '.join(each) if len(counts) > 1 else counts.pop()}."]
    short = [name for name, count in steps.items() if count <= WARMUP_STEPS]
    if len(short) < len(steps):
        said.append(f"Times are medians after the first {WARMUP_STEPS} steps.")
    if short:
        said.append(f"Times of {'; '.join(short)} are those of first steps, which are slow.")
    said += [column.note for column in _optional(summaries).values() if column.note]
    if against := next(iter(summaries.values()))["vs"]:
        said.append(
            f"{', '.join(f'vs {name}' for name in against)}: ratio of tokens/s in the steps that "
            f"both have, with its 95 % interval (bootstrap of the steps); empty below {MIN_STEPS} "
            "such steps."
        )
    return said


def cost_shares(run: Run) -> dict[str, float]:
    """Return parts of a step's time, means over the steps after the first.

    Returns:
        `planning`, and of weights and gradients that move `weights_exposed`, `weights_hidden` and
        so on: exposed is what a rank waits for, hidden what happens behind other work. Empty if not
        known, or if fewer than `MIN_STEPS` steps are timed.
    """
    timed = run.metrics[WARMUP_STEPS:]
    if len(timed) < MIN_STEPS:
        return {}
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
