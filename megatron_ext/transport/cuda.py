"""Moves replicas between GPUs whose memory the ranks reach directly, over NVLink.

Kernels of the home rank write into a peer's slot and read a peer's slot gradients. Generation
counters in the peers' memory put the accesses in order: the kernels advance these counters and wait
for them (`csrc/include/megatron_ext/peer_exchange.h`), without a barrier and without the host.
Calls return at once; work that follows on the current stream sees the results. Pushes and pulls run
on their own streams. The device enforces the time limit of a wait, and a later call raises the
error.

The host does not know the transfers: the kernels of a push and of a pull compile the plan, on the
device, into this rank's copies (`csrc/cuda/compile_copies.cuh`) and sums.

All calls but `reset` can be captured in a CUDA graph, and follow the plan that is in memory at the
replay. Three rules then hold: every layer has pushed before, a push or a pull ends in the graph in
which it started, and all ranks replay the same graphs in the same order.

With `CUDA_DEVICE_MAX_CONNECTIONS=1` a GPU starts the work of all streams in the order of the calls.
No launch here waits for another launch that waits for peers, so later work runs beside a push or a
pull. Work on any stream that follows `Pending.wait` waits for the push or pull.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.ops import has_cuda_part
from megatron_ext.transport.gpus import budget_of, what_it_lacks
from megatron_ext.transport.one_sided import (
    RELAY_THRESHOLD,
    OneSidedTransport,
    UnderWay,
    group_timeout_s,
)
from megatron_ext.transport.symmetric_heap import SymmetricHeap
from megatron_ext.transport.transport import Mains, Transfers, TransportOptions


class CudaTransport(OneSidedTransport):
    """Moves replicas with kernels over memory that all ranks of a domain reach.

    Args:
        heap: Allocates the buffers. Ranks may also be streams of one process on one GPU, each
            with its own heap and transport; then the blocks of all launches must fit on the GPU
            together.
        timeout_s: Longest wait for a peer, in seconds.
        relay_threshold: Most sends of a rank without relays (`relay.py`).
        push_blocks: Blocks that copy; by default as `budget_of` the GPU.
        grad_reduce_share: Blocks that add, as a share of the multiprocessors; by default likewise.

    Raises:
        RuntimeError: The compiled library is missing or has no CUDA part.
    """

    name = "cuda"

    def __init__(
        self,
        heap: SymmetricHeap,
        *,
        timeout_s: float,
        relay_threshold: int = RELAY_THRESHOLD,
        push_blocks: int | None = None,
        grad_reduce_share: float | None = None,
    ) -> None:
        if not has_cuda_part():
            raise RuntimeError(
                "transport cuda needs the CUDA part of megatron_ext's library: install the CUDA "
                "toolkit (nvcc) and a torch with CUDA, then build again; or use "
                "balance.transport=collective"
            )
        gpu = torch.cuda.get_device_properties(heap.device)
        if lack := what_it_lacks(gpu.name, (gpu.major, gpu.minor)):
            raise RuntimeError(f"transport cuda cannot be used: {lack}")
        budget = budget_of((gpu.major, gpu.minor), push_blocks, grad_reduce_share)
        exchange = torch.classes.megatron_ext.PeerExchange(
            heap.rank,
            heap.peers.start,
            len(heap.peers),
            timeout_s,
            torch.empty(0, device=heap.device),
            relay_threshold,
            budget.push_blocks,
            budget.pull_blocks(gpu.multi_processor_count),
        )
        super().__init__(exchange, heap.rank, heap.num_ranks, heap.peers)
        self._heap = heap
        self.failed = exchange.failed()

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a zeroed buffer that the domain's ranks reach; see `Transport.allocate`."""
        if device != self._heap.device:
            raise ValueError(
                f"transport cuda has memory of {self._heap.device} only, not of {device}"
            )
        slot_bytes = math.prod(shape[1:]) * dtype.itemsize
        num_bytes = torch.classes.megatron_ext.PeerExchange.segment_bytes(shape[0], slot_bytes)
        mine, addresses = self._heap.share(num_bytes)
        buffer = mine[: shape[0] * slot_bytes].view(dtype).view(shape)
        self._segment_ids[buffer.data_ptr()] = self._exchange.add_segment(buffer, addresses)
        return buffer

    def push(
        self, transfers: Transfers, mains: Mains, slot_weights: list[Tensor], label: str = ""
    ) -> UnderWay:
        """Start copying mains into slots; see `Transport.push`. The host waits for no plan.

        Raises:
            ValueError: The plan is too large; the message says how large it may be.
        """
        push = self._exchange.start_push(
            self._segments(slot_weights),
            [segment for main in zip(*mains, strict=True) for segment in main],
            transfers.mains_per_rank,
            transfers.experts_in_slots.to(self._heap.device).contiguous(),
            label,
        )
        return UnderWay(self._exchange.finish_push, push)

    def pull_add(
        self,
        transfers: Transfers,
        slot_grads: list[Tensor],
        totals: Mains,
        aside: Sequence[Sequence[Tensor | None] | None],
        label: str = "",
    ) -> UnderWay:
        """Start adding slot gradients at the mains' home; see `Transport.pull_add`.

        Raises:
            ValueError: The plan is too large; the message says how large it may be.
        """
        mains = range(transfers.mains_per_rank)
        pull = self._exchange.start_pull(
            self._segments(slot_grads),
            [segment[m] for m in mains for segment in totals],
            [segment and segment[m] for m in mains for segment in aside],
            transfers.mains_per_rank,
            transfers.experts_in_slots.to(self._heap.device).contiguous(),
            label,
        )
        return UnderWay(self._exchange.finish_pull, pull)

    def note_reads(self) -> None:
        """Let later pushes wait for the current stream; see `Transport.note_reads`."""
        self._exchange.note_reads()

    def cancel(self) -> None:
        """End waits for peers; see `Transport.cancel`."""
        self._exchange.cancel()

    def _share_tables(self, num_bytes: int) -> tuple[Tensor, Tensor]:
        return self._heap.share(num_bytes)

    def raise_failure(self) -> None:
        """Raise the error of a failed wait; every other call does so, too."""
        self._exchange.raise_failure()

    def close(self) -> None:
        """Free all memory that no tensor uses; called after the last transfer of all ranks."""
        super().close()
        self._heap.close()

    def _highest(self, value: int) -> int:
        return self._heap.highest(value)


def make(ep_group: ProcessGroup, device: torch.device, options: TransportOptions) -> CudaTransport:
    """Return the transport of a rank; see `TransportKind.make`."""
    return CudaTransport(
        SymmetricHeap(ep_group, device, options.domain_ranks, options.symmetric_memory),
        timeout_s=options.timeout_s or group_timeout_s(ep_group, device),
        push_blocks=options.push_blocks,
        grad_reduce_share=options.grad_reduce_share,
    )
