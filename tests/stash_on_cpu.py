"""Stands in for the two kernels of Megatron's paged stash, and for who marks what it takes.

The kernels are Triton's, and copy the rows that hold tokens into pages and back. Transformer
Engine's fused kernels mark the activations that they save for backward; those are not there on a
CPU, so every saved tensor with a row for each row of the buffer is marked here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor


class _Kernel:
    """A function that is launched as Triton's kernels are, on a grid without meaning here."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def __getitem__(self, grid: Any) -> Any:
        return self._function


def _pages(first: Tensor, num_tokens: Tensor, size: int) -> tuple[int, int, int]:
    tokens = int(num_tokens)
    return int(first[0]), tokens, -(-tokens // size)


def _copy(
    rows: Tensor,
    pages: Tensor,
    host_pages: Tensor,
    num_tokens: Tensor,
    free: Tensor,
    free_on_host: Tensor,
    head: Tensor,
    tail: Tensor,
    capacity: Tensor,
    record: Tensor,
    overflow: Tensor,
    host_spill: Tensor,
    spilled: Tensor,
    new_head: Tensor,
    **sizes: int,
) -> None:
    """Take pages from the ring of free ones, without pages on the host."""
    assert not sizes["HAS_HOST_BUFFER"]
    width, size = sizes["HIDDEN_SIZE"], sizes["PAGE_SIZE"]
    at, tokens, needed = _pages(head, num_tokens, size)
    new_head.copy_(head)
    if int(overflow) or int(tail[0]) - at < needed:
        overflow.fill_(1)
        return
    taken = free[(at + torch.arange(needed)) % int(capacity[0])]
    record[:needed] = taken
    places = (taken[:, None] * size + torch.arange(size)).view(-1)[:tokens]
    pages[places] = rows.view(-1, width)[:tokens]
    new_head[0] = at + needed


def _pop(
    pages: Tensor,
    host_pages: Tensor,
    rows: Tensor,
    num_tokens: Tensor,
    record: Tensor,
    spilled: Tensor,
    overflow: Tensor,
    free: Tensor,
    free_on_host: Tensor,
    tail: Tensor,
    capacity: Tensor,
    new_tail: Tensor,
    **sizes: int,
) -> None:
    """Give the pages back; rows without tokens are never written: NaN here."""
    width, size = sizes["HIDDEN_SIZE"], sizes["PAGE_SIZE"]
    at, tokens, needed = _pages(tail, num_tokens, size)
    new_tail.copy_(tail)
    by_row = rows.view(-1, width)
    by_row.fill_(torch.nan)
    if int(overflow):
        return
    places = (record[:needed, None] * size + torch.arange(size)).view(-1)[:tokens]
    by_row[:tokens] = pages[places]
    free[(at + torch.arange(needed)) % int(capacity[0])] = record[:needed]
    new_tail[0] = at + needed


@contextmanager
def stash_on_cpu() -> Iterator[list[int]]:
    """Let the stash work between CPU ranks, from its first step on; lists what it was asked for.

    The list has the address of every tensor that autograd saved beside it.
    """
    from megatron.core.transformer.moe import paged_stash

    seen: list[int] = []
    save = paged_stash.PagedStashManager.on_save_for_backward

    def mark_and_save(manager: Any, tensor: Tensor) -> Any:
        seen.append(tensor.untyped_storage().data_ptr())
        rows = manager.max_num_tokens
        if rows and tensor.is_floating_point() and tensor.numel() and tensor.numel() % rows == 0:
            tensor.grouped_tensor_scale_inv = False
        return save(manager, tensor)

    with (
        mock.patch.multiple(
            paged_stash,
            paged_stash_copy_kernel=_Kernel(_copy),
            paged_stash_pop_kernel=_Kernel(_pop),
        ),
        mock.patch.multiple(
            paged_stash.PagedStashManager, STASH_MGR=None, on_save_for_backward=mark_and_save
        ),
    ):
        yield seen
