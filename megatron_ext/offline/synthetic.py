"""Loads from a seed, by what is wrong with them.

Every source rank has N tokens, and each token chooses K different experts: a row of a load sums to
N * K, and no entry is above N. Ranks draw from the same popularity, so rows differ by chance only.

Legend: B loads, R ranks of the EP group, E logical experts, N tokens of a rank, K choices a token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from megatron_ext.offline.loads import Loads

_STEEPEST = 12.0
"""Exponent beyond which nothing changes: the hottest experts are chosen by every token."""


@dataclass(frozen=True, kw_only=True)
class LoadSpec:
    """What to generate; see `KINDS` for what a kind makes of it."""

    ranks: int
    experts: int
    tokens: int = 8192
    top_k: int = 8
    batch: int = 1
    seed: int = 0
    exponent: float = 0.8
    """Of the law of popularity; the larger, the steeper."""
    imbalance: float | None = None
    """Busiest rank / mean without balancing; chosen instead of the exponent."""
    share: float = 0.25
    """Of ranks that are cold, or of experts that are dead."""

    def __post_init__(self) -> None:
        """Check what no kind can do without."""
        for name in ("ranks", "experts", "tokens", "top_k", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} ({getattr(self, name)}) must be >= 1")
        if self.experts % self.ranks:
            raise ValueError(f"experts ({self.experts}) must be a multiple of ranks ({self.ranks})")
        if self.top_k > self.experts:
            raise ValueError(f"top_k ({self.top_k}) must be <= experts ({self.experts})")
        if not 0 <= self.exponent <= _STEEPEST:
            raise ValueError(f"exponent ({self.exponent}) must be from 0 to {_STEEPEST}")
        if not 0 < self.share < 1:
            raise ValueError(f"share ({self.share}) must be between 0 and 1")


def generate(kind: str, spec: LoadSpec) -> Loads:
    """Generate loads; equal arguments give equal loads.

    Args:
        kind: One of `KINDS`.
        spec: Sizes, seed and degree.

    Returns:
        int64 [B, R, E]; with step, microbatch and layer where the loads follow each other.

    Raises:
        ValueError: There is no such kind, or it cannot be as `spec` says.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown kind {kind!r}; known: {', '.join(sorted(KINDS))}")
    generator = np.random.default_rng(spec.seed)
    popularities = KINDS[kind].popularities(spec, generator)
    load = np.stack([_sample(spec, popularity, generator) for popularity in popularities])
    trace = {}
    if KINDS[kind].is_trace:
        zeros = torch.zeros(spec.batch, dtype=torch.int64)
        trace = {"step": torch.arange(spec.batch), "microbatch": zeros, "layer": zeros.clone()}
    return Loads(torch.from_numpy(load), trace)


