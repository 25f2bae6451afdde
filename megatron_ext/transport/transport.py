"""What a transport is: what it moves, what it promises, and where it can be used.

A transport allocates the slot buffers (a symmetric heap must own them), pushes main weights into
peers' slots and adds peers' slot gradients into the mains' sums. It knows transfers, not plans:
`balance/` decides what to replicate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
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


@dataclass(frozen=True, eq=False)
class Transfers:
    """Every replica of the group, as a plan has them; equal on all ranks.

    Iterating lists them by rank, then slot. For a plan on a GPU the host waits for the device to do
    so; a transport that needs no list leaves the plan on the device, and `known` asks for no wait.

    >>> list(Transfers(torch.tensor([[-1], [0]], dtype=torch.int32), mains_per_rank=2))
    [Transfer(home_rank=0, main_idx=0, replica_rank=1, slot_idx=0)]
    """

    slots: Tensor
    """Logical expert in each slot of each rank, or -1: int32 [R, S]."""
    mains_per_rank: int
    """Expert e is main e % mains_per_rank of rank e // mains_per_rank."""
    on_host: Tensor | None = None
    """`slots` on the host, where that is known already."""
    is_urgent: bool = False
    """Whether they shall be under way at once, even if the host has to wait for the plan."""

    @property
    def known(self) -> Transfers | None:
        """The same on the host, if the host need not wait for them; else None."""
        on_host = self.on_host if self.slots.is_cuda else self.slots
        return None if on_host is None else replace(self, slots=on_host)

    def __iter__(self) -> Iterator[Transfer]:
        for rank, experts in enumerate(self.slots.tolist()):
            for slot_idx, expert in enumerate(experts):
                if expert >= 0:
                    home_rank, main_idx = divmod(expert, self.mains_per_rank)
                    yield Transfer(home_rank, main_idx, rank, slot_idx)


class HostCopy:
    """The values of a tensor on the host: copied there, or written there by a kernel."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self._written = torch.cuda.Event() if device.type == "cuda" else None
        self.memory = torch.empty(shape, dtype=dtype, pin_memory=self._written is not None)
        """Where the values are; for a GPU's kernels to write to, or a launch on the CPU."""

    def start(self, source: Tensor) -> None:
        """Start to copy, behind the work of the current stream; the host does not wait."""
        self.memory.copy_(source, non_blocking=True)
        self.mark_written()

    def mark_written(self) -> None:
        """Note that the work of the current stream so far writes the values."""
        if self._written is not None:
            self._written.record()

    def wait(self) -> Tensor:
        """Wait until the values are there; return them."""
        if self._written is not None:
            self._written.synchronize()
        return self.memory


class Pending(Protocol):
    """A push or a pull under way."""

    def wait(self) -> None:
        """Return when the push or pull is done; see `Transport`."""


class GathersRows(Protocol):
    """Gathers words of all ranks of an EP group; all call alike, in the same order."""

    def gather(self, row: Tensor, label: str = "") -> Tensor:
        """Return the rows of all ranks.

        Args:
            row: int64 [W], with the same W on all ranks, on the device of the slots.
            label: What this is for, to be named in errors.

        Returns:
            int64 [R, W], in memory of its own.

        Raises:
            RuntimeError: A rank was too late. Between GPUs this comes when the device has noticed,
                from `raise_failure` or a later call, and the row of that rank is zeros.
        """

    def raise_failure(self) -> None:
        """See `Transport.raise_failure`."""


class Transport(Protocol):
    """Moves expert state between the ranks of an EP group; all call alike, in the same order."""

    name: str
    """As in `balance.transport`."""

    @property
    def failed(self) -> Tensor | None:
        """1 once a wait of this rank has failed, else 0: int32 [1] in memory of the host.

        The device writes it. None if waits that fail raise where they are made.
        """

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a zeroed buffer that peers can reach; every rank calls with the same arguments."""

    def push(
        self,
        transfers: Transfers,
        mains: list[list[Tensor]],
        slots: list[Tensor],
        label: str = "",
    ) -> Pending:
        """Start copying mains into slots. The caller does not read their old content any more.

        `wait()` returns when this rank's slots hold their replicas and its mains may be changed.

        Args:
            transfers: Every replica of the group.
            mains: `mains[g][m]` is segment g of this rank's main m.
            slots: `slots[g]` is segment g of all slots of this rank, [S, *segment shape].
            label: Which layer this is for, to be named in errors.
        """

    def pull_add(
        self,
        transfers: Sequence[Transfer],
        slot_grads: list[Tensor],
        sums: dict[int, list[Tensor]],
        label: str = "",
    ) -> Pending:
        """Start adding slot gradients at the mains' home, in the order of `transfers`.

        `wait()` returns when the sums are there and this rank may overwrite its slot gradients.

        Args:
            transfers: Every replica of the group, in an order that is the same on all ranks.
            slot_grads: `slot_grads[g]` is segment g of all slot gradients of this rank, [S,
                *segment shape].
            sums: For each main m of this rank that has replicas, one tensor a segment, overwritten
                with the sum of its replicas' gradients. Of the dtype of `slot_grads`, but float32
                for gradients stored in bfloat16 or float16.
            label: Which layer this is for, to be named in errors.
        """

    @property
    def rows(self) -> GathersRows | None:
        """Gathers without a collective, where every rank reaches all ranks' memory; else None."""

    def raise_failure(self) -> None:
        """Raise the error of a wait that has failed by now, if the host has not heard of it yet.

        Raises:
            RuntimeError: A peer was too late or made other calls.
        """

    def reset(self) -> None:
        """Forget an aborted step, as if no call had been made yet; every rank calls.

        After an error on any rank the ranks may have made different calls. Once all have left the
        step and called this, they go on alike; slots and slot gradients then hold nothing useful.
        """


@dataclass(frozen=True, kw_only=True)
class TransportOptions:
    """What a transport is told beside its EP group and device; equal on all ranks."""

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


@dataclass(frozen=True, kw_only=True)
class TransportKind:
    """A transport's entry in the registry: how it is named, chosen and made."""

    name: str
    """Its value of the setting `balance.transport`."""
    device_type: str | None
    """Type of device that the experts must be on; None if any."""
    max_slots: int | None = None
    """Most slots of a rank; None if any number."""
    adds_float16: bool = False
    """Whether it adds gradients that are stored in float16."""
    obstacles: Callable[[ProcessGroup, torch.device], list[str]] | None
    """Tries to reach each rank of an EP group from this rank; says why it does not, or nothing
    where it does. All ranks call. None if the transport reaches ranks wherever they are."""
    is_slow: Callable[[torch.device], bool] = lambda device: False
    """Whether others reach this rank's memory on that device, but slowly."""
    make: Callable[[ProcessGroup, torch.device, TransportOptions], Transport]
    """Makes the transport for an EP group and its device; all ranks call."""
