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
    load_library()
    counts = torch.ops.megatron_ext.count_load(routing_map_NE)
    ranks = ep_group.size()
    if ranks == 1:
        return counts[None]
    load = counts.new_empty(ranks * counts.numel())
    dist.all_gather_into_tensor(load, counts, group=ep_group)
    return load.view(ranks, -1)
