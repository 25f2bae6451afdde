"""Loads from a seed, by what is wrong with them.

Every source rank has N tokens, and each token chooses K different experts: a row of a load sums to
N * K, and no entry is above N. Ranks draw from the same popularity, so rows differ by chance only.

Legend: B loads, R ranks of the EP group, E logical experts, N tokens of a rank, K choices a token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch

from megatron_ext.offline.loads import Loads

Law: TypeAlias = Callable[[float], np.ndarray]
"""Popularity of the experts, float [E], at an exponent: the larger, the steeper."""

_STEEPEST = 12.0
"""Exponent beyond which nothing changes: the hottest experts are chosen by every token."""
_STEPS = 240
"""Exponents tried from 0 to the steepest; imbalance need not grow all the way."""
_MISS = 0.01
"""How far the imbalance of a load may be from what was asked for, as a fraction of that."""


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
    """Busiest rank / mean without balancing, of every load; chosen instead of the exponent."""
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
        if self.seed < 0:
            raise ValueError(f"seed ({self.seed}) must be >= 0")
        if not 0 <= self.exponent <= _STEEPEST:
            raise ValueError(f"exponent ({self.exponent}) must be from 0 to {_STEEPEST}")
        if self.imbalance is not None and not 1 <= self.imbalance <= self.ranks:
            raise ValueError(
                f"imbalance ({self.imbalance}) must be from 1 to the number of ranks ({self.ranks})"
            )
        if not 0 < self.share < 1:
            raise ValueError(f"share ({self.share}) must be between 0 and 1")


def make_spec(kind: str, **given: Any) -> LoadSpec:
    """Return a spec with the kind's own defaults.

    Args:
        kind: One of `KINDS`.
        given: Fields of `LoadSpec`.

    Raises:
        ValueError: There is no such kind, a value is out of range or means nothing to the kind.
    """
    known = _get_kind(kind)
    for name in ("exponent", "imbalance", "share"):
        if name in given and name not in known.settings:
            raise ValueError(f"{name} is no setting of {kind}; it has {', '.join(known.settings)}")
    return LoadSpec(**{**known.defaults, **given})


def generate(
    kind: str, spec: LoadSpec, *, on_load: Callable[[int], object] = lambda count: None
) -> Loads:
    """Generate loads; equal arguments give equal loads.

    Args:
        kind: One of `KINDS`.
        spec: Sizes, seed and degree. An imbalance that is asked for is met by each load within 1 %.
        on_load: Called with 1 after every load.

    Returns:
        int64 [B, R, E]; with step, microbatch and layer where the loads follow each other.

    Raises:
        ValueError: There is no such kind, or it cannot be as `spec` says.
    """
    known = _get_kind(kind)
    if spec.imbalance is not None and "imbalance" not in known.settings:
        raise ValueError(f"imbalance is no setting of {kind}; it has {', '.join(known.settings)}")
    if known.is_trace and spec.batch < 2:
        raise ValueError(f"batch ({spec.batch}) must be >= 2 for {kind}, which is about change")
    generator = np.random.default_rng(spec.seed)
    loads = []
    for law in known.laws(spec, generator):
        loads.append(_draw(spec, law, generator))
        on_load(1)
    trace = {}
    if known.is_trace:
        zeros = torch.zeros(spec.batch, dtype=torch.int64)
        trace = {"step": torch.arange(spec.batch), "microbatch": zeros, "layer": zeros.clone()}
    return Loads(torch.from_numpy(np.stack(loads)), trace)


def _draw(spec: LoadSpec, law: Law, generator: np.random.Generator) -> np.ndarray:
    """Draw the choices of all tokens: int64 [R, E].

    Systematic sampling: experts lie on a line of length K, each as long as its chance of being
    chosen; a token throws a comb with teeth at distance 1. So it hits K different experts, and a
    rank's counts need no token by itself: only how many combs start before each border. The combs
    are thrown first; then the exponent alone decides the load, and is searched by the very load it
    gives, chance included.
    """
    starts = np.sort(generator.random((spec.ranks, spec.tokens)), axis=1)
    exponent = spec.exponent
    if spec.imbalance is not None:
        exponent = _find_exponent(spec, spec.imbalance, law, np.sort(starts, axis=None))
    borders = place_on_line(law(exponent), spec.top_k)
    return np.stack([_count_teeth(borders, of_rank) for of_rank in starts])


def place_on_line(popularity: np.ndarray, top_k: int) -> np.ndarray:
    """Where each expert begins on the line of length K, and the line's end: float [E + 1].

    Sums are rounded, so the last expert that has a chance may seem to end beside K. The dead ones
    behind it must not get what is left.

    >>> place_on_line(np.array([8.0, 1.0, 0.0, 1.0, 0.0]), 2).tolist()
    [0.0, 1.0, 1.5, 1.5, 2.0, 2.0]
    """
    borders = np.concatenate([[0.0], np.cumsum(chances(popularity, top_k))])
    return np.where(borders == borders[-1], top_k, np.minimum(borders, top_k))


def _count_teeth(borders: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Count the teeth between neighboring borders, of combs with these starts (sorted, < 1)."""
    whole = np.floor(borders)
    before = np.searchsorted(starts, borders - whole, side="left")
    return np.diff(whole.astype(np.int64) * starts.size + before)


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


