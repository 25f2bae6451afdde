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
    problems = []
    for check in (
        partial(_check_strategy, balance),
        partial(_check_transport, balance, config),
        _check_gpu,
    ):
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
    problems += _broken(MUST_BE, config, f"balance.strategy={balance.strategy}")
    if balance.local_first:
        problems += _broken(_MUST_BE_FOR_LOCAL_FIRST, config, "balance.local_first")
    if _forces_even(balance):
        problems += _broken(_MUST_BE_TO_FORCE, config, f"balance.strategy={balance.strategy}")
    if predicts(balance):
        problems += _broken(_MUST_BE_TO_PREDICT, config, f"balance.strategy={balance.strategy}")
    return problems


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


def _check_strategy(balance: BalanceConfig) -> None:
    if _forces_even(balance):
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
"""What every balanced layer needs."""

_MUST_BE_FOR_LOCAL_FIRST = (
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

_MUST_BE_TO_FORCE = (
    _Rule(
        "moe_pad_expert_input_to_capacity",
        (False,),
        "experts would get more than their capacity",
    ),
)
"""What a strategy needs besides that forces even routing."""

_MUST_BE_TO_PREDICT = (
    _Rule("moe_enable_routing_replay", (False,), "predictions would be recorded as choices"),
)
"""What strategies need besides whose layers predict the next one's load."""
