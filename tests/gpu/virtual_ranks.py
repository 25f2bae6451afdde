"""Ranks of an EP group as streams of one GPU: their buffers all lie in its memory.

What waits for each other must run at the same time: launches are small, no two ranks share a
hardware queue, and a call that may wait for the whole GPU is made before anything moves. A rank's
transport is made here, so that its own streams are known. This is to be imported before CUDA
starts, because it asks for many queues.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import product
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from megatron_ext.transport.cuda import CudaTransport
from megatron_ext.transport.reach import domain_of

# A queue for every stream, so that none waits behind another's kernel. Tests of other numbers of
# queues give it themselves, and have a process for each rank.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

BLOCKS = 4
"""Of every launch; one multiprocessor has room for several."""

SHARE = 0.03
"""So many of 132 multiprocessors are four blocks, too."""

POOL = 32
"""Streams of each priority that torch makes, and gives out in turn."""

SPARE_BYTES = 256 << 20
"""The caching allocator has so much of a rank's stream, from before anything moves."""

Thing = TypeVar("Thing")


class Streams(NamedTuple):
    """Of one rank."""

    main: Any
    push: Any
    pull: Any


class VirtualRanks:
    """What the heaps of all ranks share."""

    def __init__(self, num_ranks: int, domain_ranks: int | None = None) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.num_ranks = num_ranks
        self.domain_ranks = domain_ranks or num_ranks
        self._chosen = choose(num_ranks, *_pools(), _queues())
        self.streams = [each.main for each in self._chosen]
        self.buffers: list[list[Tensor]] = []  # of each `share`, by rank
        self.values = [0] * num_ranks
        self.all_here = threading.Barrier(num_ranks, timeout=60)
        self.lock = threading.Lock()

    def transport(self, rank: int, **options: Any) -> CudaTransport:
        """Return a rank's transport, whose pushes and pulls are on streams of this rank alone."""
        urgent, plain = _pools()
        of_rank = self._chosen[rank]
        give_next(of_rank.push, urgent, _draw_urgent)
        give_next(of_rank.pull, plain, torch.cuda.Stream)
        made = CudaTransport(VirtualHeap(self, rank), **options)
        # If it took other streams, or more of them, ranks may wait for each other for ever.
        for used, pool, draw in (
            (of_rank.push, urgent, _draw_urgent),
            (of_rank.pull, plain, torch.cuda.Stream),
        ):
            assert draw() == pool[(pool.index(used) + 1) % len(pool)]
        return made

    def run(self, things: Sequence[Thing], fn: Callable[[Thing], None]) -> None:
        """Run `fn` for each rank's thing, each in a thread and on the rank's stream.

        The things are made by now: with a kernel of another rank under way, what they allocate
        might wait for it, and it for them.
        """
        assert len(things) == self.num_ranks
        self.warm()

        def on_stream(rank: int) -> None:
            try:
                with torch.cuda.stream(self.streams[rank]):
                    fn(things[rank])
            except BaseException:
                self.all_here.abort()
                raise

        with ThreadPoolExecutor(self.num_ranks) as pool:
            futures = [pool.submit(on_stream, rank) for rank in range(self.num_ranks)]
        # Also after a failure: kernels that still wait would write into a later test's memory.
        torch.cuda.synchronize()
        failures = [future.exception() for future in futures]
        # Peers of a rank that failed only say that they waited for it.
        failures.sort(key=lambda failure: isinstance(failure, threading.BrokenBarrierError))
        for failure in failures:
            if failure is not None:
                raise failure

    def warm(self) -> None:
        """Let allocators get what moving needs, while nothing moves: of the device, and pinned."""
        for of_rank in self._chosen:
            for stream, spare in zip(of_rank, (SPARE_BYTES, 8 << 20, 8 << 20), strict=True):
                with torch.cuda.stream(stream):
                    # Small tensors come from a pool of blocks of 2 MB.
                    small = [
                        torch.empty(1 << 20, dtype=torch.uint8, device=self.device)
                        for _ in range(16)
                    ]
                    large = torch.empty(spare, dtype=torch.uint8, device=self.device)
                    large[:1].zero_()
                    large[0].item()
                    del small, large
        pinned = [
            torch.empty(1 << shift, dtype=torch.uint8, pin_memory=True) for shift in range(17)
        ]
        del pinned
        torch.cuda.synchronize()


