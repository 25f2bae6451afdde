"""Shares a page of a GPU's memory through the CUDA driver, and tries to read another GPU's page.

torch's symmetric memory later shares whole buffers in the same way. A try with one page reports
the driver's error, and no rank hangs. Numbers of devices and the driver's cliques prove nothing:
GPU A reaches GPU B when A has read from B's page the bytes that B has written.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import ExitStack
from ctypes import byref, c_char, c_char_p, c_int, c_size_t, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any

import torch

_PINNED, _DEVICE, _READ_WRITE = 1, 1, 3
_FILE, _FABRIC = 1, 8
"""Kinds of handles of memory, as cuda.h numbers them."""


class _Location(ctypes.Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", c_int),
        ("handles", c_int),
        ("location", _Location),
        ("windows", c_void_p),
        ("flags", c_uint64),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", c_int))


_MOST_LINKS = 18
"""Most NVLinks of a GPU, as in nvml.h."""


def num_links(uuid: str, library: Any = None) -> int | None:
    """Return how many NVLinks of a GPU are up; None without an answer of the driver.

    The GPU's `uuid` is as `torch.cuda.get_device_properties` has it.
    """
    try:
        library = library or ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    if library.nvmlInit_v2() != 0:
        return None
    gpu, found = c_void_p(), 0
    try:
        if library.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode(), byref(gpu)) != 0:
            return None
        for link in range(_MOST_LINKS):
            is_up = c_int()
            # The call fails if the GPU has no such link.
            if library.nvmlDeviceGetNvLinkState(gpu, link, byref(is_up)) == 0:
                found += is_up.value
    finally:
        library.nvmlShutdown()
    return found


class DriverError(RuntimeError):
    """A call of the driver failed; the message has the call's name and the driver's words."""


@dataclass
class SharedPage:
    """Memory of a GPU that other GPUs may try to read, until `close`."""

    handle: bytes | int
    """A fabric handle, which is valid on other machines, too, or a file descriptor."""
    num_bytes: int
    _held: ExitStack

    def close(self) -> None:
        """Free the memory. Ranks that have mapped the memory keep it until they unmap it."""
        self._held.close()


class Driver:
    """The calls of the CUDA driver that share memory between GPUs."""

    def __init__(self, library: Any = None) -> None:
        self._library = library or ctypes.CDLL("libcuda.so.1")

    def share(self, device: int, token: bytes) -> SharedPage:
        """Return memory of a GPU with `token` at its start.

        Raises:
            DriverError: The GPU can share no memory.
        """
        with torch.cuda.device(device):
            torch.cuda.synchronize()  # binds this thread's calls of the driver to this GPU
            try:
                return self._share(device, token, _FABRIC)
            except DriverError:  # no fabric here, or no channel to it
                return self._share(device, token, _FILE)

    def fabric_obstacle(self, device: int) -> str:
        """Return the reason why a GPU has no fabric handles, or ""."""
        with torch.cuda.device(device):
            torch.cuda.synchronize()
            try:
                self._share(device, b"", _FABRIC).close()
            except DriverError as error:
                return str(error)
        return ""

    def read(self, device: int, handle: bytes | int, num_bytes: int, length: int) -> bytes:
        """Return the first `length` bytes of memory that another GPU shares, read by a GPU.

        Raises:
            DriverError: The GPU does not reach that memory.
        """
        with torch.cuda.device(device), ExitStack() as held:
            torch.cuda.synchronize()
            memory = c_uint64()
            if isinstance(handle, bytes):
                theirs: Any = ctypes.create_string_buffer(handle, len(handle))
                self._call("cuMemImportFromShareableHandle", byref(memory), theirs, _FABRIC)
            else:
                theirs = c_void_p(handle)
                self._call("cuMemImportFromShareableHandle", byref(memory), theirs, _FILE)
            held.callback(self._call, "cuMemRelease", memory)
            address = self._map(memory, num_bytes, device, held)
            content = (c_char * length)()
            self._call("cuMemcpyDtoH_v2", content, address, c_size_t(length))
            return content.raw

    def _share(self, device: int, token: bytes, kind: int) -> SharedPage:
        asked = _Properties(_PINNED, kind, _Location(_DEVICE, device), None, 0)
        page, memory = c_size_t(), c_uint64()
        self._call("cuMemGetAllocationGranularity", byref(page), byref(asked), 0)
        with ExitStack() as held:
            self._call("cuMemCreate", byref(memory), page, byref(asked), c_uint64(0))
            held.callback(self._call, "cuMemRelease", memory)
            fabric, file = (c_char * 64)(), c_int()
            handle = fabric if kind == _FABRIC else byref(file)
            self._call("cuMemExportToShareableHandle", handle, memory, kind, c_uint64(0))
            if kind == _FILE:  # The open file would keep the memory.
                held.callback(os.close, file.value)
            address = self._map(memory, page.value, device, held)
            self._call("cuMemcpyHtoD_v2", address, c_char_p(token), c_size_t(len(token)))
            self._call("cuCtxSynchronize")  # The copy may have returned before the bytes are there.
            mine = fabric.raw if kind == _FABRIC else file.value
            return SharedPage(mine, page.value, held.pop_all())

    def _map(self, memory: c_uint64, num_bytes: int, device: int, held: ExitStack) -> c_uint64:
        """Map memory for a GPU until `held` is closed; return the address."""
        address, size, none = c_uint64(), c_size_t(num_bytes), c_uint64(0)
        self._call("cuMemAddressReserve", byref(address), size, c_size_t(0), none, none)
        held.callback(self._call, "cuMemAddressFree", address, size)
        self._call("cuMemMap", address, size, c_size_t(0), memory, none)
        held.callback(self._call, "cuMemUnmap", address, size)
        access = _Access(_Location(_DEVICE, device), _READ_WRITE)
        self._call("cuMemSetAccess", address, size, byref(access), c_size_t(1))
        return address

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            words = c_char_p()
            self._library.cuGetErrorString(status, byref(words))
            raise DriverError(f"{name}: {(words.value or b'unknown error').decode()} ({status})")
