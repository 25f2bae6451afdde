"""Stage 1: gathers the exact load of this microbatch, equal on every rank of the EP group.

Each rank counts its router's choices; the planner gets the int64 [R, E] load. With expert tensor
parallelism, the T ranks of an expert-TP group hold shards of the same experts, and each rank has
tokens of its own: an EP rank's row of the load is the sum over the T ranks. Legend: N local tokens,
E logical experts, R ranks of the EP group, T ranks of an expert-TP group.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.ops import load_library
from megatron_ext.transport import GathersRows


def load_of(counts: Tensor, ep_size: int) -> Tensor:
    """Return the load, int64 [R, E], from the counts of all ranks that plan alike, [R * T, E].

    >>> load_of(torch.tensor([[3, 1], [0, 2], [5, 0], [1, 1]]), ep_size=2).tolist()
    [[3, 3], [6, 1]]
    """
    if len(counts) == ep_size:
        return counts
    return counts.view(ep_size, -1, counts.shape[1]).sum(1)


def gather_counts(
    routing_map_NE: Tensor,
    group: dist.ProcessGroup,
    tail: Tensor | None = None,
    rows: GathersRows | None = None,
    label: str = "",
) -> tuple[Tensor, Tensor]:
    """Count this rank's assignments and gather the counts of all ranks that plan alike.

    Args:
        routing_map_NE: The router's choices, bool [N, E]; N may differ between ranks and be 0.
        group: The ranks that plan alike: the EP group, or R * T ranks, those of an expert-TP group
            side by side. One rank alone sends nothing.
        tail: One more number of this rank, int64 [1], for a further column.
        rows: Gathers one row per rank of `group` through peer memory; None for a collective.
        label: Names the gather in errors of `rows`.

    Returns:
        Each rank's assignments to each logical expert, int64 [R * T, E] or, with `tail`, [R * T,
        E + 1]; and the marks of this rank's tokens, by which `assign` chooses instances.
    """
    load_library()
    counts, marks = torch.ops.megatron_ext.count_load(routing_map_NE, tail)
    if group.size() == 1:
        return counts[None], marks
    if rows is not None:
        return rows.gather(counts, label), marks
    gathered = counts.new_empty(group.size() * counts.numel())
    dist.all_gather_into_tensor(gathered, counts, group=group)
    return gathered.view(group.size(), -1), marks
