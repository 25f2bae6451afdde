"""Settings of a run: structured-config dataclasses, with their only defaults.

What only one strategy asks for is declared in that strategy's file and joined to these in
`balance/strategies/settings.py`. Recipes (YAML) hold only differences; C++ has no defaults; no
environment variable changes results.
"""

from __future__ import annotations

import importlib.util
import math
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from functools import cache
from types import NoneType, UnionType
from typing import Any, ClassVar, cast, get_args, get_origin, get_type_hints

MISSING: Any = "???"
"""OmegaConf's mark of a value that the user has to give."""

OBJECTIVES = ("tolerance", "time")
"""What a planner aims at: see `BalanceConfig.objective`."""

COST_UNITS = {"link_bandwidth": "bytes per second", "assignment_time": "seconds"}
"""The costs among the fields of `BalanceConfig`, and their units."""


MOVED = {
    "interval": "history.interval",
    "alpha": "llep.alpha",
    "min_tokens_per_gemm": "llep.min_tokens_per_gemm",
    "locality_share": "libra.locality_share",
}
"""Settings that were fields of `balance` itself once, and their names now."""


class Section:
    """A group of settings under one name: a dataclass with fields from `setting`."""

    __slots__ = ()

    NAME: ClassVar[str]
    """Name of the section, as in front of its settings on the command line."""

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
        problems = field_problems(type(self), self) + self.relation_problems()
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

    def relation_problems(self) -> list[str]:
        """Return what is wrong by rules beyond the type, range and choices of one field."""
        return []


def setting(
    default: Any,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    choices: Sequence[str] = (),
) -> Any:
    """Declare a field of a section.

    Args:
        default: The field's value where nothing else is said.
        least: Smallest allowed number.
        above: Allowed numbers are larger than this.
        most: Largest allowed number.
        below: Allowed numbers are smaller than this.
        choices: The allowed words; where the field may be a number too, the words beside numbers.
    """
    limits = {">=": least, ">": above, "<=": most, "<": below}
    return field(
        default=default,
        metadata={
            "limits": {sign: limit for sign, limit in limits.items() if limit is not None},
            "choices": tuple(choices),
        },
    )


def field_problems(section: Any, values: Any, names: Collection[str] | None = None) -> list[str]:
    """Return which values are not of the type, range or choices that `section` declares.

    Args:
        section: The class that declares the fields: a section, or another dataclass.
        values: Holds these fields, by the same names.
        names: The fields; by default all.
    """
    return [
        rule.problem(value)
        for rule in _rules(section)
        if (names is None or rule.name in names)
        and not rule.allows(value := getattr(values, rule.name))
    ]


_HOLDS = {">=": operator.ge, ">": operator.gt, "<=": operator.le, "<": operator.lt}


@dataclass(frozen=True)
class _Rule:
    """What a field's annotation and `setting` allow."""

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
        if isinstance(value, float) and not math.isfinite(value):
            return False
        return all(_HOLDS[sign](value, limit) for sign, limit in self.limits.items())

    def problem(self, value: Any) -> str:
        """What to say about a value that is not allowed."""
        is_number = isinstance(value, int | float) and self.has_type(value)
        is_finite = is_number and (isinstance(value, int) or math.isfinite(value))
        is_out_of_range = is_finite and not self.choices
        words = (self._range(),) if is_out_of_range else (self._kind(), self._range())
        return f"{self.label} ({value!r}) must be {' '.join(filter(None, words))}"

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


