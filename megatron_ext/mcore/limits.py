"""Settings of Megatron that exclude balancing: all problems at once, before training."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch

from megatron_ext.balance.strategies import STRATEGIES, get_planner
from megatron_ext.balance.strategies.strategy import ForcesEven, FromPlacement, StaysMegatron
from megatron_ext.config import BalanceConfig
from megatron_ext.transport import TRANSPORTS, resolve_transport
from megatron_ext.transport.gpus import lack_here


def validate_for_balancing(config: Any, balance: BalanceConfig) -> list[str]:
    """Return every reason why layers of `config` cannot be balanced as `balance` says.

    Args:
        config: Megatron's TransformerConfig.
        balance: What the balancer may do.

    Raises:
        TypeError: `balance` is no `BalanceConfig`.
    """
    require_balance_config(balance)
    if _is_absent(balance):
        return []
    with_strategy = f"balance.strategy={balance.strategy}"
    if _forces_even(balance):
        # Megatron's own layer but for the choices: no plans, no slots, no replicas.
        return _expert_problems(config) + _broken(MUST_BE_TO_FORCE, config, with_strategy)
    problems = []
    for check in (partial(_check_strategy, balance), _check_gpu):
        try:
            check()
        except (ValueError, ModuleNotFoundError) as error:
            problems.append(str(error))
    problems += _transport_problems(balance, config) + _expert_problems(config)
    ep_size = config.expert_model_parallel_size
    if ep_size % (balance.domain_ranks or ep_size):
        problems.append(
            f"balance.nvlink_domain ({balance.nvlink_domain}) must divide "
            f"expert_model_parallel_size ({ep_size})"
        )
    problems += _broken(MUST_BE, config, with_strategy)
    if balance.local_first:
        problems += _broken(MUST_BE_FOR_LOCAL_FIRST, config, "balance.local_first")
    if predicts(balance):
        problems += _broken(MUST_BE_TO_PREDICT, config, with_strategy)
    return problems


def require_valid(config: Any, balance: BalanceConfig) -> None:
    """Check the settings of a layer that is about to be built.

    Raises:
        ValueError: Something excludes balancing. No ConfigError: Megatron raises errors anew, of
            the same class with a longer text.
    """
    if problems := validate_for_balancing(config, balance):
        raise ValueError("; ".join(problems))


def require_balance_config(balance: Any) -> None:
    """Check that a user gave a `BalanceConfig`.

    Raises:
        TypeError: It is something else.
    """
    if not isinstance(balance, BalanceConfig):
        raise TypeError(f"balance ({balance!r}) must be a BalanceConfig, as BalanceConfig(slots=2)")


def _is_absent(balance: BalanceConfig) -> bool:
    """Whether the layers stay Megatron's own."""
    strategy = STRATEGIES.get(balance.strategy)
    return strategy is not None and isinstance(strategy.kind, StaysMegatron)


def predicts(balance: BalanceConfig) -> bool:
    """Whether a layer predicts the load of the next one."""
    strategy = STRATEGIES.get(balance.strategy)
    return strategy is not None and strategy.predicts


def _forces_even(balance: BalanceConfig) -> bool:
    """Whether even routing is forced instead of planned."""
    strategy = STRATEGIES.get(balance.strategy)
    return strategy is not None and isinstance(strategy.kind, ForcesEven)


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


def _check_strategy(balance: BalanceConfig) -> None:
    planner = get_planner(balance.strategy, for_time=balance.plans_for_time)
    if isinstance(planner, FromPlacement) and not balance.placement:
        raise ValueError(
            f"balance.placement must name a file with balance.strategy={balance.strategy}: "
            "`megatron-ext place craft` makes one from a trace"
        )