def _sample(spec: LoadSpec, popularity: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Draw the choices of all tokens: int64 [R, E].

    Systematic sampling: experts lie on a line of length K, each as long as its chance of being
    chosen; a token throws a comb with teeth at distance 1. So it hits K different experts, and a
    rank's counts need no token by itself: only how many combs start before each border.
    """
    borders = np.concatenate([[0.0], np.cumsum(chances(popularity, spec.top_k))])
    borders[-1] = spec.top_k
    rows = []
    for _ in range(spec.ranks):
        starts = np.sort(generator.random(spec.tokens))
        whole = np.floor(borders)
        before = np.searchsorted(starts, borders - whole, side="left")
        rows.append(np.diff(whole.astype(np.int64) * spec.tokens + before))
    return np.stack(rows).astype(np.int64)


def chances(popularity: np.ndarray, top_k: int) -> np.ndarray:
    """Chance of each expert to be among a token's K, in proportion to popularity but at most 1.

    >>> chances(np.array([8.0, 1.0, 1.0, 0.0]), 2).tolist()
    [1.0, 0.5, 0.5, 0.0]
    """
    certain = np.zeros(popularity.shape, dtype=bool)
    while True:
        left = top_k - int(certain.sum())
        rest = np.where(certain, 0.0, popularity)
        scaled = rest * (left / rest.sum()) if left else rest * 0.0
        above = scaled > 1.0
        if not above.any():
            return np.where(certain, 1.0, scaled)
        certain |= above


def _home_imbalance(spec: LoadSpec, popularity: np.ndarray) -> float:
    by_rank = chances(popularity, spec.top_k).reshape(spec.ranks, -1).sum(1)
    return float(by_rank.max() * spec.ranks / spec.top_k)


def _with_degree(spec: LoadSpec, law: Callable[[float], np.ndarray]) -> np.ndarray:
    """The law's popularity at the exponent asked for, or at that which gives the imbalance."""
    if spec.imbalance is None:
        return law(spec.exponent)
    reachable = [_home_imbalance(spec, law(a)) for a in np.linspace(0.0, _STEEPEST, 241)]
    if not min(reachable) <= spec.imbalance <= max(reachable):
        raise ValueError(
            f"imbalance ({spec.imbalance}) must be from {min(reachable):.3f} to "
            f"{max(reachable):.3f} for these experts, ranks, choices and seed"
        )
    # The first step that crosses it, then halving.
    distance = np.array(reachable) - spec.imbalance
    crossing = int(np.argmax(distance[:-1] * distance[1:] <= 0))
    low, high = (_STEEPEST * (crossing + side) / 240 for side in (0, 1))
    rises = reachable[crossing + 1] >= reachable[crossing]
    for _ in range(60):
        middle = (low + high) / 2
        if (_home_imbalance(spec, law(middle)) < spec.imbalance) == rises:
            low = middle
        else:
            high = middle
    return law(high)


def _zipf(spec: LoadSpec, generator: np.random.Generator) -> Callable[[float], np.ndarray]:
    place = generator.permutation(spec.experts) + 1.0
    return lambda exponent: place**-exponent


def _power_law(spec: LoadSpec, generator: np.random.Generator) -> Callable[[float], np.ndarray]:
    uniform = 1.0 - generator.random(spec.experts)
    return lambda exponent: uniform**-exponent


def _independent(
    law: Callable[[LoadSpec, np.random.Generator], Callable[[float], np.ndarray]],
) -> Callable[[LoadSpec, np.random.Generator], list[np.ndarray]]:
    return lambda spec, generator: [
        _with_degree(spec, law(spec, generator)) for _ in range(spec.batch)
    ]


def _drift(spec: LoadSpec, generator: np.random.Generator) -> list[np.ndarray]:
    """Popularity turns from one draw to another and on: a half circle over the batch."""
    if spec.imbalance is not None:
        raise ValueError("imbalance cannot be asked of drift, where it changes; give an exponent")
    here, there = generator.standard_normal((2, spec.experts))
    angles = np.linspace(0.0, math.pi, spec.batch)
    return [
        np.exp(2 * spec.exponent * (math.cos(angle) * here + math.sin(angle) * there))
        for angle in angles
    ]


def _domain_shift(spec: LoadSpec, generator: np.random.Generator) -> list[np.ndarray]:
    first, second = (_with_degree(spec, _zipf(spec, generator)) for _ in range(2))
    return [first if b < spec.batch // 2 else second for b in range(spec.batch)]


def _cold_ranks(spec: LoadSpec, generator: np.random.Generator) -> list[np.ndarray]:
    cold = round(spec.share * spec.ranks)
    if not 0 < cold < spec.ranks:
        raise ValueError(
            f"share ({spec.share}) of {spec.ranks} ranks must be 1 to {spec.ranks - 1}"
        )
    mains = spec.experts // spec.ranks
    return _some_dead(
        spec,
        generator,
        lambda: np.isin(np.arange(spec.experts) // mains, generator.permutation(spec.ranks)[:cold]),
    )


def _dead_experts(spec: LoadSpec, generator: np.random.Generator) -> list[np.ndarray]:
    dead = max(round(spec.share * spec.experts), 1)
    return _some_dead(
        spec,
        generator,
        lambda: np.isin(np.arange(spec.experts), generator.permutation(spec.experts)[:dead]),
    )


def _some_dead(
    spec: LoadSpec, generator: np.random.Generator, draw: Callable[[], np.ndarray]
) -> list[np.ndarray]:
    popularities = []
    for _ in range(spec.batch):
        dead = draw()
        if spec.experts - int(dead.sum()) < spec.top_k:
            raise ValueError(
                f"share ({spec.share}) leaves {spec.experts - int(dead.sum())} experts for "
                f"top_k ({spec.top_k}) choices"
            )
        popularities.append(_with_degree(spec, _without(dead, _zipf(spec, generator))))
    return popularities


def _without(dead: np.ndarray, law: Callable[[float], np.ndarray]) -> Callable[[float], np.ndarray]:
    return lambda exponent: np.where(dead, 0.0, law(exponent))


def _hot_rank(spec: LoadSpec, generator: np.random.Generator) -> list[np.ndarray]:
    """One rank has `imbalance` times the mean, the others are equal."""
    wanted = 2.0 if spec.imbalance is None else spec.imbalance
    mains = spec.experts // spec.ranks
    most = min(spec.ranks, mains * spec.ranks / spec.top_k)
    if spec.ranks < 2 or not 1 <= wanted <= most:
        raise ValueError(f"imbalance ({wanted}) of a hot rank must be from 1 to {most:.3f}")
    shares = np.full((spec.batch, spec.ranks), (spec.ranks - wanted) / (spec.ranks - 1))
    shares[np.arange(spec.batch), generator.integers(spec.ranks, size=spec.batch)] = wanted
    return list(np.repeat(shares, mains, axis=1))


@dataclass(frozen=True)
class Kind:
    """A way in which loads are uneven."""

    summary: str
    popularities: Callable[[LoadSpec, np.random.Generator], list[np.ndarray]]
    """Popularity of the experts for each of the B loads, float [E] each."""
    is_trace: bool = False
    tokens: int = LoadSpec.tokens
    """Tokens of a rank if nothing is said."""


KINDS: dict[str, Kind] = {
    "zipf": Kind("the k-th hottest expert has 1 / k ** exponent", _independent(_zipf)),
    "power-law": Kind("popularity has a power-law tail", _independent(_power_law)),
    "drift": Kind("popularity wanders from load to load", _drift, is_trace=True),
    "domain-shift": Kind("other experts are popular in the second half", _domain_shift, True),
    "cold-ranks": Kind("a share of the ranks gets nothing", _cold_ranks),
    "hot-rank": Kind("one rank is hot, the others equal", _hot_rank),
    "few-tokens": Kind("Zipf with few tokens", _independent(_zipf), tokens=256),
    "dead-experts": Kind("a share of the experts gets nothing", _dead_experts),
}
