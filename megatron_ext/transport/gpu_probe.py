"""Finds the GPUs that reach each other's memory: all ranks try to read a page of every rank.

Ranks pass their pages as fabric handles if the GPUs have them (one NVLink domain, on one machine or
several), otherwise as file descriptors, which a socket takes to the other ranks of a machine.
"""

from __future__ import annotations

import os
import secrets
import socket
from array import array
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron_ext.ops import has_cuda_part
from megatron_ext.transport.gpu_driver import Driver, DriverError, SharedPage, num_links
from megatron_ext.transport.gpus import PULL_BYTES
from megatron_ext.transport.reach import gather
from megatron_ext.transport.shared_heap import machine_of_this_process

_TOKEN_BYTES = 16
_FILES_TIMEOUT_S = 10.0
"""Longest wait for the descriptor of a rank that has announced one."""


@dataclass(frozen=True)
class _Offer:
    """A rank's page, as the rank announces it to the others."""

    machine: object
    gpu: str
    """UUID, because another process may number the devices differently."""
    token: bytes
    num_bytes: int = 0
    fabric: bytes | None = None
    mailbox: str = ""
    problem: str = ""
    """The reason why the rank has no page, or ""."""


def gpu_obstacles(
    ep_group: ProcessGroup, device: torch.device, driver: Driver | None = None
) -> list[str]:
    """Return by rank why this rank's GPU does not reach the rank's memory, or ""; all ranks call.

    Each rank has a GPU, which `device` names with or without a number.
    """
    number = device.index if device.index is not None else torch.cuda.current_device()
    gpu = torch.cuda.get_device_properties(number)
    token = secrets.token_bytes(_TOKEN_BYTES)
    page, problem = None, ""
    try:
        if not has_cuda_part():
            raise RuntimeError("the library has no CUDA part")
        _require_room(gpu)
        driver = driver or Driver()
        page = driver.share(number, token)
    except (RuntimeError, OSError) as error:
        problem = str(error)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as mailbox:
        mailbox.bind(f"\0megatron_ext.{os.getpid()}.{secrets.token_hex(8)}")
        mine = _Offer(
            (machine_of_this_process(), os.readlink("/proc/self/ns/net")),
            str(gpu.uuid),
            token,
            problem=problem,
        )
        if page is not None:
            fabric = page.handle if isinstance(page.handle, bytes) else None
            name = mailbox.getsockname().decode()
            mine = _Offer(mine.machine, mine.gpu, token, page.num_bytes, fabric, name)
        offers = gather(mine, ep_group)
        files = _exchange_files(page, offers, dist.get_rank(ep_group), mailbox)
        found = [
            _obstacle(driver, number, mine, other, files.get(rank))
            for rank, other in enumerate(offers)
        ]
        gather(None, ep_group)  # other ranks read this rank's page until all ranks are here
    for file in files.values():
        os.close(file)
    if page is not None:
        page.close()
    return found


def has_no_link(device: torch.device) -> bool:
    """Return whether this rank's GPU has no NVLink, so that other GPUs use PCIe to reach it."""
    return num_links(str(torch.cuda.get_device_properties(device).uuid)) == 0


def reach_of_devices(driver: Driver, devices: Sequence[int]) -> list[list[str]]:
    """Return why GPU a of this process does not reach GPU b, or "", for all pairs: [a][b]."""
    found = [["" for _ in devices] for _ in devices]
    for b, sharer in enumerate(devices):
        token = secrets.token_bytes(_TOKEN_BYTES)
        try:
            _require_room(torch.cuda.get_device_properties(sharer))
            page = driver.share(sharer, token)
        except DriverError as error:
            for row in found:
                row[b] = str(error)
            continue
        for a, reader in enumerate(devices):
            if a != b:
                found[a][b] = _try(driver, reader, page.handle, page.num_bytes, token)
        page.close()
    return found


def _require_room(gpu: Any) -> None:
    """Check that the kernel that adds gradients has enough shared memory on a GPU.

    Raises:
        DriverError: It has not.
    """
    if (room := gpu.shared_memory_per_block_optin) < PULL_BYTES:
        raise DriverError(
            f"a block on {gpu.name} has {room} bytes of shared memory, and the kernel that adds "
            f"gradients takes {PULL_BYTES}"
        )


def _obstacle(
    driver: Driver | None, device: int, mine: _Offer, other: _Offer, file: int | None
) -> str:
    if problem := mine.problem or other.problem:
        return problem
    assert driver is not None
    if other.token == mine.token:
        return ""
    if other.gpu == mine.gpu:
        return f"they share the GPU {mine.gpu}"
    if (other.fabric is None) != (mine.fabric is None):
        return "only one of their GPUs has handles of the fabric"
    handle = other.fabric if other.fabric is not None else file
    if handle is None:
        return (
            "it is on another machine or in another container, and the GPUs have no handles of the "
            "fabric (they need NVLink between machines, and an IMEX channel)"
        )
    return _try(driver, device, handle, other.num_bytes, other.token)


def _try(driver: Driver, device: int, handle: bytes | int, num_bytes: int, token: bytes) -> str:
    try:
        found = driver.read(device, handle, num_bytes, len(token))
    except DriverError as error:
        return str(error)
    return "" if found == token else "it reads other bytes there than were written"


def _exchange_files(
    page: SharedPage | None, offers: Sequence[_Offer], rank: int, mailbox: socket.socket
) -> dict[int, int]:
    """Send this rank's file descriptor to the machine's other ranks; return theirs by rank."""
    files: dict[int, int] = {}
    machine = [
        peer
        for peer, offer in enumerate(offers)
        if offer.mailbox and offer.fabric is None and offer.machine == offers[rank].machine
    ]
    if page is None or rank not in machine:
        return files
    mailbox.settimeout(_FILES_TIMEOUT_S)
    at = machine.index(rank)
    for hop in range(1, len(machine)):  # in turns, so that no mailbox is ever full
        peer = machine[(at + hop) % len(machine)]
        rights = socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [int(page.handle)])
        with suppress(OSError):  # a rank without a descriptor counts as not reached
            # Not `socket.send_fds`, which ignores the address.
            mailbox.sendmsg([str(rank).encode()], [rights], 0, offers[peer].mailbox)
        # Nothing is received where the process may not open a file more.
        with suppress(OSError, IndexError):
            told, received, _, _ = socket.recv_fds(mailbox, 16, 1)
            files[int(told)] = received[0]
    return files
