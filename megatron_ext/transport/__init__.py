"""How bytes reach a peer's slot.

    transport.py       what a transport is
    collective.py      over torch.distributed
    shared_memory.py   over memory that CPU ranks of one machine share
    shared_heap.py     how CPU ranks come to share memory
    cuda.py            over GPU memory that ranks reach over NVLink
    one_sided.py       what `shared_memory.py` and `cuda.py` have in common
    relay.py           who copies what to whom, so that no rank sends too much

A new transport is a file with a `TransportKind` and an entry of `TRANSPORTS`: the later it stands
there, the sooner `auto` takes it.
"""

from __future__ import annotations

import logging

import torch
from torch.distributed import ProcessGroup

from megatron_ext.arguments import did_you_mean
from megatron_ext.transport.collective import COLLECTIVE
from megatron_ext.transport.cuda import CUDA
from megatron_ext.transport.shared_memory import SHARED_MEMORY
from megatron_ext.transport.transport import Pending as Pending
from megatron_ext.transport.transport import Transfer as Transfer
from megatron_ext.transport.transport import Transfers as Transfers
from megatron_ext.transport.transport import Transport as Transport
from megatron_ext.transport.transport import TransportKind as TransportKind

logger = logging.getLogger(__name__)

TRANSPORTS: dict[str, TransportKind] = {
    kind.name: kind for kind in (COLLECTIVE, SHARED_MEMORY, CUDA)
}
"""All transports by name. `auto` takes the last transport that can serve."""


def make_transport(
    name: str,
    ep_group: ProcessGroup,
    device: torch.device,
    *,
    grad_reduce_share: float,
    timeout_s: float | None = None,
) -> Transport:
    """Return the transport called `name` for this EP group; every rank calls.

    Args:
        name: Name of a transport, or `auto`.
        ep_group: The ranks that move replicas.
        device: Where the experts are.
        grad_reduce_share: Share of a GPU that adding gradients may use.
        timeout_s: Longest wait for a peer, in seconds; by default as long as collectives of the
            group wait.

    Raises:
        ValueError: No such transport, or not for this device.
        RuntimeError: The group's ranks are not where the transport needs them.
    """
    reason = ""
    if name == "auto":
        candidates = _candidates(device.type)
        kind = next(each for each in candidates if each.can_serve(ep_group, device))
        if kind is not candidates[0]:
            reason = ": not all ranks of the EP group can reach each other's memory"
    else:
        kind = TRANSPORTS[resolve_transport(name, device_type=device.type)]
    logger.info("balance.transport=%s uses %s on %s%s", name, kind.name, device.type, reason)
    return kind.make(ep_group, device, grad_reduce_share, timeout_s)


def resolve_transport(name: str, *, device_type: str = "cpu", mapped: bool = True) -> str:
    """Return the transport that `name` stands for.

    Args:
        name: Name of a transport, or `auto`.
        device_type: Type of the experts' device.
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
        # A transport that needs one type of device is for ranks that reach each other's memory.
        return _candidates(device_type if mapped else None)[0].name
    if name not in TRANSPORTS:
        raise ValueError(
            f"balance.transport ({name!r}) is not available here; "
            f"use 'auto' or one of {list(TRANSPORTS)}{did_you_mean(name, TRANSPORTS)}"
        )
    needed = TRANSPORTS[name].device_type
    if needed not in (None, device_type):
        raise ValueError(
            f"balance.transport ({name!r}) moves experts of {needed.upper()} ranks only, these are "
            f"on {device_type}; use 'auto' or 'collective'"
        )
    return name


def _candidates(device_type: str | None) -> list[TransportKind]:
    """Transports that `auto` may take for experts on that device, the best first."""
    return [
        kind for kind in reversed(TRANSPORTS.values()) if kind.device_type in (None, device_type)
    ]
