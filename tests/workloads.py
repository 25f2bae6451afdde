"""Loads and routing maps to test with, made from a seed; `test_workloads.py` checks their promises.

Legend: R ranks of the EP group, E logical experts, N tokens, K choices per token. A load is int64
[R, E]. Functions with `per_rank` give every source rank exactly so many assignments, spread by the
same weights. `of_kind` and `hard_loads` are `megatron-ext synth`: K different experts a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_ext.files.routes import Routes
from megatron_ext.lab.synthetic import generate, make_spec


def uniform(ranks: int, experts: int, per_rank: int, seed: int = 0) -> Tensor:
    """Every assignment picks an expert with equal chance."""
    return _draw(torch.ones(experts), ranks, per_rank, _generator(seed))


def zipf(ranks: int, experts: int, per_rank: int, exponent: float, seed: int = 0) -> Tensor:
    """The k-th hottest expert has weight 1 / k ** exponent; which expert is hot is random."""
    generator = _generator(seed)
    weights = torch.arange(1, experts + 1, dtype=torch.float64) ** -exponent
    shuffled = weights[torch.randperm(experts, generator=generator)]
    return _draw(shuffled, ranks, per_rank, generator)


def zipf_top_k(
    ranks: int, experts: int, tokens: int, top_k: int, exponent: float, seed: int = 0
) -> Tensor:
    """As `zipf`, but the K choices of a token are different experts, as a router's are."""
    generator = _generator(seed)
    weights = torch.arange(1, experts + 1, dtype=torch.float32) ** -exponent
    shuffled = weights[torch.randperm(experts, generator=generator)]
    # The K largest of weights with Gumbel noise are a draw without replacement.
    uniform = torch.rand(ranks, tokens, experts, generator=generator)
    noisy = shuffled.log() - (-uniform.log()).log()
    picks = noisy.topk(top_k).indices.flatten(1)
    load = torch.zeros(ranks, experts, dtype=torch.int64)
    return load.scatter_add(1, picks, torch.ones_like(picks))


def power_law(ranks: int, experts: int, per_rank: int, shape: float, seed: int = 0) -> Tensor:
    """Weights from a Pareto distribution: the smaller `shape`, the fewer and hotter the hot."""
    generator = _generator(seed)
    chance = 1.0 - torch.rand(experts, generator=generator, dtype=torch.float64)
    return _draw(chance ** (-1.0 / shape), ranks, per_rank, generator)


def one_hot_expert(ranks: int, experts: int, per_rank: int, expert: int = 0) -> Tensor:
    """All assignments of all ranks go to one expert."""
    load = torch.zeros(ranks, experts, dtype=torch.int64)
    load[:, expert] = per_rank
    return load


