"""Reads run directories, also of runs that go on, were killed, or are of another version.

What is missing becomes a sentence in `Run.missing`. A file that cannot be read is an error, and so
is a folder that holds nothing of a run.
"""

from __future__ import annotations

import math
import os
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, TypeAlias

from megatron_ext.files.json_files import read_json
from megatron_ext.files.opening import is_regular
from megatron_ext.files.run_dir import ABOUT_FILE, CONFIG_FILE, LAYERS_FILE, METRICS_FILE
from megatron_ext.files.yaml_files import read_yaml
from megatron_ext.telemetry.step_lines import read_lines
from megatron_ext.trainer.reports.layers import LayerLines, Layers

Metrics: TypeAlias = Sequence[Mapping[str, Any]]
"""Lines of a run's `metrics.jsonl`, by step."""

SHOWN = ("loss", "imbalance_before", "imbalance_after", "step_ms", "tokens_per_s", "replicas")
"""The metrics of a step that a report shows."""

_BY_PROGRAM = {
    "loss": "`take` was given no loss",
    "tokens_per_s": "`take` was given no tokens, so nothing is said about speed",
    "step_ms": "only the first step is there, whose time is not known",
}
"""What is said where no step of a program with `StepMetrics` has a metric."""

_FILES = (METRICS_FILE, CONFIG_FILE, LAYERS_FILE, ABOUT_FILE)

_SETTING = r"\+*[\w./@]+="
_BETWEEN_SETTINGS = rf",(?={_SETTING})"
"""In the name of a sweep's run, such as `balance.slots=1,profile.ranks=[0,1]`."""

_CUT = reprlib.Repr()
_CUT.maxlevel, _CUT.maxlist, _CUT.maxstring, _CUT.maxother = 3, 30, 200, 200


@dataclass(frozen=True)
class Run:
    """What could be read of a run directory."""

    metrics: Metrics
    layers: Layers | None
    """None where the run has only means of all layers."""
    settings: Mapping[str, str]
    """Of the resolved configuration, `section.name` to value; empty if it is not there."""
    about: Mapping[str, Any]
    """Machine, versions and start, as `run_log` wrote them; empty if it did not."""
    missing: Sequence[str]
    """What is not there or not of one kind, a sentence without its period each."""

    @property
    def strategy(self) -> str | None:
        """How the run balanced all its steps; None if that is not known, or changed."""
        known = {step["strategy"] for step in self.metrics if isinstance(step.get("strategy"), str)}
        known = known or {self.settings.get("balance.strategy")}
        return known.pop() if len(known) == 1 else None

    @property
    def num_ranks(self) -> float:
        """Ranks of the run; NaN if that is not known."""
        return _positive(self.about.get("num_ranks", self.settings.get("num_ranks")))

    @property
    def peak_flops_per_s(self) -> float:
        """Peak of a GPU by the recipe's machine; NaN if it names none, or the run had no GPU."""
        peak = self.settings.get("hardware.constants.peak_flops_per_s.value")
        return _positive(peak if self.about.get("gpus") else None)


def _positive(value: Any) -> float:
    """Return a number above 0 of a file; NaN for anything else.

    >>> _positive("989e12"), _positive(0), _positive(None), _positive("many"), _positive(True)
    (989000000000000.0, nan, nan, nan, nan)
    """
    with suppress(ValueError):
        value = float(value) if isinstance(value, str) else value
    found = number(value)
    return found if found > 0 else math.nan


def read_runs(folders: Sequence[Path]) -> dict[str, Run]:
    """Read runs, by the names of their folders, or by their paths if names repeat.

    The runs of a sweep have short names: "slots 1" for the folder `balance.slots=1`.

    Raises:
        FileNotFoundError: A folder holds nothing of a run.
        ValueError: A folder is given twice, or a file cannot be read; the message names it.
    """
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise ValueError(f"a run is there twice in {', '.join(map(str, folders))}")
    names = _short_names([folder.resolve().name for folder in folders])
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    return {name: _read_run(folder) for name, folder in zip(names, folders, strict=True)}


