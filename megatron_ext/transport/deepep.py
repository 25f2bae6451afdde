"""Moves replicas by DeepEP's own primitives for redundant experts.

`EPBuffer.lb_prefetch_weights` pushes mains into slots, and `EPBuffer.lb_reduce_grads` adds slots'
gradients at home; both take the matrix of a plan's slots. What they ask for, from DeepEP 2.5's
`deep_ep/buffers/ep.py` and `deep_ep/include/deep_ep/impls/ep/reduce_grads.cuh`:

- All ranks of one NVLink domain make each call, which begins and ends with a barrier.
- Slots lie in memory of the buffer that is called, and that memory is planned before the buffer is
  made. So each buffer of slots is an `EPBuffer` of its own, and a call moves one segment.
- A call reads or adds to one tensor [M, *shape] of all mains. Mains that lie apart are copied into
  one first, and sums are added to the mains' totals from one.
- Gradients are float32. They are added by atomic operations, so the order is not fixed, and the
  last bits of a sum differ from run to run.
- A rank that is late is waited for by the device; when DeepEP's time limit is over, its kernel ends
  the process. Such a step cannot be forgotten.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.transport.one_sided import group_timeout_s
from megatron_ext.transport.reach import domain_of, gather
from megatron_ext.transport.symmetric_heap import domain_group
from megatron_ext.transport.transport import Mains, Transfers, Transport, TransportOptions

_NEEDED = ("lb_prefetch_weights", "lb_reduce_grads")


class _Call:
    """Calls of DeepEP under way with a mapping, and what the stream that waits for them does."""

    def __init__(
        self, events: list[Any], mapping: Tensor, then: Callable[[], None] | None = None
    ) -> None:
        self._events = events
        self._mapping = mapping  # other streams read it
        self._then = then

    def wait(self) -> None:
        """See `Pending`; later calls do nothing."""
        for event in self._events:
            event.current_stream_wait()
        self._events = []
        if self._then is not None:
            self._then()
            self._then = None


class DeepEPTransport(Transport):
    """Transport over DeepEP's buffers; all ranks of `group`, one NVLink domain, make it.

    `first_rank` is the domain's first in the EP group. The device waits for a peer at most
    `timeout_s`. Multiprocessors push (`push_sms`) and add (`pull_sms`); with 0 DeepEP chooses.

    Raises:
        RuntimeError: DeepEP is not installed, or has no primitives for redundant experts.
    """

    name = "deepep"

    def __init__(
        self,
        group: ProcessGroup,
        first_rank: int,
        *,
        timeout_s: float,
        push_sms: int = 0,
        pull_sms: int = 0,
    ) -> None:
        self._deep_ep = _import()
        self._group = group
        self._first_rank = first_rank
        self._timeout_s = math.ceil(timeout_s)
        self._sms = push_sms, pull_sms
        self._buffers: dict[int, Any] = {}  # by the address of their slots
        self._side_by_side: dict[int, Tensor] = {}  # likewise, [M, n] of all mains
        self._pushing: _Call | None = None
        self._pulling: _Call | None = None
        self._read: torch.cuda.Event | None = None

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a zeroed buffer that the domain's ranks reach; see `Transport.allocate`.

        Raises:
            ValueError: A slot's bytes are no multiple of what DeepEP copies at a time.
            RuntimeError: DeepEP finds another NVLink domain.
        """
        slot_bytes = math.prod(shape[1:]) * dtype.itemsize
        least = self._deep_ep.get_num_tma_alignment()
        if slot_bytes % least:
            raise ValueError(
                f"a slot of {slot_bytes} bytes ({list(shape[1:])}, {dtype}) must be a multiple of "
                f"{least} bytes for transport {self.name}; use balance.transport=cuda"
            )
        plan = self._deep_ep.BufferAllocator()
        slots: Tensor = plan.allocate(shape, dtype)  # has memory when the buffer is made
        buffer = self._deep_ep.EPBuffer(
            self._group,
            num_bytes=self._deep_ep.get_num_allocation_alignment(),  # none for tokens
            lb_allocation_plan_or_num_bytes=plan,
            allow_hybrid_mode=False,
            num_gpu_timeout_secs=self._timeout_s,
        )
        ranks = self._group.size()
        if buffer.num_nvlink_ranks != ranks:
            raise RuntimeError(
                f"transport {self.name}: DeepEP finds {buffer.num_nvlink_ranks} ranks in an NVLink "
                f"domain, not {ranks}; set balance.nvlink_domain to its number, or use "
                "balance.transport=cuda"
            )
        slots.zero_()
        self._buffers[slots.data_ptr()] = buffer
        return slots

    def push(
        self, transfers: Transfers, mains: Mains, slot_weights: list[Tensor], label: str = ""
    ) -> _Call:
        """Start copying mains into slots; see `Transport.push`."""
        if self._read is not None:
            self._read.wait()
        if self._pushing is not None:  # its handle was dropped, and its mapping goes
            self._pushing.wait()
        mapping = self._mapping(transfers)
        events = [
            self._buffers[slots.data_ptr()].lb_prefetch_weights(
                slots, self._beside(of_mains, slots), mapping, num_sms=self._sms[0]
            )
            for of_mains, slots in zip(mains, slot_weights, strict=True)
        ]
        self._pushing = _Call(events, mapping)
        return self._pushing

    def note_reads(self) -> None:
        """Let later pushes wait for the current stream's work so far, which reads the slots."""
        self._read = torch.cuda.Event()
        self._read.record()

    def pull_add(
        self,
        transfers: Transfers,
        slot_grads: list[Tensor],
        totals: Mains,
        aside: Sequence[Sequence[Tensor | None] | None],
        label: str = "",
    ) -> _Call:
        """Start adding slot gradients at the mains' home; see `Transport.pull_add`.

        Raises:
            ValueError: The slots' gradients are not float32.
        """
        for grads in slot_grads:
            if grads.dtype != torch.float32:
                raise ValueError(
                    f"slot_grads must be float32 for transport {self.name}, got {grads.dtype}; use "
                    "balance.transport=cuda"
                )
        if self._pulling is not None:  # its handle was dropped, and the next pull takes its memory
            self._pulling.wait()
        mapping = self._mapping(transfers)
        if not slot_grads:
            return _Call([], mapping)
        sums = [
            self._kept(grads, len(of_mains), grads[0].nbytes).view(torch.float32).zero_()
            for grads, of_mains in zip(slot_grads, totals, strict=True)
        ]
        events = [
            self._buffers[grads.data_ptr()].lb_reduce_grads(
                grads.view(len(grads), -1), added, mapping, num_sms=self._sms[1]
            )
            for grads, added in zip(slot_grads, sums, strict=True)
        ]
        mains_per_rank, rank = len(totals[0]), self._group.rank()
        own = torch.arange(mains_per_rank, device=mapping.device) + rank * mains_per_rank
        is_replicated = (mapping.view(-1, 1) == own).any(0)
        is_used = mapping[rank] >= 0

        def add() -> None:
            for added, of_mains, before in zip(sums, totals, aside, strict=True):
                for main_idx, total in enumerate(of_mains):
                    more = added[main_idx].view_as(total)
                    if before is not None and (rest := before[main_idx]) is not None:
                        more = more + rest
                    total.add_(torch.where(is_replicated[main_idx], more, 0))
            for grads in slot_grads:
                grads.masked_fill_(is_used.view(-1, *[1] * (grads.dim() - 1)), 0)

        self._pulling = _Call(events, mapping, add)
        return self._pulling

    def reset(self) -> None:
        """Refuse to forget an aborted step.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError(
            f"transport {self.name} cannot forget an aborted step, because ranks may stand in "
            "different barriers of DeepEP; start again from a checkpoint, or use "
            "balance.transport=cuda"
        )

    def _mapping(self, transfers: Transfers) -> Tensor:
        """Return the slots of the domain, int32 [D, S], with experts counted from its first."""
        ranks = self._group.size()
        held = transfers.experts_in_slots[self._first_rank : self._first_rank + ranks]
        first = self._first_rank * transfers.mains_per_rank
        return torch.where(held >= 0, held - first, -1).to(torch.int32).contiguous()

    def _beside(self, mains: list[Tensor], slots: Tensor) -> Tensor:
        """Return all mains in one tensor [M, ...] with as many bytes a main as a slot has."""
        slot_bytes = slots[0].nbytes
        starts = [each.data_ptr() for each in mains]
        is_one = all(
            each.is_contiguous()
            and each.nbytes == slot_bytes
            and start == starts[0] + i * slot_bytes
            and each.untyped_storage().data_ptr() == mains[0].untyped_storage().data_ptr()
            for i, (each, start) in enumerate(zip(mains, starts, strict=True))
        )
        if is_one:
            shape, strides = mains[0].shape, mains[0].stride()
            return mains[0].detach().as_strided((len(mains), *shape), (mains[0].numel(), *strides))
        copies = self._kept(slots, len(mains), slot_bytes)
        for copy, main in zip(copies, mains, strict=True):
            given = main.detach().reshape(-1).view(torch.uint8)
            if len(given) > slot_bytes:
                raise ValueError(
                    f"a main must be at most as large as its slot, {slot_bytes} bytes, got "
                    f"{len(given)}"
                )
            copy[: len(given)].copy_(given)
        return copies

    def _kept(self, slots: Tensor, num_mains: int, slot_bytes: int) -> Tensor:
        """Return memory [M, slot_bytes], for all calls with these slots."""
        if (kept := self._side_by_side.get(slots.data_ptr())) is None:
            kept = torch.empty(num_mains, slot_bytes, dtype=torch.uint8, device=slots.device)
            self._side_by_side[slots.data_ptr()] = kept
        return kept


def make(
    ep_group: ProcessGroup, device: torch.device, options: TransportOptions
) -> DeepEPTransport:
    """Return the transport of a rank; see `TransportKind.make`.

    Raises:
        RuntimeError: A rank has no DeepEP with primitives for redundant experts.
    """
    problem = ""
    try:
        _import()
    except RuntimeError as error:
        problem = str(error)
    # A rank that has it would wait for one that has not.
    for rank, other in enumerate(gather(problem, ep_group)):
        if other:
            raise RuntimeError(f"rank {rank}: {other}")
    rank, num_ranks = dist.get_rank(ep_group), dist.get_world_size(ep_group)
    peers = domain_of(rank, options.domain_ranks or num_ranks)
    share = options.grad_reduce_share or 0.0
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    return DeepEPTransport(
        domain_group(ep_group, peers, device),
        peers.start,
        timeout_s=options.timeout_s or group_timeout_s(ep_group, device),
        push_sms=options.push_blocks or 0,
        pull_sms=math.ceil(share * sms),
    )


def _import() -> Any:
    """Return DeepEP's package.

    Raises:
        RuntimeError: It is not installed, or has no primitives for redundant experts.
    """
    try:
        import deep_ep
    except ImportError as error:
        found = f"it cannot be imported ({error})"
    else:
        if all(hasattr(getattr(deep_ep, "EPBuffer", None), name) for name in _NEEDED):
            return deep_ep
        found = f"version {getattr(deep_ep, '__version__', 'unknown')} has not"
    raise RuntimeError(
        f"balance.transport=deepep needs DeepEP 2.5 or later, with EPBuffer.{' and '.join(_NEEDED)}"
        f": {found}; install it, or use balance.transport=cuda"
    )