def _find_exponent(spec: LoadSpec, wanted: float, law: Law, starts: np.ndarray) -> float:
    """Find the exponent at which the combs of all ranks (sorted) give the imbalance."""
    mains = spec.experts // spec.ranks

    def measure(exponent: float) -> float:
        home_loads = _count_teeth(place_on_line(law(exponent), spec.top_k)[::mains], starts)
        return float(home_loads.max() / home_loads.mean())

    exponents = np.linspace(0.0, _STEEPEST, _STEPS + 1).tolist()
    reached = [measure(exponent) for exponent in exponents]
    above = np.array(reached) >= wanted
    candidates = [exponents[int(np.argmin(np.abs(np.array(reached) - wanted)))]]
    for crossing in np.flatnonzero(above[:-1] != above[1:])[:1]:
        low, high = exponents[crossing : crossing + 2]
        for _ in range(60):
            middle = (low + high) / 2
            if (measure(middle) >= wanted) == above[crossing]:
                low = middle
            else:
                high = middle
        candidates += [low, high]
    best = min(candidates, key=lambda exponent: abs(measure(exponent) - wanted))
    if abs(measure(best) - wanted) > _MISS * wanted:
        raise ValueError(
            f"imbalance ({wanted}) cannot be had within {_MISS:.0%}: these sizes and this seed "
            f"give {min(reached):.3f} to {max(reached):.3f}, nearest {measure(best):.3f}"
        )
    return best


def _zipf(spec: LoadSpec, generator: np.random.Generator) -> Law:
    place = generator.permutation(spec.experts) + 1.0
    return lambda exponent: place**-exponent


def _power_law(spec: LoadSpec, generator: np.random.Generator) -> Law:
    uniform = 1.0 - generator.random(spec.experts)
    return lambda exponent: uniform**-exponent


def _hot_rank(spec: LoadSpec, generator: np.random.Generator) -> Law:
    mains = spec.experts // spec.ranks
    is_hot = np.arange(spec.experts) // mains == generator.integers(spec.ranks)
    return lambda exponent: np.exp(np.where(is_hot, exponent, 0.0))


