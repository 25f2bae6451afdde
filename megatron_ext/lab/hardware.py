"""Hardware files: the constants of a machine that `simulate` needs, each with its source.

    summary: one line
    constants:
      memory_bytes: {value: 190e9, source: "UltraEP, Table 2"}
      ...

All constants of `Hardware` are needed; there are no defaults, so that none is overlooked.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from megatron_ext.balance.strategies import unknown_strategy
from megatron_ext.config import check_fields, limits
from megatron_ext.files.recipes import shipped_recipes
from megatron_ext.files.yaml_files import find_file, read_yaml
from megatron_ext.trainer.config import TrainConfig

SOLVED_RANKS = 64
"""Ranks that `solve_us` is given for, with 256 experts."""

FIXED_SOLVE = 0.42
"""Part of `solve_us` that any number of ranks takes; the rest grows with the ranks. Source: an
H100 takes 20.4 us for 8 ranks and 41.3 for 64."""

_POSITIVE, _SHARE = limits(above=0), limits(above=0, most=1)
_MOST_RANKS = 1_000_000
"""Far more than any machine has."""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One kind of machine. "A rank" is a GPU, or a process on a CPU."""

    name: str
    summary: str
    sources: dict[str, str]
    """Source of each constant below: a paper's section, a data sheet, a measurement, a guess."""

    domain_ranks: int = field(metadata=limits(least=1, most=_MOST_RANKS))
    """Ranks that reach each other over the fast links."""
    server_ranks: int = field(metadata=limits(least=1, most=_MOST_RANKS))
    """Ranks of a server, which a job asks for as one machine."""
    memory_bytes: float = field(metadata=_POSITIVE)
    """Memory of a rank."""
    peak_flops_per_s: float = field(metadata=limits(least=1))
    """Peak of a rank in dense matrix products."""
    expert_efficiency: float = field(metadata=_SHARE)
    """Share of the peak that experts reach. Work: their matrix products. Time: also the activation
    function and weighing by the router's probabilities."""
    dense_efficiency: float = field(metadata=_SHARE)
    """Share of the peak that dense parts reach. Work: matrix products and attention. Time: also
    norms, sums, mask, softmax and router. It holds for logits too, with the time of the loss."""
    memory_bandwidth: float = field(metadata=_POSITIVE)
    """Bytes per second that a rank reads and writes where it only moves bytes."""
    optimizer_bandwidth: float = field(metadata=_POSITIVE)
    """Bytes per second (`ModelShape.optimizer_bytes`) in an optimizer's step, which clips and
    clears gradients too."""
    token_bandwidth: float = field(metadata=_POSITIVE)
    """Bytes per second that a rank sends in dispatch and combine within the domain, as reached. The
    time includes bringing tokens into the order of experts and back."""
    weight_bandwidth: float = field(metadata=_POSITIVE)
    """Bytes per second that a rank sends as replicas within the domain, as reached."""
    outer_bandwidth: float = field(metadata=_POSITIVE)
    """Bytes per second that a rank sends out of its domain, as reached."""
    overlap: float = field(metadata=limits(least=0, most=1))
    """Share of a computation that can hide transfers and plans: 0 on ranks that do all in turn."""
    relay_threshold: int = field(metadata=limits(least=0, most=_MOST_RANKS))
    """Most sends of a rank without relays (`transport/relay.py`)."""
    solve_us: dict[str, float]
    """Microseconds of planning one load of 64 ranks and 256 experts, by strategy. For a strategy
    without an entry, a simulation takes the time that its own planning took."""

    def __post_init__(self) -> None:
        """Check every constant."""
        check_fields(self)
        for strategy, time in self.solve_us.items():
            if problem := unknown_strategy(strategy):
                raise ValueError(f"solve_us of {problem}")
            if not 0 <= time < math.inf:
                raise ValueError(f"solve_us.{strategy} ({time}) must be >= 0 and finite")


def constants() -> list[str]:
    """Names of the constants, in their order."""
    described = ("name", "summary", "sources")
    return [each.name for each in fields(Hardware) if each.name not in described]


def read_hardware(name_or_file: str) -> Hardware:
    """Read a hardware file by its path, or by its name in `recipes/hardware`.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: A constant or a source is missing, or a value is wrong; the message says which.
    """
    path = find_file(name_or_file, shipped_recipes() / "hardware", "hardware")
    return _hardware(read_yaml(path), path)


def recipe_hardware(config: TrainConfig) -> Hardware | None:
    """Return the machine that a recipe is for, as `read_hardware`; None if it names none."""
    named = config.hardware
    if not named.constants:
        return None
    content = {"summary": named.summary, "constants": named.constants}
    return _hardware(content, Path(named.NAME))


def _hardware(content: dict[str, Any], path: Path) -> Hardware:
    given = content.get("constants")
    if not isinstance(given, dict):
        raise ValueError(f"{path} has no section 'constants'")
    known = constants()
    if unknown := sorted(set(given) - set(known), key=str):
        raise ValueError(f"{path}: unknown constant {unknown[0]!r}; known: {', '.join(known)}")
    values, sources = {}, {}
    for name in known:
        constant = given.get(name)
        if not isinstance(constant, dict) or constant.keys() != {"value", "source"}:
            raise ValueError(f"{path}: {name} must be there, as {{value: ..., source: ...}}")
        values[name], sources[name] = constant["value"], str(constant["source"] or "").strip()
        if not sources[name]:
            raise ValueError(f"{path}: {name} must say its source")
    summary = str(content.get("summary") or "")
    try:
        return Hardware(name=path.stem, summary=summary, sources=sources, **values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
