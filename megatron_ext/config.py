"""Settings of balancing, with their only defaults, and what settings are made of.

Those of a training run are in `trainer/config.py`. What a recipe (YAML) leaves out has its default;
C++ has no defaults; no environment variable changes results.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from types import NoneType, UnionType
from typing import Any, ClassVar, Self, cast, get_args, get_origin, get_type_hints

OBJECTIVES = ("tolerance", "time")
"""What a planner aims at: see `BalanceConfig.objective`."""

TRANSPORTS = ("auto", "collective", "shared_memory", "deepep", "cuda")
"""Values of `BalanceConfig.transport`: the names of `transport.TRANSPORTS`, which imports torch."""

MOST_WAIT_S = 4e9
"""Longest wait in seconds: twice as long still fits into 64 bits of nanoseconds."""

COST_UNITS = {"link_bandwidth": "bytes per second", "assignment_time": "seconds"}
"""The costs among the fields of `BalanceConfig`, and their units."""


class Section:
    """A group of settings under one name: a dataclass with fields from `setting`."""

    __slots__ = ()

    NAME: ClassVar[str] = ""
    """Name of the section, as in front of its settings on the command line."""

    def __init_subclass__(cls, name: str | None = None) -> None:
        """Name a section; a dataclass with slots is made once more, and keeps its name."""
        if name is not None:
            cls.NAME = name

    def __new__(cls, *args: Any, **values: Any) -> Self:
        """Make a section, whose fields are then set.

        Raises:
            TypeError: There is no setting of a name.
        """
        for name in values.keys() - {each.name for each in fields(cast("Any", cls))}:
            raise TypeError(no_setting(cls, name))
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Check the types of all values; their ranges are checked with the whole run's.

        Raises:
            ConfigError: With all problems.
        """
        if problems := self.type_problems():
            raise ConfigError(problems)

    def problems(self) -> list[str]:
        """Return everything that is wrong, one line a problem: setting, value, rule."""
        # Rules may compare values: only of the declared types they can.
        if problems := self.type_problems():
            return problems
        problems = [*field_problems(type(self), self), *self._relation_problems()]
        for part in self.sections():
            problems += part.problems()
        return problems

    def type_problems(self) -> list[str]:
        """Return which values are not of their declared types, here and in the sections inside."""
        problems = []
        kind: Any = type(self)
        for rule in _rules(kind):
            value = getattr(self, rule.name)
            problems += [] if rule.has_type(value) else [rule.problem(value)]
        for part in self.sections():
            problems += part.type_problems()
        return problems

    def sections(self) -> list[Section]:
        """Return the sections inside this section."""
        values = [getattr(self, each.name) for each in fields(cast("Any", self))]
        return [value for value in values if isinstance(value, Section)]

    @classmethod
    def kinds(cls) -> list[type[Section]]:
        """Return the classes of this section and of all sections inside, in their order."""
        made: list[Any] = [each.default_factory for each in fields(cast("Any", cls))]
        inside = [each for each in made if isinstance(each, type) and issubclass(each, Section)]
        return [cls, *(kind for each in inside for kind in each.kinds())]

    def _relation_problems(self) -> Iterable[str]:
        """Return what is wrong by rules beyond the type, range and choices of one field."""
        return ()


def setting(default: Any, **allowed: Any) -> Any:
    """Declare a field of a section, with its default and what `limits` takes."""
    return field(default=default, metadata=limits(**allowed))


