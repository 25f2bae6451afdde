"""GPUs reach each other when one reads what the other has written; fakes stand for the driver."""

from __future__ import annotations

import ctypes
import dataclasses
import logging
import os
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_ext import transport
from megatron_ext.transport import gpu_driver, gpu_probe, shared_heap
from megatron_ext.transport.gpu_driver import Driver, DriverError, SharedPage
from megatron_ext.transport.gpu_probe import gpu_obstacles, reach_of_devices
from tests.ranks import run_ranks

NOT_PERMITTED, NO_PEER = 800, 217


class Cuda:
    """What the driver does of what is asked of it here, for devices of one process."""

    def __init__(self, num_devices: int, *, fabric: bool, apart: Any = (), stale: Any = ()) -> None:
        self.num_devices, self.fabric = num_devices, fabric
        self.apart, self.stale = apart, stale  # (reader, owner)
        self.live: dict[int, Any] = {}  # handles, exported names and addresses
        self.num_names = 1000

    def _new(self, value: Any) -> int:
        self.num_names += 1
        self.live[self.num_names] = value
        return self.num_names

    def cuGetErrorString(self, status: int, words: Any) -> int:
        words._obj.value = {NOT_PERMITTED: b"not permitted", NO_PEER: b"no peer"}[status]
        return 0

    def cuMemGetAllocationGranularity(self, size: Any, asked: Any, option: int) -> int:
        size._obj.value = 4096
        return 0

    def cuMemCreate(self, memory: Any, size: Any, asked: Any, flags: Any) -> int:
        wants = asked._obj
        assert (wants.type, wants.location.type) == (1, 1)
        assert wants.location.id < self.num_devices
        if wants.handles == 8 and not self.fabric:
            return NOT_PERMITTED
        memory._obj.value = self._new(SimpleNamespace(device=wants.location.id, content=b""))
        return 0

    def cuMemExportToShareableHandle(self, handle: Any, memory: Any, kind: int, flags: Any) -> int:
        assert (kind == 8) == self.fabric
        if kind == 8:
            handle.raw = str(memory.value).encode().ljust(64)
        else:  # a new descriptor of the caller's
            handle._obj.value = os.memfd_create(f"page {memory.value} ")
        return 0

    def cuMemImportFromShareableHandle(self, memory: Any, handle: Any, kind: int) -> int:
        if kind == 8:
            owned = int(handle.raw)
        else:
            owned = int(Path(f"/proc/self/fd/{handle.value}").readlink().name.split()[1])
        memory._obj.value = self._new(self.live[owned])
        return 0

    def cuMemAddressReserve(self, address: Any, size: Any, *others: Any) -> int:
        address._obj.value = self._new(SimpleNamespace(memory=None))
        return 0

    def cuMemMap(self, address: Any, size: Any, offset: Any, memory: Any, flags: Any) -> int:
        self.live[address.value].memory = self.live[memory.value]
        return 0

    def cuMemSetAccess(self, address: Any, size: Any, access: Any, count: Any) -> int:
        reader, place = access._obj.location.id, self.live[address.value]
        place.reader = reader
        return NO_PEER if (reader, place.memory.device) in self.apart else 0

    def cuMemcpyHtoD_v2(self, address: Any, content: Any, size: Any) -> int:
        self._staged = self.live[address.value].memory, ctypes.string_at(content, size.value)
        return 0

    def cuCtxSynchronize(self) -> int:
        """Only now a copy from memory that is not pinned has surely come."""
        memory, memory.content = self._staged
        return 0

    def cuMemcpyDtoH_v2(self, content: Any, address: Any, size: Any) -> int:
        place = self.live[address.value]
        is_stale = (place.reader, place.memory.device) in self.stale
        content.raw = bytes(size.value) if is_stale else place.memory.content[: size.value]
        return 0

    def cuMemUnmap(self, address: Any, size: Any) -> int:
        self.live[address.value].memory = None
        return 0

    def cuMemAddressFree(self, address: Any, size: Any) -> int:
        assert self.live.pop(address.value).memory is None, "freed while mapped"
        return 0

    def cuMemRelease(self, memory: Any) -> int:
        del self.live[memory.value]
        return 0


