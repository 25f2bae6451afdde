"""The page of one run, or of several compared: its text, and what its script draws.

Legend: T steps, L layers, R ranks of the EP group, K steps whose rank loads are shown.
"""

from __future__ import annotations

import html
import re
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ext.files.tables import html_table
from megatron_ext.files.whole import write_whole
from megatron_ext.trainer.reports.layers import Layers
from megatron_ext.trainer.reports.page import Page, page_html, part, sentences, wide
from megatron_ext.trainer.reports.read import Run, column
from megatron_ext.trainer.reports.speed import MIN_STEPS, WARMUP_STEPS
from megatron_ext.trainer.reports.summary import (
    cells,
    cost_shares,
    differing_settings,
    notes,
)
from megatron_ext.trainer.reports.verdict import Compared, compare

FILE = "report.html"

CURVES = ("tokens_per_s", "imbalance_before", "imbalance_after", "loss")

_MOST_POINTS = 500
"""Points of a curve, and columns of a heat map: about what a screen shows. Of more steps, means."""


_BANDED_STEPS = WARMUP_STEPS + MIN_STEPS
"""The throughput of shorter runs is shown as it is: it says nothing about their speed."""


def run_page(runs: Mapping[str, Run], compared: Compared | None = None) -> Page:
    """Return the page of runs; throughput, imbalance and loss are compared with the first one's.

    `compared` is `compare` of the runs, where it is known: of long runs it takes a while.
    """
    summaries, said, unknown = compared or compare(runs)
    title = "; ".join(runs)
    first = next(iter(runs.values()))
    return Page(
        title=title,
        top=f"<h1>{html.escape(title)}</h1>{sentences(said, unknown)}"
        f"{wide(html_table(*cells(summaries)))}<p>{html.escape(' '.join(notes(summaries)))}</p>",
        data={
            "runs": [
                {
                    "name": name,
                    "curves": _drawn(_curves(run)),
                    "against": _drawn(_differences(run, first)) if run is not first else None,
                    "layers": _layers(run.layers),
                    "costs": cost_shares(run),
                }
                for name, run in runs.items()
            ],
            "warmup": WARMUP_STEPS,
            "bands": any(len(run.metrics) >= _BANDED_STEPS for run in runs.values()),
        },
        bottom=_settings(runs) + _machine(runs),
        script=part(__package__, "run_page.js"),
    )


