"""Several ranks on one GPU: collectives of GPU tensors go over gloo, through memory of the host.

    python -m tests.gpu.one_gpu MODULE [ARGUMENTS OF THE MODULE]

NCCL refuses two ranks of a GPU. With this, layers, streams, events and the allocator run as they
are, between processes that take turns on the GPU. Times mean nothing then; order does.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.trainer.ranks import launch
from megatron_ext.transport import symmetric_heap
from megatron_ext.transport.gpu_probe import SHARED_GPU

BACKEND = "staged"

ENVIRONMENT = {
    SHARED_GPU: "1",
    # Torch's symmetric memory refuses ranks of one GPU otherwise.
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
}

_COLLECTIVES = {
    **{
        name: name
        for name in (
            *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "barrier", "send"),
            *("recv", "allgather", "gather", "scatter", "reduce_scatter", "alltoall"),
            *("_allgather_base", "_reduce_scatter_base", "alltoall_base"),
        )
    },
    # As torch calls them from 2.13 on.
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
}
"""Methods of a group, and what gloo calls them."""

_COALESCED = {
    "allgather_into_tensor_coalesced": "_allgather_base",
    "reduce_scatter_tensor_coalesced": "_reduce_scatter_base",
    "all_gather_single_coalesced": "_allgather_base",
    "reduce_scatter_single_coalesced": "_reduce_scatter_base",
}
"""Several calls in one, which gloo makes one after the other."""


class StagedGroup(dist.ProcessGroup):
    """A group of gloo's that takes tensors of any device."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self.staged = 0
        """Tensors that went through the host."""

    def getBackendName(self) -> str:
        """Return the name, as torch asks for it."""
        return BACKEND

    def _get_backend(self, device: torch.device) -> Any:
        return self._gloo


def _staged(name: str) -> Callable[..., Any]:
    def call(self: StagedGroup, *args: Any, **kwargs: Any) -> Any:
        copies: list[tuple[Tensor, Tensor]] = []

        def on_host(value: Any) -> Any:
            if isinstance(value, Tensor) and _is_elsewhere(value):
                copies.append((value, value.detach().to("cpu", copy=True)))
                return copies[-1][1]
            if isinstance(value, list | tuple):
                return type(value)(on_host(each) for each in value)
            return value

        under_way = _Staged(getattr(self._gloo, name)(*on_host(args), **kwargs), copies)
        self.staged += len(copies)
        # All but these end at once: what is only read is written back as it was.
        if name not in ("send", "recv"):
            under_way.wait()
        return under_way

    return call


class _Staged(dist.Work):
    """A call of gloo's; the first `wait` copies back what it was given."""

    def __init__(self, work: Any, copies: list[tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self._work = work
        self._copies = copies

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._work.wait()
        with torch.no_grad():
            for tensor, copy in self._copies:
                tensor.copy_(copy)
        self._copies = []
        return True

    def is_completed(self) -> bool:
        return not self._copies


def _one_by_one(name: str) -> Callable[..., Any]:
    one = _staged(name)

    def call(self: StagedGroup, outputs: Any, inputs: Any, *options: Any) -> Any:
        works = [one(self, *each) for each in zip(outputs, inputs, strict=True)]
        return works[-1]

    return call


for _name, _of_gloo in _COLLECTIVES.items():
    setattr(StagedGroup, _name, _staged(_of_gloo))
for _name, _of_gloo in _COALESCED.items():
    setattr(StagedGroup, _name, _one_by_one(_of_gloo))


def _is_elsewhere(tensor: Tensor) -> bool:
    return tensor.device.type != "cpu"


def _make(store: dist.Store, rank: int, size: int, timeout: timedelta) -> StagedGroup:
    return StagedGroup(store, rank, size, timeout)


@contextmanager
def one_gpu() -> Iterator[None]:
    """Let all groups that are made be such groups, whatever backend they ask for."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _make, devices=["cpu", "cuda"])
    make_world, make_group = dist.init_process_group, dist.new_group

    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        make_world(BACKEND, *args, **kwargs)

    def new_group(*args: Any, **kwargs: Any) -> Any:
        return make_group(*args, **kwargs | {"backend": BACKEND, "pg_options": None})

    def domain_group(ep_group: Any, peers: range, device: torch.device) -> Any:
        """Return gloo's own group: torch's symmetric memory asks a group for its store."""
        ranks = dist.get_process_group_ranks(ep_group)
        group = make_group(
            [ranks[peer] for peer in peers], backend="gloo", use_local_synchronization=True
        )
        dist.barrier(group)
        return group

    with (
        mock.patch.object(dist, "init_process_group", init_process_group),
        mock.patch.object(symmetric_heap, "domain_group", domain_group),
        mock.patch.object(dist, "new_group", new_group),
        mock.patch.dict(os.environ, ENVIRONMENT),
    ):
        yield


def be_a_rank(fn: Callable[..., Any], *args: Any) -> Any:
    """Call a rank's function; its GPU is that of all ranks."""
    with one_gpu():
        return fn(*args)


def main() -> None:
    """Run a part with all of its ranks on one GPU."""
    name, *sys.argv[1:] = sys.argv[1:]
    start = launch.launch_ranks

    def launch_ranks(fn: Callable[..., Any], *args: Any, num_ranks: int) -> Any:
        return start(be_a_rank, fn, *args, num_ranks=num_ranks)

    with mock.patch.object(launch, "launch_ranks", launch_ranks):
        importlib.import_module(name).main()


if __name__ == "__main__":
    from tests.gpu.one_gpu import main as run  # functions of ranks are found by this name

    run()