@pytest.mark.parametrize("fabric", [True, False])
def test_what_a_gpu_cannot_read_it_does_not_reach(fabric: bool) -> None:
    sizes = [ctypes.sizeof(each) for each in (gpu_driver._Properties, gpu_driver._Access)]
    assert sizes == [32, 12], "as cuda.h has them"
    cuda = Cuda(3, fabric=fabric, apart={(0, 2)}, stale={(1, 0)})
    with (
        mock.patch.object(torch.cuda, "device", return_value=nullcontext()),
        mock.patch.object(torch.cuda, "synchronize"),
        mock.patch.object(gpu_probe.secrets, "token_bytes", return_value=b"0123456\x0089abcdef"),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=_gpu("large")),
    ):
        found = reach_of_devices(Driver(cuda), range(3))
    stale = "it reads other bytes there than were written"
    assert found == [["", "", "cuMemSetAccess: no peer (217)"], [stale, "", ""], ["", "", ""]]
    assert not cuda.live, "nothing is left"
    _check_no_descriptors_are_left()


class FileDriver:
    """Memory is a file, which only the right descriptor or path opens; ranks may be kept apart."""

    def __init__(self, rank: int, *, fabric: bool, apart: Any = ()) -> None:
        self.rank, self.fabric, self.apart = rank, fabric, apart

    def share(self, device: int, token: bytes) -> SharedPage:
        held = ExitStack()
        file = os.memfd_create("page")
        held.callback(os.close, file)
        os.write(file, bytes([self.rank]) + token)
        path = f"/proc/{os.getpid()}/fd/{file}".encode()
        return SharedPage(path if self.fabric else file, 4096, held)

    def read(self, device: int, handle: Any, num_bytes: int, length: int) -> bytes:
        file = os.open(handle, os.O_RDONLY) if self.fabric else handle
        owner, *content = os.pread(file, 1 + length, 0)
        if self.fabric:
            os.close(file)
        if (self.rank, owner) in self.apart:
            raise DriverError(f"{self.rank} cannot map {owner}")
        return bytes(content)


def _gpu(uuid: str, shared_memory: int = 232448) -> SimpleNamespace:
    return SimpleNamespace(
        uuid=uuid, name=f"GPU {uuid}", shared_memory_per_block_optin=shared_memory
    )


def _probe(rank: int, gpus: str, machines: str, **options: Any) -> list[str]:
    machine = dataclasses.replace(shared_heap.machine_of_this_process(), host=machines[rank])
    with (
        mock.patch.object(gpu_probe, "has_cuda_part", return_value=True),
        mock.patch.object(gpu_probe, "machine_of_this_process", return_value=machine),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=_gpu(gpus[rank])),
    ):
        # One visible GPU a process: all have number 0.
        driver: Any = FileDriver(rank, **options)
        found = gpu_obstacles(dist.group.WORLD, torch.device("cuda", 0), driver)
    _check_no_descriptors_are_left()
    return found


def _check_no_descriptors_are_left() -> None:
    files = [str(file.resolve()) for file in Path("/proc/self/fd").iterdir()]
    assert not [name for name in files if "memfd:page" in name], "descriptors are left"


def _probe_all(rank: int, cases: list[tuple[str, str, dict[str, Any]]]) -> list[list[str]]:
    return [_probe(rank, gpus, machines, **options) for gpus, machines, options in cases]


def test_ranks_read_the_pages_of_those_they_reach() -> None:
    cases = [
        ("abcd", "1111", dict(fabric=False)),
        ("abcd", "1122", dict(fabric=True)),
        ("abcd", "1122", dict(fabric=False)),
        ("abca", "1111", dict(fabric=False)),
        ("abcd", "1111", dict(fabric=False, apart={(1, 3)})),
    ]
    found = run_ranks(_probe_all, 4, cases)
    everyone, fabric, machines, shared, apart = zip(*found, strict=True)
    assert everyone == fabric == ([""] * 4,) * 4
    assert [[not why for why in row] for row in machines] == [
        *[[True, True, False, False]] * 2,
        *[[False, False, True, True]] * 2,
    ]
    assert machines[0][2].startswith("it is on another machine or in another container, and the G")
    assert shared[0] == ["", "", "", "they share the GPU a"] == shared[3][::-1]
    assert [each for row in apart for each in row if each] == ["1 cannot map 3"]
    assert apart[1][3] == "1 cannot map 3"


