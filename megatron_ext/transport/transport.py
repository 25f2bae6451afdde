"""Defines the interface of a transport, which moves weights and gradients of replicas.

A transport allocates the slot buffers (a symmetric heap must own them), copies main weights into
peers' slots and adds peers' slot gradients into the mains' sums. A transport knows transfers, not
plans: `balance/` decides which experts are replicated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Transfer:
    """One replica: a main of one rank, a slot of another rank. Ranks count within the EP group."""

    home_rank: int
    main_idx: int
    replica_rank: int
    slot_idx: int


class Transfers:
    """Every replica of a plan, in the whole group; equal on all ranks.

    An iteration lists the replicas by rank, then slot. For a plan on a GPU, the host waits for a
    copy of the plan, unless the copy was started long before. A transport that needs no list leaves
    the plan on the device.

    >>> list(Transfers(torch.tensor([[-1], [0]], dtype=torch.int32), mains_per_rank=2))
    [Transfer(home_rank=0, main_idx=0, replica_rank=1, slot_idx=0)]

    Args:
        experts_in_slots: Logical expert in each slot of each rank, or -1: int32 [R, S].
        mains_per_rank: Expert e is main e % mains_per_rank of rank e // mains_per_rank.
    """

    def __init__(self, experts_in_slots: Tensor, mains_per_rank: int) -> None:
        self.experts_in_slots = experts_in_slots
        self.mains_per_rank = mains_per_rank
        self._on_host: HostCopy | None = None

    @property
    def is_on_host(self) -> bool:
        """Whether an iteration waits for nothing, because the plan was never on a GPU."""
        return not self.experts_in_slots.is_cuda

    def start_copy(self) -> None:
        """Start to copy the plan to the host, once; the host does not wait."""
        if self._on_host is None and not self.is_on_host:
            held = self.experts_in_slots
            self._on_host = HostCopy(tuple(held.shape), held.dtype, held.device)
            self._on_host.start(held)

    def __iter__(self) -> Iterator[Transfer]:
        self.start_copy()
        held = self._on_host.wait() if self._on_host is not None else self.experts_in_slots
        for rank, experts in enumerate(held.tolist()):
            for slot_idx, expert in enumerate(experts):
                if expert >= 0:
                    home_rank, main_idx = divmod(expert, self.mains_per_rank)
                    yield Transfer(home_rank, main_idx, rank, slot_idx)


class HostCopy:
    """Memory of the host with a copy of a tensor's values, which kernels can write, too.

    Attributes:
        memory: The copy, pinned where `device` is a GPU.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self._written = torch.cuda.Event() if device.type == "cuda" else None
        self.memory = torch.empty(shape, dtype=dtype, pin_memory=self._written is not None)

    def start(self, source: Tensor) -> None:
        """Start a copy of `source` behind the current stream's work; the host does not wait."""
        self.memory.copy_(source, non_blocking=True)
        self.note_written()

    def note_written(self) -> None:
        """Let `wait` wait for the current stream's work so far, which writes `memory`."""
        if self._written is not None:
            self._written.record()

    def wait(self) -> Tensor:
        """Wait until the values are on the host; return the values."""
        if self._written is not None:
            self._written.synchronize()
        return self.memory


class Pending(Protocol):
    """A push or a pull that has started."""

    def wait(self) -> None:
        """Return when the push or pull is done; see `Transport`."""


class GathersRows(Protocol):
    """Gathers one row per rank of an EP group; all ranks make the same calls in the same order."""

    def gather(self, row: Tensor, label: str = "", into: Tensor | None = None) -> Tensor:
        """Return the rows of all ranks, int64 [R, W], in new memory or `into`.

        A row is int64 [W], with the same W on all ranks, on the device of the slots. The label
        names the gather in errors. `into` is contiguous, int64, of R * W elements, on that device
        or in pinned memory of the host, where the rows are when the device has come so far.

        Raises:
            RuntimeError: A rank was too late. Between GPUs, `raise_failure` or a later call raises
                the error after the device has noticed, and the row of the late rank is zeros.
        """

    def raise_failure(self) -> None:
        """See `Transport.raise_failure`."""


Mains = list[list[Tensor]]
"""A tensor [*shape] by segment and main of a rank."""