class ConfigError(ValueError):
    """Everything that is wrong with a configuration, one line a problem: setting, value, rule."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


@dataclass(kw_only=True, slots=True)
class BalanceConfig(Section):
    """What the balancer may do. Equal on all ranks of an EP group (compared once at start).

    A setting that only one strategy uses is in a section of its own, beside that strategy; the
    class in `megatron_ext.balance.strategies.settings` has these sections, too.
    """

    NAME: ClassVar[str] = "balance"

    strategy: str = "quota"
    """Name of the balancer, in `megatron_ext.balance.strategies`. `none` leaves Megatron's
    own layer in place, and so does `sem_moe`, which needs `data.affinity` or `data.rebatch`."""

    slots: int = setting(2, least=0)
    """Replicas a rank can hold at a time (S). Costs S x (weights + gradients) of one expert per
    rank, whatever the number of layers; twice as much with `libra` and `libra_paper`. 2 is the
    paper's setting for 64 ranks (UltraEP, Table 3)."""

    # Far beyond the number of ranks, above which it allows everything; in millionths it fits int64.
    tolerance: float = setting(0.01, least=0, most=1_000_000)
    """Imbalance that is good enough, as a fraction of the mean rank load: the planner stops
    spending replicas there."""

    placement: str = ""
    """File of replicas that were placed before the run (`megatron-ext place craft`). `craft` needs
    it and uses its replicas; other planners use no more slots in a layer than it does. Empty is
    none."""

    objective: str = setting("tolerance", choices=OBJECTIVES)
    """`tolerance`: within `tolerance` at least cost. `time`: every load gets the tolerance at which
    the modelled time of the layer is least, by the two costs below."""

    # OmegaConf takes a whole number for a float only where int is named, too.
    link_bandwidth: float | int | str = setting("auto", choices=("auto",))
    """Bytes per second that a rank sends to its peers. For objective `time`. `auto` is measured
    when the run begins, on its own ranks (`mcore/measure.py`)."""

    assignment_time: float | int | str = setting("auto", choices=("auto",))
    """Seconds of expert computation, forward, per assignment. For objective `time`. `auto` as
    above."""

    min_quota: int = setting(1, least=1)
    """Fewest assignments a replica must take over to be worth its transfer."""

    transport: str = "auto"
    """How weights and gradients reach a peer's slot: `shared_memory` (CPU ranks of one machine),
    `cuda` (GPUs that reach each other's memory), `collective` (torch.distributed: everywhere), or
    `auto`, which takes the one whose ranks reach each other, else `collective`, and logs why."""

    local_first: bool = False
    """Compute a rank's own tokens while those of other ranks are on their way to it, then these
    (Libra's two stages; docs/decisions/016). For the dispatcher `alltoall`."""

    grad_reduce_share: float | int | str = setting("auto", above=0, most=0.5, choices=("auto",))
    """Share of a GPU's multiprocessors that adding replica gradients may use beside the backward
    pass, from above 0 to 0.5: on all of them, it could keep out what its peers wait for. `auto` is
    by the GPU's architecture (`transport/gpus.py`). On a CPU one thread adds."""

    push_blocks: int | str = setting("auto", least=1, choices=("auto",))
    """Warps of a GPU that copy weights to peers, each a block of its own. `auto` is by the GPU's
    architecture (`transport/gpus.py`). On a CPU one thread copies."""

    max_in_flight: int | str = setting("auto", least=1, choices=("auto",))
    """Microbatches of one layer between forward and backward at a time. `auto` is what the pipeline
    schedule needs."""

    nvlink_domain: int | str = setting("auto", least=1, choices=("auto",))
    """Ranks per NVLink domain; replicas stay in the home rank's domain. `auto` is as many
    neighbours in the EP group as reach each other's memory, which all ranks try at start. With
    transport `collective` it is the whole EP group."""

    symmetric_memory: str = setting("auto", choices=("auto", "cuda", "nccl"))
    """Backend of torch's symmetric memory, which transport `cuda` gets its memory from: `cuda`
    (handles of the driver, over several machines those of the fabric), `nccl` (windows of the
    communicator), or `auto`, which leaves it as torch is set."""

    timeout_s: float | int | str = setting("auto", above=0, choices=("auto",))
    """Seconds that a rank waits for another to move its part of a replica. `auto` is the time limit
    of the EP group's collectives; in `megatron-ext train` it is the run's `timeout_s`."""

    log_every: int | str = setting("auto", least=0, choices=("auto",))
    """Microbatches between two lines that one rank of a pipeline stage writes on what balancing
    did; 0 writes none, nor the one at start. `auto` is 100; in `megatron-ext train`, which has its
    own metrics, it is 0."""

    check_plans: bool = False
    """Compare plan digests over the EP group in every microbatch, before anything follows the plan
    (slow). Ranks that plan differently are found without it, too, but one layer later."""

    def __post_init__(self) -> None:
        """Check what can be checked here; the rest is checked where the model is known.

        Raises:
            ConfigError: With all problems.
        """
        if problems := self.problems():
            raise ConfigError(problems)

    def relation_problems(self) -> list[str]:
        """See `Section.relation_problems`."""
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
    def symmetric_backend(self) -> str | None:
        """Backend of torch's symmetric memory; None if as torch is set."""
        return None if self.symmetric_memory == "auto" else self.symmetric_memory

    @property
    def adding_share(self) -> float | None:
        """Share of a GPU that adds gradients; None if as the GPU's architecture wants it."""
        return None if self.grad_reduce_share == "auto" else float(self.grad_reduce_share)

    @property
    def copying_blocks(self) -> int | None:
        """Blocks that copy weights; None if as the GPU's architecture wants it."""
        return None if self.push_blocks == "auto" else int(self.push_blocks)

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


