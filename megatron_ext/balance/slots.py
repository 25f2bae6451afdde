"""Stages 4 and 8: replicas are materialized in the slots, and their gradients reduced.

All layers share a rank's slots, so one materializing ends before the next begins, and one
reduction ends before the next begins. Slot gradients have the dtype of the mains' gradients. The
home rank adds slot gradients in float32 (float64 for float64 weights), in rank order of replicas.

Needs: a plan, the mains' weights, a transport. Gives: replicas in slots, and sums for the mains.

Legend: E logical experts, R ranks, M mains per rank, S slots per rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.balance.layout import ExpertLayout
from megatron_ext.balance.main_weights import Aside, MainWeights, Segment
from megatron_ext.balance.stage_times import TIMES, Mark
from megatron_ext.transport import (
    Pending,
    Transfers,
    Transport,
    TransportOptions,
    make_transport,
)
from megatron_ext.transport.reach import gather


class SlotBuffers:
    """The slots of this rank: weights and gradients of S experts, shared by all layers.

    Slots are no parameters: they have no optimizer state, and are in no gradient bucket and in no
    checkpoint. The transport allocates them: for each segment of an expert's state one tensor [S,
    *shape] of gradients, and one of weights. Quantized weights are bytes, uint8 [S, n] for each
    part, in which a forward's and a backward's parts take turns.
    """

    def __init__(
        self,
        layout: ExpertLayout,
        segments: Sequence[Segment],
        *,
        dtype: torch.dtype,
        device: torch.device,
        ep_rank: int,
        transport: Transport,
    ) -> None:
        self.layout = layout
        self.segments = tuple(segments)
        self.ep_rank = ep_rank
        self.transport = transport
        self.slot_weights = [
            [
                transport.allocate((layout.slots, *shape), of_part, device)
                for shape, of_part in segment.slot_shapes(dtype)
            ]
            for segment in segments
        ]
        """By segment and part."""
        self.slot_grads: list[Tensor | None] = [None] * len(self.segments)
        """By segment; None until `allocate_grads` makes the buffer."""
        # The forward whose replicas are all here; None during a transfer, so that an aborted
        # transfer does not look complete.
        self._resident: weakref.ref[Any] | None = None
        self._resident_columnwise = False
        self._has_directions = any(segment.has_directions for segment in segments)
        self._last_push: weakref.ref[Materializing] | None = None
        # The last reduction. The forward keeps the reduction and its sums alive.
        self._reducing: weakref.ref[Reducing] | None = None
        self._num_virtual_layers = 0

    @property
    def weight_buffers(self) -> list[Tensor]:
        """The slots' weights, one part after the other, as `MainWeights.rows` has the mains'."""
        return [part for of_segment in self.slot_weights for part in of_segment]

    @property
    def weight_bytes(self) -> int:
        """Bytes of one replica's weights: what a push moves."""
        return sum(buffer[0].nbytes for buffer in self.weight_buffers)

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers on this rank."""
        buffers = (*self.weight_buffers, *self.slot_grads)
        return sum(buffer.nbytes for buffer in buffers if buffer is not None)

    def allocate_grads(self, dtypes: Sequence[torch.dtype | None]) -> list[Tensor | None]:
        """Return a layer's slot gradients, made once; every EP rank calls with the same dtypes.

        A segment without gradients has dtype None and gets None: every segment of a model that is
        only evaluated, and of frozen experts.

        Raises:
            ValueError: Another layer with these slots has gradients of another dtype.
        """
        for segment_idx, dtype in enumerate(dtypes):
            if dtype is None:
                continue
            grad = self.slot_grads[segment_idx]
            if grad is None:
                shape = self.layout.slots, *self.segments[segment_idx].shape
                device = self.slot_weights[segment_idx][0].device
                grad = self.transport.allocate(shape, dtype, device)
                self.slot_grads[segment_idx] = grad
            if grad.dtype != dtype:
                raise ValueError(
                    f"expert gradients of a layer are {dtype}, and {grad.dtype} of another that "
                    "shares its slots: train all models of a process with the same "
                    "gradient_accumulation_fusion and grad_reduce_in_fp32"
                )
        return [
            grad if dtype is not None else None
            for grad, dtype in zip(self.slot_grads, dtypes, strict=True)
        ]

    def new_virtual_layer_id(self) -> int:
        """Return a virtual layer id that no other layer with these slots uses."""
        self._num_virtual_layers += 1
        return self._num_virtual_layers - 1

    def hold_replicas_of(self, forward: object, *, columnwise: bool) -> bool:
        """Whether the slots hold the replicas that were pushed for this forward, so directed."""
        is_turned = self._has_directions and columnwise != self._resident_columnwise
        return not is_turned and self._resident is not None and self._resident() is forward

    def push(
        self,
        experts_in_slots: Tensor,
        mains: MainWeights,
        label: str,
        *,
        on_host: Tensor | None = None,
        owner: object | None = None,
        columnwise: bool = False,
    ) -> Materializing:
        """Start materializing replicas in this rank's slots; every EP rank calls.

        The slots may be read after `wait()`, and the mains must not change before.

        Args:
            experts_in_slots: Logical expert for each slot, or -1: int32 [R, S].
            mains: This rank's mains.
            label: Names the forward in errors.
            on_host: `experts_in_slots` on the host, where the host has it already.
            owner: The forward that uses the replicas, if a backward follows. None if no backward
                follows, as in evaluation; such a push is not timed.
            columnwise: Whether a backward reads the replicas, and not a forward.
        """
        self._resident, self._resident_columnwise = None, columnwise
        # Do not iterate these transfers here: for a plan on a GPU the host would wait for it.
        transfers = Transfers(experts_in_slots, self.layout.mains_per_rank, on_host)
        rows = mains.rows(columnwise=columnwise)
        pending = self.transport.push(transfers, rows, self.weight_buffers, label)
        materializing = Materializing(pending, self, owner)
        self._last_push = weakref.ref(materializing)
        return materializing

    def begin_fused(
        self, experts_in_slots: Tensor, slot_grads: Sequence[Tensor | None], mains: MainWeights
    ) -> Aside:
        """Zero the gradients of this rank's replicas; fused products then add to them.

        All layers share the slots' gradients, so this call waits for a reduction under way. Returns
        `MainWeights.set_aside` of the mains with replicas, for `reduce_replica_grads`, which also
        explains the arguments.
        """
        self._end_reduction()
        for slot_idx in self._used(experts_in_slots):
            for buffer in slot_grads:
                if buffer is not None:
                    buffer[slot_idx].zero_()
        transfers = Transfers(experts_in_slots, self.layout.mains_per_rank)
        return mains.set_aside({t.main_idx for t in transfers if t.home_rank == self.ep_rank})

    def reduce_replica_grads(
        self,
        experts_in_slots: Tensor,
        slot_grads: Sequence[Tensor | None],
        replica_grads: Sequence[Any],
        label: str,
        *,
        aside: Aside | None = None,
    ) -> Reducing:
        """Start adding the gradients of all replicas; every rank of the EP group calls.

        All layers share the slots' gradients, so this call waits for a reduction under way.

        Args:
            experts_in_slots: The `experts_in_slots` of the forward's plan, int32 [R, S], on the
                host: the host allocates sums for experts with replicas only.
            slot_grads: The result of `allocate_grads`; a segment with None is not reduced.
            replica_grads: The gradients from autograd, one entry a segment, indexed by slot. None
                for a segment or a slot without a gradient.
            label: Names the forward in errors.
            aside: With fused gradients the result of `begin_fused`, which is added to the sums. A
                replica without an entry in `replica_grads` then has its gradient in `slot_grads`.
        """
        self._end_reduction()
        used = self._used(experts_in_slots)
        for buffer, grad in zip(slot_grads, replica_grads, strict=True):
            if buffer is None:
                continue
            for slot_idx in used:
                of_slot = grad[slot_idx] if grad is not None else None
                if of_slot is not None:
                    buffer[slot_idx].copy_(of_slot)
                elif aside is None:
                    # A recomputed router may send no token to a replica that the plan has.
                    buffer[slot_idx].zero_()
        transfers = list(Transfers(experts_in_slots, self.layout.mains_per_rank))
        sums = {
            t.main_idx: [_sum_like(buffer) for buffer in slot_grads]
            for t in transfers
            if t.home_rank == self.ep_rank
        }
        pending = self.transport.pull_add(
            transfers,
            [buffer for buffer in slot_grads if buffer is not None],
            {m: [total for total in each if total is not None] for m, each in sums.items()},
            label,
        )
        reducing = Reducing(sums, pending, aside or {})
        self._reducing = weakref.ref(reducing)
        return reducing

    def _end_reduction(self) -> None:
        # The forward keeps a running reduction alive. If the reference is dead, the step was
        # aborted, and there is nothing to wait for.
        if self._reducing is not None and (reducing := self._reducing()) is not None:
            reducing.wait()

    def _used(self, experts_in_slots: Tensor) -> list[int]:
        """This rank's slots with a replica."""
        of_rank = experts_in_slots[self.ep_rank].tolist()
        return [slot_idx for slot_idx, expert in enumerate(of_rank) if expert >= 0]

    def reset(self) -> None:
        """Forget an aborted step; every rank of the EP group calls before the next one."""
        self._resident = None
        self._reducing = None
        self.transport.reset()


