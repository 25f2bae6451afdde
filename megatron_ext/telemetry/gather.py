"""Brings the numbers of a step's MoE layers, of all pipeline stages, to every rank.

All ranks make two reductions: one of maxima, which also gives the sizes of the step, and one of
sums, in which one rank alone writes a number, or one rank of each EP group adds to it.

Legend: G EP groups that hold the same experts, L layers of the model, M microbatches of a step,
    R ranks of an EP group, E logical experts, S slots per rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from megatron_ext.balance.bounds import lower_bound
from megatron_ext.balance.metrics import home_loads, imbalances
from megatron_ext.telemetry.names import HOT
from megatron_ext.telemetry.recorder import Computed

_PERCENTILES = (50, 90, 99)

_CELL = (
    "imbalance_before",
    "imbalance_after",
    "maxvio",
    "replicas",
    "rank_sends",
    "pushed_bytes",
    "pulled_bytes",
    "bound_gap",
    "rows_over_capacity",
)
"""Numbers of one layer in one microbatch, on one EP group."""


class Place(NamedTuple):
    """A rank's position among the ranks that hold the same experts."""

    group: int
    """The rank's EP group, from 0 to `groups - 1`."""
    groups: int
    """EP groups that hold the same experts (G)."""
    ep_size: int
    """Ranks of an EP group (R)."""
    speaks: bool
    """Whether the rank reports for its EP group and for all shards of the experts."""
    num_layers: int
    """Layers of the model, with those of multi-token prediction (L)."""


@dataclass(frozen=True)
class GatheredStep:
    """The numbers of a step, of all ranks; equal on all ranks."""

    cells: dict[str, np.ndarray]
    """By name of `_CELL`: float64 [G, L, M]; NaN for a forward that was not counted."""
    num_experts: tuple[int, ...]
    """Experts of each layer (E); 0 for a layer that counted nothing."""
    rank_loads: np.ndarray
    """Assignments of each rank before and after, of all microbatches and EP groups: int64 [2, L,
    R]."""
    expert_loads: np.ndarray
    """Assignments to each expert, of all microbatches and EP groups: int64 [L, largest E]."""
    num_slots: int
    """Slots of a rank (S), in the layer with most slots."""
    worst: dict[str, Any]
    """The microbatch and layer with the largest imbalance before, as in `layers.jsonl`."""
    largest: dict[str, float]
    """The ranks' own numbers: the largest of all ranks."""

    def metrics(self) -> dict[str, float]:
        """Return the step's metrics, named as in `METRICS`; {} without counted forwards."""
        numbers = {name: values[~np.isnan(values)] for name, values in self.cells.items()}
        if not numbers["replicas"].size:
            return {}
        metrics: dict[str, float] = {}
        for name in ("imbalance_before", "imbalance_after"):
            metrics[name] = float(numbers[name].mean())
        for name in ("imbalance_before", "imbalance_after"):
            percentiles = np.percentile(numbers[name], _PERCENTILES)
            for percent, value in zip(_PERCENTILES, percentiles, strict=True):
                metrics[f"{name}_p{percent}"] = float(value)
            metrics[f"{name}_max"] = float(numbers[name].max())
        if (gaps := numbers["bound_gap"]).size:
            metrics["bound_gap"] = float(gaps.mean())
        if (over := numbers["rows_over_capacity"]).size:
            metrics["rows_over_capacity"] = float(over.sum())
        metrics["maxvio"] = float(numbers["maxvio"].mean())
        metrics["replicas"] = float(numbers["replicas"].mean())
        metrics["replicas_max"] = float(numbers["replicas"].max())
        metrics["rank_sends_max"] = float(numbers["rank_sends"].max())
        if self.num_slots:
            slots = self.rank_loads.shape[-1] * self.num_slots
            metrics["slot_use"] = metrics["replicas"] / slots
            for name in ("pushed_bytes", "pulled_bytes"):
                metrics[name] = float(numbers[name].sum())
        return metrics | self._experts() | self.largest

    def layers(self, *, with_experts: bool) -> dict[str, Any]:
        """Return the step's columns of `layers.jsonl`, without the step's number.

        Columns have one entry for each layer of the column `layer`:

            imbalance_before, imbalance_after           mean over microbatches and EP groups
            imbalance_before_max, imbalance_after_max   largest of them
            replicas                                    mean, of a microbatch
            rank_loads_before, rank_loads_after         assignments of each rank of an EP group
            expert_loads                                assignments to each expert

        Loads are sums over the step's microbatches and EP groups. `worst` is the microbatch and
        layer with the largest imbalance before: its loads, and the logical expert in each slot, or
        -1.
        """
        counted = [layer for layer, experts in enumerate(self.num_experts) if experts]
        columns: dict[str, Any] = {"layer": [layer + 1 for layer in counted]}
        for name in ("imbalance_before", "imbalance_after"):
            columns[name] = self._over_microbatches(np.nanmean, name, counted)
        for name in ("imbalance_before", "imbalance_after"):
            columns[f"{name}_max"] = self._over_microbatches(np.nanmax, name, counted)
        columns["replicas"] = self._over_microbatches(np.nanmean, "replicas", counted)
        for name, loads in zip(("before", "after"), self.rank_loads, strict=True):
            columns[f"rank_loads_{name}"] = loads[counted].tolist()
        if with_experts:
            columns["expert_loads"] = [
                self.expert_loads[layer, : self.num_experts[layer]].tolist() for layer in counted
            ]
        return columns | ({"worst": self.worst} if counted else {})

    def _over_microbatches(self, how: Any, name: str, layers: list[int]) -> list[float]:
        return how(self.cells[name][:, layers], axis=(0, 2)).tolist() if layers else []

    def _experts(self) -> dict[str, float]:
        """Return the mean number of experts of a layer without tokens, and with many tokens."""
        loads = [
            self.expert_loads[layer, :experts]
            for layer, experts in enumerate(self.num_experts)
            if experts
        ]
        return {
            "dead_experts": float(np.mean([(each == 0).sum() for each in loads])),
            "hot_experts": float(np.mean([(each > HOT * each.mean()).sum() for each in loads])),
        }


