"""Moves replicas through memory that the CPU ranks of one machine share.

The home rank writes into a peer's slot and reads a peer's slot gradients. Generation counters in
the shared memory, without a barrier, put the accesses of the ranks in order
(`csrc/include/megatron_ext/exchange.h`). A thread of the transport copies and adds while the rank
computes.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.ops import load_library
from megatron_ext.transport.one_sided import (
    RELAY_THRESHOLD,
    OneSidedTransport,
    UnderWay,
    group_timeout_s,
    interruptible,
)
from megatron_ext.transport.reach import domain_of, gather
from megatron_ext.transport.relay import compile_copies
from megatron_ext.transport.shared_heap import share
from megatron_ext.transport.transport import (
    SHARED_MEMORY_SLOTS,
    Mains,
    Transfer,
    Transfers,
    TransportOptions,
)

_FLAGS_BYTES = SHARED_MEMORY_SLOTS * 256
"""Flags of the slots of a rank, 256 bytes each."""


class SharedMemoryTransport(OneSidedTransport):
    """Transport over memory that the ranks of a domain map; all ranks of `ep_group` make it.

    Args:
        ep_group: The ranks that make the same calls.
        domain_ranks: Ranks per domain. The ranks of a domain run on one machine and see each
            other's processes. By default the whole EP group is one domain.
        timeout_s: Longest wait for a peer, in seconds; by default the time limit of the group's
            collectives.
        relay_threshold: Most sends of a rank without relays (`relay.py`).
        max_delay_us: Longest random sleep around flags, for tests of the order of accesses.

    Raises:
        RuntimeError: The ranks cannot map each other's memory.
    """

    name = "shared_memory"

    def __init__(
        self,
        ep_group: ProcessGroup,
        *,
        domain_ranks: int | None = None,
        timeout_s: float | None = None,
        relay_threshold: int = RELAY_THRESHOLD,
        max_delay_us: int = 0,
    ) -> None:
        load_library()
        rank = dist.get_rank(ep_group)
        timeout_s = timeout_s or group_timeout_s(ep_group, torch.device("cpu"))
        exchange = torch.classes.megatron_ext.Exchange(rank, timeout_s, max_delay_us)
        num_ranks = dist.get_world_size(ep_group)
        super().__init__(exchange, rank, num_ranks, domain_of(rank, domain_ranks or num_ranks))
        self._relay_threshold = relay_threshold
        self._group = ep_group
        self._exchange.set_flags(share(_FLAGS_BYTES, "flags", ep_group, self._peers))
        # The numbers of ranks of other machines are of no process here, or of another; nobody waits
        # for those ranks.
        self._exchange.set_processes(gather(os.getpid(), ep_group))

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a zeroed buffer that the domain's ranks map; see `Transport.allocate`."""
        if device.type != "cpu":
            raise ValueError(f"transport shared_memory has memory of the CPU only, not of {device}")
        if math.prod(shape) == 0:
            raise ValueError(f"a segment must have elements, got slots of {list(shape)}")
        num_bytes = math.prod(shape) * dtype.itemsize
        regions = share(num_bytes, f"{dtype} {list(shape)}", self._group, self._peers)
        buffers = [region.view(dtype).view(-1, *shape[1:]) for region in regions]
        mine = buffers[self._rank]
        self._segment_ids[mine.data_ptr()] = interruptible(self._exchange.add_segment, buffers)
        return mine

    def push(
        self, transfers: Transfers, mains: Mains, slot_weights: list[Tensor], label: str = ""
    ) -> UnderWay:
        """Start copying mains into slots; see `Transport.push`."""
        listed = list(transfers)
        self._check_within(listed)
        copies = compile_copies(listed, self._num_ranks, self._relay_threshold)
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
        generation = interruptible(
            self._exchange.start_push,
            self._segments(slot_weights),
            sources,
            flat,
            expected,
            transfers.experts_in_slots,
            label,
        )
        return UnderWay(self._exchange.finish_push, generation)

    def pull_add(
        self,
        transfers: Transfers,
        slot_grads: list[Tensor],
        totals: Mains,
        aside: Sequence[Sequence[Tensor | None] | None],
        label: str = "",
    ) -> UnderWay:
        """Start adding slot gradients at the mains' home; see `Transport.pull_add`."""
        listed = list(transfers)
        self._check_within(listed)
        replicas: dict[int, list[int]] = defaultdict(list)
        computed: list[int] = []
        for transfer in listed:
            if transfer.home_rank == self._rank:
                replicas[transfer.main_idx] += (transfer.replica_rank, transfer.slot_idx)
            if transfer.replica_rank == self._rank:
                computed += (transfer.home_rank, transfer.slot_idx)
        flat = [value for each in replicas.values() for value in (len(each) // 2, *each)]
        generation = interruptible(
            self._exchange.start_pull,
            self._segments(slot_grads),
            [segment[main_idx] for main_idx in replicas for segment in totals],
            [segment and segment[main_idx] for main_idx in replicas for segment in aside],
            flat,
            computed,
            label,
        )
        return UnderWay(self._exchange.finish_pull, generation)

    def _check_within(self, transfers: Iterable[Transfer]) -> None:
        """Check that no transfer leaves or enters this rank's domain."""
        for each in transfers:
            if (each.home_rank in self._peers) != (each.replica_rank in self._peers):
                raise ValueError(
                    f"a replica of rank {each.home_rank} on rank {each.replica_rank} leaves the "
                    f"NVLink domain of ranks {self._peers.start} to {self._peers.stop - 1}, which "
                    f"transport {self.name} moves replicas in"
                )

    def _share_tables(self, num_bytes: int) -> list[list[Tensor]]:
        return [share(num_bytes, "rows", self._group, self._peers)]

    def _highest(self, value: int) -> int:
        return max(gather(value, self._group))


def make(
    ep_group: ProcessGroup, device: torch.device, options: TransportOptions
) -> SharedMemoryTransport:
    """Return the transport of a rank; see `TransportKind.make`."""
    return SharedMemoryTransport(
        ep_group, domain_ranks=options.domain_ranks, timeout_s=options.timeout_s
    )