def _sum_like(buffer: Tensor | None) -> Tensor | None:
    """Memory for a sum over slots, which are the rows of the buffer."""
    if buffer is None:
        return None
    return torch.empty_like(buffer[0], dtype=torch.promote_types(buffer.dtype, torch.float32))


class Materializing:
    """Replicas on their way into the slots; without `pending` there was nothing to move."""

    def __init__(
        self,
        pending: Pending | None,
        buffers: SlotBuffers | None = None,
        owner: object | None = None,
    ) -> None:
        self._pending = pending
        self._buffers = buffers
        self._owner = weakref.ref(owner) if owner is not None else None
        self._started = TIMES.mark() if owner is not None else None

    def wait(self) -> None:
        """Return when the slots hold the replicas; it may be called again."""
        if self._pending is None:
            return
        with timed("materialize", self._started):
            self._pending.wait()
        self._pending = None
        # A later push may have begun, and overwrites the replicas of this one.
        if self._buffers is not None and (last := self._buffers._last_push) and last() is self:
            self._buffers._resident = self._owner


class Reducing:
    """Replica gradients on their way into the mains' sums."""

    def __init__(
        self, sums: dict[int, list[Tensor | None]], pending: Pending, aside: Aside
    ) -> None:
        self._sums = sums
        self._pending: Pending | None = pending
        self._aside = aside
        self._started = TIMES.mark()

    def wait(self) -> dict[int, list[Tensor | None]]:
        """Wait for the sums of the mains with replicas; return them by main and segment.

        Sums are float32 (float64 for float64 weights), and include the part of `main_grad` that was
        set aside. A segment without gradients has None. A second call returns the same sums.
        """
        if self._pending is not None:
            with timed("reduce", self._started):
                self._pending.wait()
            self._pending = None
            add_aside(self._sums, self._aside)
        return self._sums


