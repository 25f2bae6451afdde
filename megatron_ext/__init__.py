"""Expert load balancing for MoE training on stock Megatron-Core.

The path of one microbatch through one MoE layer, stage by stage. `mcore/moe_layer.py` runs the
stages; stage 4 starts before stage 3 and ends before stage 6:

    1 balance/load.py       exact load: every rank's assignments to every expert
    2 balance/plan.py       which experts to replicate where, and the quota of every instance
    3 balance/reroute.py    each assignment to an instance, so that the quotas are met
    4 balance/slots.py      main weights into slots            (transport/ moves the bytes)
    5 mcore/dispatcher.py   tokens to the instances' ranks
    6 mcore/experts.py      experts over mains and slots
    7 mcore/dispatcher.py   outputs back
    8 in backward, after stage 4 once more
      balance/slots.py         slot gradients into sums
      balance/main_weights.py  what sums go into (`totals`)

`balance/forward.py` holds one forward, and shows stages 4 and 8 to autograd.
"""

from __future__ import annotations

import importlib

# As `typing` has it: Ctrl-C gives a traceback until a command has imported this file.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from megatron_ext.balance.costs import LayerCosts as LayerCosts
    from megatron_ext.balance.plan import BalancePlan as BalancePlan
    from megatron_ext.balance.solve import solve as solve
    from megatron_ext.config import BalanceConfig as BalanceConfig
    from megatron_ext.cpu_platform import enable_cpu_platform as enable_cpu_platform
    from megatron_ext.mcore.between_steps import reset_after_abort as reset_after_abort
    from megatron_ext.mcore.bridge_callback import BridgeCallback as BridgeCallback
    from megatron_ext.mcore.check import check as check
    from megatron_ext.mcore.grouped_experts import grouped_mm_spec as grouped_mm_spec
    from megatron_ext.mcore.provider import balanced_provider_spec as balanced_provider_spec
    from megatron_ext.mcore.spec import balance_spec as balance_spec
    from megatron_ext.mcore.step_metrics import StepMetrics as StepMetrics

_HOMES = {
    "BalanceConfig": "megatron_ext.config",
    "BalancePlan": "megatron_ext.balance.plan",
    "BridgeCallback": "megatron_ext.mcore.bridge_callback",
    "LayerCosts": "megatron_ext.balance.costs",
    "StepMetrics": "megatron_ext.mcore.step_metrics",
    "balance_spec": "megatron_ext.mcore.spec",
    "balanced_provider_spec": "megatron_ext.mcore.provider",
    "check": "megatron_ext.mcore.check",
    "enable_cpu_platform": "megatron_ext.cpu_platform",
    "grouped_mm_spec": "megatron_ext.mcore.grouped_experts",
    "reset_after_abort": "megatron_ext.mcore.between_steps",
    "solve": "megatron_ext.balance.solve",
}

__all__ = [*_HOMES]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> object:
    """Import public names at first use: the CPU platform must come before Megatron."""
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name == "__version__":  # Written in pyproject.toml only.
        return importlib.import_module("importlib.metadata").version("megatron-ext")
    raise AttributeError(f"module 'megatron_ext' has no attribute {name!r}")
