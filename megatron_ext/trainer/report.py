"""Compares runs of one model: as a table, a summary for programs, a picture, a page.

Times and throughput are medians over the steps after `WARMUP_STEPS`, so that a moment in which the
machine did something else does not count; imbalances and replicas are means over all steps.
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import IO, Any

from megatron_ext.files.tables import html_table, markdown_table
from megatron_ext.files.yaml_files import read_yaml
from megatron_ext.trainer.run_log import CONFIG_FILE, METRICS_FILE, read_metrics

Metrics = Sequence[Mapping[str, Any]]
"""Lines of a run's `metrics.jsonl`."""

_SHOWN = ("loss", "imbalance_before", "imbalance_after", "step_ms", "tokens_per_s", "replicas")
"""The metrics of a step that a report needs."""

WARMUP_STEPS = 5
"""First steps, which allocate memory and load code: they do not count in timings."""


def summarize(metrics: Metrics) -> dict[str, Any]:
    """Return the numbers of a run.

    Returns:
        `imbalance_before`, `imbalance_after`, `step_ms`, `tokens_per_s`, `final_loss`, `replicas`
        (per layer and microbatch) and `losses` (of every step).
    """
    timed = metrics[WARMUP_STEPS:] or metrics
    return {
        "imbalance_before": fmean(step["imbalance_before"] for step in metrics),
        "imbalance_after": fmean(step["imbalance_after"] for step in metrics),
        "step_ms": median(step["step_ms"] for step in timed),
        "tokens_per_s": median(step["tokens_per_s"] for step in timed),
        "final_loss": metrics[-1]["loss"],
        "replicas": fmean(step["replicas"] for step in metrics),
        "losses": [step["loss"] for step in metrics],
    }


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


def read_runs(folders: Sequence[Path]) -> dict[str, Metrics]:
    """Read the metrics of runs, by the names of their folders, or by their paths if names repeat.

    Raises:
        FileNotFoundError: A folder holds no metrics.
        ValueError: A run has not finished a step, its metrics cannot be read or lack a metric that
            is shown, or a folder is given twice.
    """
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise ValueError(f"a run is there twice in {', '.join(map(str, folders))}")
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    runs: dict[str, Metrics] = {}
    for name, folder in zip(names, folders, strict=True):
        if not (folder / METRICS_FILE).is_file():
            below = sorted(str(file.parent) for file in folder.glob(f"*/{METRICS_FILE}"))
            hint = f"; there are runs in it: {', '.join(below)}" if below else ""
            raise FileNotFoundError(f"{folder} is no run directory: it has no {METRICS_FILE}{hint}")
        runs[name] = read_metrics(folder)
        if not runs[name]:
            raise ValueError(f"{folder} has not finished a step yet")
        for step in runs[name]:
            for shown in _SHOWN:
                if not isinstance(step.get(shown), int | float):
                    raise ValueError(
                        f"{folder / METRICS_FILE}: step {step['step']} has no number {shown!r}"
                    )
    return runs


def differing_settings(folders: Mapping[str, Path]) -> dict[str, dict[str, str]]:
    """Return the settings in which runs differ, each by run; the run's directory does not count.

    Raises:
        ValueError: A run's settings cannot be read.
    """
    settings = {}
    for name, folder in folders.items():
        file = folder / CONFIG_FILE
        settings[name] = dict(_flat(read_yaml(file))) if file.is_file() else {}
    keys = dict.fromkeys(key for each in settings.values() for key in each)
    values = {key: {name: each.get(key, "") for name, each in settings.items()} for key in keys}
    return {
        key: each
        for key, each in values.items()
        if len(set(each.values())) > 1 and key != "run_dir"
    }


def _flat(settings: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)


def table(summaries: Mapping[str, Mapping[str, Any]], against: Sequence[str]) -> str:
    """Return the runs as a Markdown table; `vs x` is the ratio of tokens/s to run x."""
    return markdown_table(*_cells(summaries, against))


