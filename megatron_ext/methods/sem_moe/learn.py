"""Sem-MoE: puts experts and samples that belong together on one rank, so that fewer tokens travel.

    1 predict     how often a token id goes to an expert, from recorded routes
    2 co-cluster  experts to ranks for fixed samples, samples to ranks for fixed experts, by turns
    3 tables      expert at each position of each layer; share of a token id's choices on each rank;
                  rank of a token by its id, and by the token's ranks in the last two layers

`checkpoints_tools.relayout` moves a checkpoint's experts, `samples.py` a run's samples, `tokens.py`
its single tokens. Legend: N tokens, Q samples, L layers, K experts of a token, V vocabulary, E
logical experts, R ranks of the EP group. Arrays have these names in all functions; those of one
layer lack the axis L:

    predicted    expected choices of each expert by each sample, float64 [Q, L, E]
    home         rank of each expert, int64 [L, E]
    sample_rank  rank of each sample, int64 [Q]
    rank_of      rank that has most of a token's experts, int64 [L, N]

Source: Sem-MoE (Y. Li et al.), sections 3.2 and 3.3, Algorithm 1, section B.1.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from megatron_ext.balance.metrics import imbalances
from megatron_ext.balance.plan_metrics import load_imbalance_rates
from megatron_ext.files.routes import Routes
from megatron_ext.methods.sem_moe.samples import schedule
from megatron_ext.methods.sem_moe.semantics import Semantics

STEPS = 10
"""Most rounds of Algorithm 1; the algorithm ends when a round changes nothing."""


def learn(
    routes: Routes, ranks: int, *, on_layer: Callable[[int], object] = lambda count: None
) -> Semantics:
    """Cluster the experts and samples of recorded routes, and make the tables.

    `on_layer` is called with 1 after each layer of each step, and at the end with the rest of
    `STEPS` times the layers, which was not needed.

    Raises:
        ValueError: Ranks do not divide the experts, or there are fewer samples than ranks.
    """
    if ranks < 1 or routes.num_experts % ranks:
        raise ValueError(f"experts ({routes.num_experts}) must be a multiple of ranks ({ranks})")
    if routes.num_samples < ranks:
        raise ValueError(f"samples ({routes.num_samples}) must be at least as many as ranks")
    # The tables of all layers together could be larger than memory: each is made twice.
    numbers = range(len(routes.layers))
    by_layer = [_sum_by_sample(routes, _confidence(routes, n)) for n in numbers]
    predicted = routes.choice.shape[2] * np.stack(by_layer, axis=1)
    home, _ = co_cluster(predicted, ranks, on_layer=on_layer)
    affinity = np.zeros((routes.vocab_size, ranks))
    for n in numbers:
        affinity += _confidence(routes, n) @ np.eye(ranks)[home[n]] / len(home)
    seen = np.bincount(routes.token, minlength=routes.vocab_size) > 0
    affinity[~seen] = 1 / ranks
    rank_of = ranks_of_tokens(routes, home, ranks)
    return Semantics(
        routes.layers,
        np.argsort(home, axis=1, kind="stable"),
        affinity.astype(np.float32),
        *ranks_of_ids(routes, rank_of, ranks),
        transitions(rank_of, ranks).astype(np.float32),
    )


def _confidence(routes: Routes, layer: int) -> np.ndarray:
    """Return the chance of each expert to be chosen by a token id: [V, E]; 0 if not seen.

    Source: Sem-MoE, section 3.2 (token-to-expert activation and confidence tables).
    """
    table = routes.counts(layer, routes.token, routes.vocab_size).astype(np.float64)
    return table / np.maximum(table.sum(1, keepdims=True), 1)


def _sum_by_sample(routes: Routes, table: np.ndarray) -> np.ndarray:
    """Add up a table's rows [V, ...] of the token ids of each sample: float64 [Q, ...]."""
    columns = [
        np.bincount(routes.sample, column[routes.token], minlength=routes.num_samples)
        for column in table.T
    ]
    return np.stack(columns, axis=1)


