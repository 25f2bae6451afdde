"""Transport over torch.distributed point-to-point: works wherever the EP group's backend does.

It is the baseline. It is two-sided: every transfer is a send and a receive, and both sides post
them in the order of the transfers. Received gradients are staged before they are added; the staging
memory is one expert's gradients for each replica.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import P2POp, ProcessGroup, Work

from megatron_ext.transport.transport import Transfer, Transfers, TransportKind


class _Batch:
    """Posted sends and receives, with the tensors that must stay alive until they are done."""

    def __init__(self, ops: list[P2POp]) -> None:
        self._ops = ops
        self._work: list[Work] = dist.batch_isend_irecv(ops) if ops else []

    def wait(self) -> None:
        for work in self._work:
            work.wait()
        self._ops.clear()


class _Sum:
    """Gradients under way, and the additions to make when they have arrived."""

    def __init__(self, batch: _Batch, additions: list[tuple[bool, Tensor, Tensor]]) -> None:
        self._batch = batch
        self._additions = additions  # (whether the sum starts with this, sum, gradient)

    def wait(self) -> None:
        self._batch.wait()
        for is_first, total, staged in self._additions:
            if is_first:
                total.copy_(staged)
            else:
                total.add_(staged)
        self._additions.clear()


class CollectiveTransport:
    """Transport that moves replicas with batched sends and receives over `ep_group`."""

    name = "collective"
    failed = None

    def __init__(self, ep_group: ProcessGroup) -> None:
        self._group = ep_group
        self._rank = dist.get_rank(ep_group)

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return zeroed local memory, which is enough for a two-sided transport."""
        return torch.zeros(shape, dtype=dtype, device=device)

    def push(
        self,
        transfers: Transfers,
        mains: list[list[Tensor]],
        slots: list[Tensor],
        label: str = "",
    ) -> _Batch:
        """Start copying mains into slots; see `Transport.push`."""
        ops = []
        for transfer in transfers:
            for segment_idx, slot_segment in enumerate(slots):
                if transfer.home_rank == self._rank:
                    main = mains[segment_idx][transfer.main_idx]
                    ops.append(self._op(dist.isend, main, transfer.replica_rank))
                elif transfer.replica_rank == self._rank:
                    ops.append(
                        self._op(dist.irecv, slot_segment[transfer.slot_idx], transfer.home_rank)
                    )
        return _Batch(ops)

    def pull_add(
        self,
        transfers: Sequence[Transfer],
        slot_grads: list[Tensor],
        sums: dict[int, list[Tensor]],
        label: str = "",
    ) -> _Sum:
        """Start adding slot gradients at the mains' home; see `Transport.pull_add`."""
        ops = []
        additions: list[tuple[bool, Tensor, Tensor]] = []
        started: set[int] = set()
        for transfer in transfers:
            if transfer.replica_rank == self._rank:
                for grad in slot_grads:
                    ops.append(self._op(dist.isend, grad[transfer.slot_idx], transfer.home_rank))
            elif transfer.home_rank == self._rank:
                is_first = transfer.main_idx not in started
                started.add(transfer.main_idx)
                for total, grad in zip(sums[transfer.main_idx], slot_grads, strict=True):
                    # The first replica's gradient arrives in the sum itself: nothing to zero,
                    # nothing to stage.
                    is_staged = not is_first or total.dtype != grad.dtype
                    target = torch.empty_like(total, dtype=grad.dtype) if is_staged else total
                    ops.append(self._op(dist.irecv, target, transfer.replica_rank))
                    if is_staged:
                        additions.append((is_first, total, target))
        return _Sum(_Batch(ops), additions)

    def raise_failure(self) -> None:
        """Do nothing: torch.distributed raises by itself."""

    def reset(self) -> None:
        """Do nothing: sends and receives that an aborted step has posted cannot be taken back.

        The next step is right if all ranks aborted between the same two calls.
        """

    def _op(self, op: Any, tensor: Tensor, peer: int) -> P2POp:
        return P2POp(op, tensor, group=self._group, group_peer=peer)


COLLECTIVE = TransportKind(
    name=CollectiveTransport.name,
    device_type=None,
    obstacles=None,
    make=lambda ep_group, device, options: CollectiveTransport(ep_group),
)
