"""Shares memory between the ranks of one machine: one region a rank, all of the same size.

A region is an anonymous file (memfd). The file has no name, so nothing is left after its processes
end or are killed. Peers open the file through `/proc/<pid>/fd/<fd>` while the rank holds it open,
so all ranks must see each other's processes. A region lives as long as a tensor over the region.
"""

from __future__ import annotations

import mmap
import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.transport.reach import gather

_MADV_POPULATE_WRITE = 23
"""Not in Python's `mmap`: fault all pages in now (Linux 5.14)."""


@dataclass(frozen=True)
class _Machine:
    """Identifies a machine: processes with equal values can open each other's files."""

    host: str
    boot_id: str
    pid_namespace: str


@dataclass(frozen=True)
class _Offer:
    """A region that a rank holds open for its peers."""

    machine: _Machine
    pid: int
    fd: int
    inode: tuple[int, int]
    num_bytes: int
    purpose: str


_ELSEWHERE = "it is on another machine or in another container"


def machine_obstacles(ep_group: ProcessGroup, device: torch.device) -> list[str]:
    """Return by rank why this rank cannot map its memory, or ""; see `TransportKind.obstacles`."""
    mine = machine_of_this_process()
    return ["" if other == mine else _ELSEWHERE for other in gather(mine, ep_group)]


def share(num_bytes: int, purpose: str, ep_group: ProcessGroup, peers: range) -> list[Tensor]:
    """Return the peers' new regions as zeroed bytes, by rank of the EP group; all ranks call.

    All ranks ask for the same size of a region, at least 1, and for the same purpose. `peers` are
    the ranks that share with this rank, this rank among them; the result has no bytes of others.

    Raises:
        ValueError: The ranks do not ask for the same.
        RuntimeError: Some rank cannot open another's region; raised on all ranks.
    """
    fd = os.memfd_create("megatron_ext", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, num_bytes)
        # This rank touches the pages first, because a page lies in the memory nearest to the
        # processor that touches the page first.
        mine = _map(fd, num_bytes)
        offer = _Offer(machine_of_this_process(), os.getpid(), fd, _inode(fd), num_bytes, purpose)
        offers = gather(offer, ep_group)
        regions = [torch.empty(0, dtype=torch.uint8) for _ in offers]
        failure = None
        try:
            for rank in peers:
                other = offers[rank]
                regions[rank] = mine if other == offer else _open(other, offer)
        except (ValueError, RuntimeError) as error:
            failure = error
        # This gather also keeps the file open until the last peer has opened it.
        failures = gather(failure, ep_group)
    finally:
        os.close(fd)
    for each in (failure, *failures):
        if each is not None:
            raise each
    return regions


def _open(offer: _Offer, mine: _Offer) -> Tensor:
    if (offer.num_bytes, offer.purpose) != (mine.num_bytes, mine.purpose):
        raise ValueError(
            f"all ranks must share the same, but one asks for {mine.num_bytes} bytes for "
            f"{mine.purpose} and another for {offer.num_bytes} bytes for {offer.purpose}"
        )
    try:
        if offer.machine != mine.machine:
            raise OSError(_ELSEWHERE)
        fd = os.open(f"/proc/{offer.pid}/fd/{offer.fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            if _inode(fd) != offer.inode:
                raise OSError("it is in another pid namespace")
            return _map(fd, offer.num_bytes)
        finally:
            os.close(fd)
    except OSError as error:
        raise RuntimeError(
            f"process {mine.pid} on {mine.machine.host} cannot map memory of process {offer.pid} "
            f"on {offer.machine.host} ({error}); use balance.transport=collective"
        ) from error


def _map(fd: int, num_bytes: int) -> Tensor:
    mapping = mmap.mmap(fd, num_bytes, mmap.MAP_SHARED)
    # Both only save time: fewer page faults, and none in a training step.
    with suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    with suppress(OSError):
        mapping.madvise(_MADV_POPULATE_WRITE)
    return torch.frombuffer(mapping, dtype=torch.uint8)


def _inode(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def machine_of_this_process() -> _Machine:
    """Identify this machine; the result is equal for processes that see each other's files."""
    return _Machine(
        socket.gethostname(),
        Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        os.readlink("/proc/self/ns/pid"),
    )
