"""Moves replicas by torch.distributed's send and receive, over any backend of the EP group.

This transport is the baseline. Every replica is a message: the home rank sends, the replica's rank
receives, and both post the message in the order of the transfers. A message has all segments of an
expert, so the sender packs and the receiver stages: each needs memory of one expert for a replica.

The host must know the transfers to post the messages. For a plan on a GPU, `push` starts a copy of
the plan to the host, and `wait()` posts the messages; for a plan on the host, `push` posts them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import P2POp, ProcessGroup, Work

from megatron_ext.transport.transport import HostCopy, Transfer, Transfers, TransportKind

_Arrival = Callable[[], None]
"""Copies or adds a message that has arrived."""


class _Batch:
    """Posted messages, and the tensors that must stay alive until the messages are done."""

    def __init__(self, ops: list[P2POp], arrivals: list[_Arrival]) -> None:
        self._ops = ops
        self._arrivals = arrivals
        self._work: list[Work] = dist.batch_isend_irecv(ops) if ops else []

    def wait(self) -> None:
        for work in self._work:
            work.wait()
        for arrival in self._arrivals:
            arrival()
        self._arrivals.clear()
        self._ops.clear()


class _Push:
    """A push, whose messages are posted when the host knows the transfers."""

    def __init__(self, transfers: Transfers, post: Callable[[Iterable[Transfer]], _Batch]) -> None:
        self._mains_per_rank = transfers.mains_per_rank
        self._post = post
        self._batch: _Batch | None = None
        known = transfers.known
        if known is not None:
            self._batch = post(known)
            return
        held = transfers.experts_in_slots
        self._on_host = HostCopy(tuple(held.shape), held.dtype, held.device)
        self._on_host.start(held)

    def wait(self) -> None:
        if self._batch is None:
            self._batch = self._post(Transfers(self._on_host.wait(), self._mains_per_rank))
        self._batch.wait()


class CollectiveTransport:
    """Transport that moves replicas with batched sends and receives over `ep_group`."""

    name = "collective"
    failed = None
    rows = None

    def __init__(self, ep_group: ProcessGroup) -> None:
        self._group = ep_group
        self._rank = dist.get_rank(ep_group)

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return zeroed local memory: peers send to it, and need not reach it."""
        return torch.zeros(shape, dtype=dtype, device=device)

    def push(
        self,
        transfers: Transfers,
        mains: list[list[Tensor]],
        slot_weights: list[Tensor],
        label: str = "",
    ) -> _Push:
        """Start copying mains into slots; see `Transport.push`."""

        def post(listed: Iterable[Transfer]) -> _Batch:
            ops: list[P2POp] = []
            arrivals: list[_Arrival] = []
            packed: dict[int, Tensor] = {}
            for transfer in listed:
                if transfer.home_rank == self._rank:
                    main_idx = transfer.main_idx
                    if main_idx not in packed:
                        packed[main_idx] = _pack([segment[main_idx] for segment in mains])
                    ops.append(self._op(dist.isend, packed[main_idx], transfer.replica_rank))
                elif transfer.replica_rank == self._rank:
                    slot = [
                        _start(segment[transfer.slot_idx], of_mains[0])
                        for segment, of_mains in zip(slot_weights, mains, strict=True)
                    ]
                    message = _message_for(slot)
                    ops.append(self._op(dist.irecv, message, transfer.home_rank))
                    arrivals.append(partial(_fill, slot, message, slot))
            return _Batch(ops, arrivals)

        return _Push(transfers, post)

    def note_reads(self) -> None:
        """Do nothing: `wait` fills the slots, on the stream that goes on to read them."""

    def pull_add(
        self,
        transfers: Sequence[Transfer],
        slot_grads: list[Tensor],
        sums: dict[int, list[Tensor]],
        label: str = "",
    ) -> _Batch:
        """Start adding slot gradients at the mains' home; see `Transport.pull_add`."""
        ops: list[P2POp] = []
        arrivals: list[_Arrival] = []
        started: set[int] = set()
        for transfer in transfers:
            # A rank that receives uses the shapes and dtypes of this slot only.
            grads = [grad[transfer.slot_idx] for grad in slot_grads]
            if transfer.replica_rank == self._rank:
                ops.append(self._op(dist.isend, _pack(grads), transfer.home_rank))
            elif transfer.home_rank == self._rank:
                message = _message_for(grads)
                ops.append(self._op(dist.irecv, message, transfer.replica_rank))
                put = _add if transfer.main_idx in started else _fill
                started.add(transfer.main_idx)
                arrivals.append(partial(put, sums[transfer.main_idx], message, grads))
        return _Batch(ops, arrivals)

    def raise_failure(self) -> None:
        """Do nothing: torch.distributed raises its own errors."""

    def reset(self) -> None:
        """Do nothing: posted sends and receives of an aborted step cannot be withdrawn.

        The next step is right if all ranks aborted between the same two calls.
        """

    def _op(self, op: Any, tensor: Tensor, peer: int) -> P2POp:
        return P2POp(op, tensor, group=self._group, group_peer=peer)


def _start(slot: Tensor, main: Tensor) -> Tensor:
    """Return what a main fills of its slot; see `Transport.push`."""
    return slot if slot.shape == main.shape else slot[: main.numel()]


def _pack(segments: Sequence[Tensor]) -> Tensor:
    """Return the segments' bytes, one behind the other."""
    return torch.cat([each.detach().reshape(-1).view(torch.uint8) for each in segments])


def _message_for(segments: Sequence[Tensor]) -> Tensor:
    """Return memory for the packed bytes of such segments."""
    num_bytes = sum(each.nbytes for each in segments)
    return torch.empty(num_bytes, dtype=torch.uint8, device=segments[0].device)


def _unpack(message: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return the segments in a message, which have the shapes and dtypes of `like`."""
    pieces = message.split([each.nbytes for each in like])
    return [
        piece.view(each.dtype).view(each.shape) for piece, each in zip(pieces, like, strict=True)
    ]


def _fill(targets: list[Tensor], message: Tensor, like: list[Tensor]) -> None:
    for target, piece in zip(targets, _unpack(message, like), strict=True):
        target.copy_(piece)


def _add(targets: list[Tensor], message: Tensor, like: list[Tensor]) -> None:
    for target, piece in zip(targets, _unpack(message, like), strict=True):
        target.add_(piece)


COLLECTIVE = TransportKind(
    name=CollectiveTransport.name,
    device_type=None,
    adds_float16=True,
    obstacles=None,
    make=lambda ep_group, device, options: CollectiveTransport(ep_group),
)
