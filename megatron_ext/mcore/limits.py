"""What in a Megatron configuration excludes balancing, or re-batching of tokens.

All problems at once, before training.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron_ext.balance.strategies import STRATEGIES, get_planner, get_strategy
from megatron_ext.config import BalanceConfig
from megatron_ext.transport import resolve_transport


def validate_for_balancing(config: Any, balance: BalanceConfig) -> list[str]:
    """Return every reason why layers of `config` cannot be balanced as `balance` says.

    Args:
        config: Megatron's TransformerConfig.
        balance: What the balancer may do.
    """
    if _is_absent(balance):
        return []
    problems = []
    for check in (partial(_check_strategy, balance), partial(resolve_transport, balance.transport)):
        try:
            check()
        except (ValueError, ModuleNotFoundError) as error:
            problems.append(str(error))
    ep_size = config.expert_model_parallel_size
    num_experts = config.num_moe_experts
    if not num_experts:
        problems.append(f"num_moe_experts ({num_experts}) must be >= 1 to balance experts")
    elif num_experts % ep_size:
        problems.append(
            f"num_moe_experts ({num_experts}) must be a multiple of "
            f"expert_model_parallel_size ({ep_size})"
        )
    if balance.nvlink_domain != "auto" and ep_size % int(balance.nvlink_domain):
        problems.append(
            f"balance.nvlink_domain ({balance.nvlink_domain}) must divide "
            f"expert_model_parallel_size ({ep_size})"
        )
    problems += [
        f"{name} ({getattr(config, name)!r}) must be {allowed!r} "
        f"with balance.strategy={balance.strategy}: {reason}"
        for name, allowed, reason in _MUST_BE
        if getattr(config, name, allowed) not in (allowed, None, False)
    ]
    if balance.local_first:
        problems += [
            f"{name} ({getattr(config, name)!r}) must be {allowed!r} with balance.local_first: "
            f"{reason}"
            for name, allowed, reason in _MUST_BE_FOR_LOCAL_FIRST
            if getattr(config, name, allowed) != allowed
        ]
    if _predicts(balance) and getattr(config, "moe_enable_routing_replay", False):
        problems.append(
            "moe_enable_routing_replay (True) must be False "
            f"with balance.strategy={balance.strategy}: predictions would be recorded as choices"
        )
    return problems


def validate_for_rebatching(config: Any, balance: BalanceConfig | None) -> list[str]:
    """Return every reason why tokens of `config` cannot be dealt to ranks by their experts.

    Args:
        config: Megatron's TransformerConfig.
        balance: What the balancer may do; None for Megatron's own layers.
    """
    tp_size, ep_size = config.tensor_model_parallel_size, config.expert_model_parallel_size
    problems = []
    sequence_parallel = getattr(config, "sequence_parallel", False)
    if tp_size == 1 or tp_size != ep_size or not sequence_parallel:
        problems.append(
            "token re-batching needs a tensor-parallel group that is the EP group, with sequence "
            f"parallelism: tensor_model_parallel_size ({tp_size}) must be "
            f"expert_model_parallel_size ({ep_size}) and > 1, sequence_parallel "
            f"({sequence_parallel}) must be True"
        )
    recompute = getattr(config, "recompute_granularity", None)
    if recompute == "full" and config.pipeline_model_parallel_size > 1:
        problems.append(
            "recompute_granularity ('full') must not be 'full' with token re-batching and "
            f"pipeline_model_parallel_size ({config.pipeline_model_parallel_size}) > 1: a layer "
            "that is recomputed does not know its microbatch's token ids"
        )
    if balance is not None and _predicts(balance):
        problems.append(
            f"balance.strategy ({balance.strategy}) must not predict with token re-batching: a "
            "layer's tokens are not those of the layer before it, whose routing would be compared"
        )
    problems += [
        f"{name} ({getattr(config, name)!r}) must be one of {allowed} with token re-batching: "
        f"{reason}"
        for name, allowed, reason in _ONE_OF_FOR_REBATCHING
        if getattr(config, name, allowed[0]) not in allowed
    ]
    return problems


def _is_absent(balance: BalanceConfig) -> bool:
    """Whether the layers stay Megatron's own."""
    strategy = STRATEGIES.get(balance.strategy)
    return strategy is not None and strategy.kind == "absent"


def _predicts(balance: BalanceConfig) -> bool:
    """Whether a layer predicts the load of the next one."""
    strategy = STRATEGIES.get(balance.strategy)
    return strategy is not None and strategy.place_predicted is not None


def _check_strategy(balance: BalanceConfig) -> None:
    if get_strategy(balance.strategy).kind == "planner":
        planner = get_planner(balance.strategy, for_time=balance.objective == "time")
        if planner.needs_placement and not balance.placement:
            raise ValueError(
                f"balance.placement must name a file with balance.strategy={balance.strategy}: "
                "`megatron-ext place craft` makes one from a trace"
            )


_MUST_BE = (
    ("moe_expert_capacity_factor", None, "a dropped token belongs to no quota"),
    ("moe_pad_expert_input_to_capacity", False, "padding would be planned as load"),
    ("expert_tensor_parallel_size", 1, "replicas of sharded experts are not supported"),
    ("gradient_accumulation_fusion", False, "it would bypass the replicas' share of the gradient"),
    ("overlap_moe_expert_parallel_comm", False, "two layers would use the shared slots at once"),
    (
        "delay_wgrad_compute",
        False,
        "slot gradients must be complete when the experts' backward ends",
    ),
    ("overlap_dispatch_backward_with_experts_wgrad", False, "slot gradients must not be delayed"),
    ("fp8", None, "quantized experts are not supported"),
    ("fp4", None, "quantized experts are not supported"),
    ("cuda_graph_impl", "none", "plans are read on the host"),
)
"""(field of TransformerConfig, value it must have, why). A field that Megatron lacks is fine."""

_MUST_BE_FOR_LOCAL_FIRST = (
    ("moe_token_dispatcher_type", "alltoall", "only there own tokens can be kept from travelling"),
    (
        "moe_shared_expert_overlap",
        False,
        "shared experts would want the same places of the exchange",
    ),
)
"""As above."""

_ONE_OF_FOR_REBATCHING: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("expert_tensor_parallel_size", (1, None), "a rank must have whole experts"),
    (
        "moe_router_load_balancing_type",
        ("none", "aux_loss", "global_aux_loss"),
        "others look at tokens of one sample, or of one rank, together",
    ),
    ("moe_expert_capacity_factor", (None,), "which tokens are dropped would change"),
    ("moe_enable_routing_replay", (False,), "choices are replayed by place, not by token"),
    ("overlap_moe_expert_parallel_comm", (False,), "it runs a layer's parts without the layer"),
    ("cuda_graph_impl", ("none",), "the exchange is decided on the host"),
)
"""(field of TransformerConfig, values it may have, why). A field that Megatron lacks is fine."""
