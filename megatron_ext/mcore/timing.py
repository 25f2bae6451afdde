"""How long work takes on ranks that work at the same time."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

_CPU = torch.device("cpu")


def slowest_s(
    work: Callable[[], object],
    group: ProcessGroup | None = None,
    device: torch.device = _CPU,
) -> float:
    """Return the seconds of `work`, which all ranks begin together, on the slowest of them.

    Args:
        work: What this rank does. Work on a GPU counts until it is done.
        group: The ranks, which all call; by default all ranks of the world.
        device: Where the work is done, and where tensors must be for the group's collectives.

    Returns:
        The same value on all ranks, bit by bit.
    """
    dist.barrier(group)
    _wait_for(device)
    started = perf_counter()
    work()
    _wait_for(device)
    elapsed_s = torch.tensor(perf_counter() - started, dtype=torch.float64, device=device)
    dist.all_reduce(elapsed_s, dist.ReduceOp.MAX, group=group)
    return float(elapsed_s)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
