"""The page of one run, or of several compared: its text, and what its script draws.

Legend: T steps, L layers, R ranks of the EP group, K steps whose rank loads are shown.
"""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ext.files.tables import html_table
from megatron_ext.files.whole import write_whole
from megatron_ext.trainer.reports.layers import Layers
from megatron_ext.trainer.reports.page import Page, page_html, part, sentences, wide
from megatron_ext.trainer.reports.read import Run, column
from megatron_ext.trainer.reports.summary import (
    WARMUP_STEPS,
    cells,
    cost_shares,
    differing_settings,
    steps_line,
    summarize,
)
from megatron_ext.trainer.reports.verdict import verdict

FILE = "report.html"

CURVES = ("tokens_per_s", "imbalance_before", "imbalance_after", "loss")

_MOST_POINTS = 500
"""Points of a curve, and columns of a heat map: about what a screen shows. Of more steps, means."""


def run_page(runs: Mapping[str, Run]) -> Page:
    """Return the page of runs; throughput, imbalance and loss are compared with the first one's."""
    against = list(runs)[:1] if len(runs) > 1 else []
    summaries = {name: summarize(run.metrics) for name, run in runs.items()}
    said, unknown = verdict(runs, summaries)
    steps = steps_line({name: len(run.metrics) for name, run in runs.items()})
    title = ", ".join(runs)
    first = next(iter(runs.values()))
    about: dict[str, dict[str, str]] = {}
    for name, run in runs.items():
        for key, value in _flat_about(run.about):
            about.setdefault(key, {})[name] = value
    return Page(
        title=title,
        top=f"<h1>{html.escape(title)}</h1>{sentences(said, unknown)}"
        f"{wide(html_table(*cells(summaries, against)))}<p>{html.escape(steps)}</p>",
        data={
            "runs": [
                {
                    "name": name,
                    "curves": _thinned(_curves(run)),
                    "against": _thinned(_differences(run, first)) if run is not first else None,
                    "layers": _layers(run.layers),
                    "costs": cost_shares(run),
                }
                for name, run in runs.items()
            ],
            "warmup": WARMUP_STEPS,
        },
        bottom=_table("Settings that differ", runs, differing_settings(runs))
        + _table("Machine and versions", runs, about),
        script=part(__package__, "run_page.js"),
    )


def write_run_page(runs: Mapping[str, Run], file: Path) -> None:
    """Write `run_page` to a file, whose folder is made if it is not there.

    A link of that name is replaced: a run directory may be a stranger's.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, [page_html(run_page(runs))])


def _curves(run: Run) -> dict[str, np.ndarray]:
    steps = np.array([step["step"] for step in run.metrics], dtype=np.float64)
    return {"step": steps} | {name: np.array(column(run.metrics, name)) for name in CURVES}


def _differences(run: Run, first: Run) -> dict[str, np.ndarray]:
    """A run's curves minus the first run's, in the steps that both have; throughput in percent."""
    own, others = _curves(run), _curves(first)
    steps, here, there = np.intersect1d(own["step"], others["step"], return_indices=True)
    differences = {"step": steps}
    for name in CURVES:
        base = others[name][there]
        differences[name] = own[name][here] - base
        if name == "tokens_per_s":
            differences[name] = np.divide(
                100 * differences[name], base, out=np.full_like(base, np.nan), where=base > 0
            )
            # First steps allocate and load: their ratio would hide all others.
            differences[name][steps <= WARMUP_STEPS] = np.nan
    return differences


def _thinned(curves: Mapping[str, np.ndarray]) -> dict[str, list[float]]:
    return {name: _digits(_bucket_means(values)) for name, values in curves.items()}


def _bucket_means(values: np.ndarray) -> np.ndarray:
    """Means of equal numbers of steps, so many that at most `_MOST_POINTS` are left: [..., T].

    What is not known does not count; a mean of nothing is NaN.
    """
    size = -(-values.shape[-1] // _MOST_POINTS)
    if size <= 1:
        return values
    starts = np.arange(0, values.shape[-1], size)
    known = ~np.isnan(values)
    sums = np.add.reduceat(np.where(known, values, 0), starts, axis=-1)
    counts = np.add.reduceat(known, starts, axis=-1, dtype=np.int64)
    return np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0)


def _digits(values: np.ndarray, number: int = 6) -> Any:
    """Numbers of so many digits, as lists: more would only make the page larger."""
    size = np.where(np.isfinite(values) & (values != 0), np.abs(values), 1)
    scale = 10.0 ** (number - 1 - np.floor(np.log10(size)))
    return (np.round(values * scale) / scale).tolist()


def _layers(layers: Layers | None) -> dict[str, Any] | None:
    if layers is None:
        return None
    return {
        "steps": _digits(_bucket_means(np.array(layers.steps, dtype=np.float64))),
        "steps_each": -(-len(layers.steps) // _MOST_POINTS),
        "layers": list(layers.numbers),
        "columns": {
            name: _digits(_bucket_means(values), 4)
            for name, values in layers.columns.items()
            if not np.isnan(values).all()
        },
        "rank_steps": list(layers.kept_steps),
        "ranks": {name: np.round(of, 2).tolist() for name, of in layers.rank_loads.items()},
        "worst": list(layers.worst),
    }


def _table(title: str, runs: Mapping[str, Run], values: Mapping[str, Mapping[str, str]]) -> str:
    """A table of values by name and run, under a title; empty if there are none."""
    if not values:
        return ""
    rows = [(key, *(each.get(run, "") for run in runs)) for key, each in values.items()]
    # No name above the first column: a run could have the same.
    return f"<h2>{title}</h2>{wide(html_table(('', *runs), rows))}"


def _flat_about(about: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = []
    for key, value in about.items():
        if isinstance(value, Mapping):
            rows += [(str(name), str(one)) for name, one in value.items()]
        elif isinstance(value, list):
            counts = Counter(map(str, value))
            rows.append((key, ", ".join(f"{count} x {one}" for one, count in counts.items())))
        else:
            rows.append((key, str(value)))
    return rows
