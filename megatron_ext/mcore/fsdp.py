"""Experts of which Megatron-FSDP keeps shards: it gathers them for their layer, and frees them.

While a layer runs, its mains are whole, and a push reads them as any others. Their gradients are
those of one microbatch: fused products overwrite `main_grad`, the replicas' sums are added to it,
and behind the join Megatron-FSDP scatters it. Unfused, autograd adds the sums.
"""

from __future__ import annotations

from typing import Any

from megatron_ext.balance.strategies import of_methods
from megatron_ext.config import BalanceConfig
from megatron_ext.mcore.limits import DELAYS


def check_beside_fsdp(config: Any, balance: BalanceConfig) -> None:
    """Check that nothing needs mains, or writes their gradients, at another time.

    Raises:
        ValueError: A setting does.
    """
    fields = (*DELAYS, "overlap_moe_expert_parallel_comm")
    met = [name for name in fields if getattr(config, name, None)]
    met += of_methods("LAYERS", balance)
    met += ["balance.objective=time with costs to measure"] * bool(balance.costs_to_measure)
    if met:
        raise ValueError(
            f"{' and '.join(met)} must not be set with Megatron-FSDP (--use-megatron-fsdp), which "
            "gathers a layer's weights, and takes their gradients, in the layer's own time"
        )
