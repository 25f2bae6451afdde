"""Stage 3: from logical to physical routing, so that every instance gets exactly its quota.

Reroute turns this rank's shares of a plan into the dispatcher's input: a routing map, or ids if
the router gives ids. In between, choices are [N, K] tables of indices, and backward needs nothing
else. Probabilities keep the router's dtype: reroute moves them, and computes nothing with them.
Legend: N local tokens, E logical experts, K choices per token, R ranks of the EP group, P physical
experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_ext.balance.plan import Shares
from megatron_ext.ops import load_library


def as_map(choices: Tensor, num_experts: int) -> Tensor:
    """Return a router's choices as a map, bool [N, E].

    The router gives a map, or ids of experts [N, K] of an integer dtype, -1 where a token has fewer
    choices.

    >>> as_map(torch.tensor([[2, 0], [1, -1]]), num_experts=3).int().tolist()
    [[1, 0, 1], [0, 1, 0]]
    """
    if choices.dtype == torch.bool:
        return choices
    # A column more for what is no choice.
    columns = choices.new_zeros(len(choices), num_experts + 1, dtype=torch.bool)
    chosen = columns.scatter(1, torch.where(choices < 0, num_experts, choices).long(), True)
    return chosen[:, :num_experts].contiguous()


@dataclass(frozen=True, eq=False)
class Assignment:
    """Which instance computes each of the tokens' choices."""

    logical: Tensor
    """The tokens' experts, rising, then -1: int32 [N, K]."""
    physical: Tensor
    """The instances that take them, then -1: int32 [N, K]."""


def assign(
    routing_map_NE: Tensor, shares: Shares, top_k: int, marks: Tensor | None = None
) -> Assignment:
    """Give each of this rank's assignments an instance, so that each takes exactly its share.

    An expert's instances lie on a line, the main first and then by rank, each as long as its share.
    The j-th of the expert's n local assignments goes to position `j * stride mod n` of that line.
    The stride has no factor in common with n, so the shares are exact. It is near n's golden
    section, so tokens that follow each other go to different instances.

    Args:
        routing_map_NE: Logical choices, bool [N, E]. Its column sums must be the row sums of
            `shares.split`.
        shares: What this rank's tokens are to be split by.
        top_k: Most choices of a token (K).
        marks: The marks from `gather_counts` for this routing map; made anew if None.

    Raises:
        ValueError: A shape or dtype does not fit.
        RuntimeError: The column sums are not what the shares cover, or a token has more than K
            choices (on a GPU such choices get no instance instead).

    >>> routing = torch.tensor([[True, False], [True, True]])
    >>> shares = Shares(torch.tensor([[1, 1], [0, 1]]), torch.tensor([[0, 3], [-1, 2]]))
    >>> assign(routing, shares, top_k=2).physical.tolist()
    [[0, -1], [3, 2]]

    Source: UltraEP, section 5.2 (token assignment by cumulative quotas), without the interleaving.
    """
    load_library()
    return Assignment(
        *torch.ops.megatron_ext.assign(
            routing_map_NE, shares.split, shares.physical_index, top_k, marks, shares.lines
        )
    )


class RoutingMaps:
    """Memory for one microbatch's dense maps, until its virtual layer is lent again.

    Dispatchers read the maps until the layer's forward ends, and autograd may keep the maps for the
    backward. So two microbatches between their forward and their backward need memory each.
    """

    def __init__(self) -> None:
        self._probs: Tensor | None = None
        self._routing: Tensor | None = None

    def take(self, probs_NE: Tensor, num_physical: int) -> tuple[Tensor, Tensor]:
        """Return memory for [N, P] probabilities and choices; allocates when it has to grow."""
        size = probs_NE.shape[0] * num_physical
        if (
            self._probs is None
            or self._routing is None
            or self._probs.numel() < size
            or (self._probs.dtype, self._probs.device) != (probs_NE.dtype, probs_NE.device)
        ):
            self._probs = probs_NE.new_empty(size)
            self._routing = probs_NE.new_empty(size, dtype=torch.bool)
        # `.data` has a version counter of its own: the last microbatch's graph may still exist, but
        # its backward is over.
        return (
            self._probs.data[:size].view(-1, num_physical),
            self._routing.data[:size].view(-1, num_physical),
        )


def reroute(
    probs_NE: Tensor,
    routing_map_NE: Tensor,
    shares: Shares,
    top_k: int,
    num_physical: int,
    *,
    marks: Tensor | None = None,
    maps: RoutingMaps | None = None,
) -> tuple[Tensor, Tensor]:
    """Assign as `assign` does, and move the probabilities of the choices to their instances.

    Returns probabilities [N, P] and choices, bool [N, P], in the memory of `maps` if it is given.
    Each row keeps its number of choices. In backward, gradients come back over the same table;
    entries without a choice get none.

    >>> probs = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    >>> shares = Shares(torch.tensor([[1, 1], [0, 1]]), torch.tensor([[0, 3], [-1, 2]]))
    >>> probs, routing = reroute(probs, probs > 0, shares, top_k=2, num_physical=4)
    >>> probs.tolist()
    [[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.5, 0.5]]
    """
    load_library()
    probs_NP, routing_map_NP = _Reroute.apply(
        probs_NE, routing_map_NE, shares, top_k, num_physical, marks, maps or RoutingMaps()
    )
    return probs_NP, routing_map_NP


def reroute_ids(ids_NK: Tensor, assignment: Assignment, num_experts: int) -> Tensor:
    """Replace each choice by the instance that takes it; probabilities stay as they are.

    Choices are in any order, [N, K] of an integer dtype, or -1; the result is of the same dtype.

    >>> routing = torch.tensor([[True, False], [True, True]])
    >>> shares = Shares(torch.tensor([[1, 1], [0, 1]]), torch.tensor([[0, 3], [-1, 2]]))
    >>> assignment = assign(routing, shares, top_k=2)
    >>> reroute_ids(torch.tensor([[0, -1], [1, 0]]), assignment, num_experts=2).tolist()
    [[0, -1], [2, 3]]
    """
    # By logical expert, with a column more for what is no choice.
    physical = assignment.physical.new_full((len(ids_NK), num_experts + 1), -1)
    logical = assignment.logical
    physical.scatter_(1, torch.where(logical < 0, num_experts, logical).long(), assignment.physical)
    ids = torch.where(ids_NK < 0, num_experts, ids_NK).long()
    return physical.gather(1, ids).to(ids_NK.dtype)


class _Reroute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        probs_NE: Tensor,
        routing_map_NE: Tensor,
        shares: Shares,
        top_k: int,
        num_physical: int,
        marks: Tensor | None,
        maps: RoutingMaps,
    ) -> tuple[Tensor, Tensor]:
        probs_NP, routing_map_NP = maps.take(probs_NE, num_physical)
        ctx.tables = torch.ops.megatron_ext.reroute(
            probs_NE,
            routing_map_NE,
            shares.split,
            shares.physical_index,
            top_k,
            marks,
            shares.lines,
            probs_NP,
            routing_map_NP,
        )
        ctx.num_experts = probs_NE.shape[1]
        ctx.mark_non_differentiable(routing_map_NP)
        return probs_NP, routing_map_NP

    @staticmethod
    def backward(ctx: Any, grad_NP: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        grad_NE = torch.ops.megatron_ext.place_back(grad_NP, *ctx.tables, ctx.num_experts)
        return grad_NE, None, None, None, None, None, None
