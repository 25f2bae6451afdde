"""What torch's symmetric memory gives is checked, and ranks share it within their domain only.

Layer 2 (4 gloo ranks). Fakes stand for the module and for the GPUs.
"""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed import _symmetric_memory

from megatron_ext.transport.symmetric_heap import (
    _NO_MULTICAST,
    _SHARED_NUMBERS,
    SymmetricHeap,
)
from tests.ranks import run_ranks
from tests.transport.test_transports import CPU

START = 1 << 20


class Torch:
    """The symmetric memory of one rank: addresses are START + 4096 x rank + the offset."""

    def __init__(self, offset: int = 256, missing: tuple[int, ...] = ()) -> None:
        self.offset, self.missing = offset, missing
        self.groups: list[list[int]] = []
        self.variables: set[str] = set()
        self.backend = "CUDA"

    def rendezvous(self, mine: Any, group: Any) -> Any:
        ranks = dist.get_process_group_ranks(group)
        self.groups.append(ranks)
        asked = (_NO_MULTICAST, _SHARED_NUMBERS)
        self.variables = {name for name in asked if os.environ.get(name) == "1"}
        start = mine.data_ptr() - self.offset
        others = [0 if rank in self.missing else START + 4096 * rank for rank in ranks]
        others[group.rank()] = start
        return SimpleNamespace(buffer_ptrs=others)

    def set_backend(self, name: str) -> None:
        if self.groups:
            raise RuntimeError("it is in use")
        self.backend = name


def _faked(fake: Torch, gpu: str, host: str = "one") -> ExitStack:
    held = ExitStack()
    blocks = SimpleNamespace(
        empty_strided_p2p=lambda size, _, dtype, device: torch.empty(
            size, dtype=dtype, device=device
        )
    )
    held.enter_context(mock.patch.object(_distributed_c10d, "_SymmetricMemory", blocks))
    for name, value in (
        # Of a pool, whose blocks ranks may know already.
        ("empty", mock.Mock(side_effect=AssertionError("memory from a pool"))),
        ("rendezvous", fake.rendezvous),
        ("get_backend", lambda device: fake.backend),
        ("set_backend", fake.set_backend),
    ):
        held.enter_context(mock.patch.object(_symmetric_memory, name, value))
    properties = SimpleNamespace(uuid=gpu)
    held.enter_context(
        mock.patch.object(torch.cuda, "get_device_properties", return_value=properties)
    )
    held.enter_context(mock.patch.object(socket, "gethostname", return_value=host))
    held.enter_context(mock.patch.dict(os.environ))
    os.environ.pop(_SHARED_NUMBERS, None)
    os.environ.pop(_NO_MULTICAST, None)
    return held


def _share(rank: int) -> None:
    world, fake = dist.group.WORLD, Torch()
    peers = [0, 1] if rank < 2 else [2, 3]
    # As after `init_process_group(device_id=...)`: torch then splits the world's communicator, for
    # which all ranks must come, and those of another pipeline stage do not.
    bound = []

    def unbound(*args: Any, **kwargs: Any) -> Any:
        bound.append(world.bound_device_id)
        return new_group(*args, **kwargs)

    given, new_group = torch.device("cpu", rank), dist.new_group
    world.bound_device_id = given
    with _faked(fake, f"GPU-{rank}"), mock.patch.object(dist, "new_group", unbound):
        heap = SymmetricHeap(world, CPU, domain_ranks=2, backend="nccl")
        assert (bound, world.bound_device_id) == ([None], given)
        world.bound_device_id = None
        assert fake.backend == "NCCL"
        mine, addresses = heap.share(64)
        assert fake.groups == [peers], "others do not take part"
        assert (mine == 0).all()
        expected = [START + 4096 * peer + 256 if peer in peers else 0 for peer in range(4)]
        expected[rank] = mine.data_ptr()
        assert addresses.tolist() == expected
        assert heap.highest(rank) == peers[1]
        with pytest.raises(RuntimeError, match=r"symmetric_memory \(cuda\) .* backend NCCL"):
            SymmetricHeap(world, CPU, backend="cuda")

    for why, gpu, device, host, shared in (
        ("all GPUs may have number 0", f"GPU-{rank}", CPU, "one", True),
        ("ranks that share a GPU are torch's to refuse", "the only GPU", CPU, "one", False),
        ("a number for each GPU", f"GPU-{rank}", torch.device("cpu", rank), "one", False),
        ("equal numbers, but on other hosts", f"GPU-{rank}", CPU, f"host-{rank}", False),
    ):
        fake = Torch()
        with _faked(fake, gpu, host):
            heap = SymmetricHeap(world, device)
            if device == CPU:  # Its fakes make memory of no other.
                heap.share(64)
                assert fake.variables == {_NO_MULTICAST} | ({_SHARED_NUMBERS} if shared else set())
            assert (_SHARED_NUMBERS in heap._variables) == shared, why
            # With them set, torch makes multicast mappings for nobody in this process.
            assert not {_NO_MULTICAST, _SHARED_NUMBERS} & os.environ.keys(), why
    with _faked(fake := Torch(), f"GPU-{rank}"):
        os.environ[_NO_MULTICAST] = os.environ[_SHARED_NUMBERS] = "0"
        SymmetricHeap(world, CPU).share(64)
        assert not fake.variables, "what the user has set stays"
        assert os.environ[_NO_MULTICAST] == os.environ[_SHARED_NUMBERS] == "0"

    # All ranks raise what one has found.
    for bytes, name, backend, refused in (
        (91, "TMPDIR", None, True),
        (91, "TEMP", None, True),
        (90, "TMPDIR", None, False),
        (91, "TMPDIR", "nccl", False),  # Which makes no sockets.
    ):
        with _faked(Torch(), str(rank)):
            for each in ("TMPDIR", "TMP", "TEMP", "TEMPDIR"):
                os.environ.pop(each, None)
            if rank == 1:
                # Torch asks for the first of them. An umlaut is two bytes.
                os.environ |= {name: "/\u00fc" + "x" * (bytes - 3), "TEMPDIR": "/" + "x" * 200}
            if refused:
                with pytest.raises(RuntimeError, match=f"rank 1 on one: {name} has 91 .*for 90: "):
                    SymmetricHeap(world, CPU)
            else:
                SymmetricHeap(world, CPU, backend=backend)
    with _faked(Torch(missing=(1,) if rank == 3 else ()), str(rank)):
        heap = SymmetricHeap(world, CPU)
        with pytest.raises(RuntimeError, match=r"gave rank 3 no address .*ranks \[1\]"):
            heap.share(64)
    with _faked(Torch(offset=512 if rank == 2 else 256), str(rank)):
        heap = SymmetricHeap(world, CPU)
        with pytest.raises(RuntimeError, match=r"gave rank 2 .* 512 bytes .*rank 0 256 bytes"):
            heap.share(64)


def test_a_heap_is_of_a_domain_and_checks_what_torch_gives() -> None:
    run_ranks(_share, 4)
