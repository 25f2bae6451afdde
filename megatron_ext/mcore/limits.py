"""Refuses settings of Megatron that exclude balancing: all problems at once, before training."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from megatron.core.transformer import TransformerConfig

from megatron_ext.balance.strategies import STRATEGIES, get_planner, of_methods
from megatron_ext.balance.strategies.strategy import ForcesEven, FromPlacement, StaysMegatron
from megatron_ext.config import BalanceConfig
from megatron_ext.transport import TRANSPORTS, TransportKind, resolve_transport
from megatron_ext.transport.gpus import lack_here


def validate_for_balancing(config: Any, balance: BalanceConfig) -> list[str]:
    """Return every reason why layers of `config` cannot be balanced with the settings `balance`.

    Raises:
        TypeError: `balance` is no `BalanceConfig`.
    """
    require_balance_config(balance)
    strategy = STRATEGIES.get(balance.strategy)
    kind = strategy.kind if strategy is not None else None
    if isinstance(kind, StaysMegatron):
        return []
    with_strategy = f"balance.strategy={balance.strategy}"
    if isinstance(kind, ForcesEven):
        # Only the choices differ from Megatron's own layer: no plans, no slots, no replicas.
        return _expert_problems(config) + broken(MUST_BE_TO_FORCE, config, with_strategy)
    problems = _strategy_problems(balance)
    if lack := lack_here():
        problems.append(f"experts cannot be balanced on this GPU: {lack}")
    problems += _transport_problems(balance, config) + _expert_problems(config)
    if _has_graphs(config):
        from megatron_ext.mcore.graph_limits import host_problems

        problems += host_problems(config, balance)
    ep_size = config.expert_model_parallel_size
    if ep_size % (balance.domain_ranks or ep_size):
        problems.append(
            f"balance.nvlink_domain ({balance.nvlink_domain}) must divide "
            f"expert_model_parallel_size ({ep_size})"
        )
    problems += broken(MUST_BE, config, with_strategy) + _capacity_problems(config, balance)
    if setting := quantization_of(config):
        from megatron_ext.mcore.quantized_limits import engine_problems

        problems += engine_problems(setting)
    if balance.costs_to_measure:
        problems += broken(MUST_BE_TO_MEASURE, config, "balance.objective=time")
    for setting, rules in of_methods("LIMITS", balance).items():
        problems += broken(rules, config, setting)
    return problems


def require_valid(config: Any, balance: BalanceConfig) -> None:
    """Check the settings of a layer that is about to be built.

    Raises:
        ValueError: A setting excludes balancing. The class is not ConfigError, because Megatron
            raises an error of the same class with a longer text.
    """
    if problems := validate_for_balancing(config, balance):
        raise ValueError("; ".join(problems))


def require_balance_config(balance: Any) -> None:
    """Check that a user gave a `BalanceConfig`.

    Raises:
        TypeError: `balance` is of another type.
    """
    if not isinstance(balance, BalanceConfig):
        raise TypeError(f"balance ({balance!r}) must be a BalanceConfig, as BalanceConfig(slots=2)")


_PADS_UNEVEN = "moe_hybridep_pad_uneven_dispatch_inputs", "moe_hybridep_pad_variable_tokens"
"""One option: its name in releases of Megatron-Core, and in its development branch."""


def _capacity_problems(config: Any, balance: BalanceConfig) -> list[str]:
    """Check what is known before training; the first forward knows how many tokens there are."""
    factor = getattr(config, "moe_expert_rank_capacity_factor", None)
    if factor is None or config.expert_model_parallel_size == 1 or balance.slots == 0:
        return []
    from megatron_ext.mcore.capacity import FIELD, promised_tolerance, too_small

    problems = [
        f"{uneven} (True) must be False with {FIELD} ({factor}): how many tokens a rank has "
        f"room for is known only after the plan (leave out --{uneven.replace('_', '-')})"
        for uneven in _PADS_UNEVEN
        if getattr(config, uneven, False)
    ]
    try:
        tolerance = promised_tolerance(balance)
    except (ValueError, ModuleNotFoundError):  # `_strategy_problems` says it.
        return problems
    if tolerance is not None and factor < 1 + tolerance:
        why = f"balance.tolerance={balance.tolerance}"
        problems.append(too_small(factor, round(1 + tolerance, 3), why))
    return problems


def _expert_problems(config: Any) -> list[str]:
    num_experts, ep_size = config.num_moe_experts, config.expert_model_parallel_size
    if not num_experts:
        return [f"num_moe_experts ({num_experts}) must be >= 1 to balance experts"]
    if num_experts % ep_size:
        return [
            f"num_moe_experts ({num_experts}) must be a multiple of "
            f"expert_model_parallel_size ({ep_size})"
        ]
    return []


def _strategy_problems(balance: BalanceConfig) -> list[str]:
    try:
        planner = get_planner(balance.strategy, for_time=balance.plans_for_time)
    except (ValueError, ModuleNotFoundError) as error:
        return [str(error)]
    if isinstance(planner, FromPlacement) and not balance.placement:
        return [
            f"balance.placement must name a file with balance.strategy={balance.strategy}: "
            "`megatron-ext place craft` makes one from a trace"
        ]
    return []


def _transport_problems(balance: BalanceConfig, config: Any) -> list[str]:
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        transport = TRANSPORTS[resolve_transport(balance.transport, device_type=device_type)]
    except ValueError as error:
        return [str(error)]
    ep_size = config.expert_model_parallel_size
    if ep_size == 1:  # One rank has no slots.
        return []
    problems = _slot_problems(balance, config, transport)
    if not transport.adds_float16:
        problems += broken(MUST_BE_TO_ADD, config, f"transport {transport.name}")
    return problems


_MOST_GROUPS = 64
"""Experts that a kernel of Transformer Engine takes, where one kernel takes all of a rank."""


def _slot_problems(balance: BalanceConfig, config: Any, transport: TransportKind) -> list[str]:
    if (strategy := STRATEGIES.get(balance.strategy)) is None:
        return []
    mains = (config.num_moe_experts or 0) // config.expert_model_parallel_size
    most = [(transport.max_slots, f"transport {transport.name} has flags for no more")]
    # All others take expert by expert.
    for name in ("fp4", "use_transformer_engine_op_fuser"):
        if getattr(config, name, None):
            reason = (
                f"Transformer Engine's kernels for {name} take {_MOST_GROUPS} experts, and a rank "
                f"has {mains} of its own (raise --expert-model-parallel-size)"
            )
            most.append((max(_MOST_GROUPS - mains, 0), reason))
    slots = strategy.num_slots(balance.slots, mains)
    of = f" of balance.strategy={strategy.name}" if slots != balance.slots else ""
    return [
        f"balance.slots ({slots}{of}) must be <= {number}: {reason}"
        for number, reason in most
        if number is not None and slots > number
    ]


class Demand(NamedTuple):
    """The allowed values of a field of Megatron's TransformerConfig: one rule.

    A field that this version of Megatron does not have breaks no rule.
    """

    field: str
    allowed: tuple[Any, ...]
    """Allowed values. None and False are always allowed, because they switch nothing on."""
    reason: str
    flag: str = ""
    """The cure on the command line of Megatron's programs; by default, to leave out the flag that
    has the field's name."""
    only_with: Callable[[Any], str | None] | None = None
    """Returns the setting of a model with which the rule holds, or None if the model has not set
    it. By default the rule holds always."""

    @property
    def way_out(self) -> str:
        """Return the cure on the command line of Megatron's programs."""
        return self.flag or f"leave out --{self.field.replace('_', '-')}"

    def problem(self, config: Any, with_setting: str) -> str | None:
        """Return the problem with the field in `config`, or None."""
        value = getattr(config, self.field, None)
        if value in (*self.allowed, None, False):
            return None
        if self.only_with is not None:
            if (setting := self.only_with(config)) is None:
                return None
            with_setting = setting
        allowed = " or ".join(map(repr, self.allowed))
        return self.says(self.field, repr(value), allowed, with_setting)

    def says(self, field: str, value: str, allowed: str, with_setting: str) -> str:
        """Return the problem with a field that has another than the allowed values."""
        why = f"{self.reason} ({self.way_out})"
        return f"{field} ({value}) must be {allowed} with {with_setting}: {why}"


