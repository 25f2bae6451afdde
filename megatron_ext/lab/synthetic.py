"""Synthetic loads: one generator per kind of imbalance, reproducible from a seed.

Every source rank has N tokens, and each token chooses K different experts: a row of a load sums to
N * K, and no entry is above N. Ranks draw from the same popularity, so rows differ by chance only.
(`w4-source-ragged` is the exception: there a rank has up to N tokens.)

Kinds w0 to w7 are the workloads W0 to W7 of a benchmark that was proposed for Megatron-LM. As
there, a hot set is a quarter of the experts, K at least; three of four tokens choose all their
experts from it, the fourth from all experts. Here every token has the chances of that mixture, so
expected loads are the same. Where the proposal's words and its code differ, we follow the words: in
the code W2 is W1 once more, W3 has twice the experts at about half the heat, and all ranks of W4
have N tokens.

Source: Megatron-LM pull request 7488 (benchmarks/moe/token_imbalance), README and
`routing_for_step`. Ours: which tokens W4's ranks have, and that W2 is the first rank, as hot as W1.

Legend: B loads, R ranks of the EP group, E logical experts, N tokens of a rank, K choices a token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch

from megatron_ext.config import check_fields, limits, setting
from megatron_ext.files.loads import Loads
from megatron_ext.words import did_you_mean

Law: TypeAlias = Callable[[float], np.ndarray]
"""Popularity of the experts, float [E], at an exponent: the larger, the steeper."""
Laws: TypeAlias = "Callable[[LoadSpec, np.random.Generator], list[Law]]"
"""Makes the law of each of the B loads."""

_STEEPEST = 12.0
"""Exponent beyond which nothing changes: the hottest experts are chosen by every token."""
_STEPS = 240
"""Exponents tried from 0 to the steepest; imbalance need not grow all the way."""
_MISS = 0.01
"""How far a load's imbalance may be from the requested imbalance, as a fraction of the latter."""


@dataclass(frozen=True, kw_only=True)
class LoadSpec:
    """What to generate; see `KINDS` for what a kind makes of it."""

    ranks: int = field(metadata=limits(least=1))
    experts: int = field(metadata=limits(least=1))
    tokens: int = setting(8192, least=1)
    top_k: int = setting(8, least=1)
    batch: int = setting(1, least=1)
    seed: int = setting(0, least=0)
    exponent: float = setting(0.8, least=0, most=_STEEPEST)
    """Exponent of the law of popularity; the larger, the steeper."""
    imbalance: float | None = None
    """Busiest rank / mean without balancing, of every load; chosen instead of the exponent."""
    share: float = setting(0.25, above=0, below=1)
    """Share of ranks that are cold, or of experts that are dead."""
    by_chance: bool = True
    """Whether tokens draw their choices; if not, loads are as popularity is, up to rounding."""

    def __post_init__(self) -> None:
        """Check the rules that hold for all kinds."""
        check_fields(self)
        if self.experts % self.ranks:
            raise ValueError(f"experts ({self.experts}) must be a multiple of ranks ({self.ranks})")
        if self.top_k > self.experts:
            raise ValueError(f"top_k ({self.top_k}) must be <= experts ({self.experts})")
        if self.imbalance is not None and not 1 <= self.imbalance <= self.ranks:
            raise ValueError(
                f"imbalance ({self.imbalance}) must be from 1 to the number of ranks ({self.ranks})"
            )