def add_aside(sums: dict[int, list[Tensor | None]], aside: Aside) -> None:
    """Add what was set aside to the tensors of the same mains and segments, in place."""
    for main_idx, of_main in aside.items():
        for total, before in zip(sums[main_idx], of_main, strict=True):
            if total is not None and before is not None:
                total.add_(before)


@contextmanager
def timed(stage: str, started: Mark) -> Iterator[None]:
    """Add the block's time as exposed time of a transfer, and the time since `started`."""
    if started is None:
        yield
        return
    waits = TIMES.mark()
    yield
    ended = TIMES.mark()
    TIMES.add(stage, started, ended)
    TIMES.add(f"{stage}_exposed", waits, ended)


_SHARED: WeakValueDictionary[Any, SlotBuffers] = WeakValueDictionary()


def transports_in_use() -> list[Transport]:
    """Return the transports of all slot buffers that `shared_slot_buffers` made and that live."""
    return [buffers.transport for buffers in _SHARED.values()]


def shared_slot_buffers(
    layout: ExpertLayout,
    segments: Sequence[Segment],
    *,
    dtype: torch.dtype,
    device: torch.device,
    ep_group: ProcessGroup,
    transport: str,
    options: TransportOptions,
    set_name: str = "",
) -> SlotBuffers:
    """Return `ep_group`'s slot buffers for such experts; all its ranks call.

    Layers share the buffers, which are freed with the last of these layers. Each `set_name` has
    buffers and a transport of its own.

    Raises:
        ValueError: The ranks have experts of other segments.
    """
    key = (ep_group, layout, tuple(segments), dtype, device, transport, options, set_name)
    buffers = _SHARED.get(key)
    mine = buffers is not None, tuple(segment.described(dtype) for segment in segments)
    has_buffers, experts = zip(*gather(mine, ep_group), strict=True)
    for rank, of_rank in enumerate(experts):
        for segment, like in zip(of_rank, experts[0], strict=False):
            if segment != like:
                raise ValueError(
                    f"experts must be alike on all EP ranks, got {segment} on EP rank {rank} and "
                    f"{like} on rank 0: give all ranks the same precision (--bf16, --fp8-format, "
                    "--fp8-recipe, --fp8-param-gather)"
                )
    # Each rank's garbage collector decides when buffers without layers are freed. A new model may
    # use the buffers of an earlier model only if all ranks still have these buffers.
    if not all(has_buffers) or buffers is None:
        buffers = SlotBuffers(
            layout,
            segments,
            dtype=dtype,
            device=device,
            ep_rank=ep_group.rank(),
            transport=make_transport(transport, ep_group, device, options),
        )
        _SHARED[key] = buffers
    return buffers