def co_cluster(
    predicted: np.ndarray, ranks: int, *, on_layer: Callable[[int], object] = lambda count: None
) -> tuple[np.ndarray, np.ndarray]:
    """Place experts and samples on ranks, by turns, and return the best result of all turns.

    The cost of a result is the number of choices on other ranks than the sample's, plus the choices
    on the busiest rank, summed over layers; the best result costs least. Every rank has equally
    many experts of each layer, and equally many samples up to one.

    Returns:
        `home` and `sample_rank`.

    Source: Sem-MoE, Algorithm 1; differs from it in that all affinities are in one unit, expected
    choices, with equal weights; that it starts from the experts as they are; that every swap of two
    experts is tried instead of random swaps; and that a sample has one rank for all layers.
    """
    _, num_layers, num_experts = predicted.shape
    home = np.tile(np.arange(num_experts) // (num_experts // ranks), (num_layers, 1))
    sample_rank = place_samples(predicted, home, ranks)
    best = home, sample_rank
    least = _cost(predicted, home, sample_rank, ranks)
    for step in range(STEPS):
        before = home, sample_rank
        home = np.empty_like(home)
        for layer in range(num_layers):
            home[layer] = place_experts(predicted[:, layer], sample_rank, ranks)
            on_layer(1)
        sample_rank = place_samples(predicted, home, ranks)
        cost = _cost(predicted, home, sample_rank, ranks)
        if cost < least:
            least, best = cost, (home, sample_rank)
        if all(np.array_equal(*pair) for pair in zip(before, (home, sample_rank), strict=True)):
            on_layer((STEPS - 1 - step) * num_layers)
            break
    return best


def place_experts(predicted: np.ndarray, sample_rank: np.ndarray, ranks: int) -> np.ndarray:
    """Place the experts of one layer on ranks, the hottest first; return `home`.

    An expert goes to the rank with room that has the highest score. The score counts how often the
    rank's own samples choose the expert, and how often samples choose the expert together with the
    rank's experts, less the load that the rank has already. Then pairs of experts are swapped as
    long as a swap lowers the cost.

    Source: Sem-MoE, Algorithm 1, lines 3 to 26.
    """
    num_experts = predicted.shape[1]
    load = predicted.sum(0)
    mean = max(load.sum() / ranks, 1e-12)
    # Choices of an expert by the samples of each rank, and together with each other expert.
    by_samples = _sum_by_rank(predicted, sample_rank, ranks).T
    share = predicted / np.maximum(predicted.sum(1, keepdims=True), 1e-12)
    together = predicted.T @ share
    home = np.full(num_experts, -1)
    rank_load = np.zeros(ranks)
    by_experts = np.zeros((num_experts, ranks))
    room = np.full(ranks, num_experts // ranks)
    for expert in np.argsort(-load, kind="stable").tolist():
        score = by_experts[expert] + by_samples[expert] - load[expert] * rank_load / mean
        rank = int(np.argmax(np.where(room > 0, score, -np.inf)))
        home[expert] = rank
        room[rank] -= 1
        rank_load[rank] += load[expert]
        by_experts[:, rank] += together[:, expert]
    _swap(home, load, by_samples, ranks)
    return home


def _swap(home: np.ndarray, load: np.ndarray, by_samples: np.ndarray, ranks: int) -> None:
    """Swap two experts of different ranks, in place, while that lowers the layer's cost."""
    rank_load = np.bincount(home, load, minlength=ranks)
    improved = True
    while improved:
        improved = False
        for expert in range(len(home)):
            here = home[expert]
            # With each other expert: choices that become local, and the busiest rank afterwards.
            gain = (
                by_samples[expert, home]
                + by_samples[:, here]
                - by_samples[expert, here]
                - by_samples[np.arange(len(home)), home]
            )
            change = load - load[expert]
            others = np.where(np.eye(ranks, dtype=bool), -np.inf, rank_load)
            others[:, here] = -np.inf
            after = np.maximum(rank_load[here] + change, rank_load[home] - change)
            busiest = np.maximum(np.max(others, axis=1)[home], after)
            lower = gain + np.max(rank_load) - busiest
            lower[home == here] = 0
            other = int(np.argmax(lower))
            if lower[other] > 1e-9 * max(float(np.sum(load)), 1.0):
                rank_load[here] += change[other]
                rank_load[home[other]] -= change[other]
                home[expert], home[other] = home[other], here
                improved = True


def place_samples(predicted: np.ndarray, home: np.ndarray, ranks: int) -> np.ndarray:
    """Place samples on ranks, the longest first; return `sample_rank`.

    A sample goes to the rank with room whose experts it chooses most, and whose samples make most
    of the choices of the sample's experts.

    Source: Sem-MoE, Algorithm 1, lines 28 to 42.
    """
    num_samples = len(predicted)
    flat = predicted.reshape(num_samples, -1)
    by_experts = flat @ np.eye(ranks)[home.ravel()]
    load = np.maximum(flat.sum(0), 1e-12)
    rank_of = np.empty(num_samples, dtype=np.int64)
    share = np.zeros((ranks, flat.shape[1]))
    room = np.array([len(part) for part in np.array_split(np.arange(num_samples), ranks)])
    for sample in np.argsort(-flat.sum(1), kind="stable").tolist():
        score = by_experts[sample] + share @ flat[sample]
        rank = int(np.argmax(np.where(room > 0, score, -np.inf)))
        rank_of[sample] = rank
        room[rank] -= 1
        share[rank] += flat[sample] / load
    return rank_of


def _cost(predicted: np.ndarray, home: np.ndarray, sample_rank: np.ndarray, ranks: int) -> float:
    """Return the choices that travel plus those on the busiest rank, summed over layers."""
    cost = 0.0
    for layer, of_layer in enumerate(home):
        by_rank = _sum_by_rank(predicted[:, layer], sample_rank, ranks)
        on_rank = by_rank @ np.eye(ranks)[of_layer]
        cost += on_rank.sum() - np.trace(on_rank) + on_rank.sum(0).max()
    return float(cost)


def _sum_by_rank(predicted: np.ndarray, sample_rank: np.ndarray, ranks: int) -> np.ndarray:
    """Return the choices of each expert by the samples of each rank: float64 [R, E]."""
    return np.asarray(np.eye(ranks)[sample_rank].T @ predicted)


def ranks_of_tokens(routes: Routes, home: np.ndarray, ranks: int) -> np.ndarray:
    """Return `rank_of`; of ranks with equally many experts of a token the first."""
    chosen = [of[choice] for of, choice in zip(home, routes.choice.astype(np.int64), strict=True)]
    return np.stack([np.eye(ranks)[ranks_K].sum(1).argmax(1) for ranks_K in chosen])


def ranks_of_ids(routes: Routes, rank_of: np.ndarray, ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """Count which rank tokens of an id go to, and return the likeliest with its chance.

    For every id one token more is counted than was seen, spread over all ranks. So the rank of an
    id that was seen once is not certain, and an id that was not seen has chance 1 / R everywhere.

    Returns:
        `Semantics.token_rank` and `Semantics.token_confidence`.

    Source: Sem-MoE, Algorithm 1, line 55 (token labels and their confidence); differs from it in
    what is counted: there the rank of the token's request, here the rank of the token's own
    experts, where it is to go.
    """
    rank = np.empty((len(rank_of), routes.vocab_size), dtype=np.int16)
    confidence = np.empty(rank.shape, dtype=np.float32)
    for layer, of_layer in enumerate(rank_of):
        cells = routes.token * ranks + of_layer
        counts = np.bincount(cells, minlength=routes.vocab_size * ranks).reshape(-1, ranks)
        rank[layer] = counts.argmax(1)
        confidence[layer] = (counts.max(1) + 1 / ranks) / (counts.sum(1) + 1)
    return rank, confidence


def transitions(rank_of: np.ndarray, ranks: int) -> np.ndarray:
    """Count where tokens go after two layers, as chances: float64 [L - 2, R, R, R].

    >>> transitions(np.array([[0, 0, 1], [1, 1, 1], [0, 1, 1]]), 2)[0, :, 1].tolist()
    [[0.5, 0.5], [0.0, 1.0]]

    Source: Sem-MoE, section B.1 (looking back 2 layers).
    """
    tables = []
    for first, second, third in zip(rank_of, rank_of[1:], rank_of[2:], strict=False):
        cells = (first * ranks + second) * ranks + third
        table = np.bincount(cells, minlength=ranks**3).reshape(ranks, ranks, ranks)
        total = table.sum(-1, keepdims=True)
        tables.append(np.where(total > 0, table / np.maximum(total, 1), 1 / ranks))
    return np.array(tables).reshape(-1, ranks, ranks, ranks)


def check_fit(routes: Routes, learned: Routes) -> None:
    """Refuse routes of another model or vocabulary than those that are learned from.

    Raises:
        ValueError: With the sizes of both.
    """
    layers, experts, vocab_size = learned.layers, learned.num_experts, learned.vocab_size
    if (routes.layers, routes.num_experts, routes.vocab_size) != (layers, experts, vocab_size):
        raise ValueError(
            f"routes of layers {routes.layers}, {routes.num_experts} experts and "
            f"{routes.vocab_size} ids do not fit what was learned from layers {layers}, {experts} "
            f"experts and {vocab_size} ids"
        )


def check_batches(routes: Routes, ranks: int, global_batch: int) -> None:
    """Refuse routes without a whole global batch, or batches that ranks do not share evenly.

    Raises:
        ValueError: With the sizes.
    """
    if global_batch % ranks or routes.num_samples < global_batch:
        raise ValueError(
            f"global batch ({global_batch}) must be a multiple of ranks ({ranks}) and at most the "
            f"samples there are ({routes.num_samples})"
        )


def compare(routes: Routes, semantics: Semantics, global_batch: int) -> dict[str, dict[str, float]]:
    """Measure samples dealt in turn or by affinity, each with experts as they are and moved.

    The routes are those that the semantics were learned from, or have passed `check_fit`; the batch
    has passed `check_batches`.

    Returns:
        `measure` of `round robin`, `experts` (only moved), `samples` (only by affinity), `both`.
    """
    (layers, experts), ranks = semantics.expert.shape, semantics.affinity.shape[1]
    score = _sum_by_sample(routes, semantics.affinity)
    in_turn = np.arange(routes.num_samples) % ranks
    by_affinity = in_turn.copy()
    for start in range(0, routes.num_samples - global_batch + 1, global_batch):
        batch = slice(start, start + global_batch)
        by_affinity[batch] = schedule(score[batch])
    as_is = np.tile(np.arange(experts) // (experts // ranks), (layers, 1))
    moved = semantics.home()
    return {
        name: measure(routes, home, sample_rank, ranks, global_batch)
        for name, home, sample_rank in (
            ("round robin", as_is, in_turn),
            ("experts", moved, in_turn),
            ("samples", as_is, by_affinity),
            ("both", moved, by_affinity),
        )
    }


def measure(
    routes: Routes, home: np.ndarray, sample_rank: np.ndarray, ranks: int, global_batch: int
) -> dict[str, float]:
    """Measure where tokens go, with experts and samples on these ranks, in whole global batches.

    Returns:
        `local_activation_rate`: choices of an expert on the token's rank / all choices;
        `imbalance`: busiest rank / mean; `load_imbalance_rate`: busiest rank / median. Means over
        batches and layers.
    """
    num_batches = routes.num_samples // global_batch
    batch = routes.sample // global_batch
    inside = batch < num_batches
    source = (batch * ranks + sample_rank[routes.sample])[inside]
    local, rank_loads = [], []
    for layer, of_layer in enumerate(home):
        on = of_layer[routes.choice[layer].astype(np.int64)][inside]
        cells = (source[:, None] * ranks + on).ravel()
        counts = np.bincount(cells, minlength=num_batches * ranks**2).reshape(-1, ranks, ranks)
        local.append(np.trace(counts, axis1=1, axis2=2) / counts.sum((1, 2)))
        rank_loads.append(counts.sum(1))
    by_rank = torch.from_numpy(np.stack(rank_loads))
    return {
        "local_activation_rate": float(np.mean(local)),
        "imbalance": float(imbalances(by_rank).mean()),
        "load_imbalance_rate": float(load_imbalance_rates(by_rank).mean()),
    }
