"""Ranks of an EP group as streams of one GPU: their buffers all lie in its memory.

What waits for each other must run at the same time: launches are small, and this is to be imported
before CUDA starts, because it asks for what lets kernels of one GPU wait for each other.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from megatron_ext.transport.reach import domain_of

# A queue for every stream, so that none waits behind another's kernel. Tests of other numbers of
# queues give it themselves, and have a process for each rank.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
# Loading a kernel at its first launch can wait for those that run, which may be another rank's.
os.environ["CUDA_MODULE_LOADING"] = "EAGER"

_Made = TypeVar("_Made")

BLOCKS = 4
"""Of every launch; one multiprocessor has room for several."""

SHARE = 0.03
"""So many of 132 multiprocessors are four blocks, too."""


class VirtualRanks:
    """What the heaps of all ranks share."""

    def __init__(self, num_ranks: int, domain_ranks: int | None = None) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.num_ranks = num_ranks
        self.domain_ranks = domain_ranks or num_ranks
        self.streams = [torch.cuda.Stream() for _ in range(num_ranks)]
        # Torch has 32, and gives them in turn. Two ranks on one stream would wait for each other.
        assert len({stream.cuda_stream for stream in self.streams}) == num_ranks
        self.buffers: list[list[Tensor]] = []  # of each `share`, by rank
        self.values = [0] * num_ranks
        self.all_here = threading.Barrier(num_ranks, timeout=60)
        self.lock = threading.Lock()

    def run(self, make: Callable[[int], _Made], fn: Callable[[_Made], None]) -> None:
        """Run `fn(make(rank))` for all ranks, each in a thread and on a stream of its own.

        All are made before any runs: what a rank allocates waits for what runs on the GPU, which
        may wait for that rank.
        """
        made = [make(rank) for rank in range(self.num_ranks)]
        torch.cuda.synchronize()

        def on_stream(rank: int) -> None:
            try:
                with torch.cuda.stream(self.streams[rank]):
                    fn(made[rank])
            except BaseException:
                self.all_here.abort()
                raise

        with ThreadPoolExecutor(self.num_ranks) as pool:
            futures = [pool.submit(on_stream, rank) for rank in range(self.num_ranks)]
        failures = [future.exception() for future in futures]
        # Peers of a rank that failed only say that they waited for it.
        failures.sort(key=lambda failure: isinstance(failure, threading.BrokenBarrierError))
        for failure in failures:
            if failure is not None:
                raise failure
        torch.cuda.synchronize()


class VirtualHeap:
    """One rank's `megatron_ext.transport.symmetric_heap.SymmetricHeap`."""

    def __init__(self, ranks: VirtualRanks, rank: int) -> None:
        self.rank = rank
        self.num_ranks = ranks.num_ranks
        self.peers = domain_of(rank, ranks.domain_ranks)
        self.device = ranks.device
        self._ranks = ranks
        self._num_shared = 0

    def share(self, num_bytes: int) -> tuple[Tensor, Tensor]:
        """Return this rank's part of what the first rank to ask allocates for all."""
        with self._ranks.lock:
            if self._num_shared == len(self._ranks.buffers):
                zeros = torch.zeros(self.num_ranks, -(-num_bytes // 256) * 256, dtype=torch.uint8)
                self._ranks.buffers.append(list(zeros.to(self.device)))
                torch.cuda.synchronize()
        buffers = self._ranks.buffers[self._num_shared]
        self._num_shared += 1
        addresses = [
            each.data_ptr() if rank in self.peers else 0 for rank, each in enumerate(buffers)
        ]
        return buffers[self.rank][:num_bytes], torch.tensor(addresses, device=self.device)

    def highest(self, value: int) -> int:
        """Return the highest value of all ranks, each of which is a thread."""
        self._ranks.values[self.rank] = value
        self._ranks.all_here.wait()
        highest = max(self._ranks.values)
        self._ranks.all_here.wait()
        return highest

    def close(self) -> None:
        """Do nothing: the memory is one process's."""
