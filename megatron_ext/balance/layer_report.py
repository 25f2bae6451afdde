"""Defines the report of one microbatch, which a layer gives to its observers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from megatron_ext.balance.forward import Moves
from megatron_ext.balance.layout import ExpertLayout

if TYPE_CHECKING:
    from megatron_ext.balance.predictions import PredictionReport


@dataclass(frozen=True)
class LayerReport:
    """What one layer did with one microbatch; given to the layer's observers."""

    layer_number: int
    """See `number_of`."""
    load: Tensor
    """Assignments from source rank r to logical expert e, int64 [R, E]."""
    rank_loads_after: Tensor
    """Assignments that each rank computes, int64 [R]."""
    experts_in_slots: Tensor
    """Logical expert in each slot of each rank by the plan, or -1, int32 [R, S]."""
    prediction: PredictionReport | None = None
    """How good the prediction by the layer before was; None without a prediction, as in a
    recomputed forward."""
    layout: ExpertLayout | None = None
    """Where experts and slots are; None for routing that was forced even."""
    weight_bytes: int = 0
    """Bytes of one replica's weights, over all shards."""
    grad_bytes: int = 0
    """Bytes of one replica's gradients, over all shards."""
    moves: Moves = field(default_factory=Moves)
    """How often its replicas have moved; complete when the step is over."""
    rows_over: Tensor | None = None
    """Rows of each rank beyond `moe_expert_rank_capacity_factor`, which are dropped: int64 [R];
    None without this limit."""

    @property
    def num_replicas(self) -> int:
        """Slots in use. Waits for the device, so it is better read after the step."""
        return int((self.experts_in_slots >= 0).sum())


Observer = Callable[[LayerReport], None]


def number_of(layer: Any) -> int:
    """Return the number of an MoE layer in its model, from 1 on.

    Layers of multi-token prediction follow the decoder's; Megatron-Core from 0.17 on counts them
    from 1, in hybrid models from 1 for each predicted token (`number_predicting`).
    """
    # A program may have wrapped the router, as with an adapter.
    parts = layer.router.modules()
    number: int = next(part.layer_number for part in parts if hasattr(part, "layer_number"))
    if getattr(layer, "is_mtp_layer", False):
        number += layer.config.num_layers + getattr(layer, "num_predicting_before", 0)
    return number
