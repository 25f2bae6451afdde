"""Collectives of several ranks on one GPU, as far as a machine without one can run them.

Layer 2 (gloo ranks). Here memory of the host stands for that of a GPU.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megatron_ext.transport import symmetric_heap
from megatron_ext.transport.gpu_probe import _obstacle, _Offer
from tests.gpu import one_gpu
from tests.gpu.first_run.environment import ROOT

CPU = torch.device("cpu")


def _gather(rank: int) -> Any:
    out = torch.empty(4)
    dist.all_gather_into_tensor(out, torch.tensor([1.0, 2.0]) + 10 * rank)
    return out.tolist(), [1.0, 2.0, 11.0, 12.0]


def _scatter(rank: int) -> Any:
    out = torch.empty(2)
    dist.reduce_scatter_tensor(out, torch.arange(4.0) * (rank + 1))
    return out.tolist(), [[0.0, 3.0], [6.0, 9.0]][rank]


def _all_to_all(rank: int) -> Any:
    out = torch.empty(3)
    sizes = [1, 2] if rank == 0 else [2, 1]
    work = dist.all_to_all_single(out, torch.arange(3.0) + 10 * rank, sizes, sizes, async_op=True)
    work.wait()
    return out.tolist(), [[0.0, 10.0, 11.0], [1.0, 2.0, 12.0]][rank]


def _exchange(rank: int) -> Any:
    got = torch.empty(2)
    ops = [
        dist.P2POp(dist.isend, torch.full((2,), 1.0 + rank), 1 - rank),
        dist.P2POp(dist.irecv, got, 1 - rank),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return got.tolist(), [2.0 - rank] * 2


def _with_strides(rank: int) -> Any:
    """What is written lies apart in memory."""
    table = torch.zeros(3, 2)
    column = table[:, 1]
    column.fill_(rank + 1.0)
    dist.all_reduce(column)
    return table.tolist(), [[0.0, 3.0]] * 3


def _broadcast_in_a_group(rank: int) -> Any:
    value = torch.tensor([float(rank)])
    dist.broadcast(value, 1, group=dist.new_group([0, 1], backend="nccl"))
    dist.barrier()
    return value.tolist(), [1.0]


def _objects(rank: int) -> Any:
    found: list[Any] = [None, None]
    dist.all_gather_object(found, {"rank": rank})
    return found, [{"rank": 0}, {"rank": 1}]


def _share_memory(rank: int) -> Any:
    """Torch's symmetric memory asks a group for its store."""
    group = symmetric_heap.domain_group(dist.group.WORLD, range(2), CPU)
    return (type(group) is dist.ProcessGroup, dist.get_backend(group)), (True, "gloo")


CALLS = (
    *(_gather, _scatter, _all_to_all, _exchange, _with_strides, _broadcast_in_a_group),
    *(_objects, _share_memory),
)


def _be_a_rank(rank: int, store: str) -> None:
    with one_gpu.one_gpu(), mock.patch.object(one_gpu, "_is_elsewhere", return_value=True):
        dist.init_process_group("nccl", store=dist.FileStore(store, 2), rank=rank, world_size=2)
        world: Any = dist.group.WORLD
        assert type(world) is one_gpu.StagedGroup
        for call in CALLS:
            before = world.staged
            found, expected = call(rank)
            assert found == expected, call.__name__
            own = call in (_share_memory, _broadcast_in_a_group)
            assert own or world.staged > before, f"{call.__name__} did not go through the host"
        dist.destroy_process_group()


def test_collectives_go_through_the_host() -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_be_a_rank, (f"{folder}/store",), nprocs=2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the part itself runs on a GPU")
@pytest.mark.parametrize(
    "words",
    [
        ("beside", "--ranks", "2", "--seconds", "1"),
        ("failing_rank", "--ranks", "2", "size=tiny"),
        ("parity", "--ep", "2", "--steps", "2", "size=tiny"),
    ],
    ids=lambda words: words[0],
)
def test_parts_run_with_all_ranks_on_one_gpu(words: tuple[str, ...]) -> None:
    module, *rest = words
    command = [sys.executable, "-m", "tests.gpu.one_gpu", f"tests.gpu.first_run.{module}", *rest]
    subprocess.run(command, cwd=ROOT, check=True, timeout=300)


def test_ranks_share_a_gpu_only_where_a_test_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, other = (_Offer("here", "GPU-1", token) for token in (b"1", b"2"))
    driver = mock.Mock()
    driver.read.return_value = b"2"
    asked = (driver, 0, mine, other, 7)
    assert _obstacle(*asked) == "they share the GPU GPU-1"
    for name, value in one_gpu.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    assert _obstacle(*asked) == ""
