"""Lets several ranks, a process each, train on one GPU, which NCCL and the probe of GPUs refuse.

Collectives go over gloo, through pinned memory of the host: each copies what it reads to the host,
moves the copies, and copies what it writes back. The GPU's memory is shared as between GPUs. The
driver runs one process at a time and switches every few milliseconds: streams, events, the
allocator and the order of the kernels are those of a training, and no time means anything.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.trainer.ranks.launch import launch_ranks
from megatron_ext.transport import gpu_probe

MOVES = (
    *(
        "allreduce",
        "allreduce_coalesced",
        "broadcast",
        "reduce",
        "allgather",
        "allgather_coalesced",
    ),
    *("_allgather_base", "all_gather_single", "allgather_into_tensor_coalesced"),
    *("all_gather_single_coalesced", "reduce_scatter", "_reduce_scatter_base"),
    *(
        "reduce_scatter_single",
        "reduce_scatter_tensor_coalesced",
        "reduce_scatter_single_coalesced",
    ),
    *("alltoall", "alltoall_base", "all_to_all_single", "gather", "scatter"),
    *("send", "recv", "recv_anysource"),
)
"""Methods of a process group that move tensors, in any version of torch. The first argument is what
a method writes, but for `READS`."""

READS = ("send",)


def launch(function: Callable[..., None], *args: Any, num_ranks: int) -> None:
    """Run `function(*args)` on ranks, as `launch_ranks`, and let them share a GPU if they must."""
    if torch.cuda.is_available() and num_ranks > torch.cuda.device_count():
        launch_ranks(share_gpu, function, *args, num_ranks=num_ranks)
    else:
        launch_ranks(function, *args, num_ranks=num_ranks)


def share_gpu(function: Callable[..., None], *args: Any) -> None:
    """Be one rank of several on a GPU."""
    # Torch's symmetric memory refuses ranks whose GPUs have the same number.
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    gpu_probe._obstacle = obstacle_but_for_sharing
    init_process_group = dist.init_process_group
    dist.init_process_group = lambda backend, **options: init_process_group("gloo", **options)
    stage_collectives(lambda tensor: tensor.is_cuda)
    function(*args)


_obstacle = gpu_probe._obstacle


def obstacle_but_for_sharing(driver: Any, device: int, mine: Any, other: Any, file: Any) -> str:
    """Stands for the probe's own: the rank reads the page of one that shares its GPU, too."""
    return _obstacle(driver, device, mine, replace(other, gpu=f"not {mine.gpu}"), file)


def stage_collectives(is_staged: Callable[[Tensor], bool]) -> None:
    """Let the process groups of this process move copies on the host of tensors that are staged."""
    for name in MOVES:
        if move := getattr(dist.ProcessGroup, name, None):
            setattr(dist.ProcessGroup, name, _staged(move, is_staged, writes=name not in READS))


def _staged(move: Callable[..., Any], is_staged: Callable[[Tensor], bool], *, writes: bool) -> Any:
    @wraps(move)
    def staged(group: Any, first: Any, *rest: Any, **options: Any) -> Any:
        copies: dict[int, tuple[Tensor, Tensor]] = {}
        given = [_on_host(each, copies, is_staged) for each in (first, *rest)]
        options = {key: _on_host(each, copies, is_staged) for key, each in options.items()}
        work = move(group, *given, **options)
        if not copies:
            return work
        written = {id(tensor) for tensor in _tensors(first)} if writes else set()
        return Staged(work, [pair for key, pair in copies.items() if key in written])

    return staged


class Staged:
    """Work of a group on copies. As with NCCL, results are there for the stream that waits.

    Args:
        work: The group's; None if it is done.
        back: Tensors that it writes, with their copies on the host.
    """

    def __init__(self, work: Any, back: list[tuple[Tensor, Tensor]]) -> None:
        self._work, self._back = work, back

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the group, and copy back what it wrote; only the first time."""
        if self._work is not None:
            self._work.wait(*() if timeout is None else (timeout,))
        for tensor, copy in self._back:
            tensor.data.copy_(copy, non_blocking=True)  # `data`: autograd counts no change, either
        self._work, self._back = None, []
        return True

    def is_completed(self) -> bool:
        """Whether `wait` would not block."""
        return self._work is None or bool(self._work.is_completed())


def _on_host(
    given: Any, copies: dict[int, tuple[Tensor, Tensor]], is_staged: Callable[[Tensor], bool]
) -> Any:
    """Return `given`, a tensor or lists of some, with contiguous copies on the host; notes them."""
    if isinstance(given, list | tuple) and any(True for _ in _tensors(given)):
        return [_on_host(each, copies, is_staged) for each in given]
    if not isinstance(given, Tensor) or not is_staged(given):
        return given
    if id(given) not in copies:
        copy = torch.empty(given.shape, dtype=given.dtype, pin_memory=given.is_cuda)
        copies[id(given)] = given, copy.copy_(given.detach())  # waits for the current stream
    return copies[id(given)][1]


def _tensors(given: Any) -> Iterator[Tensor]:
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, list | tuple):
        for each in given:
            yield from _tensors(each)
