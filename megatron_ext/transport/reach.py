"""Finds the NVLink domains of an EP group: the ranks that reach each other's memory.

Every rank tries to reach each other rank of its EP group; names and numbers of devices decide
nothing. Ranks of a domain are neighbours in the EP group, all domains are equally large, and inside
a domain every rank reaches every other. So one number, the ranks per domain, describes all domains.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup

_T = TypeVar("_T")


def gather(value: _T, group: ProcessGroup | None = None) -> list[_T]:
    """Return the values of all ranks, by rank; all ranks call. The value must pickle.

    Without a group, the ranks are those of the whole run.
    """
    values: list[_T | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values  # type: ignore[return-value]


def domain_of(rank: int, domain_ranks: int) -> range:
    """Return the ranks of a rank's domain.

    >>> domain_of(5, domain_ranks=4)
    range(4, 8)
    """
    first = rank - rank % domain_ranks
    return range(first, first + domain_ranks)


def gather_obstacles(mine: Sequence[str], planning_group: ProcessGroup) -> list[list[str]]:
    """Gather the reasons why ranks of an EP group do not reach others; all planning ranks call.

    `mine` are those of this rank, by rank of the EP group, or "". The result has the reason why
    rank a does not reach rank b at [a][b], and is equal on all ranks. With expert tensor
    parallelism the planning group has the EP groups of all shards, side by side. All shards of a
    replica move alike, so an obstacle of one shard counts for all shards.
    """
    rows = gather(list(mine), planning_group)
    num_shards = len(rows) // len(mine)
    return [
        [next(filter(None, each), "") for each in zip(*rows[i : i + num_shards], strict=True)]
        for i in range(0, len(rows), num_shards)
    ]


def first_obstacle(obstacles: Sequence[Sequence[str]], domain_ranks: int) -> str | None:
    """Describe the first pair of a domain's ranks that do not reach each other; None without one.

    >>> first_obstacle([["", "it is on another machine"], ["", ""]], domain_ranks=2)
    'rank 0 does not reach rank 1: it is on another machine'
    """
    for rank, row in enumerate(obstacles):
        for peer in domain_of(rank, domain_ranks):
            if peer < len(row) and row[peer]:
                return f"rank {rank} does not reach rank {peer}: {row[peer]}"
    return None


def largest_domain(obstacles: Sequence[Sequence[str]]) -> int:
    """Return the most ranks that the domains of an EP group can have.

    >>> far = "it is on another machine"
    >>> largest_domain([["", "", far, far], ["", "", far, far]] + [[far, far, "", ""]] * 2)
    2
    >>> largest_domain([["a rank without memory to share"] * 2] * 2)
    1
    """
    num_ranks = len(obstacles)
    sizes = (
        size
        for size in range(num_ranks, 1, -1)
        if num_ranks % size == 0 and first_obstacle(obstacles, size) is None
    )
    return next(sizes, 1)


def reaches_across(obstacles: Sequence[Sequence[str]], domain_ranks: int) -> bool:
    """Return whether some rank reaches a rank of another domain: replicas do not use that link.

    >>> reaches_across([["", ""], ["no link", ""]], domain_ranks=1)
    True
    """
    return any(
        not why
        for rank, row in enumerate(obstacles)
        for peer, why in enumerate(row)
        if peer not in domain_of(rank, domain_ranks)
    )
