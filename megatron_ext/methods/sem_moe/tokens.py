"""Deals tokens to the ranks that probably have the tokens' experts in an MoE layer.

    1 predict   guess each token's rank from its id or from the token's last ranks, as is surer
    2 rebatch   deal the tokens, equally many to each rank; the surest of a rank come first
    3 resume    put the tokens back into their order

A tensor-parallel group has slices of one sequence: rank r has tokens r N to (r + 1) N - 1.
Tables and tokens may be on any device. Every step is deterministic, so that ranks with equal
arguments agree. Legend: N tokens of a rank, R ranks, V vocabulary.

Source: Sem-MoE (Y. Li et al.), Algorithm 3 and section B.2.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_ext.methods.sem_moe.semantics import Semantics


class Guess(NamedTuple):
    """Likeliest ranks and their chances, for each token or for each entry of a table."""

    rank: Tensor
    """The likeliest rank, int64."""
    confidence: Tensor
    """Chance that this rank is right, float32, from 1 / R (nothing is known) to 1."""

    def look_up(self, index: Tensor) -> Guess:
        """Return the entries of a table at these indices."""
        return Guess(self.rank[index], self.confidence[index])


class LayerTables(NamedTuple):
    """Guesses for one MoE layer before its router has seen a token."""

    by_id: Guess
    """Guess by a token's id: [V]."""
    by_path: Guess | None
    """Guess by the last two ranks that a token visited: entry `a * R + b` for rank a two layers
    ago, then b. None for the first two layers."""

    @classmethod
    def of(cls, semantics: Semantics, layer: int, device: torch.device) -> LayerTables:
        """Take the tables of one layer, given by its position in `semantics.layers`."""
        rank = torch.from_numpy(semantics.token_rank[layer]).long()
        confidence = torch.from_numpy(semantics.token_confidence[layer])
        by_id = Guess(rank.to(device), confidence.to(device))
        if layer < 2:
            return cls(by_id, None)
        chances = torch.from_numpy(semantics.transition[layer - 2]).flatten(0, 1)
        return cls(by_id, Guess(chances.argmax(1).to(device), chances.amax(1).to(device)))


def predict(
    tables: LayerTables, ids: Tensor, ranks: int, went: tuple[Tensor, Tensor] | None = None
) -> Guess:
    """Guess the rank that has most of a token's experts in a layer, by token ids, int64 [R N].

    `went` has the ranks that the tokens went to two layers before and in the layer before, int64
    [R N] each. Without these ranks, ids decide alone.

    Source: Sem-MoE, Algorithm 3, line 2; if both guesses are equally sure, the ranks decide.
    """
    by_id = tables.by_id.look_up(ids)
    if went is None or tables.by_path is None:
        return by_id
    by_path = tables.by_path.look_up(went[0] * ranks + went[1])
    surer = by_id.confidence > by_path.confidence
    return Guess(
        torch.where(surer, by_id.rank, by_path.rank),
        torch.where(surer, by_id.confidence, by_path.confidence),
    )


def rebatch(guess: Guess, ranks: int) -> Tensor:
    """Deal the tokens of a group, with their guesses [R N] in order, equally many to each rank.

    A token goes to its guessed rank if the rank has room. The surest tokens choose first; of
    equally sure tokens, those that are on the rank already, then by their order. A token that finds
    no room, or has no rank likelier than others, stays on its own rank if there is room, else the
    token goes to any rank with room.

    Returns:
        The token at each position, rank by rank and in order on each rank: int64 [R N].

    Raises:
        ValueError: Ranks do not divide the tokens.

    >>> rank = torch.tensor([1, 1, 1, 0, 0, 1])
    >>> rebatch(Guess(rank, torch.tensor([0.9, 0.6, 0.8, 0.7, 0.5, 0.9])), 2)
    tensor([1, 3, 4, 0, 2, 5])

    Source: Sem-MoE, Algorithm 3, lines 3 to 6 (argsort, group_by_key, align, concat); the text does
    not say which tokens leave a rank that too many want.
    """
    num_tokens = len(guess.rank)
    if num_tokens % ranks:
        raise ValueError(f"tokens ({num_tokens}) must be a multiple of ranks ({ranks})")
    own = torch.arange(ranks, device=guess.rank.device).repeat_interleave(num_tokens // ranks)
    surest = (own != guess.rank).argsort(stable=True)
    surest = surest[guess.confidence[surest].neg().argsort(stable=True)]
    in_order = torch.arange(num_tokens, device=guess.rank.device)

    rank_of = torch.full_like(own, -1)
    wish = torch.where(guess.confidence > 1 / ranks, guess.rank, -1)
    rank_of = _seat(rank_of, wish, surest, ranks)
    rank_of = _seat(rank_of, own, in_order, ranks)
    rank_of[rank_of < 0] = torch.arange(ranks, device=own.device).repeat_interleave(
        _room(rank_of, ranks)
    )
    return rank_of.argsort(stable=True)


def _room(rank_of: Tensor, ranks: int) -> Tensor:
    """Tokens that each rank can still take, int64 [R]."""
    return len(rank_of) // ranks - torch.bincount(rank_of + 1, minlength=ranks + 1)[1:]


def _seat(rank_of: Tensor, wish: Tensor, order: Tensor, ranks: int) -> Tensor:
    """Give tokens without a rank (-1) the rank of their wish, in this order, while it has room.

    All are int64 [R N]; `order` has every token once, and a wish may be -1.
    """
    wish = torch.where(rank_of < 0, wish, -1)
    grouped = order[wish[order].argsort(stable=True)]
    wish_grouped = wish[grouped]
    group_sizes = torch.bincount(wish + 1, minlength=ranks + 1)
    first_of_group = (group_sizes.cumsum(0) - group_sizes)[wish_grouped + 1]
    place_in_group = torch.arange(len(wish), device=wish.device) - first_of_group
    fits = (wish_grouped >= 0) & (place_in_group < _room(rank_of, ranks)[wish_grouped])
    seated = rank_of.clone()
    seated[grouped[fits]] = wish_grouped[fits]
    return seated


def resume(permutation: Tensor) -> Tensor:
    """Return the position of each token, which puts dealt tokens back in order: int64 [R N].

    >>> resume(torch.tensor([1, 2, 0]))
    tensor([2, 0, 1])
    """
    return permutation.argsort(stable=True)
