"""Stages 5 to 7 in two parts: own tokens are computed while other ranks' tokens are on their way.

    forward                                   backward (from the last line up)
    send tokens to other ranks                wait for the gradients of the tokens sent
    experts on own tokens                     experts' backward on own tokens
    wait for the tokens of other ranks        send the gradients of these tokens
    experts on these                          experts' backward on these
    combine: their outputs back (Megatron)    combine's backward (Megatron)

Own tokens are those whose instance, main or slot, is on their own rank: they never leave its
memory. Their computation hides one all-to-all in forward and one in backward; nothing hides
combine.

Permutation, counts and combine are Megatron's. This file relies on one internal of Megatron's
all-to-all dispatcher, in 0.16.1 as in 0.19.2: `preprocess` leaves the counts in `input_splits`,
`output_splits` and `num_global_tokens_per_local_expert`, an entry or a row for each EP rank.

Legend: N local tokens, K choices per token, H hidden, R ranks of the EP group, M mains and S slots
per rank.

Source: Libra, two-stage locality-aware execution (MoE_local, MoE_remote). Differs from it in three
things: own tokens wait for the plan, because an exact quota may send some of them away; the other
tokens travel by all-to-all; and there is a backward.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.mcore.dispatcher import PlannedDispatcher, release_graph
from megatron_ext.mcore.limits import quantization_of
from megatron_ext.mcore.moe_layer import BalancedMoELayer
from megatron_ext.transport import HostCopy


class AllToAll:
    """One all-to-all of rows beside computation, and the all-to-all of its gradients back.

    Lives in the autograd graph of one forward. All ranks of the group send at the same point of
    their forward, and of their backward. Sizes are rows for, and from, each rank of the group.
    """

    def __init__(
        self, group: dist.ProcessGroup, send_sizes: list[int], receive_sizes: list[int]
    ) -> None:
        self._group = group
        self._send_sizes = send_sizes
        self._receive_sizes = receive_sizes
        self._under_way: tuple[dist.Work, Tensor, Tensor] | None = None

    def start(self, rows: Tensor) -> Tensor:
        """Send rows [sum(send_sizes), ...]; return the memory that they arrive in."""
        return self._start(rows, self._send_sizes, self._receive_sizes)

    def start_back(self, grads: Tensor) -> None:
        """Send the gradients of the rows that arrived."""
        self._start(grads, self._receive_sizes, self._send_sizes)

    def _start(self, rows: Tensor, send_sizes: list[int], receive_sizes: list[int]) -> Tensor:
        assert self._under_way is None, "the last rows were not waited for"
        rows = rows.contiguous()
        arriving = rows.new_empty(sum(receive_sizes), *rows.shape[1:])
        work = dist.all_to_all_single(
            arriving, rows, receive_sizes, send_sizes, group=self._group, async_op=True
        )
        # Without the graph, which refers to this object: the graph of an aborted step would keep
        # itself alive.
        self._under_way = work, rows.detach(), arriving.detach()
        return arriving

    def wait(self) -> Tensor:
        """Wait for the rows, or gradients, that are under way; return them."""
        assert self._under_way is not None, "nothing was sent"
        (work, _, arrived), self._under_way = self._under_way, None
        work.wait()
        return arrived


class Arriving(NamedTuple):
    """Rows on their way to this rank."""

    all_to_all: AllToAll
    rows: Tensor
    """Where they arrive; not to be read before `wait`."""

    def wait(self) -> Tensor:
        """Wait for the rows and return them. The backward of this sends their gradients."""
        return _Wait.apply(*self)


class _Send(torch.autograd.Function):
    """Rows -> the memory that they arrive in."""

    @staticmethod
    def forward(ctx: Any, all_to_all: AllToAll, rows: Tensor) -> Tensor:
        ctx.all_to_all = all_to_all
        return all_to_all.start(rows)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[None, Tensor]:
        # `_Wait` has sent the gradients on their way and handed on those of the memory.
        return None, ctx.all_to_all.wait()


class _Wait(torch.autograd.Function):
    """The memory that rows arrive in -> these rows."""

    @staticmethod
    def forward(ctx: Any, all_to_all: AllToAll, rows: Tensor) -> Tensor:
        ctx.all_to_all = all_to_all
        all_to_all.wait()
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, grads: Tensor) -> tuple[None, Tensor]:
        ctx.all_to_all.start_back(grads)
        return None, grads


class Dispatched(NamedTuple):
    """Rows at the experts: rows of this rank, and rows of other ranks."""

    own: Tensor
    others: Arriving


class LocalFirstDispatcher(PlannedDispatcher):
    """Megatron's all-to-all dispatcher, for tokens of other ranks only.

    Made by `physical_dispatcher`. Needs more than one EP rank, and settings that pass
    `validate_for_balancing` with `balance.local_first`.
    """

    own_tokens_per_expert: HostCopy
    """Own tokens of this rank for each of its experts, int64 [M + S]: on the host once Megatron's
    counts are there."""
    tokens_per_expert: Any

    def preprocess(self, routing_map: Tensor) -> Tensor:
        """Count as Megatron does, then take the own tokens out.

        Takes the choices of physical experts, bool [N, R * (M + S)]. Returns the tokens of other
        ranks for each of this rank's experts, int64 [M + S].
        """
        tokens_per_expert = super().preprocess(routing_map)
        rank, first = self.ep_group.rank(), self.local_expert_indices[0]
        own = routing_map[:, first : first + self.num_local_experts].sum(0)
        # Copied before Megatron's counts: when the host has these, it has the own counts, too.
        self.own_tokens_per_expert = HostCopy(tuple(own.shape), own.dtype, own.device)
        self.own_tokens_per_expert.start(own)
        self.input_splits[rank] = 0
        self.output_splits[rank] = 0
        if self.num_local_experts > 1:
            counts = self.num_global_tokens_per_local_expert.clone()  # They may be the plan's.
            counts[rank] = 0
            self.num_global_tokens_per_local_expert = counts
        return tokens_per_expert - own

    def token_dispatch(self, tokens: Tensor, probs: Tensor) -> tuple[Dispatched, Dispatched]:
        """Start the all-to-all of tokens [N * K, H] and probabilities [N * K], sorted by expert."""
        self.tokens_per_expert = self._maybe_dtoh_and_synchronize(
            "before_ep_alltoall", self.tokens_per_expert
        )
        return self._dispatch(tokens), self._dispatch(probs)

    def _dispatch(self, rows: Tensor) -> Dispatched:
        send_sizes, receive_sizes = self.input_splits.tolist(), self.output_splits.tolist()
        num_before = self._num_rows_before_own()
        num_own = rows.shape[0] - sum(send_sizes)
        before, own, after = rows.tensor_split([num_before, num_before + num_own])
        all_to_all = AllToAll(self.ep_group, send_sizes, receive_sizes)
        others = _Send.apply(all_to_all, torch.cat([before, after]))
        return Dispatched(own, Arriving(all_to_all, others))

    def _num_rows_before_own(self) -> int:
        return int(self.input_splits[: self.ep_group.rank()].sum())

    def dispatch_postprocess(
        self, tokens: Dispatched, probs: Dispatched
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Wait for the tokens of other ranks, and sort them by expert as Megatron does.

        Returns tokens [N', H], the number for each expert [M + S], probabilities [N'].
        """
        return super().dispatch_postprocess(tokens.others.wait(), probs.others.wait())

    def token_combine(self, outputs: tuple[Tensor, Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Bring back outputs of tokens sent to other ranks, and put outputs of own tokens between.

        `outputs` are those of own tokens, and of other ranks' tokens after `combine_preprocess`;
        the result [N * K, H] is in the order that `token_dispatch` got.
        """
        own, others = outputs
        returned = super().token_combine(others, *args, **kwargs)
        before, after = returned.tensor_split([self._num_rows_before_own()])
        return torch.cat([before, own, after])


class LocalFirstMoELayer(BalancedMoELayer):
    """A balanced layer that computes its rank's own tokens while the others travel."""

    def dispatcher_class(self, dispatcher: Any) -> type:
        """Return `LocalFirstDispatcher`, unless there is no other rank to send tokens to.

        Nor without slots in quantized models: linears take the first part that they compute for the
        first microbatch, and its gradient would overwrite that of the other part. With slots, the
        push comes first.
        """
        if self.ep_group.size() == 1 or (self.layout.slots == 0 and quantization_of(self.config)):
            return super().dispatcher_class(dispatcher)
        return LocalFirstDispatcher

    def routed_experts_compute(self, hidden_states: Any, probs: Any) -> tuple[Any, None]:
        """Stage 6 in two parts: own tokens, then those of other ranks."""
        dispatcher = self.token_dispatcher
        if not isinstance(dispatcher, LocalFirstDispatcher):
            return super().routed_experts_compute(hidden_states, probs)
        forward = self.under_way
        own, slot_weights = forward.materialized(hidden_states.own, self._edge)
        own_counts = dispatcher.own_tokens_per_expert.wait()
        own_output = self.run_experts(forward, slot_weights, own, own_counts, probs.own)
        others = dispatcher.dispatch_postprocess(hidden_states, probs)
        release_graph(dispatcher)
        output = self.run_experts(forward, slot_weights, *others)
        return (own_output, dispatcher.combine_preprocess(output)), None
