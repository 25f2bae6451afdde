"""Moves replicas by torch.distributed's send and receive, over any backend of the EP group.

This transport is the baseline. Every replica is a message: the home rank sends, the replica's rank
receives, and both post the message in the order of the transfers. A message has all segments of an
expert, so the sender packs and the receiver stages: each needs memory of one expert for a replica.

The host must know the transfers to post the messages. For a plan on a GPU, `push` starts a copy of
the plan to the host, and `wait()` posts the messages; for a plan on the host, `push` posts them.
`pull_add` finds the copy that the push of the same transfers has started.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import P2POp, ProcessGroup, Work

from megatron_ext.transport.transport import Mains, Transfer, Transfers, Transport, TransportOptions

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
        self._transfers = transfers
        self._post = post
        self._batch = post(transfers) if transfers.is_on_host else None
        # Of a plan on a GPU; the pull of the same transfers finds the copy.
        transfers.start_copy()

    def wait(self) -> None:
        if self._batch is None:
            self._batch = self._post(self._transfers)
        self._batch.wait()


class CollectiveTransport(Transport):
    """Transport that moves replicas with batched sends and receives over `ep_group`."""

    name = "collective"

    def __init__(self, ep_group: ProcessGroup) -> None:
        self._group = ep_group
        self._rank = dist.get_rank(ep_group)

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return zeroed local memory: peers send to it, and need not reach it."""
        return torch.zeros(shape, dtype=dtype, device=device)

    def push(
        self, transfers: Transfers, mains: Mains, slot_weights: list[Tensor], label: str = ""
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
                    arrivals.append(partial(_fill, slot, message))
            return _Batch(ops, arrivals)

        return _Push(transfers, post)

    def pull_add(
        self,
        transfers: Transfers,
        slot_grads: list[Tensor],
        totals: Mains,
        aside: Sequence[Sequence[Tensor | None] | None],
        label: str = "",
    ) -> _Batch:
        """Start adding slot gradients at the mains' home; see `Transport.pull_add`."""
        ops: list[P2POp] = []
        messages: dict[int, list[Tensor]] = {}
        for transfer in transfers:
            # A rank that receives uses the shapes and dtypes of this slot only.
            grads = [grad[transfer.slot_idx] for grad in slot_grads]
            if transfer.replica_rank == self._rank:
                ops.append(self._op(dist.isend, _pack(grads), transfer.home_rank))
                for grad in grads:
                    grad.zero_()
            elif transfer.home_rank == self._rank:
                message = _message_for(grads)
                ops.append(self._op(dist.irecv, message, transfer.replica_rank))
                messages.setdefault(transfer.main_idx, []).append(message)

        def add(main_idx: int, of_main: list[Tensor]) -> None:
            replicas = [_unpack(message, [grad[0] for grad in slot_grads]) for message in of_main]
            for segment_idx, (total, before) in enumerate(zip(totals, aside, strict=True)):
                grads = [replica[segment_idx] for replica in replicas]
                added = grads[0].to(torch.promote_types(grads[0].dtype, torch.float32))
                for grad in grads[1:]:
                    added = added + grad
                if before is not None and (more := before[main_idx]) is not None:
                    added = added + more
                total[main_idx].add_(added)

        return _Batch(ops, [partial(add, *each) for each in messages.items()])

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


def _fill(slot: list[Tensor], message: Tensor) -> None:
    for segment, piece in zip(slot, _unpack(message, slot), strict=True):
        segment.copy_(piece)


def make(
    ep_group: ProcessGroup, device: torch.device, options: TransportOptions
) -> CollectiveTransport:
    """Return the transport of a rank; see `TransportKind.make`."""
    return CollectiveTransport(ep_group)