@dataclass(kw_only=True, slots=True)
class ModelConfig(Section):
    """A GPT with experts in its layers. The section `megatron` takes more settings."""

    NAME: ClassVar[str] = "model"

    num_layers: int = setting(4, least=1)
    """Transformer layers of the whole model."""

    hidden_size: int = setting(256, least=1)
    """Width of the residual stream (H)."""

    num_attention_heads: int = setting(4, least=1)
    """Attention heads; must divide `hidden_size`, unless `megatron` says how wide a head is."""

    rotary_base: int = setting(10_000, least=1)
    """Base of the rotary position embedding."""

    rotary_percent: float = setting(1.0, above=0, most=1)
    """Part of a head that the rotary position embedding turns."""

    num_dense_layers: int = setting(0, least=0)
    """First layers that have one FFN instead of experts."""

    dense_hidden_size: int = setting(0, least=0)
    """Width inside the FFN of a dense layer; 0 is that of an expert."""

    activation: str = setting("gelu", choices=("gelu", "swiglu"))
    """Inside FFNs and experts: `gelu`, or `swiglu`, which has two matrices into their width."""

    vocab_size: int = setting(0, least=0)
    """Tokens that the model knows, at least those of the data; 0 is as many as the data have."""

    num_experts: int = setting(16, least=1)
    """Logical experts of a layer (E)."""

    topk: int = setting(2, least=1)
    """Experts that a token goes to (K)."""

    expert_hidden_size: int = setting(1024, least=1)
    """Width inside an expert (F)."""

    shared_expert_hidden_size: int = setting(0, least=0)
    """Width of the expert that every token goes to besides its K; 0 has none."""

    aux_loss: float = setting(0.0, least=0)
    """Weight of the load-balancing loss on the router; 0 leaves the router alone."""

    experts: str = setting("sequential", choices=("sequential", "grouped_mm"))
    """How a rank computes its experts: `sequential` (one matrix product after the other,
    everywhere) or `grouped_mm` (all in one call of a grouped product, Transformer Engine's where
    the layers are its own, else PyTorch's; fp32 and bf16)."""

    transformer_impl: str = setting("auto", choices=("auto", "local", "transformer_engine"))
    """Whose layers the model is made of: Megatron's own (`local`), those of `transformer_engine`,
    or `auto`: Transformer Engine's where it is installed and there is a GPU."""

    precision: str = setting("fp32", choices=("fp32", "bf16"))
    """Type of weights and activations: `fp32` or `bf16` (with fp32 main weights and gradients)."""

    def relation_problems(self) -> list[str]:
        """See `Section.relation_problems`."""
        problems = []
        if self.topk > self.num_experts >= 1:
            problems.append(
                f"model.topk ({self.topk}) must be <= model.num_experts ({self.num_experts})"
            )
        if self.num_dense_layers >= self.num_layers >= 1:
            problems.append(
                f"model.num_dense_layers ({self.num_dense_layers}) must be < "
                f"model.num_layers ({self.num_layers})"
            )
        return problems


