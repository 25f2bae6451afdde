"""What transports share whose ranks reach into each other's memory.

Here transfers become one rank's copies and sums, as an exchange takes them. An exchange is a
compiled class (`csrc/bindings/exchange.cpp`, `peer_exchange.cpp`), which moves the bytes when its
flags say so.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from megatron_ext.transport import Transfer
from megatron_ext.transport.relay import compile_copies

TIMEOUT_S = 60.0
"""Longest wait for a peer, in seconds. A rank that is late by more (a checkpoint, say) is late for
the gathering of loads before each plan too, and the others wait for it there."""

RELAY_THRESHOLD = 4
"""Most sends of a rank without relays. Not tuned: on 2 cores relays make no difference in time."""


class _UnderWay:
    """A push or a pull; also when dropped, it ends before the next one starts."""

    def __init__(self, finish: Callable[[int], None], generation: int) -> None:
        self._finish = finish
        self._generation = generation

    def wait(self) -> None:
        self._finish(self._generation)


class OneSidedTransport(ABC):
    """Moves replicas with an exchange; a subclass allocates what the exchange reaches.

    Args:
        exchange: Of this rank.
        rank: In the EP group.
        num_ranks: Of the EP group.
        relay_threshold: Most sends of a rank without relays (`relay.py`).
    """

    def __init__(self, exchange: Any, rank: int, num_ranks: int, relay_threshold: int) -> None:
        self._exchange = exchange
        self._rank = rank
        self._num_ranks = num_ranks
        self._relay_threshold = relay_threshold
        self._segment_ids: dict[int, int] = {}

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has copied into peers' slots, as home rank or relay."""
        return int(self._exchange.bytes_sent())

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
        # Whoever has left `abort` writes no more, and all have when the highest generation is
        # known: after it, nothing of the aborted step moves, and no flag is above it.
        self._exchange.restart(self._highest(self._exchange.abort()))

    def close(self) -> None:
        """End what copies, and let the shared memory go, as far as no tensor is over it."""
        self._exchange.close()

    @abstractmethod
    def _highest(self, value: int) -> int:
        """Return the highest value of all ranks; all ranks call."""

    def _segments(self, buffers: Sequence[Tensor]) -> list[int]:
        if not all(len(buffer) for buffer in buffers):
            return []
        try:
            return [self._segment_ids[buffer.data_ptr()] for buffer in buffers]
        except KeyError:
            raise ValueError(
                "slots and slot_grads must be buffers that this transport's allocate() returned"
            ) from None