def broken(rules: tuple[Demand, ...], config: Any, with_setting: str) -> list[str]:
    """Return the problems of all rules that `config` breaks."""
    return [problem for rule in rules if (problem := rule.problem(config, with_setting))]


class QuantizationDemand(Demand):
    """The rule for quantized models: which recipe, of which sizes, on which GPU."""

    def problem(self, config: Any, with_setting: str) -> str | None:
        """Return the problem with the recipe of `config`, or None."""
        if not getattr(config, self.field.removesuffix("_recipe"), None):
            return None
        # Megatron's default, where `config` is not all of a TransformerConfig.
        default = getattr(TransformerConfig, self.field, None)
        recipe: Any = getattr(config, self.field, default)
        if problem := Demand.problem(self, SimpleNamespace(**{self.field: recipe}), with_setting):
            return problem
        from megatron_ext.mcore.quantized_limits import recipe_problem

        return recipe_problem(config, self.field, recipe)


def quantization_of(config: Any) -> str | None:
    """Return the setting by which a model, or a part of it, quantizes, as `fp8=e4m3`, or None."""
    for field in ("fp8", "fp4"):
        if value := getattr(config, field, None):
            return f"{field}={value}"
    return "quant_recipe" if getattr(config, "quant_recipe", None) is not None else None


