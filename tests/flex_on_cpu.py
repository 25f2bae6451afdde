"""Stands in for DeepEP and HybridEP between CPU ranks: for what Megatron's flex dispatcher calls.

Every rank gathers the tokens of all ranks, which have equally many, and keeps those of its experts.
As with the real ones, the host waits for their number, unless HybridEP has a buffer of fixed size.
Gradients come by autograd.

Legend: N tokens of a rank, R ranks, P experts of all ranks, K choices, H hidden, N' tokens of all
ranks that a rank keeps.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe import token_dispatcher
from torch import Tensor
from torch.distributed import ProcessGroup


class Handle(NamedTuple):
    """What a combine needs of its dispatch."""

    rows: Tensor
    """Which of all ranks' tokens are here, int64 [N']."""
    num_tokens: int
    """Tokens of all ranks."""
    group: ProcessGroup
    places: Tensor | None = None
    """Their rows in HybridEP's buffer, int64 [N']."""
    overflow: Tensor = torch.zeros(1, dtype=torch.int32)
    """Whether HybridEP has dropped any, int32 [1]; Megatron reads it as the last of the handle."""


def fused_dispatch(
    x: Tensor, indices: Tensor, probs: Tensor, num_experts: int, group: ProcessGroup, **_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Handle]:
    """DeepEP's dispatch: a token once to each rank that has one of its experts.

    Returns:
        Tokens [N', H]; their choices of this rank's experts, or -1, [N', K]; the probabilities of
        these, [N', K]; tokens of each of this rank's experts, on the host; what combine needs.
    """
    num_local = num_experts // group.size()
    tokens, probs, indices = (
        gather_from_sequence_parallel_region(one, group=group) for one in (x, probs, indices)
    )
    local = indices - group.rank() * num_local
    is_here = (indices >= 0) & (local >= 0) & (local < num_local)
    rows = is_here.any(1).nonzero().view(-1)
    counts = torch.bincount(local[is_here], minlength=num_local)
    local = torch.where(is_here, local, -1)[rows]
    handle = Handle(rows, len(tokens), group)
    return tokens[rows], local, (probs * is_here)[rows], torch.tensor(counts.tolist()), handle


def fused_combine(x: Tensor, group: ProcessGroup, handle: Handle, **_: Any) -> tuple[Tensor, None]:
    """DeepEP's combine: the sum of a token's outputs, [N, H], back on its own rank."""
    return _combine(x, handle), None


def hybrid_ep_dispatch(
    x: Tensor,
    routing_map: Tensor,
    probs: Tensor,
    group: ProcessGroup,
    num_local_experts: int,
    num_permuted_tokens: int | None = None,
    pad_multiple: int | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor, None, Tensor, Handle]:
    """HybridEP's dispatch: a token once for each of its experts, sorted by expert.

    With `pad_multiple`, each expert's tokens are filled up with zeros. With `num_permuted_tokens`,
    the buffer has so many rows; what would be in the last row or behind it is dropped, and rows
    behind the experts' are never written: NaN here. The real one counts dropped tokens, too, and
    Megatron throws such a step away; here each expert's count ends with the buffer.

    Returns:
        Tokens [N', H]; their probabilities [N']; nothing; tokens of each of this rank's experts,
        without a fixed size on the host as well; what combine needs.

    Source: deep_ep/hybrid_ep_buffer.py of DeepEP, `dispatch_with_permute` (`use_host_meta`);
    csrc/hybrid_ep/extension/permute.cu, `permute_processing_kernel` (commit 13d8379), whose rows
    count from 1 and are dropped from `num_permuted_tokens` on.
    """
    first = group.rank() * num_local_experts
    tokens, chosen, probs = (
        gather_from_sequence_parallel_region(one, group=group)
        for one in (x, routing_map.contiguous(), probs)
    )
    chosen = chosen[:, first : first + num_local_experts]
    experts, rows = chosen.T.nonzero(as_tuple=True)
    counts, pad = chosen.sum(0), pad_multiple or 1
    padded = -(-counts // pad) * pad
    shift = (padded.cumsum(0) - padded) - (counts.cumsum(0) - counts)
    places = torch.arange(len(rows)) + shift[experts]
    overflow = torch.zeros(1, dtype=torch.int32)
    if num_permuted_tokens is None:
        size = int(padded.sum())
    else:
        size = num_permuted_tokens
        is_kept = places < size - 1
        overflow += not is_kept.all()
        experts, rows, places = experts[is_kept], rows[is_kept], places[is_kept]
    ends = padded.cumsum(0).clamp(max=size)
    padded = ends.diff(prepend=torch.zeros(1, dtype=ends.dtype))
    handle = Handle(rows, len(tokens), group, places, overflow)
    buffers = []
    for values in (tokens[rows], probs[rows, first + experts]):
        buffer = values.new_zeros(size, *values.shape[1:])
        buffer[int(ends[-1]) :] = torch.nan
        buffers.append(buffer.index_copy(0, places, values))
    counted = torch.tensor(padded.tolist()) if num_permuted_tokens is None else padded
    return buffers[0], buffers[1], None, counted, handle


def hybrid_ep_combine(x: Tensor, handle: Handle, **_: Any) -> Tensor:
    """HybridEP's combine: as DeepEP's, for the rows that hold tokens."""
    return _combine(x[handle.places], handle)


def _combine(x: Tensor, handle: Handle) -> Tensor:
    sums = x.new_zeros(handle.num_tokens, x.shape[1]).index_add(0, handle.rows, x)
    return reduce_scatter_to_sequence_parallel_region(sums, group=handle.group)


@contextmanager
def flex_on_cpu() -> Iterator[None]:
    """Let Megatron's flex dispatcher be made and used between CPU ranks."""
    preprocess = token_dispatcher.MoEFlexTokenDispatcher.dispatch_preprocess
    with (
        mock.patch.multiple(
            token_dispatcher,
            fused_dispatch=fused_dispatch,
            fused_combine=fused_combine,
            set_deepep_num_sms=lambda num_sms: None,
            hybrid_ep_dispatch=hybrid_ep_dispatch,
            hybrid_ep_combine=hybrid_ep_combine,
        ),
        # Not compiled, which takes longer than all the rest.
        mock.patch.object(
            token_dispatcher.MoEFlexTokenDispatcher,
            "dispatch_preprocess",
            getattr(preprocess, "_torchdynamo_orig_callable", preprocess),
        ),
    ):
        yield