def _transport_problems(balance: BalanceConfig, config: Any) -> list[str]:
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        transport = TRANSPORTS[resolve_transport(balance.transport, device_type=device_type)]
    except ValueError as error:
        return [str(error)]
    ep_size = config.expert_model_parallel_size
    if ep_size == 1:  # One rank has no slots, whatever is asked for.
        return []
    problems = []
    if not transport.adds_float16:
        problems += _broken(MUST_BE_TO_ADD, config, f"transport {transport.name}")
    strategy = STRATEGIES.get(balance.strategy)
    if strategy is not None and transport.max_slots is not None:
        slots = strategy.num_slots(balance.slots, (config.num_moe_experts or 0) // ep_size)
        if slots > transport.max_slots:
            of = f" of balance.strategy={strategy.name}" if slots != balance.slots else ""
            problems.append(
                f"balance.slots ({slots}{of}) must be <= {transport.max_slots}: transport "
                f"{transport.name} has flags for no more"
            )
    return problems


def _check_gpu() -> None:
    if lack := lack_here():
        raise ValueError(f"experts cannot be balanced on this GPU: {lack}")


class _Rule(NamedTuple):
    """What a field of Megatron's TransformerConfig must be. A field that Megatron lacks is fine."""

    field: str
    allowed: tuple[Any, ...]
    """Values that the field may have. None and False are always allowed: nothing is asked for."""
    reason: str
    flag: str = ""
    """What to do on the command line of Megatron's programs; by default, to leave out the flag that
    is named as the field."""

    @property
    def way_out(self) -> str:
        """What to do on the command line of Megatron's programs."""
        return self.flag or f"leave out --{self.field.replace('_', '-')}"

    def problem(self, config: Any, with_setting: str) -> str | None:
        """What is wrong with the field in `config`; None if nothing is."""
        value = getattr(config, self.field, None)
        if value in (*self.allowed, None, False):
            return None
        allowed = " or ".join(map(repr, self.allowed))
        return (
            f"{self.field} ({value!r}) must be {allowed} with {with_setting}: {self.reason} "
            f"({self.way_out})"
        )


def _broken(rules: tuple[_Rule, ...], config: Any, with_setting: str) -> list[str]:
    """Return the problems of all rules that `config` breaks."""
    return [problem for rule in rules if (problem := rule.problem(config, with_setting))]


MUST_BE = (
    _Rule(
        "moe_use_legacy_grouped_gemm",
        (False,),
        "replicas cannot join GroupedMLP; they join TEGroupedMLP",
    ),
    _Rule("moe_single_grouped_bias", (False,), "replicas join experts with a bias each"),
    _Rule(
        "moe_expert_rank_capacity_factor",
        (None,),
        "only HybridEP and NCCL EP read it, for buffers longer than the tokens in them; these need "
        "a GPU to be tried on, and balanced ranks need no such limit",
    ),
    _Rule(
        "moe_ncclep_zero_copy",
        (False,),
        "its buffers are NCCL EP's, made once on a GPU, for the experts without slots",
    ),
    _Rule("moe_paged_stash", (False,), "a step that it runs again would be planned twice"),
    _Rule(
        "moe_pad_experts_for_cuda_graph_inference",
        (False,),
        "decoding would fill all experts up to a capacity that leaves out the slots",
    ),
    _Rule(
        "moe_flex_dispatcher_backend",
        ("deepep", "hybridep"),
        "NCCL EP is set up once, for the experts without slots",
        "set --moe-flex-dispatcher-backend deepep",
    ),
    _Rule(
        "expert_gtp_weight_remat_size",
        (1,),
        "weights that are gathered for every use are not supported",
        "leave out --expert-tensor-parallel-num-weight-shards",
    ),
    _Rule(
        "overlap_moe_expert_parallel_comm",
        (False,),
        "two layers would use the shared slots at once",
    ),
    _Rule(
        "delay_wgrad_compute",
        (False,),
        "slot gradients must be complete when the experts' backward ends",
    ),
    _Rule(
        "overlap_dispatch_backward_with_experts_wgrad",
        (False,),
        "slot gradients must not be delayed",
    ),
    _Rule(
        "quant_recipe",
        (None,),
        "quantized experts are not supported",
        "leave out --te-precision-config-file",
    ),
    _Rule("fp8", (None,), "quantized experts are not supported", "leave out --fp8-format"),
    _Rule("fp4", (None,), "quantized experts are not supported", "leave out --fp4-format"),
    _Rule(
        "transformer_impl",
        ("local", "transformer_engine"),
        "its layers choose a dispatcher anew in every forward, over experts without slots",
        "set --transformer-impl transformer_engine",
    ),
    _Rule("cuda_graph_impl", ("none",), "plans are read on the host", "set --cuda-graph-impl none"),
)
"""What every layer needs that is balanced by plans."""

MUST_BE_FOR_LOCAL_FIRST = (
    _Rule(
        "moe_token_dispatcher_type",
        ("alltoall",),
        "only there own tokens can be kept from travelling",
        "set --moe-token-dispatcher-type alltoall",
    ),
    _Rule("moe_pad_expert_input_to_capacity", (False,), "its exchanges carry no padding"),
    _Rule(
        "expert_tensor_parallel_size",
        (1,),
        "every token travels to all shards of its expert",
        "set --expert-tensor-parallel-size 1",
    ),
    _Rule(
        "moe_shared_expert_overlap",
        (False,),
        "shared experts would want the same places of the exchange",
    ),
)
"""What `balance.local_first` needs besides."""

MUST_BE_TO_PREDICT = (
    _Rule("moe_enable_routing_replay", (False,), "predictions would be recorded as choices"),
    _Rule(
        "mlp_chunks_for_training",
        (1,),
        "a chunk would be predicted from another chunk's tokens",
    ),
)
"""What strategies need besides whose layers predict the next one's load."""

MUST_BE_TO_ADD = (
    _Rule("fp16", (False,), "only balance.transport=collective adds float16 gradients"),
)
"""What a transport needs that adds no gradients in float16."""

MUST_BE_TO_FORCE = (
    _Rule(
        "moe_pad_expert_input_to_capacity",
        (False,),
        "experts would get more than their capacity",
    ),
    _Rule(
        "cuda_graph_impl",
        ("none",),
        "a graph that runs again counts no loads",
        "set --cuda-graph-impl none",
    ),
)
"""What a strategy needs that forces even routing, in place of `MUST_BE`."""