def _cold_ranks(spec: LoadSpec, generator: np.random.Generator) -> Law:
    cold = round(spec.share * spec.ranks)
    if not 0 < cold < spec.ranks:
        raise ValueError(
            f"share ({spec.share}) of {spec.ranks} ranks must be 1 to {spec.ranks - 1}"
        )
    is_cold = np.isin(np.arange(spec.ranks), generator.permutation(spec.ranks)[:cold])
    return _without(np.repeat(is_cold, spec.experts // spec.ranks), spec, generator)


def _dead_experts(spec: LoadSpec, generator: np.random.Generator) -> Law:
    dead = max(round(spec.share * spec.experts), 1)
    is_dead = np.isin(np.arange(spec.experts), generator.permutation(spec.experts)[:dead])
    return _without(is_dead, spec, generator)


def _without(is_dead: np.ndarray, spec: LoadSpec, generator: np.random.Generator) -> Law:
    """Zipf among the experts that are not dead."""
    alive = int((~is_dead).sum())
    if alive < spec.top_k:
        raise ValueError(
            f"share ({spec.share}) leaves {alive} experts for top_k ({spec.top_k}) choices"
        )
    law = _zipf(spec, generator)
    return lambda exponent: np.where(is_dead, 0.0, law(exponent))


def _independent(
    make_law: Callable[[LoadSpec, np.random.Generator], Law],
) -> Callable[[LoadSpec, np.random.Generator], list[Law]]:
    return lambda spec, generator: [make_law(spec, generator) for _ in range(spec.batch)]


def _drift(spec: LoadSpec, generator: np.random.Generator) -> list[Law]:
    """Popularity turns from one draw to another and on: a half circle over the batch."""
    here, there = generator.standard_normal((2, spec.experts))

    def law(angle: float) -> Law:
        direction = math.cos(angle) * here + math.sin(angle) * there
        return lambda exponent: np.exp(2 * exponent * direction)

    return [law(angle) for angle in np.linspace(0.0, math.pi, spec.batch)]


def _domain_shift(spec: LoadSpec, generator: np.random.Generator) -> list[Law]:
    first, second = _zipf(spec, generator), _zipf(spec, generator)
    half = spec.batch // 2
    return [first] * half + [second] * (spec.batch - half)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A way in which loads are uneven."""

    summary: str
    laws: Callable[[LoadSpec, np.random.Generator], list[Law]]
    """The law of each of the B loads."""
    settings: tuple[str, ...] = ("exponent", "imbalance")
    """Of exponent, imbalance and share, those that mean something."""
    defaults: Mapping[str, int] = field(default_factory=dict)
    """Of `LoadSpec`, where they are not its own."""
    is_trace: bool = False


KINDS: dict[str, Kind] = {
    "zipf": Kind(summary="the k-th hottest expert has 1 / k ** exponent", laws=_independent(_zipf)),
    "power-law": Kind(
        summary="popularity has a power-law tail",
        laws=_independent(_power_law),
    ),
    "drift": Kind(
        summary="popularity wanders from load to load",
        laws=_drift,
        # The imbalance of what wanders wanders too.
        settings=("exponent",),
        defaults={"batch": 16},
        is_trace=True,
    ),
    "domain-shift": Kind(
        summary="other experts are popular in the second half",
        laws=_domain_shift,
        defaults={"batch": 16},
        is_trace=True,
    ),
    "cold-ranks": Kind(
        summary="a share of the ranks gets nothing",
        laws=_independent(_cold_ranks),
        settings=("exponent", "imbalance", "share"),
    ),
    "hot-rank": Kind(
        summary="one rank's experts are e ** exponent times as popular as the others",
        laws=_independent(_hot_rank),
    ),
    "few-tokens": Kind(
        summary="Zipf with few tokens", laws=_independent(_zipf), defaults={"tokens": 256}
    ),
    "dead-experts": Kind(
        summary="a share of the experts gets nothing",
        laws=_independent(_dead_experts),
        settings=("exponent", "imbalance", "share"),
    ),
}


def _get_kind(kind: str) -> Kind:
    if kind not in KINDS:
        raise ValueError(f"unknown kind {kind!r}; known: {', '.join(sorted(KINDS))}")
    return KINDS[kind]
