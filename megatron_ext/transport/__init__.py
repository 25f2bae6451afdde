"""Moves weights and gradients between mains and the slots of other ranks.

A new transport is a file with `make`, an entry of `TRANSPORTS`, and its name in `config.py`; `auto`
prefers later entries. A transport's file is imported when it is used.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron_ext.transport.reach import (
    first_obstacle,
    gather,
    gather_obstacles,
    largest_domain,
    reaches_across,
)
from megatron_ext.transport.transport import SHARED_MEMORY_SLOTS
from megatron_ext.transport.transport import GathersRows as GathersRows
from megatron_ext.transport.transport import HostCopy as HostCopy
from megatron_ext.transport.transport import Pending as Pending
from megatron_ext.transport.transport import Transfer as Transfer
from megatron_ext.transport.transport import Transfers as Transfers
from megatron_ext.transport.transport import Transport as Transport
from megatron_ext.transport.transport import TransportKind as TransportKind
from megatron_ext.transport.transport import TransportOptions as TransportOptions

logger = logging.getLogger(__name__)


def _of(module: str, name: str) -> Callable[..., Any]:
    """Return a function of one of this package's modules, which its first call imports."""
    return lambda *args: getattr(importlib.import_module(f"{__name__}.{module}"), name)(*args)


def _on_gpus(name: str, **others: bool) -> TransportKind:
    return TransportKind(
        name=name,
        device_type="cuda",
        obstacles=_of("gpu_probe", "gpu_obstacles"),
        is_slow=_of("gpu_probe", "has_no_link"),
        make=_of(name, "make"),
        **others,
    )


TRANSPORTS: dict[str, TransportKind] = {
    kind.name: kind
    for kind in (
        TransportKind(
            name="collective",
            device_type=None,
            lists_transfers=True,
            adds_float16=True,
            obstacles=None,
            make=_of("collective", "make"),
        ),
        TransportKind(
            name="shared_memory",
            device_type="cpu",
            max_slots=SHARED_MEMORY_SLOTS,
            obstacles=_of("shared_heap", "machine_obstacles"),
            make=_of("shared_memory", "make"),
        ),
        _on_gpus("deepep", is_automatic=False, in_graphs=False),
        _on_gpus("cuda"),
    )
}
"""All transports by name. `auto` takes the last one that works on the ranks' devices and links."""


def make_transport(
    name: str, ep_group: ProcessGroup, device: torch.device, options: TransportOptions
) -> Transport:
    """Return the transport called `name`, of `TRANSPORTS`, for this EP group; every rank calls.

    Raises:
        ValueError: It is not for this device.
        RuntimeError: The group's ranks do not reach each other in the transport's way.
    """
    return _kind(name, device.type).make(ep_group, device, options)


_AGREED: WeakKeyDictionary[ProcessGroup, dict[Any, tuple[str, int]]] = WeakKeyDictionary()


def agree_on_transport(
    name: str,
    domain_ranks: int | None,
    ep_group: ProcessGroup,
    device: torch.device,
    planning_group: ProcessGroup | None = None,
) -> tuple[str, int]:
    """Return the name of the transport, and the ranks per domain; all ranks call.

    Ranks try to reach each other's memory, once for an EP group. A domain has as many ranks as
    reach each other, unless `domain_ranks` is given. Only `collective` reaches ranks of other
    domains. The ranks that plan alike, by default the EP group, get the same answer: with expert
    tensor parallelism these are several EP groups.

    Raises:
        ValueError: It is not for this device.
        RuntimeError: Ranks do not reach each other, and transport `name` needs that.
    """
    planning_group = planning_group or ep_group
    agreed = _AGREED.setdefault(ep_group, {})
    key = name, domain_ranks, device
    if key not in agreed:

        def look(kind: TransportKind) -> list[list[str]]:
            assert kind.obstacles is not None
            return gather_obstacles(kind.obstacles(ep_group, device), planning_group)

        num_ranks = dist.get_world_size(ep_group)
        choice = choose_transport(name, domain_ranks, num_ranks, device.type, look)
        if choice.domain_ranks > 1:
            is_slow = TRANSPORTS[choice.name].is_slow(device)
            choice = warn_of_slow(choice, gather(is_slow, planning_group))
        agreed[key] = choice.name, choice.domain_ranks
        if dist.get_rank(planning_group) == 0:
            logger.log(choice.level, choice.line)
    return agreed[key]


class Choice(NamedTuple):
    """The chosen transport and domain, and the line of the log about the choice."""

    name: str
    domain_ranks: int
    level: int
    line: str