def _cells(
    summaries: Mapping[str, Mapping[str, Any]], against: Sequence[str]
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    header = (
        *("run", "imbalance before", "after", "step ms", "tokens/s"),
        *(f"vs {other}" for other in against),
        *("final loss", "replicas per layer"),
    )
    rows = [
        (
            name,
            f"{run['imbalance_before']:.2f}",
            f"{run['imbalance_after']:.2f}",
            f"{run['step_ms']:.0f}",
            f"{run['tokens_per_s']:.0f}",
            *(f"{run['tokens_per_s'] / summaries[other]['tokens_per_s']:.2f}" for other in against),
            f"{run['final_loss']:.4f}",
            f"{run['replicas']:.1f}",
        )
        for name, run in summaries.items()
    ]
    return header, rows


def steps_line(steps: Mapping[str, int]) -> str:
    """Return a line with each run's number of steps; its final loss is the last step's.

    >>> steps_line({"none": 6, "quota": 40})
    'Steps: none 6, quota 40. Times are medians after the first 5.'
    """
    each = ", ".join(f"{name} {number}" for name, number in steps.items())
    return f"Steps: {each}. Times are medians after the first {WARMUP_STEPS}."


def page(
    runs: Mapping[str, Metrics], settings: Mapping[str, Mapping[str, str]], against: Sequence[str]
) -> str:
    """Return a page of HTML that needs no other file: the table, the picture, differing settings.

    Args:
        runs: The runs to compare.
        settings: The settings in which runs differ, as `differing_settings` returns them.
        against: Runs whose tokens/s all runs are compared with.
    """
    picture = io.BytesIO()
    draw(runs, picture)
    summaries = {name: summarize(metrics) for name, metrics in runs.items()}
    parts = [html_table(*_cells(summaries, against))]
    if settings:
        rows = [(key, *(each[name] for name in runs)) for key, each in settings.items()]
        # No name above the settings: a run could have the same.
        parts += ["<h2>Settings that differ</h2>", html_table(("", *runs), rows)]
    image = base64.b64encode(picture.getvalue()).decode()
    return _PAGE.format(
        title=html.escape(", ".join(runs)),
        steps=html.escape(steps_line({name: len(metrics) for name, metrics in runs.items()})),
        parts="\n".join(parts),
        image=image,
    )


_PAGE = """<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ font-family: sans-serif; max-width: 60em; margin: 2em auto; }}
td, th {{ padding: 0.2em 0.8em; text-align: right; border-bottom: 1px solid #ddd; }}
td:first-child, th:first-child {{ text-align: left; }}
img {{ max-width: 100%; }}
</style>
<h1>{title}</h1>
{parts}
<p>{steps}</p>
<img alt="Imbalance, step time and loss over the steps" src="data:image/png;base64,{image}">
</html>
"""


def draw(runs: Mapping[str, Metrics], file: Path | IO[bytes]) -> None:
    """Write a PNG of imbalance, step time and loss over the steps of each run."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (above, middle, below) = plt.subplots(
        3, 1, sharex=True, figsize=(8, 8), layout="constrained"
    )
    for name, metrics in runs.items():
        steps = [step["step"] for step in metrics]
        above.plot(steps, [step["imbalance_after"] for step in metrics], label=name)
        middle.plot(steps, [step["step_ms"] for step in metrics])
        below.plot(steps, [step["loss"] for step in metrics])
    above.set_ylabel("imbalance (busiest rank / mean)")
    above.legend()
    # A slow first step would squeeze all others into a line.
    timed = [step["step_ms"] for metrics in runs.values() for step in metrics[WARMUP_STEPS:]]
    middle.set_ylim(0, 1.3 * max(timed) if timed else None)
    middle.set_ylabel("step time (ms)")
    below.set_ylabel("loss")
    below.set_xlabel("step")
    figure.savefig(file, dpi=120, format="png")
    plt.close(figure)
