"""The layers of a run from its `layers.jsonl`, cut down while reading to what a page can show.

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

ALIKE = 0.005
"""Imbalances that differ by less are shown as the same number."""

_RANK_LOADS = ("rank_loads_before", "rank_loads_after")

_KEPT_STEPS = 20
"""At most twice so many steps keep the loads of their ranks, evenly over the run: of each step they
would be most of a page's bytes."""

_MOST_LAYERS = 2048
"""Every layer takes memory for every step, and a stranger's lines may each have another one."""

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
        """The layer with the largest mean imbalance after balancing, and that mean.

        None if it is not known, or if all layers are alike.
        """
        after = self.columns["imbalance_after"]
        known = ~np.isnan(after)
        if not known.any():
            return None
        means = np.nansum(after, 1) / np.maximum(known.sum(1), 1)
        worst = int(np.argmax(means))
        if means[worst] - means[known.any(1)].min() < ALIKE:
            return None
        return self.numbers[worst], float(means[worst])


class LayerLines:
    """Takes the lines of a file one by one."""

    def __init__(self) -> None:
        self._steps: dict[int, tuple[list[int], np.ndarray]] = {}
        self._kept: list[tuple[int, list[int], np.ndarray]] = []
        self._stride = 1
        self._worst: list[tuple[float, int, dict[str, Any]]] = []

    def add(self, line: Mapping[str, Any]) -> None:
        """Take the line of a step.

        Raises:
            LookupError, TypeError, ValueError, ArithmeticError: A run writes other lines.
        """
        step, layers = line["step"], list(map(int, line["layer"]))
        if max(layers, default=0) > _MOST_LAYERS:
            raise ValueError
        unknown = [np.nan] * len(layers)
        columns = np.array([line.get(name, unknown) for name in COLUMNS], dtype=np.float64)
        self._steps[step] = layers, columns.reshape(len(COLUMNS), len(layers))
        if _RANK_LOADS[0] in line and layers and (len(self._steps) - 1) % self._stride == 0:
            loads = np.array([line[name] for name in _RANK_LOADS], dtype=np.float64)
            loads = loads.reshape(len(_RANK_LOADS), len(layers), -1)
            means = loads.mean(axis=2, keepdims=True)
            relative = np.divide(loads, means, out=np.ones_like(loads), where=means > 0)
            self._kept.append((step, layers, relative))
            if len(self._kept) > 2 * _KEPT_STEPS:
                self._kept, self._stride = self._kept[::2], self._stride * 2
        if "worst" in line and all(step != other for _, other, _ in self._worst):
            worst = _microbatch(line["worst"])
            before = np.array(worst["before"])
            candidate = (before.max() / max(before.mean(), 1), step, {"step": step} | worst)
            self._worst = heapq.nlargest(
                _WORST, [*self._worst, candidate], key=lambda each: each[:2]
            )

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
        ranks = self._kept[-1][2].shape[2] if self._kept else 0
        kept = sorted(
            (one for one in self._kept if one[2].shape[2] == ranks), key=lambda each: each[0]
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


def _microbatch(found: Mapping[str, Any]) -> dict[str, Any]:
    before, after = np.array([found[name] for name in _RANK_LOADS], dtype=np.float64)
    mains = int(found["num_experts"]) // len(before)
    replicas = [
        [int(expert), int(expert) // mains, rank]
        for rank, of_rank in enumerate(found["slots"])
        for expert in of_rank
        if expert >= 0
    ]
    named = {name: int(found[name]) for name in ("layer", "microbatch")}
    return named | {"before": before.tolist(), "after": after.tolist(), "replicas": replicas}
