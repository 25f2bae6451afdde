"""Shares GPU memory between the ranks of a domain by torch's symmetric memory.

Only this file uses torch's symmetric memory, a module that torch calls alpha. The module's backend
`CUDA` shares memory by handles of the driver, over several machines by fabric handles if the GPUs
have them; its backend `NCCL` uses windows of the group's communicator. `SymmetricHeap` checks that
every rank of the domain has an address, and that the buffers of all ranks are equally far behind
the start of their allocations.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.transport.one_sided import group_timeout_s
from megatron_ext.transport.reach import domain_of, gather

_SHARED_NUMBERS = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
"""Torch refuses ranks of one host whose GPUs have the same number unless this is set."""

_NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
"""Unless this is set, torch maps the memory of all ranks once more, as one address for all of them
(NVLS). No kernel here uses that, and the switches have room for few of these mappings."""

_TEMPORARY = ("TMPDIR", "TMP", "TEMP", "TEMPDIR")
"""Torch's backend `CUDA` makes a socket for each rank in the folder that the first of these names;
without any, in `/tmp`."""

_MOST_BYTES = 107 - len("/symm_mem-4194304")
"""Of that folder's path. Torch copies the path of the socket, which ends with the number of the
process, into an address with room for 107 bytes, and does not look whether the path fits."""


class SymmetricHeap:
    """Memory from torch.distributed's symmetric memory; all ranks of `ep_group` make it.

    Args:
        ep_group: The ranks that make the same calls, each with a GPU of its own.
        device: This rank's GPU.
        domain_ranks: Ranks per domain. The ranks of a domain reach each other's memory. By default
            the whole EP group is one domain.
        backend: Backend of torch's symmetric memory, `cuda` or `nccl`; by default as torch is set.

    Raises:
        RuntimeError: Torch has no such backend, or uses another already; or the path of a rank's
            folder for temporary files is too long for the backend `CUDA`.
    """

    def __init__(
        self,
        ep_group: ProcessGroup,
        device: torch.device,
        domain_ranks: int | None = None,
        backend: str | None = None,
    ) -> None:
        self.rank = dist.get_rank(ep_group)
        self.num_ranks = dist.get_world_size(ep_group)
        self.peers = domain_of(self.rank, domain_ranks or self.num_ranks)
        self.device = device
        self._group = domain_group(ep_group, self.peers, device)
        self._handles: list[Any] = []
        _use_backend(backend, device)
        gpu = str(torch.cuda.get_device_properties(device).uuid)
        place = (socket.gethostname(), device.index)
        found = gather((gpu, place, _too_long(device)), self._group)
        for rank, (_, (host, _), problem) in zip(self.peers, found, strict=True):
            if problem:
                raise RuntimeError(f"rank {rank} on {host}: {problem}")
        self._variables = [_NO_MULTICAST]
        if len({gpu for gpu, *_ in found}) == len(found) > len({place for _, place, _ in found}):
            # Every process sees one GPU, so all GPUs have number 0; torch compares names of hosts
            # and numbers.
            self._variables.append(_SHARED_NUMBERS)

    def share(self, num_bytes: int) -> tuple[Tensor, Tensor]:
        """Return this rank's new zeroed bytes and the addresses of its peers' bytes, int64 [R].

        All ranks call with the same size. Both tensors are on `device`. The addresses are valid on
        `device` while the bytes live; the addresses of ranks outside `peers` are 0. The bytes of
        all peers are zero when `share` returns.

        Raises:
            RuntimeError: A rank has no address for a peer's bytes, or the offsets differ.
        """
        # Imported here, because not every installation of torch has the modules.
        from torch._C._distributed_c10d import _SymmetricMemory
        from torch.distributed import _symmetric_memory

        # Not by torch's `empty`, which takes memory from a pool of the process: where that has a
        # block that the ranks know already, a rank skips the rendezvous in which others wait.
        mine = _SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, self.device)
        with _set_meanwhile(self._variables):
            handle = _symmetric_memory.rendezvous(mine, self._group)
        self._handles.append(handle)  # while it lives, peers' memory stays mapped
        starts = [int(start) for start in handle.buffer_ptrs]
        # The addresses are those of whole allocations; `mine` may be a part of an allocation.
        offset = mine.data_ptr() - starts[self.rank - self.peers.start]
        self._check(starts, offset)
        addresses = torch.zeros(self.num_ranks, dtype=torch.int64, device=self.device)
        addresses[self.peers.start : self.peers.stop] = torch.tensor(
            [start + offset for start in starts], device=self.device
        )
        mine.zero_()
        torch.cuda.synchronize(self.device)
        dist.barrier(self._group)
        return mine, addresses

    def highest(self, value: int) -> int:
        """Return the highest value of the domain's ranks; all ranks call."""
        return max(gather(value, self._group))

    def close(self) -> None:
        """Unmap peers' memory."""
        self._handles.clear()

    def _check(self, starts: list[int], offset: int) -> None:
        """Check the addresses and offsets of all ranks; all ranks raise the same error."""
        missing = [rank for rank, start in zip(self.peers, starts, strict=True) if start == 0]
        found = gather((offset, missing), self._group)
        what = "torch's symmetric memory (alpha, see balance.symmetric_memory)"
        for rank, (_, absent) in zip(self.peers, found, strict=True):
            if absent:
                raise RuntimeError(
                    f"{what} gave rank {rank} no address for the memory of ranks {absent}: they "
                    "must reach each other; set balance.nvlink_domain to ranks that do, or use "
                    "balance.transport=collective"
                )
        for rank, (other, _) in zip(self.peers, found, strict=True):
            if other != found[0][0]:
                raise RuntimeError(
                    f"{what} gave rank {rank} memory {other} bytes behind the start of its "
                    f"allocation, but rank {self.peers.start} {found[0][0]} bytes: the offsets "
                    "must be equal; use balance.transport=collective"
                )


