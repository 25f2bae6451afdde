"""Collectives through the host: what comes is what gloo itself brings, wherever the tensors are."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.transport import gpu_probe
from tests.gpu import one_gpu
from tests.gpu.first_run.environment import ROOT
from tests.ranks import run_ranks
from tests.trainer import dataset

Call = Callable[[Tensor, bool], tuple[Tensor, Any]]


def _lists(rank: int, given: Tensor, is_async: bool) -> tuple[Tensor, Any]:
    gathered = [torch.empty_like(given) for _ in range(2)]
    work = dist.all_gather(gathered, given, async_op=is_async)
    return gathered, work  # type: ignore[return-value]


def _calls(rank: int) -> dict[str, Call]:
    """Each returns what is written, and the handle."""

    def into(size: int, call: Callable[..., Any], **options: Any) -> Call:
        def made(given: Tensor, is_async: bool) -> tuple[Tensor, Any]:
            out = given.new_full((size, 3), -1.0)
            return out, call(out, given, async_op=is_async, **options)

        return made

    def in_place(call: Callable[..., Any], *args: Any) -> Call:
        return lambda given, is_async: (given, call(given, *args, async_op=is_async))

    splits = {
        "output_split_sizes": [1 + rank, 1 + rank],
        "input_split_sizes": [1, 2],
    }
    sizes = {"output": 2 * (1 + rank)}
    return {
        "all_reduce": in_place(dist.all_reduce),
        "broadcast": in_place(dist.broadcast, 1),
        "all_gather": lambda given, is_async: _lists(rank, given, is_async),
        "all_gather_into_tensor": into(8, dist.all_gather_into_tensor),
        "reduce_scatter_tensor": into(2, dist.reduce_scatter_tensor),
        "all_to_all_single": into(4, dist.all_to_all_single),
        "unequal all_to_all_single": lambda given, is_async: into(
            sizes["output"], dist.all_to_all_single, **splits
        )(given[:3], is_async),
    }


def _same_as_gloo(rank: int) -> None:
    given = torch.arange(12.0).view(4, 3) + 100 * rank
    plain = {name: call(given.clone(), False)[0] for name, call in _calls(rank).items()}
    # Not by `getattr`, which returns functions that would not be bound again.
    methods = vars(dist.ProcessGroup)
    before = {name: methods[name] for name in one_gpu.MOVES if name in methods}
    one_gpu.stage_collectives(lambda tensor: True)
    try:
        for name, call in _calls(rank).items():
            for is_async in (False, True):
                # Gloo and NCCL refuse a tensor like that.
                strided = given.t().contiguous().t()
                assert not strided.is_contiguous()
                written, work = call(strided, is_async)
                if is_async:
                    assert isinstance(work, one_gpu.Staged)
                    work.wait()
                    work.wait()
                found, expected = (
                    torch.stack(each) if isinstance(each, list) else each
                    for each in (written, plain[name])
                )
                assert torch.equal(found, expected), (name, is_async)
        _coalesced(rank, given)
        _messages(rank, given)
        _in_autograd(rank)
    finally:
        for name, move in before.items():
            setattr(dist.ProcessGroup, name, move)


def _coalesced(rank: int, given: Tensor) -> None:
    """As Megatron's DDP reduces and gathers its buckets: outputs are parts of the inputs."""
    from torch.distributed import _coalescing_manager

    buckets = [given.clone().view(-1), 2 * given.view(-1)]
    with _coalescing_manager(dist.group.WORLD, async_ops=True) as handle:
        for bucket in buckets:
            dist.reduce_scatter_tensor(bucket.view(2, -1)[rank], bucket)
    handle.wait()
    with _coalescing_manager(dist.group.WORLD, async_ops=False):
        for bucket in buckets:
            dist.all_gather_into_tensor(bucket, bucket.view(2, -1)[rank])
    total = 2 * torch.arange(12.0) + 100
    assert torch.equal(buckets[0], total)
    assert torch.equal(buckets[1], 2 * total)


def _messages(rank: int, given: Tensor) -> None:
    received = torch.zeros(3, 4).t()
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, given, 1 - rank),
            dist.P2POp(dist.irecv, received, 1 - rank),
        ]
    )
    assert [len(work._back) for work in works] == [0, 1], "what is sent is not written"
    for work in works:
        work.wait()
    assert torch.equal(received, given - 100 * rank + 100 * (1 - rank))


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: Tensor) -> Tensor:
        out = torch.empty_like(given)
        dist.all_to_all_single(out, given)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _Exchange.forward(ctx, grad)


