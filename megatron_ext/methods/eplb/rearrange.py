"""EPLB's full rearrangement: chooses a rank for every expert, mains included, and for replicas.

A rearrangement is for a moment at which weights are rewritten anyway, as when a checkpoint is
saved: between two microbatches a rearrangement would move most of the weights. A checkpoint has
every expert once (`rearrange`); the run chooses replicas anew. Legend: B loads, E logical experts,
P physical experts, N nodes, R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_ext.balance.metrics import home_loads, imbalances
from megatron_ext.files.loads import Loads


@dataclass(frozen=True, eq=False)
class Rearranged:
    """An arrangement of a layer's experts that makes its ranks equally loaded over a trace."""

    expert: np.ndarray
    """Logical expert at each position, rank by rank: int64 [E]."""
    before: float
    """Mean imbalance of the layer's loads with the experts on their old ranks."""
    after: float
    """Mean imbalance of the layer's loads with this arrangement."""


def rearrange(loads: Loads, *, num_groups: int, num_nodes: int) -> dict[int, Rearranged]:
    """Rearrange each layer of a trace, by its number, with `relayout` and each expert once.

    Raises:
        ValueError: The loads are of no known layer, or the numbers do not divide each other.
    """
    if "layer" not in loads.trace:
        raise ValueError("the loads are of no known layer: experts are moved layer by layer")
    _, ranks, experts = loads.load.shape
    layers = np.array(loads.layers())
    rearranged = {}
    for layer in np.unique(layers).tolist():
        load = loads.load[layers == layer]
        expert = relayout(
            load.sum((0, 1)).numpy(),
            num_physical=experts,
            num_groups=num_groups,
            num_nodes=num_nodes,
            num_ranks=ranks,
        )
        before, after = (
            float(imbalances(home_loads(one)).mean()) for one in (load, load[..., expert])
        )
        rearranged[layer] = Rearranged(expert, before, after)
    return rearranged


def relayout(
    expert_load: np.ndarray, *, num_physical: int, num_groups: int, num_nodes: int, num_ranks: int
) -> np.ndarray:
    """Arrange all logical experts, the hot ones more than once, so that ranks are equally loaded.

    Every rank has equally many of the P positions, every node equally many ranks, and every group
    equally many experts in the order of their ids. Loads are int [E].

    The policy is hierarchical if the number of nodes divides the number of groups. Groups of
    experts, to which a router may be limited, are packed on nodes whole; then each node's hottest
    experts per instance get the node's further positions; then the instances are packed on the
    node's ranks. Otherwise the policy is global: all experts are one group of one node. The
    instances of an expert share the expert's load evenly.

    Returns:
        Logical expert at each position, int64 [P], rank by rank.

    Raises:
        ValueError: The numbers do not divide each other; the message names them.

    >>> relayout(np.array([10, 3, 2, 1]), num_physical=6, num_groups=1, num_nodes=1,
    ...          num_ranks=2).tolist()
    [0, 0, 3, 0, 1, 2]

    Source: DeepSeek EPLB, README (both policies and the example, which is met exactly).
    """
    experts = len(expert_load)
    for what, of, name, by in (
        (experts, "experts", "groups", num_groups),
        (num_ranks, "ranks", "nodes", num_nodes),
        (num_physical, "physical experts", "ranks", num_ranks),
    ):
        if by < 1 or what % by:
            raise ValueError(f"{of} ({what}) must be a multiple of {name} ({by})")
    if num_physical < experts:
        raise ValueError(f"physical experts ({num_physical}) must be >= experts ({experts})")
    if num_groups % num_nodes:
        num_groups = num_nodes = 1
    load = np.asarray(expert_load, dtype=np.float64)

    group_size = experts // num_groups
    placed = []
    for groups in _pack(load.reshape(num_groups, -1).sum(1), num_nodes):
        local = np.concatenate(
            [np.arange(group * group_size, (group + 1) * group_size) for group in groups]
        )
        instances, share = _replicate(load[local], num_physical // num_nodes)
        for of_rank in _pack(share, num_ranks // num_nodes):
            placed.append(local[instances[of_rank]])
    return np.concatenate(placed)


def _replicate(load: np.ndarray, places: int) -> tuple[np.ndarray, np.ndarray]:
    """Give the positions beyond one an expert to the experts with most load per instance.

    Returns:
        Expert and share of the load of each position; first the experts in their order.
    """
    count = np.ones(len(load), dtype=np.int64)
    more = []
    for _ in range(places - len(load)):
        hottest = int(np.argmax(load / count))
        count[hottest] += 1
        more.append(hottest)
    instances = np.array([*range(len(load)), *more], dtype=np.int64)
    return instances, (load / count)[instances]


def _pack(weight: np.ndarray, packs: int) -> list[list[int]]:
    """Put the items, heaviest first, into the lightest pack that is not full; packs end equal."""
    size = len(weight) // packs
    if size == 1:
        return [[item] for item in range(packs)]
    packed: list[list[int]] = [[] for _ in range(packs)]
    total = [0.0] * packs
    for item in np.argsort(-weight, kind="stable").tolist():
        open_packs = [pack for pack in range(packs) if len(packed[pack]) < size]
        lightest = min(open_packs, key=total.__getitem__)
        packed[lightest].append(item)
        total[lightest] += weight[item]
    return packed
