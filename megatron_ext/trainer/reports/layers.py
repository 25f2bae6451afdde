"""What `layers.jsonl` says of a run's layers, cut down to what a page can show while it is read.

Legend: T steps, L layers, R ranks of the EP group, K steps whose rank loads are kept.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

COLUMNS = ("imbalance_before", "imbalance_after", "imbalance_after_max", "replicas")
"""The columns that a page shows; each has a number a layer."""

_RANK_LOADS = ("rank_loads_before", "rank_loads_after")

_KEPT_STEPS = 20
"""At most twice so many steps keep the loads of their ranks, evenly over the run: of each step they
would be most of a page's bytes."""

_WORST = 5
"""Microbatches that are kept as the worst."""


@dataclass(frozen=True)
class Layers:
    """The layers of a run's steps."""

    steps: Sequence[int]
    """T of them."""
    numbers: Sequence[int]
    """L of them, 1-based, as in Megatron."""
    columns: Mapping[str, np.ndarray]
    """Each of `COLUMNS`: float64 [L, T]; NaN where it is not known."""
    kept_steps: Sequence[int]
    """K of them."""
    rank_loads: Mapping[str, np.ndarray]
    """Before and after balancing, each load / mean of its layer: float64 [K, L, R]."""
    worst: Sequence[Mapping[str, Any]]
    """The microbatches with the largest imbalance before balancing, at most one of a step: step,
    layer, microbatch, before and after (loads of R ranks), and replicas (expert, home, rank)."""

    def worst_layer(self) -> tuple[int, float] | None:
        """The layer with the largest mean imbalance after balancing; None if that is not known."""
        after = self.columns["imbalance_after"]
        known = ~np.isnan(after).all(axis=1)
        if not known.any():
            return None
        means = np.where(known, np.nansum(after, 1) / np.maximum((~np.isnan(after)).sum(1), 1), 0)
        return self.numbers[int(np.argmax(means))], float(means.max())


class LayerLines:
    """Takes the lines of a file one by one; what does not fit its line is left out."""

    def __init__(self) -> None:
        self._steps: dict[int, tuple[list[int], list[np.ndarray]]] = {}
        self._kept: list[tuple[int, list[int], list[np.ndarray]]] = []
        self._stride = 1
        self._worst: list[tuple[float, int, dict[str, Any]]] = []

    def add(self, line: Mapping[str, Any]) -> None:
        """Take the line of a step."""
        step, layers = line["step"], line.get("layer")
        if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
            return
        self._steps[step] = layers, [_numbers(line.get(name), len(layers)) for name in COLUMNS]
        if (len(self._steps) - 1) % self._stride == 0:
            self._keep_rank_loads(step, layers, line)
        if (worst := _microbatch(line.get("worst"))) is not None:
            before = np.array(worst["before"])
            candidate = (before.max() / max(before.mean(), 1), step, {"step": step} | worst)
            if all(step != other for _, other, _ in self._worst):
                self._worst = heapq.nlargest(
                    _WORST, [*self._worst, candidate], key=lambda each: each[:2]
                )

    def _keep_rank_loads(self, step: int, layers: list[int], line: Mapping[str, Any]) -> None:
        loads = [_matrix(line.get(name), len(layers)) for name in _RANK_LOADS]
        if any(of is None for of in loads) or len({of.shape for of in loads}) != 1:  # type: ignore[union-attr]
            return
        self._kept.append((step, layers, [_over_mean(of) for of in loads if of is not None]))
        if len(self._kept) > 2 * _KEPT_STEPS:
            self._kept, self._stride = self._kept[::2], self._stride * 2

    def layers(self) -> Layers | None:
        """Return what was taken; None if it was nothing."""
        if not self._steps:
            return None
        steps = sorted(self._steps)
        numbers = sorted({layer for layers, _ in self._steps.values() for layer in layers})
        row = {layer: place for place, layer in enumerate(numbers)}
        columns = np.full((len(COLUMNS), len(numbers), len(steps)), np.nan)
        for place, step in enumerate(steps):
            layers, values = self._steps[step]
            columns[:, [row[layer] for layer in layers], place] = values
        # A run that went on with another number of ranks shows the last.
        ranks = self._kept[-1][2][0].shape[1] if self._kept else 0
        kept = sorted(
            (one for one in self._kept if one[2][0].shape[1] == ranks), key=lambda k: k[0]
        )
        loads = np.full((2, len(kept), len(numbers), ranks), np.nan)
        for place, (_, layers, both) in enumerate(kept):
            loads[:, place, [row[layer] for layer in layers]] = both
        return Layers(
            steps,
            numbers,
            dict(zip(COLUMNS, columns, strict=True)),
            [step for step, _, _ in kept],
            {"before": loads[0], "after": loads[1]},
            [worst for _, _, worst in self._worst],
        )


def _numbers(values: Any, length: int) -> np.ndarray:
    """A list as float64 [length]; NaN where it holds no numbers."""
    try:
        array = np.array(values, dtype=np.float64)
    except (ValueError, TypeError, OverflowError):
        array = np.empty(0)
    if array.shape != (length,):
        return np.full(length, np.nan)
    return np.where(np.isfinite(array), array, np.nan)


def _matrix(values: Any, length: int) -> np.ndarray | None:
    try:
        array = np.array(values, dtype=np.float64)
    except (ValueError, TypeError, OverflowError):
        return None
    is_whole = array.ndim == 2 and len(array) == length and array.shape[1] > 0
    return array if is_whole and np.isfinite(array).all() else None


def _over_mean(loads: np.ndarray) -> np.ndarray:
    means = loads.mean(axis=1, keepdims=True)
    return np.divide(loads, means, out=np.ones_like(loads), where=means > 0)


def _microbatch(found: Any) -> dict[str, Any] | None:
    """The microbatch of a line as a page draws it; None if something of it is missing or wrong."""
    if not isinstance(found, Mapping):
        return None
    before = _matrix([found.get("rank_loads_before")], 1)
    after = _matrix([found.get("rank_loads_after")], 1)
    slots, experts = found.get("slots"), found.get("num_experts")
    if before is None or after is None or before.shape != after.shape:
        return None
    ranks = before.shape[1]
    if type(experts) is not int or experts < ranks or experts % ranks:
        return None
    if not isinstance(slots, list) or len(slots) != ranks:
        return None
    if not all(isinstance(of_rank, list) for of_rank in slots):
        return None
    replicas = [
        [expert, expert // (experts // ranks), rank]
        for rank, of_rank in enumerate(slots)
        for expert in of_rank
        if type(expert) is int and 0 <= expert < experts
    ]
    named = {name: found.get(name) for name in ("layer", "microbatch")}
    if not all(type(value) is int for value in named.values()):
        return None
    return named | {"before": before[0].tolist(), "after": after[0].tolist(), "replicas": replicas}