@dataclass(kw_only=True, slots=True)
class ParallelConfig(Section):
    """How the model is spread over ranks. What the sizes leave of the ranks is data parallelism."""

    NAME: ClassVar[str] = "parallel"

    num_ranks: int = setting(0, least=0)
    """Ranks that the recipe is for: a run has at least as many. 0 is any number that fits the sizes
    below."""

    ep_size: int = setting(1, least=1)
    """Ranks that share the experts of a layer (R)."""

    tp_size: int = setting(1, least=1)
    """Ranks that share attention and embeddings (tensor parallelism), and a sequence between them
    (sequence parallelism)."""

    pp_size: int = setting(1, least=1)
    """Pipeline stages."""

    vpp_size: int = setting(1, least=1)
    """Model chunks on each stage (interleaved schedule); 1 is the plain 1F1B schedule."""

    dispatcher: str = setting("alltoall", choices=("alltoall", "allgather", "flex"))
    """Megatron's token dispatcher: `alltoall`, `allgather` or `flex`."""

    recompute: str = setting("none", choices=("none", "selective", "full"))
    """What is computed again in backward instead of kept: `none`, `selective` (the MoE layers) or
    `full`."""

    distributed_optimizer: bool = True
    """Spread the optimizer's state over data-parallel ranks."""

    overlap_grad_reduce: bool = False
    """Start the data-parallel reduction of gradients during backward."""

    overlap_param_gather: bool = False
    """Gather updated weights during the next forward; needs the two settings above."""

    def relation_problems(self) -> list[str]:
        """See `Section.relation_problems`."""
        problems = []
        if self.vpp_size > 1 and self.pp_size == 1:
            problems.append(
                f"parallel.vpp_size ({self.vpp_size}) must be 1 without a pipeline "
                "(parallel.pp_size is 1)"
            )
        if self.overlap_param_gather and not (
            self.distributed_optimizer and self.overlap_grad_reduce
        ):
            problems.append(
                "parallel.overlap_param_gather (True) needs parallel.distributed_optimizer and "
                "parallel.overlap_grad_reduce"
            )
        return problems


@dataclass(kw_only=True, slots=True)
class DataConfig(Section):
    """Which text is trained on, and how much of it in a step."""

    NAME: ClassVar[str] = "data"

    path: str = MISSING
    """Folder made by `megatron-ext data build`."""

    sequence_length: int = setting(256, least=1)
    """Tokens of a sample."""

    micro_batch_size: int = setting(4, least=1)
    """Samples that a rank computes at a time."""

    global_batch_size: int = setting(8, least=1)
    """Samples of an optimizer step, over all ranks."""

    affinity: str = ""
    """File of `megatron-ext place sem_moe`: the samples of a step go to the ranks that have the
    experts which their tokens choose, if the model starts with its experts placed by the same file.
    Empty deals them in turn. The samples of a step are the same."""

    rebatch: str = ""
    """File of `megatron-ext place sem_moe`: in MoE layers, the tokens of a sequence go to the
    tensor-parallel ranks that probably have their experts, if the model starts with its experts
    placed by the same file. Needs `parallel.tp_size` and `parallel.ep_size` to be the same, above
    1. Empty leaves tokens where the sequence puts them. What is learned is the same."""

    weights: dict[str, float] = field(default_factory=dict)
    """Share of each domain; empty is in proportion to the domains' sizes."""

    mix_by: str = setting("microbatch", choices=("microbatch", "sample"))
    """Draw a domain for each `microbatch` or for each `sample`."""

    validation_fraction: float = setting(0.02, least=0, below=1)
    """Part of every domain that is kept for evaluation."""

    reverse_samples: bool = False
    """Give the samples of a microbatch in reverse order. The step stays the same but for the order
    in which sums are rounded: the yardstick for how far two runs differ by rounding alone."""


@dataclass(kw_only=True, slots=True)
class OptimizerConfig(Section):
    """Adam and its schedule: linear warm-up, then decay until the last step."""

    NAME: ClassVar[str] = "optimizer"

    lr: float = setting(1e-3, least=0)
    """Highest learning rate, reached at the end of the warm-up."""

    min_lr: float = setting(1e-4, least=0)
    """Learning rate of the last step."""

    warmup_steps: int = setting(10, least=0)
    """Steps from learning rate 0 to `lr`; a run with fewer steps gets there in its last but one."""

    decay: str = setting("cosine", choices=("constant", "linear", "cosine"))
    """Shape of the way to `min_lr`: `constant`, `linear` or `cosine`."""

    weight_decay: float = setting(0.01, least=0)
    """Decoupled weight decay (AdamW)."""

    beta1: float = setting(0.9, least=0, below=1)
    """Decay of Adam's mean of gradients."""

    beta2: float = setting(0.95, least=0, below=1)
    """Decay of Adam's mean of squared gradients."""

    eps: float = setting(1e-8, above=0)
    """Added to Adam's denominator."""

    clip_grad: float = setting(1.0, least=0)
    """Largest norm of all gradients together; larger ones are scaled down. 0 does not clip."""

    def relation_problems(self) -> list[str]:
        """See `Section.relation_problems`."""
        if self.min_lr > self.lr:
            return [f"optimizer.min_lr ({self.min_lr}) must be <= optimizer.lr ({self.lr})"]
        return []


