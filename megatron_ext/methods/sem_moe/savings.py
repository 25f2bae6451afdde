"""Measures on recorded routes how many hidden states re-batching would save.

The tensor-parallel group is the EP group, and a microbatch is one sample: outside of MoE layers,
rank r holds the r-th part of its tokens. Legend: N tokens of a rank, R ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import torch

from megatron_ext.files.routes import Routes
from megatron_ext.methods.sem_moe.learn import ranks_of_tokens
from megatron_ext.methods.sem_moe.semantics import Semantics
from megatron_ext.methods.sem_moe.tokens import LayerTables, predict, rebatch, resume


def compare_tokens(
    routes: Routes, semantics: Semantics, *, on_layer: Callable[[int], object] = lambda count: None
) -> dict[str, dict[str, float]]:
    """Compare tokens on the ranks of their sequence slices with tokens dealt by their experts.

    Routes fit as those of `learn.compare`. Each sample loses its last tokens if the ranks do not
    divide the number of its tokens. `on_layer` is called with 1 after each layer.

    Returns:
        By `sequence order`, `round robin` (token i to rank i mod R), `by id` (the id's rank only)
        and `re-batched`:
        `local_activation_rate`: choices of an expert on the token's rank / all choices;
        `moved`: tokens that leave the rank that the sequence puts them on / all tokens;
        `sent`: hidden states that a token sends to other ranks on its way to its experts: one a
        choice that is not local, and one if it was moved before;
        `imbalance`: busiest rank's choices / mean, which dealing does not change.
        Means over layers and samples.

    Raises:
        ValueError: A sample is shorter than R.
    """
    ranks = semantics.affinity.shape[1]
    starts = sample_starts(routes, ranks)
    home = semantics.home()
    rank_of = torch.from_numpy(ranks_of_tokens(routes, home, ranks))
    ids = torch.from_numpy(routes.token)
    measured: dict[str, list[tuple[float, float, float]]] = {}
    for layer, choice in enumerate(routes.choice):
        tables = LayerTables.of(semantics, layer, torch.device("cpu"))
        expert_rank = torch.from_numpy(home[layer][choice.astype(np.int64)])
        for first, end in itertools.pairwise(starts.tolist()):
            part = slice(first, end - (end - first) % ranks)
            own = torch.arange(part.stop - part.start) * ranks // (part.stop - part.start)
            went = (rank_of[layer - 2, part], rank_of[layer - 1, part]) if layer >= 2 else None
            for name, dealt in (
                ("sequence order", own),
                ("round robin", torch.arange(len(own)) % ranks),
                ("by id", _dealt(tables, ids[part], ranks, None)),
                ("re-batched", _dealt(tables, ids[part], ranks, went)),
            ):
                measured.setdefault(name, []).append(_measure(own, dealt, expert_rank[part], ranks))
        on_layer(1)
    num_choices = routes.choice.shape[2]
    means: dict[str, dict[str, float]] = {}
    for name, values in measured.items():
        local, moved, imbalance = np.mean(values, axis=0).tolist()
        means[name] = {
            "local_activation_rate": local,
            "moved": moved,
            "sent": num_choices * (1 - local) + moved,
            "imbalance": imbalance,
        }
    return means


def sample_starts(routes: Routes, ranks: int) -> np.ndarray:
    """Return where samples begin among the tokens, and where the last one ends: int64 [Q + 1].

    Raises:
        ValueError: Samples are not in order, or one is shorter than the ranks are many.
    """
    starts = np.searchsorted(routes.sample, np.arange(routes.num_samples + 1))
    if np.any(np.diff(routes.sample) < 0) or np.diff(starts).min() < ranks:
        raise ValueError(
            f"samples must be in order, with at least as many tokens as ranks ({ranks})"
        )
    return starts


def _dealt(
    tables: LayerTables,
    ids: torch.Tensor,
    ranks: int,
    went: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """Rank of each token after re-batching, int64 [R N]."""
    permutation = rebatch(predict(tables, ids, ranks, went), ranks)
    return resume(permutation) * ranks // len(ids)


def _measure(
    own: torch.Tensor, dealt: torch.Tensor, expert_rank: torch.Tensor, ranks: int
) -> tuple[float, float, float]:
    """Share of choices that are local, share of tokens moved, imbalance."""
    load = torch.bincount(expert_rank.flatten(), minlength=ranks)
    return (
        float((expert_rank == dealt[:, None]).float().mean()),
        float((dealt != own).float().mean()),
        float(load.max() * ranks / load.sum()),
    )