def write_run_page(runs: Mapping[str, Run], file: Path, compared: Compared | None = None) -> None:
    """Write `run_page` to a file, whose folder is made if it is not there.

    A link of that name is replaced: a run directory may be a stranger's.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, [page_html(run_page(runs, compared))])


def _curves(run: Run) -> dict[str, np.ndarray]:
    steps = np.array([step["step"] for step in run.metrics], dtype=np.float64)
    curves = {name: np.array(column(run.metrics, name)) for name in CURVES}
    curves["tokens"] = _tokens(steps, curves["tokens_per_s"], column(run.metrics, "step_ms"))
    if len(steps) > WARMUP_STEPS:
        # First steps allocate and load: their speed would hide all others.
        curves["tokens_per_s"][:WARMUP_STEPS] = np.nan
    return {"step": steps} | curves


def _tokens(steps: np.ndarray, tokens_per_s: np.ndarray, step_ms: Sequence[float]) -> np.ndarray:
    """Tokens until the end of each step; steps that are not known count as the median step."""
    tokens = tokens_per_s * np.array(step_ms) / 1000
    known = ~np.isnan(tokens)
    if not known.any():
        return tokens
    tokens[~known] = np.median(tokens[known])
    return np.cumsum(tokens * np.diff(steps, prepend=0))


def _differences(run: Run, first: Run) -> dict[str, np.ndarray]:
    """A run's curves minus the first run's, in the steps that both have; throughput in percent."""
    own, others = _curves(run), _curves(first)
    steps, here, there = np.intersect1d(own["step"], others["step"], return_indices=True)
    differences = {"step": steps, "tokens": own["tokens"][here]}
    for name in CURVES:
        base = others[name][there]
        differences[name] = own[name][here] - base
        if name == "tokens_per_s":
            differences[name] = np.divide(
                100 * differences[name], base, out=np.full_like(base, np.nan), where=base > 0
            )
    return differences


def _drawn(curves: Mapping[str, np.ndarray]) -> dict[str, list[float]]:
    """Points of curves: of throughput, which is noisy, moving medians with a band."""
    drawn = {name: _bucket_means(values) for name, values in curves.items()}
    low, middle, high = _band(curves["tokens_per_s"])
    drawn |= {"tokens_per_s_low": low, "tokens_per_s": middle, "tokens_per_s_high": high}
    return {name: _digits(values, 9 if name == "step" else 6) for name, values in drawn.items()}


def _band(values: np.ndarray) -> np.ndarray:
    """Return quartiles of the steps around each point of a curve: [3, points]; NaN if not known."""
    count = len(values)
    if count < _BANDED_STEPS:
        return np.stack([values] * 3)
    half = max(2, count // 40)
    stride = -(-count // _MOST_POINTS)
    centres = np.minimum(np.arange(0, count, stride) + stride // 2, count - 1)
    padded = np.pad(values, half, constant_values=np.nan)
    around = np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1)[centres]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # Of windows without a number.
        band: np.ndarray = np.nanquantile(around, (0.25, 0.5, 0.75), axis=1)
    band[:, np.isnan(values[centres])] = np.nan
    return band


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


def _digits(values: np.ndarray, number: int) -> Any:
    """Numbers of so many digits, as lists: more would only make the page larger."""
    size = np.where(np.isfinite(values) & (values != 0), np.abs(values), 1)
    scale = 10.0 ** (number - 1 - np.floor(np.log10(size)))
    return (np.round(values * scale) / scale).tolist()


def _layers(layers: Layers | None) -> dict[str, Any] | None:
    if layers is None:
        return None
    return {
        "steps": _digits(_bucket_means(np.array(layers.steps, dtype=np.float64)), 9),
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


def _settings(runs: Mapping[str, Run]) -> str:
    differ = differing_settings(runs)
    return f"<h2>Settings that differ</h2>{_table(runs, differ)}" if differ else ""


def _machine(runs: Mapping[str, Run]) -> str:
    """Return a table of what differs between runs, and a folded one of what is equal."""
    about: dict[str, dict[str, str]] = {}
    for name, run in runs.items():
        for key, value in _flat_about(run.about):
            about.setdefault(key, {})[name] = value
    if not about:
        return ""
    equal = {
        key: next(iter(of.values()))
        for key, of in about.items()
        if len(of) == len(runs) and len(set(of.values())) == 1
    }
    differ = {key: of for key, of in about.items() if key not in equal}
    said = _table(runs, differ) if differ else ""
    if equal:
        table = wide(
            html_table(("", "all runs" if len(runs) > 1 else next(iter(runs))), [*equal.items()])
        )
        folded = f"<details><summary>Equal in all runs</summary>{table}</details>"
        said += folded if differ else table
    return f"<h2>Machine and versions</h2>{said}"


def _table(runs: Mapping[str, Run], values: Mapping[str, Mapping[str, str]]) -> str:
    """A table of values by name and run; many runs are rows, which fit on any screen."""
    # No name above the first column: a run could have the same.
    if len(runs) > max(4, len(values)) and "" not in values:
        rows = [(run, *(each.get(run, "") for each in values.values())) for run in runs]
        return wide(html_table(("", *values), rows))
    rows = [(key, *(each.get(run, "") for run in runs)) for key, each in values.items()]
    return wide(html_table(("", *runs), rows))


def _flat_about(about: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = []
    for key, value in about.items():
        if isinstance(value, Mapping):
            rows += [(str(name), str(one)) for name, one in value.items()]
        elif isinstance(value, list):
            counts = Counter(map(str, value))
            rows.append((key, ", ".join(f"{count} x {one}" for one, count in counts.items())))
        else:
            rows.append((key, re.sub(r"^([0-9a-f]{8})[0-9a-f]{32}\b", r"\1", str(value))))
    return rows
