"""Transport over memory that the ranks of one machine share.

One-sided: the home rank writes into a peer's slot and reads a peer's slot gradients. Who may do so
when is said by generation counters in the shared memory (`csrc/include/megatron_ext/exchange.h`),
never by a barrier. Copies and sums are made by a thread of its own, beside what the caller does
meanwhile.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.ops import load_library
from megatron_ext.transport import Transfer
from megatron_ext.transport.relay import compile_copies
from megatron_ext.transport.shared_heap import share

TIMEOUT_S = 60.0
"""Longest wait for a peer, in seconds. A rank that is late by more (a checkpoint, say) is late for
the gathering of loads before each plan too, and the others wait for it there."""

RELAY_THRESHOLD = 4
"""Most sends of a rank without relays. Not tuned: on 2 cores relays make no difference in time."""

_FLAGS_BYTES = 1 << 16
"""Flags of 256 slots of a rank, 256 bytes each."""


class _UnderWay:
    """A push or a pull; also when dropped, it ends before the next one starts."""

    def __init__(self, finish: Callable[[int], None], generation: int) -> None:
        self._finish = finish
        self._generation = generation

    def wait(self) -> None:
        self._finish(self._generation)


class SharedMemoryTransport:
    """Moves replicas with copies in memory that all ranks of `ep_group` map; all ranks make it.

    Args:
        ep_group: Ranks of one machine, whose processes see each other.
        timeout_s: Longest wait for a peer, in seconds.
        relay_threshold: Most sends of a rank without relays (`relay.py`).
        max_delay_us: Sleep up to so long now and then around flags: for tests of the ordering.

    Raises:
        RuntimeError: The ranks cannot map each other's memory.
    """

    def __init__(
        self,
        ep_group: ProcessGroup,
        *,
        timeout_s: float = TIMEOUT_S,
        relay_threshold: int = RELAY_THRESHOLD,
        max_delay_us: int = 0,
    ) -> None:
        load_library()
        self._group = ep_group
        self._rank = dist.get_rank(ep_group)
        self._num_ranks = dist.get_world_size(ep_group)
        self._relay_threshold = relay_threshold
        self._exchange = torch.classes.megatron_ext.Exchange(self._rank, timeout_s, max_delay_us)
        self._exchange.set_flags(share(_FLAGS_BYTES, "flags", ep_group))
        self._segment_ids: dict[int, int] = {}

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has copied into peers' slots, as home rank or relay."""
        return int(self._exchange.bytes_sent())

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a zeroed buffer that all ranks map; see `Transport.allocate`."""
        if device.type != "cpu":
            raise ValueError(f"transport shared_memory has memory of the CPU only, not of {device}")
        if shape[0] == 0:  # no slots: nothing will be moved
            return torch.zeros(shape, dtype=dtype)
        if math.prod(shape) == 0:
            raise ValueError(f"a segment must have elements, got slots of {list(shape)}")
        num_bytes = math.prod(shape) * dtype.itemsize
        regions = share(num_bytes, f"{dtype} {list(shape)}", self._group)
        buffers = [region.view(dtype).view(shape) for region in regions]
        mine = buffers[self._rank]
        self._segment_ids[mine.data_ptr()] = self._exchange.add_segment(buffers)
        return mine

    def push(
        self,
        transfers: list[Transfer],
        mains: list[list[Tensor]],
        slots: list[Tensor],
        label: str = "",
    ) -> _UnderWay:
        """Start copying mains into slots; see `Transport.push`."""
        copies = compile_copies(transfers, self._num_ranks, self._relay_threshold)
        sources: list[Tensor] = []
        flat: list[int] = []
        for copy in copies[self._rank]:
            if copy.relay_slot_idx is None:
                sources += [segment[copy.main_idx] for segment in mains]
                flat += (-1, -1)
            else:
                flat += (copy.home_rank, copy.relay_slot_idx)
            flat.append(len(copy.destinations))
            for place in copy.destinations:
                flat += place
        filled_by = {
            slot_idx: rank
            for rank, each in enumerate(copies)
            for copy in each
            for to_rank, slot_idx in copy.destinations
            if to_rank == self._rank
        }
        expected = [value for slot_idx, rank in filled_by.items() for value in (rank, slot_idx)]
        generation = self._exchange.start_push(
            self._segments(slots), sources, flat, expected, label
        )
        return _UnderWay(self._exchange.finish_push, generation)

    def pull_add(
        self,
        transfers: list[Transfer],
        slot_grads: list[Tensor],
        sums: dict[int, list[Tensor]],
        label: str = "",
    ) -> _UnderWay:
        """Start adding slot gradients at the mains' home; see `Transport.pull_add`."""
        replicas: dict[int, list[int]] = defaultdict(list)
        computed: list[int] = []
        for transfer in transfers:
            if transfer.home_rank == self._rank:
                replicas[transfer.main_idx] += (transfer.replica_rank, transfer.slot_idx)
            if transfer.replica_rank == self._rank:
                computed += (transfer.home_rank, transfer.slot_idx)
        flat = [value for each in replicas.values() for value in (len(each) // 2, *each)]
        totals = [total for main_idx in replicas for total in sums[main_idx]]
        generation = self._exchange.start_pull(
            self._segments(slot_grads), totals, flat, computed, label
        )
        return _UnderWay(self._exchange.finish_pull, generation)

    def reset(self) -> None:
        """Forget an aborted step; see `Transport.reset`."""
        # Whoever has left `abort` writes no more, and the gather ends when all have: after it,
        # nothing of the aborted step moves, and no flag is above the highest generation.
        generation = torch.tensor(self._exchange.abort())
        dist.all_reduce(generation, dist.ReduceOp.MAX, group=self._group)
        self._exchange.restart(int(generation))

    def close(self) -> None:
        """End the copying thread and let the shared memory go, as far as no tensor is over it."""
        self._exchange.close()

    def _segments(self, buffers: Sequence[Tensor]) -> list[int]:
        if not all(len(buffer) for buffer in buffers):
            return []
        try:
            return [self._segment_ids[buffer.data_ptr()] for buffer in buffers]
        except KeyError:
            raise ValueError(
                "slots and slot_grads must be buffers that this transport's allocate() returned"
            ) from None