def choose_transport(
    name: str,
    domain_ranks: int | None,
    num_ranks: int,
    device_type: str,
    look: Callable[[TransportKind], list[list[str]]],
) -> Choice:
    """Choose the transport by the settings and by the memory that ranks reach.

    Without `domain_ranks`, a domain is as large as ranks reach each other. `look` returns for a
    transport the reason why rank a does not reach rank b, or "": [R][R].

    Raises:
        ValueError: It is not for this device.
        RuntimeError: Ranks do not reach each other, and transport `name` needs that.
    """
    wanted = domain_ranks or num_ranks
    asked = (
        f"balance.transport={name}, balance.nvlink_domain={domain_ranks or 'auto'} "
        f"({num_ranks} EP ranks on {device_type})"
    )
    problem = None
    for kind in _candidates(device_type) if name == "auto" else [_kind(name, device_type)]:
        if kind.obstacles is None:
            why = f"{problem}. So replicas" if problem else "replicas"
            level = logging.WARNING if problem else logging.INFO
            cost = f"go through transport {kind.name}, {_COST_OF_MESSAGES}"
            return Choice(kind.name, wanted, level, f"{asked}: {why} {cost}")
        obstacles = look(kind)
        size = domain_ranks or largest_domain(obstacles)
        if first_obstacle(obstacles, size) is None and (size > 1 or size == wanted):
            level, found = _describe(obstacles, size, is_asked=domain_ranks is not None)
            return Choice(kind.name, size, level, f"{asked}: transport {kind.name}, {found}")
        problem = first_obstacle(obstacles, wanted)
    raise RuntimeError(f"{asked}: {problem}; use balance.transport=collective")


_COST_OF_MESSAGES = (
    "a message each over torch.distributed: several times slower than memory that ranks reach, "
    "and the host waits for plans"
)


def warn_of_slow(choice: Choice, is_slow: Sequence[bool]) -> Choice:
    """Return the choice, with a warning if some rank's memory is slow; `is_slow` by rank."""
    slow = [rank for rank, each in enumerate(is_slow) if each]
    if not slow:
        return choice
    line = f"{choice.line}. The GPUs of ranks {slow} have no NVLink: {_COST_OF_PCIE}"
    return choice._replace(level=logging.WARNING, line=line)


_COST_OF_PCIE = (
    "replicas go over PCIe, at 25 to 50 GB/s instead of 450 or more, so they may take longer than "
    "what they save; balance.objective=time weighs it, a larger balance.tolerance moves fewer"
)


def _describe(
    obstacles: Sequence[Sequence[str]], domain_ranks: int, *, is_asked: bool
) -> tuple[int, str]:
    """Return the level and the words of the log; several domains are a warning unless asked for."""
    problem = first_obstacle(obstacles, len(obstacles))
    if problem is None:
        return logging.INFO, "one domain: all ranks reach each other"
    cost = f"{problem}. Replicas stay in their domain, and so does what is uneven between domains"
    found = f"domains of {domain_ranks} ranks: {cost}"
    if reaches_across(obstacles, domain_ranks):
        found += ". Some ranks reach others beyond that, which is not used"
        return logging.WARNING, found
    if not is_asked:
        return logging.WARNING, f"{found}. If that is meant: balance.nvlink_domain={domain_ranks}"
    return logging.INFO, found


def resolve_transport(name: str, *, device_type: str = "cpu", mapped: bool = True) -> str:
    """Return the name of a transport: `name`, or the one that `auto` stands for.

    `mapped` is true if all ranks of the EP group reach each other's memory.

    >>> resolve_transport("auto")
    'shared_memory'
    >>> resolve_transport("auto", device_type="cuda")
    'cuda'
    >>> resolve_transport("auto", device_type="cuda", mapped=False)
    'collective'

    Raises:
        ValueError: It is not for this device.
    """
    if name == "auto":
        # A transport that needs one type of device is for ranks that reach each other's memory.
        return _candidates(device_type if mapped else None)[0].name
    return _kind(name, device_type).name


def _kind(name: str, device_type: str) -> TransportKind:
    needed = TRANSPORTS[name].device_type
    if needed not in (None, device_type):
        raise ValueError(
            f"balance.transport ({name!r}) moves experts of {needed.upper()} ranks only, these are "
            f"on {device_type}; use 'auto' or 'collective'"
        )
    return TRANSPORTS[name]


def _candidates(device_type: str | None) -> list[TransportKind]:
    """Return the transports that `auto` may take for experts on that device, the best first."""
    return [
        kind
        for kind in reversed(TRANSPORTS.values())
        if kind.device_type in (None, device_type) and kind.is_automatic
    ]