@dataclass(kw_only=True, slots=True)
class LoggingConfig(Section):
    """Where a run reports, besides `metrics.jsonl` and the display on rank 0."""

    NAME: ClassVar[str] = "logging"

    every: int = setting(1, least=1)
    """Steps between two plain progress lines, where the display is not a terminal; the first step
    and slow ones have lines, too."""

    trace_steps: int = setting(0, least=0)
    """Steps in one file of `trace/` in the run directory, with the exact load of every microbatch
    in every layer; 0 records none. A checkpoint ends a file early, so that a run that continues
    from it has the loads of every step."""

    route_samples: int = setting(0, least=0)
    """Samples of a step whose tokens' ids and chosen experts are recorded in `routes/`, in files of
    `trace_steps` steps: the first samples of one rank, at most its own. For `place sem_moe`. Costs
    2 bytes a choice in memory until the file is written; 0 records none."""

    heatmap_every: int = setting(100, least=1)
    """Steps from one line of `layers.jsonl` with the loads of single experts to the next."""

    tier: str = setting("brief", choices=("brief", "detailed"))
    """What W&B and TensorBoard are given: `brief` describes each step, `detailed` each layer of it,
    too."""

    max_keys: int = setting(1000, least=1)
    """Most names that a step has in W&B and TensorBoard; the layers with the largest imbalance
    before balancing are kept."""

    wandb: str = setting("off", choices=("off", "offline", "online"))
    """Weights & Biases: `off`, `offline` (written to the run directory) or `online`."""

    wandb_project: str = "megatron_ext"
    """Project of the W&B run."""

    wandb_name: str | None = None
    """Name of the W&B run; by default the name of the run directory."""

    wandb_group: str = ""
    """Group of the W&B run. Runs of a quickstart or a sweep are grouped by their folder if it is
    empty."""

    wandb_tags: list[str] = field(default_factory=list)
    """Tags of the W&B run, besides its strategy."""

    tensorboard: bool = False
    """Write the same for TensorBoard, to `tensorboard/` in the run directory."""

    otel: bool = False
    """Send what balancing does to an OpenTelemetry collector, as gauges `megatron.moe_balance.*`;
    where it is say OpenTelemetry's own environment variables."""

    def relation_problems(self) -> list[str]:
        """See `Section.relation_problems`."""
        problems = []
        if self.tensorboard and not importlib.util.find_spec("tensorboard"):
            problems.append(
                "logging.tensorboard (True) needs the package tensorboard: "
                "pip install 'megatron-ext[tensorboard]'"
            )
        if self.otel and not importlib.util.find_spec("opentelemetry"):
            problems.append(
                "logging.otel (True) needs the package opentelemetry-sdk: "
                "pip install 'megatron-ext[otel]'"
            )
        if self.wandb in ("offline", "online") and not importlib.util.find_spec("wandb"):
            problems.append(
                f"logging.wandb ({self.wandb!r}) needs the package wandb: "
                "pip install 'megatron-ext[wandb]'"
            )
        if self.route_samples > 0 and not self.trace_steps:
            problems.append(
                f"logging.route_samples ({self.route_samples}) needs logging.trace_steps > 0"
            )
        return problems


@dataclass(kw_only=True, slots=True)
class ProfileConfig(Section):
    """Steps that are recorded operator by operator, into one trace for Perfetto.

    A recorded step takes longer, and needs memory for some 200 bytes an operator.
    """

    NAME: ClassVar[str] = "profile"

    steps: int = setting(0, least=0)
    """Steps that are recorded; 0 records none."""

    # The first steps of a start allocate memory and load code.
    first: int = setting(6, least=1)
    """The first of them."""

    ranks: list[int] = field(default_factory=list)
    """The ranks that record, as [0,8]; empty is all."""

    def relation_problems(self) -> list[str]:
        """See `Section.relation_problems`."""
        if all(rank >= 0 for rank in self.ranks) and len(set(self.ranks)) == len(self.ranks):
            return []
        return [f"profile.ranks ({self.ranks}) must be different numbers >= 0"]


