"""Reads run directories as far as they can be read: of a killed run, or of another version.

What is missing becomes a sentence in `Run.missing`, not an error. Only a folder that holds nothing
of a run is refused.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from megatron_ext.files.run_dir import ABOUT_FILE, CONFIG_FILE, LAYERS_FILE, METRICS_FILE
from megatron_ext.trainer.reports.layers import LayerLines, Layers

Metrics: TypeAlias = Sequence[Mapping[str, Any]]
"""Lines of a run's `metrics.jsonl`, by step."""

SHOWN = ("loss", "imbalance_before", "imbalance_after", "step_ms", "tokens_per_s", "replicas")
"""The metrics of a step that a report shows."""

_MOST_SETTINGS = 2000
"""Settings that a configuration may have: many times those of any run."""

_CUT = reprlib.Repr()
_CUT.maxlevel, _CUT.maxlist, _CUT.maxstring, _CUT.maxother = 3, 30, 200, 200

_NAMED = 5
"""Lines that are named among those that cannot be read."""


@dataclass(frozen=True)
class Run:
    """What could be read of a run directory."""

    metrics: Metrics
    layers: Layers | None
    """None where no step says more than the means of all layers."""
    settings: Mapping[str, str]
    """Of the resolved configuration, `section.name` to value; empty if it cannot be read."""
    about: Mapping[str, Any]
    """Machine, versions and start, as `run_log` wrote them; empty if it did not."""
    missing: Sequence[str]
    """What cannot be read or is not there, a sentence without its period each."""

    @property
    def strategy(self) -> str | None:
        """How the run balanced; None if that is not known."""
        return self.settings.get("balance.strategy")

    def column(self, metric: str) -> list[float]:
        """A metric of every step; NaN where it is not known."""
        return [number(step.get(metric)) for step in self.metrics]


def read_runs(folders: Sequence[Path]) -> dict[str, Run]:
    """Read runs, by the names of their folders, or by their paths if names repeat.

    Raises:
        FileNotFoundError: A folder holds nothing of a run.
        ValueError: A folder is given twice.
    """
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise ValueError(f"a run is there twice in {', '.join(map(str, folders))}")
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    return {name: _read_run(folder) for name, folder in zip(names, folders, strict=True)}


def run_files(folder: Path) -> list[Path]:
    """Return the files that a report reads, of those that are there."""
    names = (METRICS_FILE, CONFIG_FILE, LAYERS_FILE, ABOUT_FILE)
    return [folder / name for name in names if (folder / name).is_file()]


def number(value: Any) -> float:
    """Return a number as it came out of JSON; NaN for anything else.

    >>> number(3), number(None), number("3"), number(True), number(float("inf"))
    (3.0, nan, nan, nan, nan)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value) if math.isfinite(value) else math.nan
    except OverflowError:  # An integer of hundreds of digits.
        return math.nan


def _read_run(folder: Path) -> Run:
    if not run_files(folder):
        below = sorted(str(file.parent) for file in folder.glob(f"*/{METRICS_FILE}"))
        hint = f"; there are runs in it: {', '.join(below)}" if below else ""
        raise FileNotFoundError(f"{folder} is no run directory: it has no {METRICS_FILE}{hint}")
    missing: list[str] = []
    by_step = {line["step"]: line for line in _lines(folder / METRICS_FILE, missing)}
    metrics = [by_step[step] for step in sorted(by_step)]
    if not metrics:
        missing.append("no step is finished yet")
    for metric in SHOWN:
        without = sum(math.isnan(number(step.get(metric))) for step in metrics)
        if without:
            missing.append(f"{without} of {len(metrics)} steps have no number {metric!r}")
    settings: dict[str, str] = {}
    about: Mapping[str, Any] = {}
    try:
        settings = _settings(folder / CONFIG_FILE)
    except (ValueError, RecursionError):
        missing.append(f"{CONFIG_FILE} is not there or no readable YAML")
    try:
        found = json.loads(_text(folder / ABOUT_FILE))
        about = found if isinstance(found, dict) else {}
    except (ValueError, RecursionError):
        missing.append(f"{ABOUT_FILE} with machine and versions is not there or no readable JSON")
    layer_lines = LayerLines()
    for line in _lines(folder / LAYERS_FILE, missing):
        layer_lines.add(line)
    return Run(metrics, layer_lines.layers(), settings, about, missing)


def _lines(file: Path, missing: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the objects with a step of a file of JSON lines; an unfinished last line is none."""
    if not file.is_file():
        missing.append(f"{file.name} is not there")
        return
    unread = []
    with file.open(encoding="utf-8", errors="replace") as text:
        for place, line in enumerate(text, 1):
            if not line.endswith("\n"):
                break
            try:
                found = json.loads(line)
            except (ValueError, RecursionError):
                found = None
            if isinstance(found, dict) and type(found.get("step")) is int:
                yield found
            else:
                unread.append(place)
    if unread:
        named = ", ".join(map(str, unread[:_NAMED])) + (", ..." if len(unread) > _NAMED else "")
        missing.append(f"{file.name}: no step can be read in line {named}")


def _text(file: Path) -> str:
    """A file's text; ValueError if it has none, as a pipe that nobody writes to."""
    if not file.is_file():
        raise ValueError(f"{file} is no file")
    try:
        return file.read_text("utf-8")
    except OSError as error:
        raise ValueError(f"{file}: {error}") from None


def _settings(file: Path) -> dict[str, str]:
    """Settings of a run that may be anybody's: what stands there, with nothing looked up for it.

    YAML can hold more, written out, than any memory does: values are cut, names are counted.
    """
    try:
        found = yaml.safe_load(_text(file))
    except yaml.YAMLError as error:
        raise ValueError(f"{file} is no YAML: {error}") from None
    if not isinstance(found, Mapping):
        raise ValueError(f"{file} holds no mapping")
    flat = list(islice(_flat(found), _MOST_SETTINGS + 1))
    if len(flat) > _MOST_SETTINGS:
        raise ValueError(f"{file} holds more than {_MOST_SETTINGS} settings")
    return dict(flat)


def _flat(settings: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", _CUT.repr(value) if isinstance(value, list) else str(value)