class Transport:
    """Moves weights and gradients of experts between the ranks of an EP group.

    All ranks make the same calls in the same order.
    """

    name: str
    """The value of `balance.transport` for this transport."""

    failed: Tensor | None = None
    """int32 [1] in memory of the host: 1 after a wait of this rank has failed, else 0. The device
    writes the number. None for transports whose failed waits raise at once."""

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a zeroed buffer of at least one slot that peers can reach.

        Every rank calls with the same arguments.
        """
        raise NotImplementedError

    def push(
        self, transfers: Transfers, mains: Mains, slot_weights: list[Tensor], label: str = ""
    ) -> Pending:
        """Start copying mains into slots; the caller no longer reads the slots' old content.

        `wait()` returns when this rank's slots hold their replicas and this rank may change its
        mains.

        `mains[g][m]` is segment g of this rank's main m, and `slot_weights[g]` that of all its
        slots, [S, *shape]. Where slots are bytes, [S, n], a main may have fewer, the same number on
        all ranks; they fill the slot's start. The label names the layer in errors.
        """
        raise NotImplementedError

    def note_reads(self) -> None:
        """Let later pushes wait for the current stream's work so far, which reads the slots.

        Only needed where a later push starts on another stream.
        """

    def pull_add(
        self,
        transfers: Transfers,
        slot_grads: list[Tensor],
        totals: Mains,
        aside: Sequence[Sequence[Tensor | None] | None],
        label: str = "",
    ) -> Pending:
        """Start adding the slot gradients of replicas to their mains' totals.

        For each main with replicas, `total += (sum of its replicas, rank by rank) + aside`:
        computed in float32 (float64 for float64 gradients), and rounded once to the dtype of the
        total. Totals of other mains stay as they are. `wait()` returns when this rank's totals are
        complete, and the gradients of this rank's replicas are zero again.

        Args:
            transfers: Every replica of the group.
            slot_grads: `slot_grads[g]` is segment g of the gradients of this rank's slots, [S,
                *shape].
            totals: `totals[g][m]` is for segment g of this rank's main m, [*shape]. The dtype is
                that of `slot_grads[g]`, or float32 for gradients in bfloat16 or float16.
            aside: For each segment None, or for each main None or a tensor like its total. Not
                read for a main without replicas.
            label: Names the layer in errors.
        """
        raise NotImplementedError

    @property
    def rows(self) -> GathersRows | None:
        """Return gathers through peer memory; None if some ranks do not reach each other."""
        return None

    def raise_failure(self) -> None:
        """Raise the error of a failed wait, if the host has not raised the error yet.

        Only needed where `Pending.wait` does not raise it.

        Raises:
            RuntimeError: A peer was too late or made other calls.
        """

    def cancel(self) -> None:
        """End this rank's waits for peers, those under way, too, until `reset`.

        Where a rank has several transports, it calls this for all before it resets one: a stream
        that a reset waits for may wait in another transport.
        """

    def reset(self) -> None:
        """Forget an aborted step, as if no call had been made yet; every rank calls.

        After an error on any rank, the ranks may have made different calls. After all ranks have
        left the step and called `reset`, their next calls match again; slots and slot gradients
        then hold nothing useful.
        """
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class TransportOptions:
    """Settings of a transport beside its EP group and device; equal on all ranks."""

    push_blocks: int | None = None
    """Blocks that copy weights; by default as the GPU's architecture wants (`gpus.py`)."""
    grad_reduce_share: float | None = None
    """Share of a GPU's multiprocessors that add gradients; by default likewise."""
    timeout_s: float | None = None
    """Longest wait for a peer, in seconds; by default as long as collectives of the group wait."""
    domain_ranks: int | None = None
    """Ranks per NVLink domain: replicas move within it. By default the whole EP group is one."""
    symmetric_memory: str | None = None
    """Backend of torch's symmetric memory, for `cuda`; by default as torch is set."""


SHARED_MEMORY_SLOTS = 256
"""Most slots of a rank on `shared_memory`: so many have flags."""


@dataclass(frozen=True, kw_only=True)
class TransportKind:
    """A transport's entry in the registry `TRANSPORTS`."""

    name: str
    """The value of the setting `balance.transport`."""
    device_type: str | None
    """Type of the experts' device; None for any type."""
    max_slots: int | None = None
    """Most slots of a rank; None for any number."""
    is_automatic: bool = True
    """Whether `auto` may take it."""
    in_graphs: bool = True
    """Whether a graph of whole steps may hold its calls."""
    lists_transfers: bool = False
    """Whether the host of each rank lists the transfers of a plan, and so waits for the plan."""
    adds_float16: bool = False
    """Whether the transport adds gradients that are stored in float16."""
    obstacles: Callable[[ProcessGroup, torch.device], list[str]] | None
    """Tries to reach each rank of an EP group from this rank. Returns the reason why a rank is not
    reached, or "", by rank. All ranks call. None for a transport that reaches every rank."""
    is_slow: Callable[[torch.device], bool] = lambda device: False
    """Whether other ranks reach this rank's memory on that device by a slow link only."""
    make: Callable[[ProcessGroup, torch.device, TransportOptions], Transport]
    """Makes the transport for an EP group and its device; all ranks call."""
