"""How bytes reach a peer's slot. One class a file; a new transport is a file and a line here.

A transport allocates the slot buffers (a symmetric heap must own them), pushes main weights into
peers' slots and adds peers' slot gradients into the mains' sums. It knows transfers, not plans:
what to replicate is decided elsewhere.
"""

from __future__ import annotations

import logging
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


class Pending(Protocol):
    """A push under way."""

    def wait(self) -> None:
        """Return when this rank's slots are filled and its mains may be changed."""


class Transport(Protocol):
    """Moves expert state between the ranks of an EP group; all call alike, in the same order."""

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a zeroed buffer that peers can reach; every rank calls with the same arguments."""

    def push(
        self, transfers: list[Transfer], mains: list[list[Tensor]], slots: list[Tensor]
    ) -> Pending:
        """Start copying mains into slots.

        Args:
            transfers: Every replica of the group, in an order that is the same on all ranks.
            mains: `mains[g][m]` is segment g of this rank's main m.
            slots: `slots[g]` is segment g of all slots of this rank, [S, *segment shape].
        """

    def pull_add(
        self, transfers: list[Transfer], slot_grads: list[Tensor], sums: dict[int, list[Tensor]]
    ) -> None:
        """Add slot gradients at the mains' home, in the order of `transfers`; returns when done.

        Args:
            transfers: As for `push`.
            slot_grads: `slot_grads[g]` is segment g of all slot gradients of this rank, [S,
                *segment shape].
            sums: For each main m of this rank that has replicas, one tensor a segment, overwritten
                with the sum of its replicas' gradients. Same dtype as `slot_grads`.
        """


def make_transport(name: str, ep_group: ProcessGroup, device: torch.device) -> Transport:
    """Return the transport called `name` for this EP group.

    Raises:
        ValueError: No such transport, or not on this machine.
    """
    chosen = resolve_transport(name)
    from megatron_ext.transport.collective import CollectiveTransport

    logger.info("balance.transport=%s uses %s on %s", name, chosen, device.type)
    return CollectiveTransport(ep_group)


def resolve_transport(name: str) -> str:
    """Return the transport that `name` stands for on this machine (`auto` picks one).

    >>> resolve_transport("auto")
    'collective'

    Raises:
        ValueError: No such transport.
    """
    if name in ("auto", *TRANSPORTS):
        return "collective" if name == "auto" else name
    raise ValueError(
        f"balance.transport ({name!r}) is not available here; "
        f"use 'auto' or one of {list(TRANSPORTS)}"
    )


TRANSPORTS = ("collective",)
"""Names of the transports that this installation has."""