def gather_step(
    computed: Sequence[Computed], place: Place, own: Mapping[str, float]
) -> GatheredStep:
    """Gather the numbers of a step from all ranks; all ranks of the world call.

    The forwards of a layer are in the order of the microbatches. `own` has further numbers of this
    rank, by the same names on all ranks; NaN for no number.
    """
    mine = _Mine.of(computed if place.speaks else (), place.ep_size)
    # First the maxima: sizes, and the layer and EP group with the largest imbalance.
    sizes = [int(mine.microbatches.max(initial=-1)) + 1, mine.experts_in_slots.shape[2]]
    experts, worst = np.zeros(place.num_layers), np.zeros((place.groups, place.num_layers))
    experts[mine.layers] = mine.num_experts
    np.maximum.at(worst[place.group], mine.layers, mine.cells[0])
    known = [-math.inf if math.isnan(value) else value for value in own.values()]
    parts = (np.array(sizes), experts, worst, np.array(known))
    sizes_all, experts, worst, known_all = _reduced(parts, dist.ReduceOp.MAX)
    num_microbatches, num_slots = map(int, sizes_all)
    at = np.unravel_index(int(np.argmax(worst)), worst.shape)
    worst_group, worst_layer = int(at[0]), int(at[1])

    most_experts = int(np.max(experts, initial=0))
    cells = np.zeros((len(_CELL), place.groups, place.num_layers, num_microbatches))
    rank_loads = np.zeros((2, place.num_layers, place.ep_size))
    expert_loads = np.zeros((place.num_layers, most_experts))
    shown = np.zeros(1 + place.ep_size * (2 + num_slots))
    cells[:, place.group, mine.layers, mine.microbatches] = mine.cells
    np.add.at(rank_loads[0], mine.layers, mine.before)
    np.add.at(rank_loads[1], mine.layers, mine.after)
    np.add.at(expert_loads[:, : mine.experts.shape[1]], mine.layers, mine.experts)
    if place.group == worst_group and worst_layer in mine.layers:
        one = int(np.argmax(np.where(mine.layers == worst_layer, mine.cells[0], 0)))
        held = np.full((place.ep_size, num_slots), -1)
        held[:, : mine.experts_in_slots.shape[2]] = mine.experts_in_slots[one]
        of_one = ([mine.microbatches[one]], mine.before[one], mine.after[one], held.ravel())
        shown = np.concatenate(of_one)
    reduced = _reduced((cells, rank_loads, expert_loads, shown), dist.ReduceOp.SUM)
    cells, rank_loads, expert_loads, shown = reduced
    before, after, experts_in_slots = np.split(shown[1:], [place.ep_size, 2 * place.ep_size])
    counted = cells[0] > 0
    return GatheredStep(
        cells={
            name: np.where(counted, values, math.nan)
            for name, values in zip(_CELL, cells, strict=True)
        },
        num_experts=tuple(experts.astype(int).tolist()),
        rank_loads=rank_loads.astype(np.int64),
        expert_loads=expert_loads.astype(np.int64),
        num_slots=num_slots,
        worst={
            "layer": worst_layer + 1,
            "microbatch": int(shown[0]),
            "rank_loads_before": before.astype(int).tolist(),
            "rank_loads_after": after.astype(int).tolist(),
            "slots": experts_in_slots.reshape(place.ep_size, num_slots).astype(int).tolist(),
            "num_experts": int(experts[worst_layer]),
        },
        largest={
            name: float(value)
            for name, value in zip(own, known_all, strict=True)
            if value > -math.inf
        },
    )


