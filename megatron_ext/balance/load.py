"""Stage 1: the exact load of this microbatch, equal on every rank of the EP group.

Takes the router's choices and gives the int64 [R, E] load to the planner. Legend: N local tokens, E
logical experts, R ranks of the EP group.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.ops import load_library


def gather_load(routing_map_NE: Tensor, ep_group: dist.ProcessGroup) -> Tensor:
    """Count this rank's assignments and gather the counts of all ranks: the exact load.

    Args:
        routing_map_NE: The router's choices, bool [N, E]; N may differ between ranks and be 0.
        ep_group: The expert-parallel group; with one rank nothing is sent.

    Returns:
        Assignments from each source rank to each logical expert, int64 [R, E], on the device of
        `routing_map_NE`.
    """
    return gather_counts(routing_map_NE, ep_group)


def gather_counts(
    routing_map_NE: Tensor, ep_group: dist.ProcessGroup, tail: Tensor | None = None
) -> Tensor:
    """As `gather_load`, with room for a number of each rank behind its counts.

    Args:
        routing_map_NE: As for `gather_load`.
        ep_group: As for `gather_load`.
        tail: This rank's number, int64 [1], on the device of `routing_map_NE`.

    Returns:
        The load, int64 [R, E]; with `tail` the numbers are in a column more, [R, E + 1].
    """
    load_library()
    counts = torch.ops.megatron_ext.count_load(routing_map_NE, tail)
    ranks = ep_group.size()
    if ranks == 1:
        return counts[None]
    gathered = counts.new_empty(ranks * counts.numel())
    dist.all_gather_into_tensor(gathered, counts, group=ep_group)
    return gathered.view(ranks, -1)
