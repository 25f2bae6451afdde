"""Stands in for NCCL EP between CPU ranks: for `transformer_engine.pytorch.ep`.

Megatron's manager and its wrappers of that module are the real ones, whether Transformer Engine is
there or not. The stand-in refuses what NCCL EP cannot take: a second set-up, another one than the
other ranks', sizes other than those of the set-up, another dtype, a buffer that is used twice, more
tokens than there is room for, and without copies memory that peers cannot reach. What NCCL EP
leaves as it was is NaN.

Legend: N tokens of a rank, R ranks, P experts of all ranks, K choices, H hidden, C tokens that a
rank has room for.

Source: transformer_engine/pytorch/ep.py (commit 008c3d20affe and release 2.20.2) and
megatron/core/transformer/moe/fused_a2a.py (0.19.2).
"""

from __future__ import annotations

import importlib
import re
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import utils
from megatron.core.transformer.moe import fused_a2a, token_dispatcher
from torch import Tensor
from torch.distributed import ProcessGroup

from tests.flex_on_cpu import flex_on_cpu

NAN = float("nan")


class NcclEp(types.ModuleType):
    """The stand-in for the module; its state is that of one process."""

    _BOOTSTRAPPED = False

    def __init__(self) -> None:
        super().__init__("transformer_engine.pytorch.ep")
        self.set_ups: list[dict[str, Any]] = []
        """What it was set up with; the last is in force."""
        self.num_dispatches = 0
        self.reachable: list[Tensor] = []
        """Memory that peers can reach."""

    @property
    def sizes(self) -> dict[str, Any]:
        """What it is set up with."""
        assert self._BOOTSTRAPPED, "ep_bootstrap comes first"
        return self.set_ups[-1]

    def ep_bootstrap(self, ep_group: ProcessGroup, **sizes: Any) -> None:
        """All ranks set up alike: P, most tokens of a rank (N at most), C, H, and who copies."""
        assert not self._BOOTSTRAPPED, "once in a process"
        names = {"num_experts", "max_tokens_per_rank", "recv_capacity_per_rank", "hidden_dim"}
        assert sizes.keys() == names | {"max_num_sms", "zero_copy"}
        assert ep_group.size() >= 2
        assert sizes["num_experts"] % ep_group.size() == 0
        assert sizes["max_tokens_per_rank"] % 64 == 0
        assert sizes["recv_capacity_per_rank"] >= sizes["max_tokens_per_rank"]
        of_ranks: list[Any] = [None] * ep_group.size()
        dist.all_gather_object(of_ranks, sizes, group=ep_group)
        assert of_ranks == [sizes] * ep_group.size(), of_ranks
        self.group, self._BOOTSTRAPPED = ep_group, True
        self.set_ups.append(sizes)

    def ep_finalize(self) -> None:
        """Forget the set-up, before process groups end."""
        self._BOOTSTRAPPED = False

    def symm_mem_alloc(self, shape: Any, dtype: torch.dtype, group: ProcessGroup) -> Tensor:
        """Memory that peers can reach."""
        assert group is self.group
        self.reachable.append(torch.full(shape, NAN, dtype=dtype))
        return self.reachable[-1]

    def is_symm_backed(self, tensor: Tensor) -> bool:
        """Whether peers can reach a tensor."""
        ours = {each.untyped_storage().data_ptr() for each in self.reachable}
        return tensor.untyped_storage().data_ptr() in ours

    def must_reach(self, tensor: Tensor) -> None:
        """Without copies, peers read and write this tensor."""
        if self.sizes["zero_copy"]:
            assert self.is_symm_backed(tensor), "peers cannot reach this tensor"

    def EpBuffer(self, **sizes: Any) -> Buffer:
        """State of one dispatch and its combine."""
        return Buffer(self, **sizes)

    def ep_dispatch(
        self,
        buffer: Buffer,
        tokens: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        *,
        recv_tokens: Tensor | None = None,
        recv_topk_weights: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens to the ranks of their experts.

        Returns:
            Tokens [C, H], sorted by this rank's experts, each expert's rows filled up with zeros to
            a multiple of the alignment; their probabilities [C]; rows of each expert, int32.
        """
        self.num_dispatches += 1
        hidden = self.sizes["hidden_dim"]
        if recv_tokens is None:
            recv_tokens = tokens.new_empty(buffer.capacity, hidden)
        else:  # Megatron brings memory where experts do not keep their input: in quantized models.
            self.must_reach(recv_tokens)
        if recv_topk_weights is None:
            recv_topk_weights = topk_weights.new_empty(buffer.capacity)
        else:
            self.must_reach(recv_topk_weights)
        assert recv_tokens.shape == (buffer.capacity, hidden)
        assert recv_topk_weights.shape == (buffer.capacity,)
        buffer.take_routing(topk_idx)
        assert tokens.shape == (len(topk_idx), hidden)
        assert tokens.dtype == torch.bfloat16
        assert topk_weights.shape == topk_idx.shape
        assert topk_weights.dtype == torch.float32
        received = _Dispatch.apply(buffer, tokens, topk_weights, recv_tokens, recv_topk_weights)
        return *received, buffer.rows_by_expert

    def ep_combine(
        self,
        buffer: Buffer,
        expert_out: Tensor,
        *,
        num_local_tokens: int,
        grad_out: Tensor | None = None,
    ) -> Tensor:
        """The sums [N, H] of a token's outputs, back on its own rank; outputs are [C, H]."""
        assert buffer.is_dispatched
        assert not buffer.is_combined, "a buffer is for one dispatch and one combine"
        buffer.is_combined = True
        assert num_local_tokens == buffer.num_tokens
        assert expert_out.shape == (buffer.capacity, self.sizes["hidden_dim"])
        assert expert_out.dtype == torch.bfloat16
        assert (grad_out is not None) == self.sizes["zero_copy"]
        self.must_reach(expert_out)
        combined: Tensor = _Combine.apply(buffer, expert_out, grad_out)
        return combined


class Buffer:
    """State of one dispatch and its combine, also for their backward."""

    def __init__(
        self,
        nccl_ep: NcclEp,
        *,
        top_k: int,
        max_tokens_per_rank: int,
        recv_capacity_per_rank: int,
        hidden_dim: int,
        num_local_experts: int,
        alignment: int,
    ) -> None:
        given = dict(
            max_tokens_per_rank=max_tokens_per_rank,
            recv_capacity_per_rank=recv_capacity_per_rank,
            hidden_dim=hidden_dim,
            num_experts=num_local_experts * nccl_ep.group.size(),
        )
        assert given.items() <= nccl_ep.sizes.items(), f"{given}, set up for {nccl_ep.sizes}"
        assert alignment in (0, 32, 256)
        self.nccl_ep, self.group, self.capacity = nccl_ep, nccl_ep.group, recv_capacity_per_rank
        self.top_k, self.num_local_experts, self.alignment = top_k, num_local_experts, alignment
        self.is_dispatched = self.is_combined = False

    def take_routing(self, indices: Tensor) -> None:
        """Lay out the rows of this rank by all ranks' choices, int64 [N, K]."""
        assert not self.is_dispatched, "a buffer is for one dispatch"
        self.is_dispatched = True
        self.num_tokens = len(indices)
        assert indices.shape == (self.num_tokens, self.top_k)
        assert indices.dtype == torch.int64
        assert 0 < self.num_tokens <= self.nccl_ep.sizes["max_tokens_per_rank"]
        assert bool(((indices >= 0) & (indices < self.nccl_ep.sizes["num_experts"])).all())
        assert all(len({*row}) == self.top_k for row in indices.tolist()), "choices are distinct"
        local = self.of_all(indices) - self.group.rank() * self.num_local_experts
        tokens, choices = [], []
        for expert in range(self.num_local_experts):
            rows = (local == expert).nonzero()
            padding = -len(rows) % self.alignment if self.alignment else 0
            rows = torch.cat([rows, rows.new_full((padding, 2), -1)])
            tokens.append(rows[:, 0])
            choices.append(rows[:, 1])
        self.rows_by_expert = torch.tensor([*map(len, tokens)], dtype=torch.int32)
        self.num_rows = int(self.rows_by_expert.sum())
        # The real one's trap ends the job: here all ranks see it.
        most = int(self.of_all(self.rows_by_expert.sum().view(1)).max())
        assert most <= self.capacity, f"{most} > {self.capacity}: no room"
        self.token, self.choice = torch.cat(tokens), torch.cat(choices)
        """Which of all ranks' tokens is in a row, and by which of its choices; -1 for padding."""

    def of_all(self, mine: Tensor) -> Tensor:
        """All ranks' rows; ranks have equally many."""
        of_ranks = [torch.empty_like(mine) for _ in range(self.group.size())]
        dist.all_gather(of_ranks, mine.contiguous(), group=self.group)
        return torch.cat(of_ranks)

    def to_rows(self, of_tokens: Tensor, out: Tensor) -> Tensor:
        """This rank's rows of all ranks' tokens, in `out`."""
        out.fill_(NAN)[: self.num_rows] = of_tokens[self.token] * (self.token >= 0).unsqueeze(-1)
        return out

    def to_tokens(self, rows: Tensor) -> Tensor:
        """This rank's tokens, each the sum of its rows on all ranks, added in float32."""
        is_token = self.token >= 0
        sums = torch.zeros(self.num_tokens * self.group.size(), rows.shape[1])
        sums.index_add_(0, self.token[is_token], rows[: self.num_rows][is_token].float())
        dist.all_reduce(sums, group=self.group)
        mine = sums[self.group.rank() * self.num_tokens :][: self.num_tokens]
        return mine.to(rows.dtype)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, buffer: Buffer, tokens: Tensor, weights: Tensor, received: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.buffer = buffer
        buffer.to_rows(buffer.of_all(tokens), received)
        of_rows = buffer.of_all(weights)[buffer.token, buffer.choice] * (buffer.token >= 0)
        probs.fill_(NAN)[: buffer.num_rows] = of_rows
        # Autograd must not take memory that lives longer for its own.
        return received.detach(), probs.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor, probs_grad: Tensor) -> tuple[Tensor | None, ...]:
        buffer = ctx.buffer
        assert grad.shape[0] == probs_grad.shape[0] == buffer.capacity
        assert grad.dtype == torch.bfloat16
        assert probs_grad.dtype == torch.float32
        buffer.nccl_ep.must_reach(grad)
        by_choice = torch.zeros(buffer.capacity, buffer.top_k)
        by_choice[torch.arange(buffer.num_rows), buffer.choice] = probs_grad[: buffer.num_rows]
        return None, buffer.to_tokens(grad), buffer.to_tokens(by_choice), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, buffer: Buffer, outputs: Tensor, grad_out: Tensor | None) -> Tensor:
        ctx.buffer, ctx.grad_out = buffer, grad_out
        return buffer.to_tokens(outputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        buffer, out = ctx.buffer, ctx.grad_out
        if out is None:
            out = grad.new_empty(buffer.capacity, grad.shape[1])
        buffer.nccl_ep.must_reach(out)
        return None, buffer.to_rows(buffer.of_all(grad), out), None


_WRAPPERS = (
    *("ensure_nccl_ep_bootstrapped", "new_nccl_ep_buffer", "alloc_ep_symm_buffer"),
    *("nccl_ep_dispatch", "nccl_ep_combine"),
)
"""Megatron's, which its dispatcher imports by name."""


@contextmanager
def nccl_ep_on_cpu() -> Iterator[NcclEp]:
    """Let Megatron's flex dispatcher be made and used with NCCL EP between CPU ranks."""
    nccl_ep = NcclEp()
    home = types.ModuleType("transformer_engine.pytorch")
    home.ep = nccl_ep  # type: ignore[attr-defined]
    modules = {"transformer_engine": types.ModuleType("transformer_engine"), home.__name__: home}
    manager = token_dispatcher._NCCLEPManager
    buffers = dict.fromkeys(name for name in vars(manager) if re.fullmatch("_zc_.*_buf", name))
    # Also for the end of Megatron's process groups, which forgets the set-up.
    with mock.patch.dict(vars(fused_a2a)):
        with mock.patch.dict("sys.modules", modules):
            importlib.reload(fused_a2a)
        wrappers = {name: getattr(fused_a2a, name) for name in _WRAPPERS}
        with (
            flex_on_cpu(),
            mock.patch.multiple(token_dispatcher, **wrappers),
            mock.patch.multiple(manager, **buffers),
            mock.patch.object(utils, "is_symm_backed", nccl_ep.is_symm_backed),
        ):
            yield nccl_ep