def given_imbalance(
    ranks: int, experts: int, per_rank: int, imbalance: float, seed: int = 0
) -> Tensor:
    """Home loads of this imbalance, up to rounding: one busy rank, the others equal among them."""
    if not 1.0 <= imbalance <= ranks:
        raise ValueError(f"imbalance ({imbalance}) must be from 1 to the number of ranks ({ranks})")
    generator = _generator(seed)
    busy = int(torch.randint(ranks, (), generator=generator))
    share = torch.full((ranks, 1), (ranks - imbalance) / max(ranks - 1, 1), dtype=torch.float64)
    share[busy] = imbalance
    within = torch.rand(ranks, experts // ranks, generator=generator, dtype=torch.float64) + 0.1
    weights = share * within / within.sum(1, keepdim=True)
    return _apportion(weights.flatten(), per_rank).expand(ranks, experts).contiguous()


def cold_ranks(ranks: int, experts: int, per_rank: int, cold: int) -> Tensor:
    """The experts of the last `cold` ranks get nothing, all others the same up to rounding."""
    weights = torch.ones(experts, dtype=torch.float64)
    weights[(ranks - cold) * (experts // ranks) :] = 0
    return _apportion(weights, per_rank).expand(ranks, experts).contiguous()


def of_kind(kind: str, ranks: int, experts: int, **given: Any) -> Tensor:
    """Loads of a kind of `megatron_ext.lab.synthetic`, int64 [B, R, E]; B is 1 or a trace's.

    `given` are fields of its `LoadSpec`, such as `tokens`, `top_k`, `batch`, `seed`, `exponent`.
    """
    return generate(kind, make_spec(kind, ranks=ranks, experts=experts, **given)).load


def hard_loads(
    ranks: int, experts: int, seed: int = 0, tokens: int = 8192
) -> Iterator[tuple[str, Tensor]]:
    """What planners may stumble over: name and load, int64 [R, E], made one by one.

    The public proposal's W0 to W7 (of W6 and W7 steps before and after the change), cold ranks in
    three numbers and three ways, Zipf, power law, log-normal, few tokens, and the load after a
    domain shift, which has made the other half of the ranks cold. Names are the same at all sizes.

    Args:
        ranks: R, at least 8 for an eighth of them to be cold.
        experts: E, a multiple of R. A token chooses 8; fewer where that is above E / 8.
        seed: Equal seeds give equal loads.
        tokens: N of a source rank, where the load is not about having few.
    """
    top_k = max(min(8, experts // 8), 1)

    def make(kind: str, **given: Any) -> Tensor:
        sizes = {"top_k": top_k, "seed": seed, "tokens": tokens}
        return of_kind(kind, ranks, experts, **(sizes | given))

    yield "W0 balanced", make("w0-balanced")[0]
    yield "W1 hot expert set", make("w1-hot-expert-set")[0]
    yield "W2 hot rank", make("w2-hot-rank")[0]
    yield "W3 spread hot experts", make("w3-spread-hot-experts")[0]
    yield "W4 source ragged", make("w4-source-ragged")[0]
    yield "W5 zero expert rank", make("w5-zero-expert-rank")[0]
    yield "W5 zero expert rank, 1/8", make("w5-zero-expert-rank", share=1 / 8)[0]
    rotating = make("w6-rotating-hotspot", batch=4)
    yield "W6 rotating hotspot, step 2", rotating[2]
    yield "W6 rotating hotspot, step 3", rotating[3]
    bursting = make("w7-burst", batch=4)
    yield "W7 burst, step 2", bursting[2]
    yield "W7 burst, step 3", bursting[3]
    for text, share in (("1/8", 1 / 8), ("1/4", 1 / 4), ("1/2", 1 / 2)):
        equal = {"share": share, "exponent": 0.0}
        yield f"cold {text}, warm equal", make("cold-ranks", **equal, by_chance=False)[0]
        yield f"cold {text}, warm by chance", make("cold-ranks", **equal)[0]
        yield f"cold {text}, warm zipf", make("cold-ranks", share=share)[0]
    for exponent in (0.4, 0.8, 1.2):
        yield f"zipf {exponent}", make("zipf", exponent=exponent)[0]
    for shape in (1.3, 3.0):
        yield f"power law {shape}", make("power-law", exponent=1 / shape)[0]
    for sigma in (1.0, 2.0):
        yield f"log-normal {sigma}", make("log-normal", exponent=sigma)[0]
    for few in (64, 256):
        yield f"few tokens, {few}", make("few-tokens", tokens=few)[0]
    yield "domain shift", make("cold-shift", batch=2)[1]


def routing_map(tokens: int, experts: int, top_k: int, seed: int = 0) -> Tensor:
    """Choices of N tokens, bool [N, E] with K per row; lower experts are chosen more often."""
    weights = 1.0 / torch.arange(1, experts + 1, dtype=torch.float64)
    result = torch.zeros(tokens, experts, dtype=torch.bool)
    if tokens == 0:
        return result
    chosen = torch.multinomial(weights.expand(tokens, -1), top_k, generator=_generator(seed))
    return result.scatter(1, chosen, True)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _draw(weights: Tensor, ranks: int, per_rank: int, generator: torch.Generator) -> Tensor:
    load = torch.zeros(ranks, weights.numel(), dtype=torch.int64)
    if per_rank == 0:
        return load
    chances = weights.expand(ranks, -1)
    picks = torch.multinomial(chances, per_rank, replacement=True, generator=generator)
    return load.scatter_add(1, picks, torch.ones_like(picks))


def _apportion(weights: Tensor, total: int) -> Tensor:
    """Whole numbers in proportion to the weights with this total, by largest remainder."""
    exact = weights / weights.sum() * total
    counts = exact.floor().long()
    left = total - int(counts.sum())
    counts[(exact - counts).argsort(descending=True, stable=True)[:left]] += 1
    return counts


def topical_routes(
    *,
    samples: int,
    sample_tokens: int = 32,
    topics: int,
    layers: int,
    experts: int,
    top_k: int,
    fidelity: float,
    vocab: int = 64,
    seed: int = 0,
) -> Routes:
    """Samples of one topic each, in random order; ids of a topic prefer a topic's experts.

    Each topic has ids of its own, equally many, and in each layer experts of its own, equally many
    and scattered over all ids of experts. A choice is of the topic's experts with chance
    `fidelity`, else of any; the choices of a token differ.
    """
    rng = np.random.default_rng(seed)
    topic_of_sample = rng.permutation(np.arange(samples) % topics)
    sample = np.arange(samples).repeat(sample_tokens)
    topic = topic_of_sample[sample]
    token = topic * (vocab // topics) + rng.integers(vocab // topics, size=len(topic))
    choice = np.empty((layers, len(topic), top_k), dtype=np.int16)
    for layer in range(layers):
        of_expert = rng.permutation(np.arange(experts) % topics)
        own = of_expert[None, :] == topic[:, None]
        chance = (1 - fidelity) / experts + fidelity * own / own.sum(1, keepdims=True)
        noisy = np.log(chance + 1e-12) + rng.gumbel(size=chance.shape)
        choice[layer] = np.argsort(-noisy, axis=1)[:, :top_k]
    return Routes(token, sample, tuple(range(1, layers + 1)), choice, vocab, experts)