class GraphDemand(Demand):
    """The rule for CUDA graphs: which implementation, and what its graphs may hold."""

    def problem(self, config: Any, with_setting: str) -> str | None:
        """Return the problem with the graphs of `config`, or None."""
        if not _has_graphs(config):
            return None
        from megatron_ext.mcore.graph_limits import layer_graph_problem

        found = layer_graph_problem(config, self.allowed)
        return None if found is None else self.says(*found, with_setting)


def _has_graphs(config: Any) -> bool:
    return getattr(config, "cuda_graph_impl", None) not in (None, "none")


DELAYS = "delay_wgrad_compute", "overlap_dispatch_backward_with_experts_wgrad"


def _without(field: str) -> Callable[[Any], str | None]:
    """Return an `only_with`: the rule holds where a field is off."""
    return lambda config: None if getattr(config, field, False) else f"{field} (False)"


def _beside_shards(config: Any) -> str | None:
    """Return what is set that sharded expert weights must not meet, or None."""
    further = (
        "use_transformer_engine_op_fuser",
        "add_bias_linear",
        "overlap_moe_expert_parallel_comm",
    )
    met = [name for name in (*DELAYS, *further) if getattr(config, name, None)]
    met += filter(None, [quantization_of(config)])
    granularity = getattr(config, "recompute_granularity", None)
    if granularity == "full" or (granularity and "moe" in (config.recompute_modules or ())):
        met.append("recomputed experts")
    return " and ".join(met) or None


_GRAPHS = GraphDemand(
    "cuda_graph_impl",
    ("none", "transformer_engine", "local", "full_iteration"),
    "a graph of a layer must end before the plan, and `local` ones do only in hybrid models",
    "set --cuda-graph-impl transformer_engine --cuda-graph-scope attn moe_router moe_preprocess",
)

SHARDS_FLAG = "leave out --expert-tensor-parallel-num-weight-shards"

MUST_BE = (
    Demand(
        "moe_use_legacy_grouped_gemm",
        (False,),
        "GroupedMLP cannot compute replicas, and TEGroupedMLP can",
    ),
    Demand("moe_single_grouped_bias", (False,), "each expert needs its own bias to have replicas"),
    # Of Megatron-Core's development branch.
    Demand(
        "moe_megakernel_backend",
        (False,),
        "its one kernel for dispatch, experts and combine knows no slots",
    ),
    Demand("moe_virtual_expert_load_balance", (False,), "it balances the same layers itself"),
    Demand(
        "expert_gtp_weight_remat_size",
        (1,),
        "replicas beside shards were never run with the op fuser, biases, quantization or delayed "
        "weight gradients; with recomputed experts, or two microbatches at a time, Megatron itself "
        "may read another layer's weights",
        SHARDS_FLAG,
        only_with=_beside_shards,
    ),
    *(
        Demand(
            field,
            (False,),
            "without fusion Megatron itself takes memory that nothing has set for gradients",
            "leave out --no-gradient-accumulation-fusion",
            only_with=_without("gradient_accumulation_fusion"),
        )
        for field in DELAYS
    ),
    QuantizationDemand(
        "fp8_recipe",
        ("tensorwise", "blockwise", "mxfp8"),
        "a replica has no history of scales, and no factory of quantizers",
        "set --fp8-recipe tensorwise",
    ),
    QuantizationDemand(
        "fp4_recipe",
        ("nvfp4",),
        "a replica has no factory of quantizers",
        "set --fp4-recipe nvfp4",
    ),
    Demand(
        "moe_single_grouped_weight",
        (False,),
        "its packed form of quantized weights was never run with replicas",
        only_with=quantization_of,
    ),
    Demand(
        "moe_use_grouped_tensor",
        (False,),
        "replicas in linears that take grouped tensors were never run",
        only_with=_without("use_transformer_engine_op_fuser"),
    ),
    *(
        Demand(field, ("bf16",), "replicas' tokens were never sent in another dtype")
        for field in ("moe_dispatch_fwd_dtype", "moe_combine_bwd_dtype")
    ),
    Demand(
        "transformer_impl",
        ("local", "transformer_engine"),
        "the layers of other implementations make a dispatcher in every forward, without slots",
        "set --transformer-impl transformer_engine",
    ),
    _GRAPHS,
)
"""Rules for every layer that is balanced by plans."""

MUST_BE_TO_ADD = (
    Demand("fp16", (False,), "only balance.transport=collective adds float16 gradients"),
)
"""Rules for a transport that cannot add gradients in float16."""

MUST_BE_TO_MEASURE = (
    Demand(
        "expert_gtp_weight_remat_size",
        (1,),
        "costs are measured on experts by themselves, and Megatron gathers weights in the layers' "
        "order",
        SHARDS_FLAG,
    ),
)
"""Rules for costs that are measured."""

MUST_BE_TO_FORCE = (
    Demand(
        "moe_pad_expert_input_to_capacity",
        (False,),
        "experts would get more than their capacity",
    ),
    _GRAPHS,
)
"""Rules for a strategy that forces even routing, in place of `MUST_BE`."""