def _short_names(names: Sequence[str]) -> Sequence[str]:
    """Name runs by settings without sections, if all names are settings and stay different.

    >>> _short_names(["balance.slots=1,model.dtype=bf16", "balance.slots=2,model.dtype=bf16"])
    ['slots 1, dtype bf16', 'slots 2, dtype bf16']
    >>> _short_names(["none", "balance.slots=1"])
    ['none', 'balance.slots=1']
    """
    settings = [
        [setting.partition("=") for setting in re.split(_BETWEEN_SETTINGS, name)] for name in names
    ]
    keys = {key for of_name in settings for key, _, _ in of_name}
    short = {key: key.lstrip("+").rpartition(".")[2] for key in keys}
    named = [", ".join(f"{short[key]} {value}" for key, _, value in each) for each in settings]
    is_of_sweep = all(re.match(_SETTING, name) for name in names)
    is_unique = len(set(short.values())) == len(keys) and len(set(named)) == len(names)
    return named if is_of_sweep and is_unique else names


def run_files(folder: Path) -> list[Path]:
    """Return the files that a report reads, of those that are there."""
    return [folder / name for name in _FILES if is_regular(folder / name)]


def column(metrics: Metrics, name: str) -> list[float]:
    """Return a metric of every step; NaN where it is not known."""
    return [number(step.get(name)) for step in metrics]


def number(value: Any) -> float:
    """Return a number as it came out of JSON; NaN for anything else.

    >>> number(3), number(None), number("3"), number(True), number(float("inf")), number(1e200)
    (3.0, nan, nan, nan, nan, nan)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    # Of larger ones, a sum or a product may be no number.
    return float(value) if abs(value) < 1e150 else math.nan


def _read_run(folder: Path) -> Run:
    there = run_files(folder)
    if not there:
        below = sorted(str(file.parent) for file in folder.glob(f"*/{METRICS_FILE}"))
        hint = f"; there are runs in it: {', '.join(below)}" if below else ""
        raise FileNotFoundError(f"{folder} is no run directory: it has no {METRICS_FILE}{hint}")
    settings: dict[str, str] = {}
    if folder / CONFIG_FILE in there:
        settings = dict(_flat(read_yaml(folder / CONFIG_FILE, follow=False)))
    # `StepMetrics` writes these settings only, and not what it was not told.
    is_program = bool(settings) and all(
        name == "num_ranks" or name.startswith("balance.") for name in settings
    )
    missing = [
        f"{name} is {'no file of its own' if os.path.lexists(folder / name) else 'not there'}"
        for name in _FILES
        if folder / name not in there and not (is_program and name == ABOUT_FILE)
    ]
    lines = {file.name: read_lines(file) for file in there if file.suffix == ".jsonl"}
    by_step = {line["step"]: line for line in lines.get(METRICS_FILE, ())}
    metrics = [by_step[step] for step in sorted(by_step)]
    if not metrics:
        missing.append("no step is finished yet")
    for metric in SHOWN:
        without = sum(map(math.isnan, column(metrics, metric)))
        if is_program and metric in _BY_PROGRAM:
            missing += [_BY_PROGRAM[metric]] * (without == len(metrics) > 0)
        elif without:
            missing.append(f"{without} of {len(metrics)} steps have no number {metric!r}")
    missing += _changes(metrics)
    layer_lines = LayerLines()
    for line in lines.get(LAYERS_FILE, ()):
        try:
            layer_lines.add(line)
        except (LookupError, TypeError, ValueError, ArithmeticError):
            where = f"{folder / LAYERS_FILE}, step {line['step']}"
            raise ValueError(f"{where}: not the layers of a step") from None
    return Run(
        metrics,
        layer_lines.layers(),
        settings,
        read_json(folder / ABOUT_FILE) if folder / ABOUT_FILE in there else {},
        missing,
    )


def _changes(metrics: Metrics) -> list[str]:
    """Say how the steps were balanced, if the run continued with another strategy."""
    known = (line for line in metrics if isinstance(line.get("strategy"), str))
    parts = [
        (_CUT.repr(strategy), [line["step"] for line in lines])
        for strategy, lines in groupby(known, lambda line: line["strategy"])
    ]
    said = ", ".join(f"by {how} in steps {steps[0]} to {steps[-1]}" for how, steps in parts)
    return [f"balanced {said}; the numbers are of all these steps"] if len(parts) > 1 else []


def _flat(settings: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield settings by their whole names, with long values cut."""
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", _CUT.repr(value) if isinstance(value, list) else str(value)
