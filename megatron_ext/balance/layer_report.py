"""Defines the report of one microbatch, which a layer gives to its observers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from megatron_ext.balance.forward import Moves
from megatron_ext.balance.layout import ExpertLayout
from megatron_ext.balance.metrics import load_accuracy


@dataclass(frozen=True, eq=False)
class PredictionReport:
    """How good the prediction of one load was.

    Fields are tensors on the layer's device. Properties are computed from them and wait for the
    device, so they are better read after the step.
    """

    load: Tensor
    """Predicted assignments from source rank r to logical expert e, int64 [R, E]."""
    exact_load: Tensor
    """The assignments that came, int64 [R, E]."""
    num_choices: Tensor
    """This rank's assignments, int64 []."""
    num_right_choices: Tensor
    """This rank's assignments that were predicted for the same token and expert, int64 []."""
    replica_use: dict[str, Tensor]
    """`metrics.replica_use` of the replicas sent ahead, int64 [] each."""
    expert_bytes: int
    """Bytes of one expert's weights."""

    @property
    def load_accuracy(self) -> float:
        """`metrics.load_accuracy` of the prediction."""
        return load_accuracy(self.load, self.exact_load)

    @property
    def choice_accuracy(self) -> float:
        """Part of this rank's assignments that were predicted; 1 if there are none."""
        return float(self.num_right_choices) / float(self.num_choices) if self.num_choices else 1.0

    @property
    def hit_replicas(self) -> int:
        """Replicas sent ahead and used."""
        return int(self.replica_use["hit_replicas"])

    @property
    def topped_up_replicas(self) -> int:
        """Replicas used, and moved when the load was known."""
        return int(self.replica_use["topped_up_replicas"])

    @property
    def wasted_replicas(self) -> int:
        """Replicas sent ahead and not used."""
        return int(self.replica_use["wasted_replicas"])

    @property
    def sent_ahead_bytes(self) -> int:
        """Bytes of replicas sent ahead: off the critical path, beside the layer before."""
        return self.expert_bytes * (self.hit_replicas + self.wasted_replicas)

    @property
    def topped_up_bytes(self) -> int:
        """Bytes of replicas topped up: on the critical path, behind the plan."""
        return self.expert_bytes * self.topped_up_replicas


@dataclass(frozen=True)
class LayerReport:
    """What one layer did with one microbatch; given to the layer's observers."""

    layer_number: int
    """1-based, as in Megatron."""
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