def _in_autograd(rank: int) -> None:
    given = torch.arange(4.0).requires_grad_()
    there = _Exchange.apply(given)
    weight = torch.tensor([1.0, 2, 3, 4]) + 10 * rank
    (there * weight).sum().backward()
    # The gradient of what went to a rank is that rank's weight.
    expected = {0: [1.0, 2, 11, 12], 1: [3.0, 4, 13, 14]}[rank]
    assert given.grad is not None
    assert given.grad.tolist() == expected
    loss = (2 * given).sum()  # in place, of what has a history
    dist.all_reduce(loss)
    assert loss.item() == 2 * 2 * 6


def test_what_comes_is_what_gloo_brings() -> None:
    run_ranks(_same_as_gloo, 2)


def test_copies_have_no_history() -> None:
    weight = torch.ones(2, requires_grad=True)
    copies: dict[int, tuple[Tensor, Tensor]] = {}
    ((copy,), number) = one_gpu._on_host([[weight * 2], 5], copies, lambda tensor: True)
    assert (copy.tolist(), copy.requires_grad, number) == ([2.0, 2.0], False, 5)
    assert len(copies) == 1


def test_a_handle_copies_back_when_it_is_waited_for() -> None:
    class Work:
        waits = 0

        def wait(self) -> None:
            Work.waits += 1
            copy.fill_(7)

        def is_completed(self) -> bool:
            return False

    copy, tensor = torch.zeros(3), torch.ones(3)
    staged = one_gpu.Staged(Work(), [(tensor, copy)])
    assert not staged.is_completed()
    assert tensor.eq(1).all()
    staged.wait()
    assert tensor.eq(7).all()
    tensor.fill_(8)
    staged.wait()
    assert tensor.eq(8).all(), "what the caller wrote since stays"
    assert (Work.waits, staged.is_completed()) == (1, True)


@pytest.mark.parametrize(("gpus", "is_shared"), [(1, True), (2, False), (8, False)])
def test_ranks_share_a_gpu_only_where_they_must(
    gpus: int, is_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(one_gpu, "launch_ranks", lambda *args, **given: calls.append((args, given)))
    one_gpu.launch(print, 5, num_ranks=2)
    words = (one_gpu.share_gpu, print, 5) if is_shared else (print, 5)
    assert calls == [(words, {"num_ranks": 2})]


def test_the_probe_reads_the_page_of_a_rank_that_shares_the_gpu() -> None:
    class Driver:
        def read(self, device: int, handle: int, num_bytes: int, length: int) -> bytes:
            return b"page"[:length]

    mine, other = (
        gpu_probe._Offer("machine", "the one GPU", token, 4) for token in (b"mine", b"page")
    )
    assert gpu_probe._obstacle(Driver(), 0, mine, other, 3).startswith("they share the GPU")  # type: ignore[arg-type]
    assert one_gpu.obstacle_but_for_sharing(Driver(), 0, mine, other, 3) == ""


STAGED = """
from pathlib import Path
from tests.gpu import one_gpu
from tests.gpu.first_run import parity
one_gpu.stage_collectives(lambda tensor: Path(NOTE).touch() or True)
parity.main()
"""


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the part itself runs on a machine with GPUs")
def test_a_training_over_copies_learns_the_same(tmp_path: Path) -> None:
    """All of Megatron's collectives go through copies; losses are the same, bit by bit."""
    data = dataset.build(tmp_path)
    found = []
    note = tmp_path / "staged_a_tensor"
    programs = {
        "plain": "from tests.gpu.first_run import parity; parity.main()",
        "staged": STAGED.replace("NOTE", repr(str(note))),
    }
    small = [
        one for one in dataset.overrides(data, tmp_path) if not one.startswith(("run_dir", "steps"))
    ]
    for name, program in programs.items():
        assert not note.exists()
        words = [*small, "data.global_batch_size=8"]
        words.append(f"run_dir={tmp_path}/{name}/${{balance.strategy}}")
        file = tmp_path / f"{name}.json"
        command = [sys.executable, "-c", program, "--steps", "6", "--json", str(file), *words]
        subprocess.run(command, cwd=ROOT, check=True, timeout=300)
        found += json.loads(file.read_text())["rows"]
    assert note.exists()
    assert found[0] == found[1]
