"""CRAFT: chooses the layers that get replicas, how many each gets, and their ranks.

    1 estimate   replay a trace with 1, 2, 4, ... replicas in every layer
    2 budget     replicas a rank: given, or where the gain of one more falls below the average
    3 allocate   replicas among layers, so that all layers together gain most
    4 spread     with `--even`: a layer's replicas over ranks, so that all ranks hold equally many
    5 place      the hottest experts of each layer on the least loaded (of these) ranks

This is CRAFT for training: mains do not move, and all layers of a rank share the rank's slots. So a
replica costs no memory of its own, but its weights are sent in every microbatch:
docs/decisions/012-what-craft-leaves-open.md. Legend: L layers, R ranks
of the EP group, E logical experts, S slots per rank, C numbers of replicas that are compared.

Source: CRAFT (A. Zhao et al.), section 4 and Algorithms 1 to 3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_ext.balance.layout import ExpertLayout
from megatron_ext.balance.metrics import home_loads, imbalances
from megatron_ext.balance.placement import Placement
from megatron_ext.balance.strategies.strategy import PlanSettings
from megatron_ext.files.loads import Loads
from megatron_ext.methods.craft import craft
from megatron_ext.methods.eplb import eplb


@dataclass(frozen=True, eq=False, kw_only=True)
class Crafted:
    """A placement, and the gains by which `place` chose it. Balancedness is mean / busiest rank."""

    compared: np.ndarray
    """Numbers of replicas that were compared: int64 [C]."""
    baseline: np.ndarray
    """Mean balancedness of each layer without replicas: float64 [L]."""
    gains: np.ndarray
    """Mean balancedness gained by each number of replicas: float64 [L, C]."""
    placement: Placement
    budget: int
    """Replicas of a rank, over all layers, that could be allocated."""
    counts: np.ndarray
    """Replicas that were allocated to each layer: int64 [L]."""
    achieved: np.ndarray
    """Mean balancedness of each layer with the placement: float64 [L]."""

    def layers(self) -> list[dict[str, Any]]:
        """Return the numbers of each layer, for JSON."""
        replicas = self.placement.num_replicas()
        return [
            {
                "layer": layer,
                "replicas": replicas[str(layer)],
                "slot_limit": self.placement.slot_limit(layer),
                "balancedness_before": float(self.baseline[i]),
                "balancedness_after": float(self.achieved[i]),
                "gains": {
                    str(count): gain
                    for count, gain in zip(
                        self.compared.tolist(), self.gains[i].tolist(), strict=True
                    )
                },
            }
            for i, layer in enumerate(self.placement.layers)
        ]


def place(
    loads: Loads,
    layout: ExpertLayout,
    settings: PlanSettings,
    *,
    budget: int | None,
    even: bool,
    on_load: Callable[[int], object] = lambda count: None,
) -> Crafted:
    """Place replicas for a trace, which is replayed with the settings of the run to come.

    If the trace names no layer, all loads are of one layer. `budget` is the most replicas of a rank
    over all layers; None takes `knee` of the gains. With `even`, `assign` places equally many
    replicas over all layers on every rank, for replicas that stay in memory; otherwise a layer's
    replicas go to the ranks with the layer's least load. `on_load` is called with 1 after every
    replayed load, C + 1 times for each.

    Raises:
        ValueError: There are no slots or no two ranks to place replicas on, or the budget is < 0.
    """
    if layout.slots < 1 or layout.nvlink_domain < 2:
        raise ValueError(
            f"placing needs a slot and another rank: slots ({layout.slots}) must be >= 1, ranks of "
            f"an NVLink domain ({layout.nvlink_domain}) >= 2"
        )
    if budget is not None and budget < 0:
        raise ValueError(f"budget ({budget}) must be >= 0")
    layers = np.array(loads.layers())
    numbers = np.unique(layers).tolist()
    by_layer = [loads.load[layers == number] for number in numbers]
    replay = partial(_replay, layout=layout, settings=settings, on_load=on_load)

    compared, ranks = replica_counts(layout), layout.ep_size
    baseline = np.array([_balancedness(home_loads(one)) for one in by_layer])
    # CRAFT, Algorithm 1. Here loads are split as strategy `craft` does in training, instead of
    # evenly, and replicas go to the ranks with least load.
    reached = [
        [replay(one, _place_layer(one, layout, count)) for count in compared.tolist()]
        for one in by_layer
    ]
    gains = np.array(reached) - baseline[:, None]
    most = layout.slots * len(by_layer)
    best = allocate(gains, compared, most * ranks)
    if budget is None:
        budget = knee(best.gain[::ranks])
    counts = best.counts(min(budget, most) * ranks)
    capacities = assign(counts, ranks) if even else np.full((len(counts), ranks), layout.slots)
    experts_in_slots = torch.stack(
        [
            _place_layer(one, layout, count, capacities[i].tolist())
            for i, (one, count) in enumerate(zip(by_layer, counts.tolist(), strict=True))
        ]
    )
    expert_load = torch.stack([one.sum((0, 1)) for one in by_layer])
    return Crafted(
        compared=compared,
        baseline=baseline,
        gains=gains,
        placement=Placement(tuple(numbers), experts_in_slots, expert_load),
        budget=budget,
        counts=counts,
        achieved=np.array([*map(replay, by_layer, experts_in_slots)]),
    )


def replica_counts(layout: ExpertLayout) -> np.ndarray:
    """Return the numbers of replicas to compare: powers of 2 up to all slots, and all slots.

    >>> replica_counts(ExpertLayout(num_experts=8, ep_size=4, slots=2, nvlink_domain=4)).tolist()
    [1, 2, 4, 8]
    """
    most = layout.ep_size * layout.slots
    return np.array(sorted({1 << power for power in range(most.bit_length())} | {most}))


@dataclass(frozen=True, eq=False)
class Allocation:
    """The best allocation for every number of replicas up to a capacity; see `allocate`."""

    gain: np.ndarray
    """Largest gain of all layers together, by at most so many replicas: float64 [capacity + 1]."""
    _choice: np.ndarray
    """Replicas of layer l if the first l + 1 layers have c, at [l, c]: int64 [L, capacity + 1]."""

    def counts(self, capacity: int) -> np.ndarray:
        """Return the replicas of each layer, int64 [L], at most `capacity` together."""
        counts = np.zeros(len(self._choice), dtype=np.int64)
        for layer in reversed(range(len(counts))):
            counts[layer] = self._choice[layer, capacity]
            capacity -= counts[layer]
        return counts


def allocate(gains: np.ndarray, counts: np.ndarray, capacity: int) -> Allocation:
    """Choose a number of replicas for each layer so that the sum of their gains is greatest.

    The result is for every capacity up to this one. Gains are float64 [L, C], by each number of
    replicas in `counts`, int64 [C], rising; no replicas gain 0. Of equal gains, fewer replicas are
    taken.

    >>> gains = np.array([[0.3, 0.3], [0.2, 0.2]])
    >>> best = allocate(gains, np.array([1, 2]), 2)
    >>> best.counts(2).tolist(), best.counts(1).tolist(), best.gain.tolist()
    ([1, 1], [1, 0], [0.0, 0.3, 0.5])

    Source: CRAFT, Algorithm 2, whose objective is the gain times the number of replicas:
    docs/decisions/012-what-craft-leaves-open.md.
    """
    best = np.zeros(capacity + 1)
    choice = np.zeros((len(gains), capacity + 1), dtype=np.int64)
    for layer, of_layer in enumerate(gains):
        before = best.copy()
        for count, gain in zip(counts.tolist(), of_layer.tolist(), strict=True):
            if count > capacity:
                break
            candidate = before[: capacity + 1 - count] + gain
            is_better = candidate > best[count:]
            best[count:][is_better] = candidate[is_better]
            choice[layer, count:][is_better] = count
    return Allocation(best, choice)


def knee(gain: np.ndarray) -> int:
    """Return the index up to which a step gains at least as much as the average step does.

    At this index the rising curve is highest above the straight line between its ends.

    >>> knee(np.array([0.0, 0.5, 0.7, 0.75, 0.76]))
    2
    """
    steps = max(len(gain) - 1, 1)
    line = gain[0] + (gain[-1] - gain[0]) * np.arange(len(gain)) / steps
    # Rounded, so that on a straight line no point is above it.
    above = np.round(gain - line, 9)
    last = np.flatnonzero(above == above.max())[-1]
    return int(np.searchsorted(gain, gain[last]))


def assign(counts: Sequence[int] | np.ndarray, ranks: int) -> np.ndarray:
    """Spread each layer's replicas, int64 [L], so that ranks end up with equally many.

    Each rank gets the same whole number of a layer's replicas. The remainder goes to the ranks that
    have fewest so far, evenly spaced among ranks that tie, so that neighbors on a node share the
    remainder.

    Returns:
        Replicas of each layer on each rank, int64 [L, R]. Ranks differ by at most 1 in each layer,
        and in each sum over the first layers.

    >>> assign([2, 2, 4, 0], 4).tolist()
    [[1, 0, 1, 0], [0, 1, 0, 1], [1, 1, 1, 1], [0, 0, 0, 0]]

    Source: CRAFT, Algorithm 3 and Figure 10. The text asks for even spacing with both endpoints
    included; the figure and this function take the first rank of every equal part.
    """
    counts = np.asarray(counts)
    assigned = np.repeat(counts[:, None] // ranks, ranks, axis=1)
    totals = assigned.sum(0)
    for layer, rest in enumerate((counts % ranks).tolist()):
        if rest == 0:
            continue
        cutoff = np.sort(totals)[rest - 1]
        fewest = np.flatnonzero(totals < cutoff)
        tied = np.flatnonzero(totals == cutoff)
        missing = rest - len(fewest)  # At least 1: the cutoff is the rest-th smallest.
        spread = tied[np.arange(missing) * len(tied) // missing]
        chosen = np.concatenate([fewest, spread])
        assigned[layer, chosen] += 1
        totals[chosen] += 1
    return assigned


def _place_layer(
    loads: Tensor, layout: ExpertLayout, num_replicas: int, capacities: list[int] | None = None
) -> Tensor:
    """Place so many replicas for all loads of a layer, int64 [B, R, E], together: int32 [R, S]."""
    return eplb.place_replicas(
        loads.sum((0, 1)),
        layout,
        most_replicas=layout.nvlink_domain - 1,
        capacities=capacities,
        num_replicas=num_replicas,
    )


def _replay(
    loads: Tensor,
    placed: Tensor,
    layout: ExpertLayout,
    settings: PlanSettings,
    on_load: Callable[[int], object],
) -> float:
    """Return the mean balancedness of a layer's loads with these replicas."""
    after = []
    for load in loads:
        after.append(craft.share(load, placed, layout, settings).rank_loads())
        on_load(1)
    return _balancedness(torch.stack(after))


def _balancedness(rank_loads: Tensor) -> float:
    """Return the mean over loads, int64 [B, R], of mean / busiest: 1 is perfect."""
    return float((1.0 / imbalances(rank_loads)).mean())