def make_spec(kind: str, **given: Any) -> LoadSpec:
    """Return a spec with the kind's own defaults."""
    settings = [name for name in ("exponent", "imbalance", "share") if name in given]
    return LoadSpec(**{**get_kind(kind, settings).defaults, **given})


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
    known = get_kind(kind, [] if spec.imbalance is None else ["imbalance"])
    if spec.batch < known.min_batch:
        raise ValueError(
            f"batch ({spec.batch}) must be >= {known.min_batch} for {kind}, which is about change"
        )
    generator = np.random.default_rng(spec.seed)
    tokens = np.full(spec.ranks, spec.tokens)
    if known.ragged and spec.ranks > 1:  # From 0 to N at equal distances, in random order.
        tokens = generator.permutation(np.arange(spec.ranks) * spec.tokens // (spec.ranks - 1))
    loads = []
    for law in known.laws(spec, generator):
        loads.append(_draw(spec, tokens, law, generator))
        on_load(1)
    trace = {}
    if known.min_batch > 1:
        zeros = torch.zeros(spec.batch, dtype=torch.int64)
        trace = {"step": torch.arange(spec.batch), "microbatch": zeros, "layer": zeros.clone()}
    return Loads(torch.from_numpy(np.stack(loads)), trace)


def _draw(
    spec: LoadSpec, tokens: np.ndarray, law: Law, generator: np.random.Generator
) -> np.ndarray:
    """Draw the choices of all tokens, int64 [R, E]; each rank has `tokens` of them, int [R].

    Systematic sampling: experts lie on a line of length K, each as long as its chance of being
    chosen; a token throws a comb with teeth at distance 1. So the comb hits K different experts.
    A rank's counts need no single token, only how many combs start before each border. The combs
    are thrown first; then the exponent alone decides the load. So the search for the exponent looks
    at the final load, chance included.

    Without chance the combs of all ranks are thrown at equal distances, ranks in turn.
    """
    if spec.by_chance:
        thrown = generator.random((spec.ranks, spec.tokens))
        starts = [np.sort(thrown[rank, :count]) for rank, count in enumerate(tokens)]
    else:
        starts = [
            (np.arange(count) + (rank + 0.5) / spec.ranks) / count
            for rank, count in enumerate(tokens)
        ]
    exponent = spec.exponent
    if spec.imbalance is not None:
        exponent = _find_exponent(spec, spec.imbalance, law, np.sort(np.concatenate(starts)))
    borders = place_on_line(law(exponent), spec.top_k)
    return np.stack([_count_teeth(borders, of_rank) for of_rank in starts])


def place_on_line(popularity: np.ndarray, top_k: int) -> np.ndarray:
    """Where each expert begins on the line of length K, and the line's end: float [E + 1].

    Sums are rounded, so the last expert that has a chance may seem to end beside K. The dead
    experts behind it must not get the difference.

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


def _log_normal(spec: LoadSpec, generator: np.random.Generator) -> Law:
    normal = generator.standard_normal(spec.experts)
    return lambda exponent: np.exp(exponent * normal)


def _hot_rank(spec: LoadSpec, generator: np.random.Generator) -> Law:
    mains = spec.experts // spec.ranks
    is_hot = np.arange(spec.experts) // mains == generator.integers(spec.ranks)
    return lambda exponent: np.exp(np.where(is_hot, exponent, 0.0))


def _dead_experts(spec: LoadSpec, generator: np.random.Generator) -> Law:
    dead = max(round(spec.share * spec.experts), 1)
    is_dead = np.isin(np.arange(spec.experts), generator.permutation(spec.experts)[:dead])
    return _without(is_dead, _zipf(spec, generator), spec)


def _without(is_dead: np.ndarray, law: Law, spec: LoadSpec) -> Law:
    """Return the law among the experts that are not dead."""
    alive = int((~is_dead).sum())
    if alive < spec.top_k:
        raise ValueError(
            f"share ({spec.share}) leaves {alive} experts for top_k ({spec.top_k}) choices"
        )
    return lambda exponent: np.where(is_dead, 0.0, law(exponent))


def _cold_ranks(spec: LoadSpec, generator: np.random.Generator) -> Law:
    cold, order = _count_cold(spec), generator.permutation(spec.ranks)
    return _without_ranks(order[:cold], spec, generator)


def _count_cold(spec: LoadSpec) -> int:
    cold = round(spec.share * spec.ranks)
    if not 0 < cold < spec.ranks:
        raise ValueError(
            f"share ({spec.share}) of {spec.ranks} ranks must be 1 to {spec.ranks - 1}"
        )
    return cold


def _without_ranks(cold: np.ndarray, spec: LoadSpec, generator: np.random.Generator) -> Law:
    home_rank = np.arange(spec.experts) // (spec.experts // spec.ranks)
    return _without(np.isin(home_rank, cold), _zipf(spec, generator), spec)


def _zero_expert_rank(spec: LoadSpec, generator: np.random.Generator) -> Law:
    """The first experts are never chosen, the others equally often."""
    mains = spec.experts // spec.ranks
    dead = round(spec.share * spec.experts)
    if dead < mains:
        raise ValueError(
            f"share ({spec.share}) of {spec.experts} experts must be at least the {mains} of a rank"
        )
    return _without(np.arange(spec.experts) < dead, lambda exponent: np.ones(spec.experts), spec)


def _each(make_law: Callable[[LoadSpec, np.random.Generator], Law]) -> Laws:
    """Make a law for each load."""
    return lambda spec, generator: [make_law(spec, generator) for _ in range(spec.batch)]


def _drift(spec: LoadSpec, generator: np.random.Generator) -> list[Law]:
    """Popularity turns from one draw through another to the first's opposite, over the batch."""
    here, there = generator.standard_normal((2, spec.experts))

    def law(angle: float) -> Law:
        direction = math.cos(angle) * here + math.sin(angle) * there
        return lambda exponent: np.exp(2 * exponent * direction)

    return [law(angle) for angle in np.linspace(0.0, math.pi, spec.batch)]


def _cold_shift(spec: LoadSpec, generator: np.random.Generator) -> list[Law]:
    """The first ranks of a random order are cold, then the last; at a half, all others."""
    cold, order = _count_cold(spec), generator.permutation(spec.ranks)
    first = _without_ranks(order[:cold], spec, generator)
    return _halves(first, _without_ranks(order[-cold:], spec, generator), spec)


def _halves(first: Law, second: Law, spec: LoadSpec) -> list[Law]:
    half = spec.batch // 2
    return [first] * half + [second] * (spec.batch - half)


_STEPS_IN_PLACE = 3
"""Steps after which W6 has other hot experts."""
_STEPS_TO_BURST = 4
"""Every so many steps of W7, the last is a burst."""


def _hot(
    choose: Callable[[LoadSpec, int, int], np.ndarray | range], hot_tokens: float = 3 / 4
) -> Laws:
    """Make some experts hot and the others equally cold; the exponent changes nothing.

    Args:
        choose: Returns the hot experts of a load; gets the spec, the size of a hot set, the step.
        hot_tokens: Share of the tokens that choose among the hot experts, if these are a hot set.
    """

    def law(spec: LoadSpec, step: int) -> Law:
        size = max(spec.top_k, spec.experts // 4)
        heat = hot_tokens * spec.experts / size + 1 - hot_tokens  # Load of a hot expert / mean.
        hot = np.asarray(choose(spec, size, step), dtype=np.int64)
        cold = spec.experts - hot.size
        popularity = np.full(spec.experts, (spec.experts - hot.size * heat) / cold if cold else 1.0)
        if cold:
            popularity[hot] = heat
        return lambda exponent: popularity

    return lambda spec, generator: [law(spec, step) for step in range(spec.batch)]


@dataclass(frozen=True)
class Kind:
    """A way in which loads are uneven."""

    summary: str
    laws: Laws
    settings: tuple[str, ...] = ("exponent", "imbalance")
    """Which of exponent, imbalance and share mean something for the kind."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults that differ from those of `LoadSpec`."""
    min_batch: int = 1
    """Loads that it takes to see what changes; a kind with more than one makes a trace."""
    ragged: bool = False
    """Whether source ranks have from no tokens to N; else all have N."""


KINDS: dict[str, Kind] = {
    "zipf": Kind("the k-th hottest expert has 1 / k ** exponent", _each(_zipf)),
    "power-law": Kind("popularity has a power-law tail", _each(_power_law)),
    "log-normal": Kind("popularity is e ** (exponent * a normal number)", _each(_log_normal)),
    "drift": Kind(
        "popularity wanders from load to load",
        _drift,
        settings=("exponent",),  # The imbalance of what wanders wanders too.
        defaults={"batch": 16},
        min_batch=2,
    ),
    "domain-shift": Kind(
        "other experts are popular in the second half",
        lambda spec, generator: _halves(_zipf(spec, generator), _zipf(spec, generator), spec),
        defaults={"batch": 16},
        min_batch=2,
    ),
    "cold-ranks": Kind(
        "a share of the ranks gets nothing",
        _each(_cold_ranks),
        settings=("exponent", "imbalance", "share"),
    ),
    "cold-shift": Kind(
        "as cold-ranks, and other ranks get nothing in the second half",
        _cold_shift,
        settings=("exponent", "imbalance", "share"),
        defaults={"batch": 16, "share": 0.5},
        min_batch=2,
    ),
    "hot-rank": Kind(
        "one rank's experts are e ** exponent times as popular as the others", _each(_hot_rank)
    ),
    "few-tokens": Kind("Zipf with few tokens", _each(_zipf), defaults={"tokens": 256}),
    "dead-experts": Kind(
        "a share of the experts gets nothing",
        _each(_dead_experts),
        settings=("exponent", "imbalance", "share"),
    ),
    "w0-balanced": Kind(
        "all experts the same, without chance",
        _hot(lambda spec, size, step: range(0)),
        settings=(),
        defaults={"by_chance": False},
    ),
    "w1-hot-expert-set": Kind(
        "three of four tokens choose among the first quarter of the experts",
        _hot(lambda spec, size, step: range(size)),
        settings=(),
    ),
    "w2-hot-rank": Kind(
        "the first rank's experts are as hot as those of w1",
        _hot(lambda spec, size, step: range(min(size, spec.experts // spec.ranks))),
        settings=(),
    ),
    "w3-spread-hot-experts": Kind(
        "as many hot experts as in w1, as hot, at equal distances",
        _hot(lambda spec, size, step: np.arange(size) * spec.experts // size),
        settings=(),
    ),
    "w4-source-ragged": Kind(
        "source ranks have from no tokens to all N, experts are equally popular",
        _hot(lambda spec, size, step: range(0)),
        settings=(),
        ragged=True,
    ),
    "w5-zero-expert-rank": Kind(
        "a share of the experts, the first, and so of the ranks gets nothing",
        _each(_zero_expert_rank),
        settings=("share",),
        defaults={"share": 0.5},
    ),
    "w6-rotating-hotspot": Kind(
        "w1, with the next quarter of the experts after every third step",
        _hot(
            lambda spec, size, step: (
                (step // _STEPS_IN_PLACE * size + np.arange(size)) % spec.experts
            )
        ),
        settings=(),
        defaults={"batch": 4 * _STEPS_IN_PLACE},
        min_batch=_STEPS_IN_PLACE + 1,
    ),
    "w7-burst": Kind(
        "three steps without skew, and one in which half of the tokens choose as in w1",
        _hot(
            lambda spec, size, step: range(size if (step + 1) % _STEPS_TO_BURST == 0 else 0),
            hot_tokens=1 / 2,
        ),
        settings=(),
        defaults={"batch": 2 * _STEPS_TO_BURST},
        min_batch=_STEPS_TO_BURST,
    ),
}


def get_kind(kind: str, settings: Sequence[str] = ()) -> Kind:
    """Return a kind by its name.

    Raises:
        ValueError: There is no such kind, or it does not have one of the settings.
    """
    if kind not in KINDS:
        known = ", ".join(sorted(KINDS))
        raise ValueError(f"unknown kind {kind!r}; known: {known}{did_you_mean(kind, KINDS)}")
    has = KINDS[kind].settings
    for name in settings:
        if name not in has:
            raise ValueError(f"{name} is no setting of {kind}; it has {', '.join(has) or 'none'}")
    return KINDS[kind]