def _without_a_page(rank: int) -> list[str]:
    """Rank 1 cannot share; nobody may wait for its descriptor."""
    driver: Any = FileDriver(rank, fabric=False)
    if rank == 1:
        driver.share = mock.Mock(side_effect=DriverError("cuMemCreate: not permitted (800)"))
    gpu = _gpu(str(rank), 101376 if rank == 3 else 232448)  # 3 is for a workstation.
    with (
        mock.patch.object(gpu_probe, "has_cuda_part", return_value=rank != 2),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=gpu),
    ):
        return gpu_obstacles(dist.group.WORLD, torch.device("cuda", 0), driver)


def test_a_rank_without_a_page_is_reached_by_none() -> None:
    refused, absent = "cuMemCreate: not permitted (800)", "the library has no CUDA part"
    small = (
        "a block on GPU 3 has 101376 bytes of shared memory, and the kernel that adds gradients "
        "takes 106880"
    )
    assert run_ranks(_without_a_page, 4) == [
        ["", refused, absent, small],
        [refused] * 4,
        [absent] * 4,
        [small] * 4,
    ]


def _with_all_files_open(rank: int) -> list[str]:
    """Rank 1 may open no file more: of a message with a descriptor it gets the words."""
    receive = gpu_probe.socket.recv_fds

    def without_descriptors(*arguments: Any) -> tuple[bytes, list[int], int, Any]:
        told, received, flags, sender = receive(*arguments)
        for file in received:
            os.close(file)
        return told, [], flags, sender

    where = mock.patch.object(gpu_probe.socket, "recv_fds", without_descriptors)
    with where if rank == 1 else nullcontext():
        return _probe(rank, "abc", "111", fabric=False)


def test_a_rank_that_can_open_no_file_reaches_nobody() -> None:
    first, full, last = run_ranks(_with_all_files_open, 3)
    assert first == last == ["", "", ""]
    assert [not why for why in full] == [False, True, False]


class Nvml:
    """The library that manages GPUs, for one GPU with links that are up (1) or down (0)."""

    def __init__(self, links: list[int], is_known: bool = True) -> None:
        self.links, self.is_known, self.num_open = links, is_known, 0

    def nvmlInit_v2(self) -> int:
        self.num_open += 1
        return 0

    def nvmlShutdown(self) -> int:
        self.num_open -= 1
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, gpu: Any) -> int:
        gpu._obj.value = 7
        return 0 if self.is_known and uuid == b"GPU-12ab" else 6

    def nvmlDeviceGetNvLinkState(self, gpu: Any, link: int, is_up: Any) -> int:
        assert gpu.value == 7
        if link >= len(self.links):
            return 3  # not supported
        is_up._obj.value = self.links[link]
        return 0


def test_a_gpu_without_links_is_reached_over_pcie() -> None:
    found = []
    for nvml in (Nvml([1, 0, 1]), Nvml([]), Nvml([0, 0]), Nvml([1], is_known=False)):
        found.append(gpu_driver.num_links("12ab", nvml))
        assert nvml.num_open == 0
    assert found == [2, 0, 0, None]
    with mock.patch.object(gpu_driver.ctypes, "CDLL", side_effect=OSError):
        assert gpu_driver.num_links("12ab") is None
    gpu = mock.Mock(uuid="12ab")
    with mock.patch.object(torch.cuda, "get_device_properties", return_value=gpu):
        for links, has_none in ((0, True), (2, False), (None, False)):
            with mock.patch.object(gpu_probe, "num_links", return_value=links):
                assert transport.TRANSPORTS["cuda"].is_slow(torch.device("cuda", 0)) == has_none


def _agree_slowly(rank: int, slow: list[int]) -> None:
    kind = dataclasses.replace(
        transport.TRANSPORTS["shared_memory"], is_slow=lambda device: rank in slow
    )
    with (
        mock.patch.dict(transport.TRANSPORTS, shared_memory=kind),
        mock.patch.object(transport.logger, "log") as log,
    ):
        group: Any = dist.new_group()
        chosen = transport.agree_on_transport("auto", None, group, torch.device("cpu"))
    assert chosen == ("shared_memory", 2)
    if rank == 0:
        (level, line), _ = log.call_args
        assert (level == logging.WARNING) == bool(slow)
        assert (f"GPUs of ranks {slow} have no NVLink: replicas go over PCIe" in line) == bool(slow)


def test_what_pcie_costs_is_said() -> None:
    for slow in ([], [1]):
        run_ranks(_agree_slowly, 2, slow)
