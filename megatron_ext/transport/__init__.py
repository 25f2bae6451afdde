"""How bytes reach a peer's slot. One class a file; a new transport is a file and a line here.

A transport allocates the slot buffers (a symmetric heap must own them), pushes main weights into
peers' slots and adds peers' slot gradients into the mains' sums. It knows transfers, not plans:
what to replicate is decided elsewhere.

    collective.py      over torch.distributed
    shared_memory.py   over memory that CPU ranks of one machine share
    shared_heap.py     how they come to share it
    cuda.py            over GPU memory that ranks reach over NVLink
    one_sided.py       what these two share
    relay.py           who copies what to whom, so that no rank sends too much
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Transfer:
    """One replica: a main of one rank into a slot of another. Ranks count within the EP group."""

    home_rank: int
    main_idx: int
    replica_rank: int
    slot_idx: int


@dataclass(frozen=True, eq=False)
class Transfers:
    """Every replica of the group, as a plan has them; equal on all ranks.

    Iterating lists them by rank, then slot. For a plan on a GPU the host waits for that, so a
    transport that can leaves the plan where it is.

    >>> list(Transfers(torch.tensor([[-1], [0]], dtype=torch.int32), mains_per_rank=2))
    [Transfer(home_rank=0, main_idx=0, replica_rank=1, slot_idx=0)]
    """

    slots: Tensor
    """Logical expert in each slot of each rank, or -1: int32 [R, S]."""
    mains_per_rank: int
    """Expert e is main e % mains_per_rank of rank e // mains_per_rank."""

    def __iter__(self) -> Iterator[Transfer]:
        for rank, experts in enumerate(self.slots.tolist()):
            for slot_idx, expert in enumerate(experts):
                if expert >= 0:
                    home_rank, main_idx = divmod(expert, self.mains_per_rank)
                    yield Transfer(home_rank, main_idx, rank, slot_idx)


class Pending(Protocol):
    """A push or a pull under way."""

    def wait(self) -> None:
        """Return when it is done; see `Transport`."""


class Transport(Protocol):
    """Moves expert state between the ranks of an EP group; all call alike, in the same order."""

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

        `wait()` returns when this rank's slots are filled and its mains may be changed.

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
                for gradients stored in bfloat16.
            label: Which layer this is for, to be named in errors.
        """

    def reset(self) -> None:
        """Forget an aborted step, so that the next call is a first one; every rank calls.

        After an error on any rank the ranks may have made different calls. Once all have left the
        step and called this, they go on alike; slots and slot gradients then hold nothing useful.
        """


def make_transport(
    name: str, ep_group: ProcessGroup, device: torch.device, *, grad_reduce_share: float
) -> Transport:
    """Return the transport called `name` for this EP group; every rank calls.

    Args:
        name: Of a transport, or `auto`.
        ep_group: Who moves replicas.
        device: Where the experts are.
        grad_reduce_share: Share of a GPU that adding gradients may use.

    Raises:
        ValueError: No such transport, or not for this device.
        RuntimeError: The group's ranks are not where the transport needs them.
    """
    # Here because they import this module.
    from megatron_ext.transport.collective import CollectiveTransport
    from megatron_ext.transport.cuda import CudaTransport, SymmetricHeap, can_reach_peers
    from megatron_ext.transport.shared_heap import is_on_one_machine
    from megatron_ext.transport.shared_memory import SharedMemoryTransport

    mapped = True
    if name == "auto" and device.type == "cpu":
        mapped = is_on_one_machine(ep_group)
    elif name == "auto" and device.type == "cuda":
        mapped = can_reach_peers(ep_group, device)
    chosen = resolve_transport(name, device_type=device.type, mapped=mapped)
    reason = "" if mapped else ": not all ranks of the EP group can reach each other's memory"
    logger.info("balance.transport=%s uses %s on %s%s", name, chosen, device.type, reason)
    if chosen == "shared_memory":
        return SharedMemoryTransport(ep_group)
    if chosen == "cuda":
        return CudaTransport(SymmetricHeap(ep_group, device), grad_reduce_share=grad_reduce_share)
    return CollectiveTransport(ep_group)


def resolve_transport(name: str, *, device_type: str = "cpu", mapped: bool = True) -> str:
    """Return the transport that `name` stands for.

    Args:
        name: Of a transport, or `auto`.
        device_type: Where the experts are.
        mapped: Whether all ranks of the EP group can reach each other's memory.

    >>> resolve_transport("auto")
    'shared_memory'
    >>> resolve_transport("auto", device_type="cuda")
    'cuda'
    >>> resolve_transport("auto", device_type="cuda", mapped=False)
    'collective'

    Raises:
        ValueError: No such transport, or not for this device.
    """
    if name == "auto":
        return _MAPPED.get(device_type, "collective") if mapped else "collective"
    if name not in TRANSPORTS:
        raise ValueError(
            f"balance.transport ({name!r}) is not available here; "
            f"use 'auto' or one of {list(TRANSPORTS)}"
        )
    if name in _MAPPED.values() and name != _MAPPED.get(device_type):
        needed = next(each for each, transport in _MAPPED.items() if transport == name)
        raise ValueError(
            f"balance.transport ({name!r}) moves experts of {needed.upper()} ranks only, these are "
            f"on {device_type}; use 'auto' or 'collective'"
        )
    return name


_MAPPED = {"cpu": "shared_memory", "cuda": "cuda"}
"""By device: the transport for ranks that reach each other's memory."""

TRANSPORTS = ("collective", *_MAPPED.values())
"""Names of all transports."""
