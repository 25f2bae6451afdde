"""Stands in for DeepEP 2.5's buffers on CPU ranks, and checks how they are called.

What it asks for is what `deep_ep/buffers/ep.py` and `allocator.py` of DeepEP 2.5 ask for. Slots of
all ranks lie in shared memory of one machine, as DeepEP's lie in memory that GPUs reach.
"""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

ALIGNMENT, TMA = 2 << 20, 32


class BufferAllocator:
    """Plans tensors, which have memory when a buffer is made."""

    def __init__(self) -> None:
        self.planned: list[tuple[Tensor, int]] = []
        self.num_bytes = 0
        self.materialized = False

    def allocate(self, shape: Any, dtype: torch.dtype) -> Tensor:
        assert not self.materialized
        tensor = torch.empty(shape, dtype=dtype, device="meta")
        self.planned.append((tensor, self.num_bytes))
        self.num_bytes += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        return tensor

    def materialize(self, storage: Tensor) -> None:
        assert not self.materialized
        for tensor, offset in self.planned:
            piece = storage.narrow(0, offset, tensor.nbytes)
            torch.utils.swap_tensors(tensor, piece.view(tensor.dtype).view(tensor.shape))
        self.materialized = True


class Event:
    """Calls are made when somebody waits, as late as is allowed."""

    def __init__(self, deed: Any) -> None:
        self._deed = deed

    def current_stream_wait(self) -> None:
        self._deed()
        self._deed = lambda: None


class EPBuffer:
    """One buffer of a group; all ranks make it, and call it alike."""

    under_way: Event | None = None

    def __init__(
        self,
        group: Any,
        num_bytes: int | None = None,
        *,
        lb_allocation_plan_or_num_bytes: BufferAllocator,
        allow_hybrid_mode: bool = True,
        num_gpu_timeout_secs: int = 100,
    ) -> None:
        assert num_bytes is not None
        assert num_bytes % ALIGNMENT == 0
        assert not allow_hybrid_mode, "it would ask for links between domains"
        assert isinstance(num_gpu_timeout_secs, int)
        plan = lb_allocation_plan_or_num_bytes
        assert plan.num_bytes > 0
        self.group, self.num_nvlink_ranks = group, group.size()
        # Garbage, as memory of a GPU is.
        self.storage = torch.full((plan.num_bytes,), 255, dtype=torch.uint8)
        plan.materialize(self.storage)
        sizes: list[Any] = [None] * group.size()
        dist.all_gather_object(sizes, plan.num_bytes, group=group)
        assert len(set(sizes)) == 1, "all ranks plan alike"

    def lb_prefetch_weights(
        self,
        redundant_expert_weights: Tensor,
        expert_weights: Tensor,
        redundancy_mapping: Tensor,
        num_sms: int = 0,
        previous_event: Any = None,
    ) -> Event:
        slots, mains = redundant_expert_weights, expert_weights
        self._check(slots, mains, redundancy_mapping)
        assert mains[0].nbytes == slots[0].nbytes
        assert slots[0].nbytes % TMA == 0
        mapping_of = weakref.ref(redundancy_mapping)

        def move() -> None:
            mapping = mapping_of()
            assert mapping is not None, "the caller holds the mapping until it has waited"
            of_all = self._of_all(mains.contiguous().view(torch.uint8).reshape(len(mains), -1))
            of_slots = slots.view(torch.uint8).view(len(slots), -1)
            for slot, expert in enumerate(mapping[self.group.rank()].tolist()):
                if expert >= 0:
                    of_slots[slot].copy_(of_all[expert // len(mains)][expert % len(mains)])

        return self._start(move)

    def lb_reduce_grads(
        self,
        redundant_expert_grads: Tensor,
        expert_grads: Tensor,
        redundancy_mapping: Tensor,
        num_sms: int = 0,
        previous_event: Any = None,
    ) -> Event:
        slots, mains = redundant_expert_grads, expert_grads
        self._check(slots, mains, redundancy_mapping)
        assert slots.dtype == mains.dtype == torch.float32
        assert slots.dim() == mains.dim() == 2
        assert slots.shape[1] == mains.shape[1]
        mapping_of = weakref.ref(redundancy_mapping)

        def add() -> None:
            mapping = mapping_of()
            assert mapping is not None, "the caller holds the mapping until it has waited"
            of_all = self._of_all(slots)
            for rank, row in enumerate(mapping.tolist()):
                for slot, expert in enumerate(row):
                    if expert >= 0 and expert // len(mains) == self.group.rank():
                        mains[expert % len(mains)] += of_all[rank][slot]

        return self._start(add)

    def _check(self, slots: Tensor, mains: Tensor, mapping: Tensor) -> None:
        assert slots.is_contiguous()
        assert mains.is_contiguous()
        start, end = self.storage.data_ptr(), self.storage.data_ptr() + self.storage.nbytes
        assert start <= slots.data_ptr() < end, "slots lie in the buffer that is called"
        assert mapping.dtype == torch.int32
        assert mapping.is_contiguous()
        assert mapping.shape == (self.num_nvlink_ranks, len(slots))
        for rank, row in enumerate(mapping.tolist()):
            assert all(-1 <= each < len(mains) * self.num_nvlink_ranks for each in row)
            assert all(each < 0 or each // len(mains) != rank for each in row), "no own expert"
        assert len({str(each) for each in self._of_all(mapping)}) == 1, "equal on all ranks"

    def _start(self, deed: Any) -> Event:
        """Calls of a buffer follow each other."""
        if self.under_way is not None:
            self.under_way.current_stream_wait()
        self.under_way = Event(deed)
        return self.under_way

    def _of_all(self, tensor: Tensor) -> list[Tensor]:
        gathered = [torch.empty_like(tensor) for _ in range(self.group.size())]
        dist.all_gather(gathered, tensor.contiguous(), group=self.group)
        return gathered


def deep_ep() -> Any:
    """Return the package."""
    return SimpleNamespace(
        BufferAllocator=BufferAllocator,
        EPBuffer=EPBuffer,
        get_num_allocation_alignment=lambda: ALIGNMENT,
        get_num_tma_alignment=lambda: TMA,
        __version__="2.5.0",
    )