def limits(
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    choices: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the metadata of a field of any dataclass: the numbers and words that it allows.

    Numbers may equal `least` and `most`, but not `above` and `below`. A field with choices may be a
    number, too, if its type says so.
    """
    by_sign = {">=": least, ">": above, "<=": most, "<": below}
    return {
        "limits": {sign: limit for sign, limit in by_sign.items() if limit is not None},
        "choices": tuple(choices),
    }


def check_fields(values: Any) -> None:
    """Check the types, ranges and choices that the fields of a dataclass declare.

    Raises:
        ValueError: With all problems.
    """
    if problems := field_problems(type(values), values):
        raise ValueError("; ".join(problems))


def field_problems(section: Any, values: Any, names: Collection[str] | None = None) -> list[str]:
    """Return which values are not of the type, range or choices that `section` declares.

    The section is a class, any dataclass. `values` holds its fields by the same names; `names` are
    the fields to check, by default all.
    """
    return [
        rule.problem(value)
        for rule in _rules(section)
        if (names is None or rule.name in names)
        and not rule.allows(value := getattr(values, rule.name))
    ]


def wrong_value(section: Any, name: str, value: Any) -> str:
    """Return what to say about a value that a setting of a section class cannot have."""
    return next(rule.problem(value) for rule in _rules(section) if rule.name == name)


def no_setting(section: Any, name: str) -> str:
    """Say that a section has no setting of a name, and which is near; else which there are."""
    from megatron_ext.words import did_you_mean

    known = [each.name for each in fields(section)]
    near = did_you_mean(name, known) or f"; the settings here are {', '.join(known)}"
    return f"{section.NAME}.{name}: there is no setting of this name{near}".lstrip(".")


_HOLDS = {">=": operator.ge, ">": operator.gt, "<=": operator.le, "<": operator.lt}


@dataclass(frozen=True)
class _Rule:
    """What a field's annotation and `limits` allow."""

    name: str
    """Of the field."""
    label: str
    """Name of the setting, with its section."""
    types: tuple[Any, ...]
    """The types that the annotation names; a float may be a whole number as well."""
    limits: Mapping[str, float]
    """By sign: `>=` 0."""
    choices: tuple[str, ...]

    def has_type(self, value: Any) -> bool:
        """Whether the value is of a declared type. True and False are no numbers here."""
        if isinstance(value, bool):
            return bool in self.types
        classes = tuple(get_origin(each) or each for each in self.types)
        if not isinstance(value, (*classes, int) if float in classes else classes):
            return False
        return not isinstance(value, dict | list) or self._has_items(value)

    def allows(self, value: Any) -> bool:
        """Whether the value is of a declared type, and in the range or among the choices."""
        if not self.has_type(value):
            return False
        if isinstance(value, str):
            return not self.choices or value in self.choices
        if _is_huge(value) or (isinstance(value, float) and not math.isfinite(value)):
            return False
        return value is None or all(
            _HOLDS[sign](value, limit) for sign, limit in self.limits.items()
        )

    def problem(self, value: Any) -> str:
        """What to say about a value that is not allowed."""
        is_number = isinstance(value, int | float) and self.has_type(value)
        is_finite = is_number and (isinstance(value, int) or math.isfinite(value))
        is_out_of_range = is_finite and not self.choices
        from megatron_ext.words import did_you_mean

        near = did_you_mean(value, self.choices) if isinstance(value, str) else ""
        rule = self._range() if is_out_of_range else self.allowed
        rule = "below 2^63" if _is_huge(value) and "<=" not in self.limits else rule
        return f"{self.label} ({value!r}) must be {rule}{near}"

    @property
    def allowed(self) -> str:
        """The allowed values in words: type, and range or choices."""
        return " ".join(filter(None, (self._kind(), self._range())))

    def _has_items(self, value: dict[Any, Any] | list[Any]) -> bool:
        """Whether it holds values of the type that the annotation names; a mapping, by names."""
        (inside,) = (get_args(each)[-1] for each in self.types if get_origin(each) is type(value))
        item = replace(self, types=(inside,))
        if isinstance(value, list):
            return all(item.has_type(one) for one in value)
        return all(
            isinstance(name, str) and (inside is Any or item.has_type(one))
            for name, one in value.items()
        )

    def _kind(self) -> str:
        if self.choices and not {int, float} & {*self.types}:
            return f"one of {', '.join(self.choices)}"
        # A number with a fraction may be whole, too.
        types = [each for each in self.types if each is not int or float not in self.types]
        words = [_kind_of(each) for each in types if each is not str or not self.choices]
        return " or ".join([*map(repr, self.choices), *words])

    def _range(self) -> str:
        signs = self.limits
        if signs.keys() == {">=", "<="}:
            return f"from {signs['>=']} to {signs['<=']}"
        return " and ".join(f"{sign} {limit}" for sign, limit in signs.items())


def _is_huge(value: Any) -> bool:
    """Whether it is a number that no tensor and nothing in C++ can hold."""
    return isinstance(value, int) and abs(value) >= 2**63


def _kind_of(declared: Any) -> str:
    """A type in words, as values of it are called in messages."""
    if get_origin(declared) is list:
        return f"a list of {_KINDS[get_args(declared)[0]].removeprefix('a ')}s"
    if get_origin(declared) is dict:
        _, inside = get_args(declared)
        return "a mapping" if inside is Any else f"a mapping of names to {_KINDS[inside][2:]}s"
    return _KINDS.get(declared) or f"of class {declared.__name__}"


_KINDS = {
    int: "a whole number",
    float: "a finite number",
    bool: "True or False",
    str: "text",
    NoneType: "None",
}


@cache
def _rules(section: Any) -> tuple[_Rule, ...]:
    """The rules of a section's fields, in their order."""
    hints = get_type_hints(section)
    return tuple(
        _Rule(
            name=each.name,
            label=f"{getattr(section, 'NAME', '')}.{each.name}".lstrip("."),
            types=get_args(hint) if isinstance(hint, UnionType) else (hint,),
            limits=each.metadata.get("limits", {}),
            choices=each.metadata.get("choices", ()),
        )
        for each in fields(section)
        if (hint := hints[each.name])
    )


def allowed_values(section: Any) -> dict[str, str]:
    """Return, for each field of a section, the type and the range or choices that it allows."""
    return {rule.name: rule.allowed for rule in _rules(section)}


def unless_auto(value: Any) -> Any:
    """Return the value of a setting; None for `auto`, with which the program chooses it."""
    return None if value == "auto" else value


class ConfigError(ValueError):
    """Everything that is wrong with a configuration, one line a problem: setting, value, rule."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


@dataclass(kw_only=True, slots=True)
class HistorySettings(Section, name="balance.history"):
    """What strategies that place from history have in common."""

    interval: int = setting(50, least=1)
    """Microbatches of a layer between two placements (`eplb`, `lplb`); for n global batches, n
    times the microbatches of a step. 50 is what UltraEP takes for EPLB in serving; in training it
    takes 3 global batches (section 8.1)."""


@dataclass(kw_only=True, slots=True)
class LlepSettings(Section, name="balance.llep"):
    """How much load `llep` leaves on a rank, and how small its pieces may be."""

    alpha: float = setting(1.1, least=1, most=1_000_000)
    """Capacity of a rank, as a multiple of the mean rank load: load above it spills to other
    ranks."""
    min_tokens_per_gemm: int = setting(1024, least=1)
    """Fewest assignments that are moved to another rank in one piece, unless they are the last of
    their expert."""


@dataclass(kw_only=True, slots=True)
class LibraSettings(Section, name="balance.libra"):
    """How `libra` and `libra_paper` place replicas by a prediction."""

    locality_share: float = setting(0.5, least=0, most=1)
    """Part of a rank's slots for the experts that the rank's own tokens are predicted to ask for
    most; the rest goes by load. 0.5 is what Libra takes."""


@dataclass(kw_only=True, slots=True)
class BalanceConfig(Section, name="balance"):
    """What the balancer may do. Equal on all ranks of an EP group (compared once at start).

    The settings that only some strategies use are in sections of their own.
    """

    strategy: str = "quota"
    """Name of the balancer; `megatron-ext plan --list` lists the names. `none` leaves Megatron's
    own layer in place, and so does `sem_moe`, which needs `data.affinity` or `data.rebatch`."""
    slots: int = setting(2, least=0)
    """Replicas a rank can hold at a time (S). Each rank pays S x (weights + gradients) of one
    expert, once for all layers; twice as much with `libra` and `libra_paper`. 2 is the paper's
    setting for 64 ranks (UltraEP, Table 3)."""
    # Far beyond the number of ranks, above which it allows everything; in millionths it fits int64.
    tolerance: float = setting(0.01, least=0, most=1_000_000)
    """Imbalance that is good enough, as a fraction of the mean rank load: the planner stops
    spending replicas there."""

    placement: str = ""
    """File of replicas that were placed before the run (`megatron-ext place craft`). `craft` needs
    it and uses its replicas; other planners use no more slots in a layer than it does. Empty is
    none."""

    objective: str = setting("tolerance", choices=OBJECTIVES)
    """`tolerance`: plans stay within `tolerance` and cost as little as possible. `time`: for every
    load, the planner takes the tolerance at which the layer's modelled time is least, by the costs
    `link_bandwidth` and `assignment_time`."""
    # OmegaConf takes a whole number for a float only where int is named, too.
    link_bandwidth: float | int | str = setting("auto", choices=("auto",))
    """Bytes per second that a rank sends to its peers, for objective `time`. With `auto`, the run
    measures it on its own ranks when it begins (`mcore/measure.py`)."""
    assignment_time: float | int | str = setting("auto", choices=("auto",))
    """Seconds that an expert's forward takes for an assignment, for objective `time`. With `auto`,
    the run measures it, too."""

    min_quota: int = setting(1, least=1)
    """Fewest assignments a replica must take over to be worth its transfer."""

    transport: str = setting("auto", choices=TRANSPORTS)
    """How weights and gradients reach a peer's slot: `shared_memory` (CPU ranks of one machine),
    `cuda` (GPUs that reach each other's memory), `deepep` (the same by DeepEP's own primitives),
    `collective` (torch.distributed: everywhere), or `auto`, which takes `shared_memory` or `cuda`
    where ranks reach each other, else `collective`, and logs why."""
    local_first: bool = False
    """A rank computes its own tokens while the tokens of other ranks are on their way, and those
    afterwards (Libra's two stages; docs/decisions/016). Needs the dispatcher `alltoall`."""

    grad_reduce_share: float | int | str = setting("auto", above=0, most=0.5, choices=("auto",))
    """Share of a GPU's multiprocessors that may add replica gradients beside the backward pass. A
    larger share could keep out work that the peers wait for. `auto` goes by the GPU's architecture
    (`transport/gpus.py`). On a CPU one thread adds."""
    push_blocks: int | str = setting("auto", least=1, choices=("auto",))
    """Thread blocks of a GPU, of four warps each, that copy weights to peers. `auto` goes by the
    GPU's architecture (`transport/gpus.py`). On a CPU one thread copies."""

    max_in_flight: int | str = setting("auto", least=1, choices=("auto",))
    """Most forwards of a layer that may wait for their backward; one more is an error. `auto` sets
    no limit."""

    nvlink_domain: int | str = setting("auto", least=1, choices=("auto",))
    """Ranks per NVLink domain; replicas stay in the home rank's domain. `auto` is as many
    neighbours in the EP group as reach each other's memory, which all ranks try at start. With
    transport `collective` it is the whole EP group."""
    symmetric_memory: str = setting("auto", choices=("auto", "cuda", "nccl"))
    """Backend of torch's symmetric memory, in which transport `cuda` keeps slots: `cuda` (handles
    of the driver, or of the fabric over several machines), `nccl` (windows of the communicator), or
    `auto`, which leaves torch's own choice."""
    timeout_s: float | int | str = setting("auto", above=0, most=MOST_WAIT_S, choices=("auto",))
    """Seconds that a rank waits for another to move its part of a replica. `auto` is the time limit
    of the EP group's collectives; in `megatron-ext train` it is the run's `timeout_s`."""

    log_every: int | str = setting("auto", least=0, choices=("auto",))
    """Microbatches between two lines about balancing in the log of one rank of each pipeline stage;
    0 writes no line, also none at the start. `auto` is 100; in `megatron-ext train`, which has its
    own metrics, it is 0."""
    check_plans: bool = False
    """Compare digests of plans over the EP group in every microbatch, before anything follows the
    plan (slow). If it is off, ranks with different plans are found before tokens travel with
    dispatcher `alltoall` and no expert tensor parallelism, and one layer later otherwise."""

    # Here, so that settings can be read and compared without the strategies.
    history: HistorySettings = field(default_factory=HistorySettings)
    llep: LlepSettings = field(default_factory=LlepSettings)
    libra: LibraSettings = field(default_factory=LibraSettings)

    def __post_init__(self) -> None:
        """Check what can be checked here; the rest is checked where the model is known.

        Raises:
            ConfigError: With all problems.
        """
        if problems := self.problems():
            raise ConfigError(problems)

    def _relation_problems(self) -> list[str]:
        if not self.plans_for_time:
            return []
        return [
            f"balance.{name} ({value}) must be > 0 with balance.objective=time, or 'auto', which "
            "measures it"
            for name in COST_UNITS
            if isinstance(value := getattr(self, name), int | float) and value <= 0
        ]

    @property
    def domain_ranks(self) -> int | None:
        """Ranks per NVLink domain; None for as many as reach each other's memory.

        That is the whole EP group where nothing is tried: with `collective`, and offline.
        """
        return None if self.nvlink_domain == "auto" else int(self.nvlink_domain)

    @property
    def wait_limit_s(self) -> float | None:
        """Longest wait for another rank's part of a replica, in seconds; None if as the group's."""
        return None if self.timeout_s == "auto" else float(self.timeout_s)

    @property
    def lines_every(self) -> int:
        """Microbatches between two lines; 0 if none are written."""
        return 100 if self.log_every == "auto" else int(self.log_every)

    @property
    def plans_for_time(self) -> bool:
        """Whether the planner has to know what a layer costs in time."""
        return self.objective == "time"

    @property
    def costs_to_measure(self) -> tuple[str, ...]:
        """Names of the costs that the objective needs and that are to be measured."""
        if not self.plans_for_time:
            return ()
        return tuple(name for name in COST_UNITS if getattr(self, name) == "auto")
