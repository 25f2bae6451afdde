"""Base of the transports whose ranks read and write each other's memory.

An exchange is a compiled class (`csrc/bindings/exchange.cpp`, `peer_exchange.cpp`), which moves the
bytes when the flags of the peers allow. The subclass gives it the transfers of pushes and pulls.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _get_default_timeout

from megatron_ext.ops.build import library
from megatron_ext.transport.transport import GathersRows, Transport

RELAY_THRESHOLD = 4
"""Most sends of a rank without relays. Not tuned: on 2 cores relays make no difference in time."""


def group_timeout_s(group: ProcessGroup, device: torch.device) -> float:
    """Return the time limit of a group's collectives on this device, in seconds."""
    options = getattr(group._get_backend(device), "options", None)
    limit = (
        options._timeout
        if options is not None
        else _get_default_timeout(dist.Backend(dist.get_backend(group)))
    )
    return float(limit.total_seconds())


class UnderWay:
    """Handle of a push or pull. If a handle is dropped, the next transfer waits in its place."""

    def __init__(self, finish: Callable[[int], None], generation: int) -> None:
        self._finish = finish
        self._generation = generation

    def wait(self) -> None:
        """See `Pending`."""
        interruptible(self._finish, self._generation)


def interruptible(call: Callable[..., Any], *arguments: Any) -> Any:
    """Call an exchange; raises what a handler of a signal raised meanwhile: `KeyboardInterrupt`."""
    try:
        return call(*arguments)
    except RuntimeError:  # Torch makes this of every error.
        ctypes.PyDLL(str(library())).megatron_ext_raise()
        raise


class OneSidedTransport(Transport, ABC):
    """Transport around an exchange; a subclass pushes and pulls, and allocates the buffers.

    The exchange numbers ranks as the EP group does, and has the memory of `peers` only: the ranks
    of this rank's domain, this rank among them.
    """

    def __init__(self, exchange: Any, rank: int, num_ranks: int, peers: range) -> None:
        self._exchange = exchange
        self._rank = rank
        self._peers = peers
        self._num_ranks = num_ranks
        self._most_words = 0
        self._segment_ids: dict[int, int] = {}

    @property
    def rows(self) -> GathersRows | None:
        """See `Transport.rows`."""
        return self if len(self._peers) == self._num_ranks else None

    def gather(self, row: Tensor, label: str = "", into: Tensor | None = None) -> Tensor:
        """Return the rows of all ranks; see `GathersRows`."""
        if (num_words := row.numel()) > self._most_words:
            num_bytes = torch.classes.megatron_ext.Exchange.table_bytes(self._num_ranks, num_words)
            self._exchange.set_table(*self._share_tables(num_bytes), num_words)
            self._most_words = num_words
        return interruptible(self._exchange.gather, row, label, into)

    @abstractmethod
    def _share_tables(self, num_bytes: int) -> Sequence[Any]:
        """Share zeroed memory of all ranks for the exchange's table of rows; all ranks call."""

    def reset(self) -> None:
        """Forget an aborted step; see `Transport.reset`."""
        # A rank that has left `abort` writes no more, and all ranks have left `abort` when the
        # highest generation is known. From then on nothing of the aborted step moves, and no flag
        # is above that generation.
        self._exchange.restart(self._highest(self._exchange.abort()))

    def close(self) -> None:
        """End all copying, and free the shared memory that no tensor uses."""
        self._exchange.close()

    @abstractmethod
    def _highest(self, value: int) -> int:
        """Return the highest value of all ranks; all ranks call."""

    def _segments(self, buffers: Sequence[Tensor]) -> list[int]:
        try:
            return [self._segment_ids[buffer.data_ptr()] for buffer in buffers]
        except KeyError:
            raise ValueError(
                "slot_weights and slot_grads must be buffers that this transport's allocate() "
                "returned"
            ) from None
