"""What a layer tells its observers of one microbatch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from megatron_ext.balance.in_flight import Moves
from megatron_ext.balance.layout import ExpertLayout
from megatron_ext.balance.plan import BalancePlan
from megatron_ext.mcore.lookahead import PredictionReport


@dataclass(frozen=True)
class LayerReport:
    """What one layer did with one microbatch; given to the layer's observers."""

    layer_number: int
    """1-based, as in Megatron."""
    load: Tensor
    """Assignments from source rank r to logical expert e, int64 [R, E]."""
    rank_loads_after: Tensor
    """Assignments that each rank computes, int64 [R]."""
    slots: Tensor
    """Logical expert in each slot of each rank by the plan, or -1, int32 [R, S]."""
    prediction: PredictionReport | None = None
    """How good the prediction by the layer before was; None without a prediction, as in a
    recomputed forward."""
    layout: ExpertLayout | None = None
    """Where experts and slots are; None for routing that was forced even."""
    weight_bytes: int = 0
    """Bytes of one replica's weights, over all shards."""
    grad_bytes: int = 0
    """Bytes of its gradients."""
    moves: Moves = field(default_factory=Moves)
    """How often its replicas have moved; complete when the step is over."""

    @property
    def num_replicas(self) -> int:
        """Slots in use. Waits for the device, so it is better read after the step."""
        return int((self.slots >= 0).sum())


Observer = Callable[[LayerReport], None]

PlanObserver = Callable[[BalancePlan, Tensor | None], None]
"""Is called with a plan, and the slots int32 [R, S] that were sent ahead for it, or None."""
