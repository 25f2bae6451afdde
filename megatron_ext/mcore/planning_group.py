"""Finds the ranks that must make the same plan, and checks their settings and plans.

Each of these ranks plans alone, from the same load and by the same settings.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import asdict
from typing import Any

import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer

from megatron_ext.balance.agreement import name_ranks
from megatron_ext.balance.plan import BalancePlan
from megatron_ext.config import BalanceConfig
from megatron_ext.transport.reach import gather

logger = logging.getLogger(__name__)

LATE_S = 60.0
"""A rank that waits so long for the first answer of others says that they may have no balancing."""


def warn_if_late(what: str) -> threading.Timer:
    """Warn of ranks without balancing, which never answer, unless the result is cancelled soon."""
    text = (
        f"rank {dist.get_rank()} has waited {LATE_S:.0f} s for the other ranks {what}: all ranks "
        "of a model must call balance_spec or balance_models with equal settings, also those of "
        "pipeline stages without MoE layers; a rank that has not never answers"
    )
    timer = threading.Timer(LATE_S, logger.warning, [text])
    timer.daemon = True
    timer.start()
    return timer


def planning_group(layer: MoELayer) -> dist.ProcessGroup:
    """Return the ranks that share a layer's experts; ranks with shards of one expert are adjacent.

    The experts compute the tokens of all these ranks. So all of them plan by the same load, and
    each shard of a replica goes to a slot within the EP group of that shard.
    """
    dispatcher: Any = layer.token_dispatcher
    if dispatcher.tp_size == 1:
        return layer.ep_group
    group: dist.ProcessGroup = dispatcher.tp_ep_group
    assert group.rank() == layer.ep_group.rank() * dispatcher.tp_size + dispatcher.tp_rank
    return group


def check_equal_config(balance: BalanceConfig, group: dist.ProcessGroup) -> None:
    """Check that all ranks have equal settings, because each rank plans alone."""
    late = warn_if_late("of an EP group to build a balanced layer")
    try:
        settings = gather(asdict(balance), group)
    finally:
        late.cancel()
    for rank, other in enumerate(settings):
        for name, value in settings[0].items():
            if other[name] != value:
                raise ValueError(
                    f"balance.{name} must be equal on all ranks that share experts: "
                    f"rank 0 has {value!r}, rank {rank} has {other[name]!r}"
                )


def check_equal_plans(
    plan: BalancePlan, group: dist.ProcessGroup, layer_number: int | None
) -> None:
    """Compare the content of all ranks' plans; all ranks call (`balance.check_plans`)."""
    digests = gather(plan.digest(), group)
    if different := [rank for rank, digest in enumerate(digests) if digest != digests[0]]:
        num_shards = group.size() // plan.layout.ep_size
        raise RuntimeError(
            f"layer {layer_number}: {name_ranks(different, num_shards)} solved another plan than "
            f"rank 0 (digests {digests}); planning must be the same integer arithmetic on the same "
            "load"
        )
