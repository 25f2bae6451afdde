"""Says which GPUs the kernels run on, and how many blocks they use, by the GPU's architecture.

The figures of `BUDGETS` are computed, not measured: with 2 us for a hand-over, a link of 450 GB/s
needs 0.9 MB in flight and a link of 900 GB/s 1.8 MB. A block of a push has 48 KiB of stores under
way, a block of a pull 96 KiB of loads.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch


class Budget(NamedTuple):
    """The part of a GPU that moves replicas while the rest computes."""

    push_blocks: int
    """Blocks of four warps that copy weights. Blocks on all multiprocessors would lock out products
    that need a whole multiprocessor."""
    grad_reduce_share: float
    """Multiprocessors that add gradients, as a share of all."""

    def pull_blocks(self, multiprocessors: int) -> int:
        """Return the number of blocks that add gradients, one a multiprocessor."""
        return math.ceil(self.grad_reduce_share * multiprocessors)


BUDGETS = {9: Budget(32, 0.25), 10: Budget(64, 0.4)}
"""Budgets by the major number of the compute capability: Hopper, then Blackwell. A later GPU has
the last of these budgets."""

PULL_BYTES = 106880
"""Shared memory of a block of a pull (`csrc/cuda/pull_add_peers.cu`). GPUs for workstations, of
compute capability 12, have less."""

OLDEST = min(BUDGETS)
"""The first major number whose GPUs have bulk copies between global and shared memory."""


def budget_of(
    capability: tuple[int, int],
    push_blocks: int | None = None,
    grad_reduce_share: float | None = None,
) -> Budget:
    """Return the budget of a GPU, with the given numbers in place of the architecture's.

    >>> budget_of((9, 0))
    Budget(push_blocks=32, grad_reduce_share=0.25)
    >>> budget_of((12, 1), push_blocks=8)
    Budget(push_blocks=8, grad_reduce_share=0.4)
    """
    usual = BUDGETS[max(major for major in BUDGETS if major <= max(capability[0], OLDEST))]
    return Budget(
        usual.push_blocks if push_blocks is None else push_blocks,
        usual.grad_reduce_share if grad_reduce_share is None else grad_reduce_share,
    )


def what_it_lacks(name: str, capability: tuple[int, int]) -> str | None:
    """Return the reason why the kernels cannot run on a GPU of that name, in one line, or None.

    >>> what_it_lacks("NVIDIA H100 80GB HBM3", (9, 0))
    >>> what_it_lacks("NVIDIA A100-SXM4-80GB", (8, 0))
    'NVIDIA A100-SXM4-80GB (compute capability 8.0) has no bulk copies between global and shared \
memory; the kernels need compute capability 9.0 or later'
    """
    if capability[0] >= OLDEST:
        return None
    return (
        f"{name} (compute capability {capability[0]}.{capability[1]}) has no bulk copies between "
        f"global and shared memory; the kernels need compute capability {OLDEST}.0 or later"
    )


def lack_here() -> str | None:
    """Return the reason why the kernels cannot run on this process's GPU, or None."""
    if not torch.cuda.is_available():
        return None
    return what_it_lacks(torch.cuda.get_device_name(), torch.cuda.get_device_capability())
