"""Stages 4 and 8: replicas are materialized in the slots, and their gradients reduced.

All layers share a rank's slots, so one materializing ends before the next begins, and one
reduction ends before the next begins. Slot gradients have the dtype of the mains' gradients. The
home rank adds slot gradients in float32 (float64 for float64 weights), in rank order of replicas.
A plan may stay on a GPU: nothing here reads it on the host.

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
from megatron_ext.balance.main_weights import Aside, MainWeights, Segment, Totals
from megatron_ext.balance.stage_times import TIMES, Mark
from megatron_ext.transport import Pending, Transfers, Transport, TransportOptions, make_transport
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
        self.last_planned: weakref.ref[Any] | None = None
        """The forward that planned last for these slots."""
        # The last reduction. The forward keeps the reduction and its totals alive.
        self._reducing: weakref.ref[Reducing] | None = None
        # Its transfer, until somebody has waited for it.
        self._reduction: Pending | None = None
        # Whether a slot's gradient may be other than zero.
        self._are_grads_used = False
        self._num_virtual_layers = 0
        self.num_pushes = 0
        """Pushes so far: each overwrites the replicas of the one before."""

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
        transfers: Transfers,
        mains: MainWeights,
        label: str,
        *,
        owner: object | None = None,
        columnwise: bool = False,
    ) -> Materializing:
        """Start materializing replicas in this rank's slots; every EP rank calls.

        The slots may be read after `wait()`, and the mains must not change before. For a plan on a
        GPU the host does not wait. The owner is the forward that uses the replicas, if a backward
        follows; else, as in evaluation, the push is not timed. `columnwise` says that a backward
        reads the replicas, and not a forward. The label names the forward in errors.
        """
        self._resident, self._resident_columnwise = None, columnwise
        self.num_pushes += 1
        rows = mains.rows(columnwise=columnwise)
        pending = self.transport.push(transfers, rows, self.weight_buffers, label)
        return Materializing(pending, self, owner)

    def begin_fused(self, slot_grads: Sequence[Tensor | None]) -> None:
        """Let fused products add to the slots' gradients, which begin at zero.

        All layers share the slots' gradients, so this call waits for a reduction under way.
        """
        self._end_reduction()
        if self._are_grads_used:  # By a backward that stopped halfway.
            self._zero_grads(slot_grads)
        self._are_grads_used = True

    def reduce_replica_grads(
        self,
        transfers: Transfers,
        slot_grads: Sequence[Tensor | None],
        replica_grads: Sequence[Any],
        totals: Totals,
        label: str,
        *,
        aside: Aside | None = None,
    ) -> Reducing:
        """Start adding the gradients of all replicas; every rank of the EP group calls.

        All layers share the slots' gradients, so this call waits for a reduction under way. The
        host does not wait for a plan on a GPU. Slots' gradients are zero again at the end.

        Args:
            transfers: The replicas.
            slot_grads: The result of `allocate_grads`; a segment with None is not reduced.
            replica_grads: The gradients from autograd, one entry a segment, indexed by slot. None
                for a segment or a slot without a gradient.
            totals: What the mains' sums are added to: `MainWeights.totals`.
            label: Names the forward in errors.
            aside: With fused gradients, after `begin_fused`: what `MainWeights.set_aside` returned,
                which is added to the sums. A slot without an entry in `replica_grads` then has its
                gradient in `slot_grads`.
        """
        self._end_reduction()
        asides = aside if aside is not None else [None for _ in totals]
        trained = [
            (buffer, grads, of_segment, before)
            for buffer, grads, of_segment, before in zip(
                slot_grads, replica_grads, totals, asides, strict=True
            )
            if buffer is not None and of_segment is not None
        ]
        for buffer, grads, *_ in trained:
            is_stacked = grads is None or isinstance(grads, Tensor)
            for slot, grad in [(buffer, grads)] if is_stacked else zip(buffer, grads, strict=True):
                if grad is not None:
                    slot.copy_(grad)
                elif aside is None:
                    # A recomputed router may send no token to a replica that the plan has.
                    slot.zero_()
        self._are_grads_used = True
        pending = self.transport.pull_add(
            transfers,
            [buffer for buffer, *_ in trained],
            [of_segment for *_, of_segment, _ in trained],
            [before for *_, before in trained],
            label,
        )
        reducing = Reducing(self, pending, totals)
        self._reducing, self._reduction = weakref.ref(reducing), pending
        return reducing

    def _zero_grads(self, slot_grads: Sequence[Tensor | None]) -> None:
        for buffer in slot_grads:
            if buffer is not None:
                buffer.zero_()
        self._are_grads_used = False

    def _end_reduction(self) -> None:
        # The forward keeps a running reduction alive. Without it, a backward did not come to the
        # join, and its reduction may still read the slots' gradients.
        if self._reducing is not None and (reducing := self._reducing()) is not None:
            reducing.wait()
        elif self._reduction is not None:
            self._reduction.wait()
            self._reduction = None
            self._are_grads_used = False

    def reset(self) -> None:
        """Forget an aborted step; every rank of the EP group calls before the next one."""
        self._resident = None
        self._reducing = self._reduction = None
        self.transport.reset()
        # Now, because the next backward may be a replay, which does not ask.
        self._zero_grads(self.slot_grads)


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
        self._num_pushes = buffers.num_pushes if buffers is not None else 0
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
        if self._buffers is not None and self._buffers.num_pushes == self._num_pushes:
            self._buffers._resident = self._owner


class Reducing:
    """Replica gradients on their way into the mains' totals."""

    def __init__(self, buffers: SlotBuffers, pending: Pending, totals: Totals) -> None:
        self._buffers = buffers
        self._pending: Pending | None = pending
        self._totals = totals
        self._started = TIMES.mark()

    def wait(self) -> Totals:
        """Wait for the totals; return them. A second call returns the same."""
        if self._pending is not None:
            with timed("reduce", self._started):
                self._pending.wait()
            self._pending = self._buffers._reduction = None
            self._buffers._are_grads_used = False
        return self._totals


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