@dataclass(frozen=True)
class _Mine:
    """The counted forwards of this rank (F) as arrays, padded to the largest layer."""

    layers: np.ndarray
    """From 0 on, int [F]."""
    microbatches: np.ndarray
    """From 0 on, int [F]."""
    num_experts: np.ndarray
    """int [F]."""
    before: np.ndarray
    """Assignments of each rank if experts stay at home, int [F, R]."""
    after: np.ndarray
    """Assignments that each rank computes, int [F, R]."""
    experts: np.ndarray
    """Assignments to each expert, int [F, E]."""
    experts_in_slots: np.ndarray
    """Logical expert in each slot, or -1: int [F, R, S]."""
    bytes: np.ndarray
    """Bytes pushed and pulled, int [2, F]."""
    gaps: np.ndarray
    """Busiest rank's load over the proven bound, minus 1: float64 [F]. Only the first microbatch of
    each layer has a gap, because a bound takes 0.15 ms with 64 ranks and 256 experts; others, and
    those without a plan, have NaN."""
    rows_over: np.ndarray
    """Rows of all ranks beyond the rank capacity factor, float64 [F]; NaN without this limit."""

    @classmethod
    def of(cls, computed: Sequence[Computed], ep_size: int) -> _Mine:
        seen: dict[int, int] = {}
        microbatches = []
        for one in computed:
            microbatches.append(seen.get(one.layer_number, 0))
            seen[one.layer_number] = microbatches[-1] + 1
        experts = [one.load.numpy().sum(0) for one in computed]
        before = [home_loads(one.load).numpy() for one in computed]
        held = [one.experts_in_slots.numpy() for one in computed]
        moved = [one.pushed_bytes for one in computed], [one.pulled_bytes for one in computed]
        gaps = [
            float(one.rank_loads_after.max()) / float(lower_bound(one.load, one.layout)) - 1
            if microbatch == 0 and one.layout is not None and one.load.any()
            else math.nan
            for one, microbatch in zip(computed, microbatches, strict=True)
        ]
        return cls(
            layers=np.array([one.layer_number - 1 for one in computed], dtype=int),
            microbatches=np.array(microbatches, dtype=int),
            num_experts=np.array([len(each) for each in experts], dtype=int),
            before=_stacked(before, (ep_size,), 0),
            after=_stacked([one.rank_loads_after.numpy() for one in computed], (ep_size,), 0),
            experts=_stacked(experts, (0,), 0),
            experts_in_slots=_stacked(held, (ep_size, 0), -1),
            bytes=np.array(moved),
            gaps=np.array(gaps),
            rows_over=np.array([one.rows_over for one in computed], dtype=np.float64),
        )

    @cached_property
    def cells(self) -> np.ndarray:
        """Return the numbers of `_CELL` of each forward, float64 [len(_CELL), F]."""
        total = self.experts.sum(1)
        hottest = self.experts.max(1, initial=0) * self.num_experts / np.maximum(total, 1)
        mains = self.num_experts // max(self.before.shape[1], 1)
        held = self.experts_in_slots
        homes = np.where(held >= 0, held // np.maximum(mains, 1)[:, None, None], -1)
        sends = [(homes == rank).sum((1, 2)) for rank in range(self.before.shape[1])]
        return np.stack(
            [
                _imbalances(self.before),
                _imbalances(self.after),
                np.where(total > 0, hottest - 1, 0),
                (held >= 0).sum((1, 2)),
                np.max(sends, axis=0),
                *self.bytes,
                self.gaps,
                self.rows_over,
            ]
        )


def _imbalances(rank_loads: np.ndarray) -> np.ndarray:
    return imbalances(torch.from_numpy(rank_loads)).numpy()


def _stacked(arrays: Sequence[np.ndarray], least: tuple[int, ...], fill: int) -> np.ndarray:
    """Stack arrays on a new first axis, each padded at its ends to the largest shape."""
    shapes = [each.shape for each in arrays]
    if len(set(shapes)) == 1:
        return np.stack(arrays)
    shape = tuple(max(sizes) for sizes in zip(least, *shapes, strict=True))
    total = np.full((len(arrays), *shape), fill)
    for place, each in enumerate(arrays):
        total[place][tuple(map(slice, each.shape))] = each
    return total


def _reduced(parts: Sequence[np.ndarray], how: Any) -> list[np.ndarray]:
    """Reduce arrays, of equal shapes on all ranks, over all ranks in one operation."""
    ends = np.cumsum([0, *(part.size for part in parts)])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    total = torch.from_numpy(np.concatenate([part.ravel() for part in parts])).double().to(device)
    dist.all_reduce(total, how)
    values = total.cpu().numpy()
    return [
        values[start:end].reshape(part.shape)
        for (start, end), part in zip(pairwise(ends), parts, strict=True)
    ]
