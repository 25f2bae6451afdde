"""Settings of Megatron that exclude balancing: all problems at once, before training."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from megatron_ext.balance.strategies import STRATEGIES, get_planner, get_strategy
from megatron_ext.balance.strategies.strategy import ForcesEven, FromPlacement, StaysMegatron
from megatron_ext.config import BalanceConfig
from megatron_ext.transport import TRANSPORTS, resolve_transport


def validate_for_balancing(config: Any, balance: BalanceConfig) -> list[str]:
    """Return every reason why layers of `config` cannot be balanced as `balance` says.

    Args:
        config: Megatron's TransformerConfig.
        balance: What the balancer may do.
    """
    if _is_absent(balance):
        return []
    problems = []
    for check in (partial(_check_strategy, balance), partial(_check_transport, balance, config)):
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
    if ep_size % (balance.domain_ranks or ep_size):
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
    if predicts(balance) and getattr(config, "moe_enable_routing_replay", False):
        problems.append(
            "moe_enable_routing_replay (True) must be False "
            f"with balance.strategy={balance.strategy}: predictions would be recorded as choices"
        )
    return problems


def _is_absent(balance: BalanceConfig) -> bool:
    """Whether the layers stay Megatron's own."""
    strategy = STRATEGIES.get(balance.strategy)
    return strategy is not None and isinstance(strategy.kind, StaysMegatron)


def predicts(balance: BalanceConfig) -> bool:
    """Whether a layer predicts the load of the next one."""
    strategy = STRATEGIES.get(balance.strategy)
    return strategy is not None and strategy.predicts


def _check_strategy(balance: BalanceConfig) -> None:
    if isinstance(get_strategy(balance.strategy).kind, ForcesEven):
        return
    planner = get_planner(balance.strategy, for_time=balance.plans_for_time)
    if isinstance(planner, FromPlacement) and not balance.placement:
        raise ValueError(
            f"balance.placement must name a file with balance.strategy={balance.strategy}: "
            "`megatron-ext place craft` makes one from a trace"
        )


def _check_transport(balance: BalanceConfig, config: Any) -> None:
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    transport = TRANSPORTS[resolve_transport(balance.transport, device_type=device_type)]
    strategy = STRATEGIES.get(balance.strategy)
    ep_size = config.expert_model_parallel_size
    # One rank has no slots, whatever is asked for.
    if transport.max_slots is None or strategy is None or ep_size == 1:
        return
    slots = strategy.num_slots(balance.slots, (config.num_moe_experts or 0) // ep_size)
    if slots > transport.max_slots:
        of = f" of balance.strategy={strategy.name}" if slots != balance.slots else ""
        raise ValueError(
            f"balance.slots ({slots}{of}) must be <= {transport.max_slots}: transport "
            f"{transport.name} has flags for no more"
        )


_MUST_BE = (
    (
        "moe_grouped_gemm",
        False,
        "replicas join SequentialMLP or GroupedExperts; group them with model.experts=grouped_mm, "
        "in a script with megatron_ext.grouped_mm_spec",
    ),
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
"""The same for `balance.local_first`."""