def choose(
    num_ranks: int,
    urgent: Sequence[Hashable],
    plain: Sequence[Hashable],
    queues: dict[Hashable, int],
) -> list[Streams]:
    """Return streams for each rank, of which no two ranks' share a queue.

    Streams of one rank may, as all of a training do with `CUDA_DEVICE_MAX_CONNECTIONS=1`.

    Args:
        num_ranks: Ranks.
        urgent: Streams of the highest priority, which push.
        plain: Those of the lowest, for the rest.
        queues: The queue of each stream.

    Raises:
        RuntimeError: There are too few queues.
    """
    owners: dict[int, int] = {}
    taken: list[list[Any]] = [[] for _ in range(num_ranks)]
    for pool in (plain, urgent, plain):
        for rank in range(num_ranks):
            used = {stream for streams in taken for stream in streams}
            left = [
                stream
                for stream in pool
                if stream not in used and owners.get(queues[stream], rank) == rank
            ]
            if not left:
                raise RuntimeError(
                    f"{num_ranks} ranks in one process need hardware queues of their own, and the "
                    f"GPU's streams share {len(set(queues.values()))}"
                )
            stream = min(left, key=lambda stream: queues[stream] in owners)
            owners[queues[stream]] = rank
            taken[rank].append(stream)
    return [Streams(*each) for each in taken]


def give_next(wanted: Any, pool: Sequence[Any], draw: Callable[[], Any]) -> None:
    """Draw from torch's pool, until it will give out `wanted` next."""
    before = pool[pool.index(wanted) - 1]
    for _ in range(len(pool)):
        if draw() == before:
            return
    raise RuntimeError("torch does not give out its streams in turn")


def classes_of(
    streams: Sequence[Hashable], held_up: Callable[[Any, Sequence[Any]], Sequence[Any]]
) -> dict[Hashable, int]:
    """Return a number for each stream, the same for those that share a queue.

    `held_up(stream, others)` returns the others whose work waits behind the stream's.
    """
    numbers: dict[Hashable, int] = {}
    left = list(dict.fromkeys(streams))
    while left:
        first, *others = left
        together = [first, *held_up(first, others)]
        numbers |= dict.fromkeys(together, len(set(numbers.values())))
        left = [stream for stream in others if stream not in together]
    return numbers


def _draw_urgent() -> Any:
    return torch.cuda.Stream(priority=torch.cuda.Stream.priority_range()[1])


@cache
def _pools() -> tuple[list[Any], list[Any]]:
    """Return torch's streams of the highest priority and of the lowest, in its turn."""
    return [_draw_urgent() for _ in range(POOL)], [torch.cuda.Stream() for _ in range(POOL)]


@cache
def _queues() -> dict[Hashable, int]:
    """Find out which streams share a queue, by what waits behind a kernel that takes long."""
    words = torch.zeros(1, device="cuda")
    cycles = 20_000_000  # 10 ms and more

    def held_up(stream: Any, others: Sequence[Any]) -> list[Any]:
        nonlocal cycles
        while True:
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                torch.cuda._sleep(cycles)
                end = stream.record_event(torch.cuda.Event(enable_timing=True))
            ends = {}
            for other in others:
                with torch.cuda.stream(other):
                    words.zero_()
                    ends[other] = other.record_event(torch.cuda.Event(enable_timing=True))
            in_time = not end.query()
            torch.cuda.synchronize()
            if in_time:
                return [other for other in others if end.elapsed_time(ends[other]) >= 0]
            cycles *= 4  # The host was slower than the kernel, which has shown nothing.

    urgent, plain = _pools()
    held_up(plain[0], [*plain, *urgent])  # loads the kernels
    return classes_of([*urgent, *plain], held_up)


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


class ByTorch:
    """Stands for the transport of a rank whose replicas are of its own experts: torch moves them.

    No replica of a transport of one rank arrives, but with this one what looks at replicas runs.
    """

    def allocate(self, shape: Any, dtype: Any, device: Any) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    def push(self, transfers: Any, mains: Any, slots: Any, label: str) -> ByTorch:
        for t in transfers:
            for of_segment, into in zip(mains, slots, strict=True):
                into[t.slot_idx] = of_segment[t.main_idx]
        return self

    def pull_add(self, transfers: Any, grads: Any, totals: Any, asides: Any, label: str) -> ByTorch:
        for g, main_idx in product(range(len(totals)), range(len(totals[0]))):
            slots = [t.slot_idx for t in transfers if t.main_idx == main_idx]
            aside = asides[g] and asides[g][main_idx]
            for each in [*grads[g][slots], *([] if aside is None or not slots else [aside])]:
                totals[g][main_idx] += each
            grads[g][slots] = 0
        return self

    def wait(self) -> None:
        pass
