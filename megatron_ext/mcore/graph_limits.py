"""Refuses CUDA graphs of Megatron that hold what a replay cannot repeat.

Graphs of layers end before the plan (`partial_graphs.py`). Graphs of whole steps have the plan in
them (`full_graphs.py`), so nothing in such a step may ask the host: a replay runs no Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_ext.balance.strategies import STRATEGIES
from megatron_ext.config import BalanceConfig
from megatron_ext.transport import TRANSPORTS

SCOPES = ("attn", "mlp", "mamba", "moe_router", "moe_preprocess")
"""What of a layer its graph may hold."""

_FULL = "full_iteration"
_WHOLE_STEPS = f"CUDA graphs of whole steps ({_FULL})"


def hold_whole_steps(config: Any) -> bool:
    """Whether CUDA graphs hold whole steps, and not parts of layers."""
    impl = getattr(config, "cuda_graph_impl", None)
    # Megatron-Core before 0.19 says it by a scope, and so do recipes.
    return impl == _FULL or (impl == "local" and _scopes(config)[1] == [_FULL])


def hold_routers(config: Any) -> bool:
    """Whether CUDA graphs of layers hold routers: their replays call no hook of these."""
    if hold_whole_steps(config) or getattr(config, "cuda_graph_impl", "none") == "none":
        return False
    names = _scopes(config)[1]
    return not names or "moe_router" in names


def _scopes(config: Any) -> tuple[str, list[str]]:
    """Return the field that says what the graphs of layers hold, and its names."""
    # The field's name from 0.17 on, and before.
    is_new = hasattr(config, "cuda_graph_modules")
    field = "cuda_graph_modules" if is_new else "cuda_graph_scope"
    value = getattr(config, field, None) or []
    scopes = value.split(",") if isinstance(value, str) else value
    return field, [getattr(each, "name", each) for each in scopes]


def layer_graph_problem(config: Any, impls: Sequence[str]) -> tuple[str, str, str] | None:
    """Return what is wrong with graphs of layers: a field, its value, and what it must be; or None.

    `impls` are the implementations that can be allowed.
    """
    if hold_whole_steps(config):
        return None
    # Only in the layers of hybrid models do Megatron's own graphs leave out the experts.
    is_hybrid = getattr(config, "is_hybrid_model", False)
    allowed = [each for each in impls if each != "local" or is_hybrid]
    impl = config.cuda_graph_impl
    if impl not in allowed:
        return "cuda_graph_impl", repr(impl), " or ".join(map(repr, allowed))
    field, names = _scopes(config)
    if names and {*names} <= {*SCOPES}:
        return None
    return field, ", ".join(names) or "whole layers", f"of {', '.join(SCOPES)}"


def host_problems(config: Any, balance: BalanceConfig) -> list[str]:
    """Return what would ask the host in whole steps, if graphs hold these."""
    if not hold_whole_steps(config):
        return []
    problems = []
    strategy = STRATEGIES.get(balance.strategy)
    if strategy is not None and not strategy.plans_on_device:
        names = [name for name, each in STRATEGIES.items() if each.plans_on_device]
        problems.append(
            f"balance.strategy ({balance.strategy}) must be {' or '.join(names)} with "
            f"{_WHOLE_STEPS}: other strategies plan on the host"
        )
    if balance.check_plans:
        problems.append(
            f"balance.check_plans (True) must be False with {_WHOLE_STEPS}: the host would compare "
            "plans; the device compares digests of them as always"
        )
    transport = TRANSPORTS.get(balance.transport)
    if transport is not None and not transport.in_graphs:
        problems.append(
            f"balance.transport ({transport.name}) must be another with {_WHOLE_STEPS}: nobody has "
            "captured its calls (set balance.transport=cuda)"
        )
    elif transport is not None and transport.lists_transfers:
        problems.append(
            f"balance.transport ({transport.name}) must be another with {_WHOLE_STEPS}: its host "
            "waits for plans (keep the EP group in one NVLink domain, or set balance.nvlink_domain)"
        )
    if getattr(config, "cuda_graph_warmup_steps", None) == 0:
        problems.append(
            f"cuda_graph_warmup_steps (0) must be >= 1 with {_WHOLE_STEPS}: slots are made in the "
            "first step (set --cuda-graph-warmup-steps 1)"
        )
    has_sizes = getattr(config, "moe_expert_rank_capacity_factor", None) is not None
    is_padded = config.moe_pad_expert_input_to_capacity
    if config.expert_model_parallel_size > 1 and not (has_sizes or is_padded):
        problems.append(
            f"moe_expert_rank_capacity_factor (None) must be set with {_WHOLE_STEPS}: dispatchers "
            "ask the host for sizes, unless the sizes are fixed (set --moe-token-dispatcher-type "
            "flex --moe-flex-dispatcher-backend hybridep --moe-expert-rank-capacity-factor 1.05, "
            "of Megatron-Core 0.19)"
        )
    return problems