def domain_group(ep_group: ProcessGroup, peers: range, device: torch.device) -> ProcessGroup:
    """Return a group of the domain's ranks, which has made its first collective."""
    group = ep_group
    if len(peers) < dist.get_world_size(ep_group):
        all_ranks = dist.get_process_group_ranks(ep_group)
        with _by_itself():
            group = dist.new_group(
                [all_ranks[rank] for rank in peers],
                timeout=timedelta(seconds=group_timeout_s(ep_group, device)),
                backend=dist.get_backend(ep_group),
                use_local_synchronization=True,  # other domains, and other EP groups, are not asked
            )
    dist.barrier(group)  # the NCCL backend needs the communicator, which a collective makes
    return group


@contextmanager
def _by_itself() -> Iterator[None]:
    """Let torch make a group without the communicator of all ranks.

    Where `init_process_group` was given a device, torch splits that communicator. All ranks of the
    world would have to take part, and other pipeline stages do not.
    """
    world: Any = dist.group.WORLD
    bound, world.bound_device_id = world.bound_device_id, None
    try:
        yield
    finally:
        world.bound_device_id = bound


@contextmanager
def _set_meanwhile(variables: Iterable[str]) -> Iterator[None]:
    """Set variables of the environment to 1, but those that are set.

    Torch asks for them at each rendezvous. If they stayed, torch would make no multicast mappings
    for other users of symmetric memory in this process.
    """
    ours = [name for name in variables if name not in os.environ]
    os.environ.update(dict.fromkeys(ours, "1"))
    try:
        yield
    finally:
        for name in ours:
            del os.environ[name]


def _too_long(device: torch.device) -> str:
    """Return what is wrong with the path of this rank's folder for temporary files, or nothing."""
    from torch.distributed import _symmetric_memory

    name = next((name for name in _TEMPORARY if name in os.environ), None)
    if name is None or _symmetric_memory.get_backend(device) != "CUDA":
        return ""
    length = len(os.environb[os.fsencode(name)])
    if length <= _MOST_BYTES:
        return ""
    return (
        f"{name} has {length} bytes, and torch's symmetric memory has room for {_MOST_BYTES}: set "
        f"{name} to a folder with a shorter path, as /tmp ({name} is {os.environ[name]})"
    )


def _use_backend(name: str | None, device: torch.device) -> None:
    from torch.distributed import _symmetric_memory

    if name is None or name.upper() == _symmetric_memory.get_backend(device):
        return
    try:
        _symmetric_memory.set_backend(name.upper())  # type: ignore[arg-type]
    except RuntimeError as error:
        raise RuntimeError(
            f"balance.symmetric_memory ({name}) cannot be used, torch's symmetric memory has "
            f"backend {_symmetric_memory.get_backend(device)}: {error}"
        ) from error
