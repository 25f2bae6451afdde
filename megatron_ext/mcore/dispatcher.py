"""Stages 5 and 7: token dispatch and combine over physical experts, by Megatron's own dispatchers.

A dispatcher sends each token to the ranks that hold its experts and knows nothing else of them.
Given M + S experts a rank instead of M and a routing map over physical experts, Megatron's
dispatchers do all that is needed as they are. Only `balance.local_first` needs one of another kind
(local_first.py).
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from megatron_ext.balance.layout import ExpertLayout
from megatron_ext.mcore.local_first import LocalFirstDispatcher


def physical_dispatcher(
    dispatcher: Any,
    layout: ExpertLayout,
    config: Any,
    ep_rank: int,
    pg_collection: Any,
    *,
    local_first: bool = False,
) -> Any:
    """Return a dispatcher of the same kind as `dispatcher` for routing maps [N, P].

    Args:
        dispatcher: The one that Megatron's layer made for logical experts.
        layout: Experts and slots of the EP group.
        config: The layer's TransformerConfig.
        ep_rank: This rank in the EP group.
        pg_collection: Process groups of the layer.
        local_first: Keep own tokens out of the exchange; `dispatcher` is all-to-all.
    """
    per_rank = layout.physical_per_rank
    local_experts = list(range(ep_rank * per_rank, (ep_rank + 1) * per_rank))
    # A shallow copy keeps every other setting; __post_init__ must not run again on a finished
    # config.
    physical_config = copy.copy(config)
    physical_config.num_moe_experts = layout.num_physical
    kind = LocalFirstDispatcher if local_first else type(dispatcher)
    physical = kind(per_rank, local_experts, config=physical_config, pg_collection=pg_collection)
    if dispatcher.shared_experts is not None:
        physical.set_shared_experts(dispatcher.shared_experts)
    return physical


def release_graph(dispatcher: Any) -> None:
    """Let go of the autograd graph that a dispatcher holds through the probabilities it remembers.

    Megatron's dispatchers keep them until the next microbatch, only to look at their dtype. Of a
    step that was aborted, this would keep the graph alive, and with it the plans of earlier layers.
    """
    for name in ("probs", "local_probs"):
        remembered = getattr(dispatcher, name, None)
        if isinstance(remembered, torch.Tensor):
            setattr(dispatcher, name, remembered.detach())
