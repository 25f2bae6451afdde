"""Where a layer's experts and slots are."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from megatron_ext.balance.layout import ExpertLayout
from megatron_ext.balance.planner import plan_layout
from megatron_ext.config import BalanceConfig


def layout_of(config: Any, balance: BalanceConfig, ep_size: int) -> ExpertLayout:
    """Return where a layer's experts and slots are, with domains as `balance` says them.

    Args:
        config: Megatron's TransformerConfig.
        balance: What the balancer may do.
        ep_size: Ranks of the EP group (R).
    """
    layout = plan_layout(
        balance.strategy,
        num_experts=config.num_moe_experts,
        ep_size=ep_size,
        slots=balance.slots,
        nvlink_domain=balance.domain_ranks,
    )
    # One rank has nobody to share its load with.
    has_slots = ep_size > 1 and not config.moe_pad_expert_input_to_capacity
    return layout if has_slots else dataclasses.replace(layout, slots=0)


def experts_device() -> torch.device:
    """Where the experts of this rank will be, also if they are still to be moved there."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