@dataclass(kw_only=True, slots=True)
class CheckpointConfig(Section):
    """When to save, and where to start from. A run continues from its own newest checkpoint."""

    NAME: ClassVar[str] = "checkpoint"

    every: int = setting(0, least=0)
    """Steps between two checkpoints; 0 saves none."""

    keep: int = setting(2, least=1)
    """Newest checkpoints that are kept."""

    load: str | None = None
    """A checkpoint (`RUN/checkpoints/step_...`) that a run without checkpoints of its own starts
    from."""

    verify: bool = True
    """Compare a checkpoint's files with their checksums before it is loaded."""

    fallback: bool = True
    """Where the newest checkpoint is damaged, continue from the newest that is whole, with a
    warning. False refuses."""

    trust: bool = False
    """Load a checkpoint that another user wrote, or that holds pickled classes beyond those that
    checkpoints need. Loading such a checkpoint may run code that is in it."""

    required: bool = False
    """End the run where a checkpoint cannot be saved. False goes on without it, with a warning each
    time."""

    asynchronous: bool = False
    """Write a checkpoint beside the training, from a copy of the state in the memory of the CPU."""


@dataclass(kw_only=True, slots=True)
class HardwareConfig(Section):
    """The machine that a recipe is for. Files of `recipes/hardware` have these fields."""

    NAME: ClassVar[str] = "hardware"

    summary: str = ""
    """What it is, in a line; empty is any machine."""

    constants: dict[str, Any] = field(default_factory=dict)
    """Its numbers with their sources, as `megatron-ext simulate` reads them."""

    @property
    def domain_ranks(self) -> int | None:
        """Ranks of an NVLink domain; None if nothing is said of the machine."""
        return self._number("domain_ranks")

    @property
    def server_ranks(self) -> int | None:
        """Ranks of a server, of which a domain may have several; None if nothing is said of it."""
        return self._number("server_ranks")

    def _number(self, name: str) -> int | None:
        constant = self.constants.get(name)
        value = constant.get("value") if isinstance(constant, Mapping) else None
        return value if isinstance(value, int) else None


@dataclass(kw_only=True, slots=True)
class TrainConfig(Section):
    """A training run. Together with the data, everything that determines its result."""

    NAME: ClassVar[str] = ""

    recipe: str = ""
    """Name of the recipe that the settings began with; it is filled in."""

    at_most: dict[str, int] = field(default_factory=dict)
    """Limits of numbers, by the names of their settings: where a recipe has more, the limit is
    taken. What the command line sets stays. `size=tiny` has such limits."""

    run_dir: str = "runs/train"
    """Directory of the run's files: config, metrics, checkpoints."""

    steps: int = setting(100, least=1)
    """Optimizer steps of the whole run."""

    seed: int = setting(1234, least=0, most=2**32 - 1)
    """Seed of the initial weights and of the order of the data."""

    on_nan: str = setting("stop", choices=("stop", "skip", "ignore"))
    """What is done with a step whose loss or gradients are not finite: `stop` the run before its
    optimizer step, `skip` that optimizer step, or `ignore` it. If only the loss is not finite, the
    optimizer step is made: then `stop` ends the run after it. A state that is not finite is never
    saved, and ends a run that does not `ignore` it."""

    timeout_s: float = setting(600, least=1)
    """Seconds that a rank waits for another before the run ends and says who hangs where. Must be
    longer than anything that a rank does without other ranks, as writing its part of a checkpoint.
    """

    restarts: int = setting(0, least=0)
    """How often a run whose ranks died starts again by itself, from its newest whole checkpoint.
    Not after a signal, or for what it would meet again: settings, numbers that are not finite, a
    checkpoint that is refused. For several machines, `launch/train.sh` hands it on as
    `--max-restarts`."""

    eval_every: int = setting(0, least=0)
    """Steps between two evaluations; 0 makes none."""

    eval_steps: int = setting(4, least=1)
    """Global batches of an evaluation, always the same ones."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    balance: BalanceConfig = field(default_factory=BalanceConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)

    megatron: dict[str, Any] = field(default_factory=dict)
    """Further fields of Megatron's TransformerConfig, by its names."""

    @property
    def group_timeout(self) -> timedelta:
        """How long process groups wait: a backstop, behind those that can say who hangs."""
        return timedelta(seconds=2 * self.timeout_s)

    def relation_problems(self) -> list[str]:
        """See `Section.relation_problems`."""
        problems = [] if self.run_dir else ["run_dir ('') must name a folder"]
        if self.eval_every > 0 and self.data.validation_fraction == 0:
            problems.append(f"eval_every ({self.eval_every}) needs data.validation_fraction > 0")
        profile = self.profile
        if profile.steps > 0 and profile.first + profile.steps - 1 > self.steps:
            problems.append(
                f"profile.first ({profile.first}) + profile.steps ({profile.steps}) must be "
                f"<= steps + 1 ({self.steps + 1}): the run ends before"
            )
        return problems
