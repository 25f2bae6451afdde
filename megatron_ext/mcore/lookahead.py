"""From one balanced layer to the next: a prediction of its load, and replicas sent ahead.

A hidden state changes little from layer to layer, so the next layer's router already knows most of
its choices from this layer's input. The replicas that a planner places by that prediction are moved
while this layer computes. The next layer waits for them, plans with the exact load, and moves only
what is missing.

    layer i      materialize, wait; predict layer i + 1, start its replicas
                 dispatch, experts, combine             (the replicas of layer i + 1 move)
    layer i + 1  attention, route, gather load          (and move)
                 wait for them; solve plan; materialize what is missing, wait; predict layer i + 2

So that replicas can arrive while others are used, the layers of a chunk take two sets of slots in
turn. Nothing is sent ahead over the end of a chunk, nor in a forward that is recomputed in
backward, where layers do not come one after the other.

Source: Libra, section 3.2 and 4 (lookahead predictor, even and odd buffers).
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_ext.balance.load import gather_load
from megatron_ext.balance.metrics import load_accuracy, replica_use
from megatron_ext.balance.plan import BalancePlan
from megatron_ext.balance.slots import SentAhead
from megatron_ext.mcore.experts import finish_parameter_gather

if TYPE_CHECKING:
    from megatron_ext.mcore.moe_layer import BalancedMoELayer


@dataclass(frozen=True)
class PredictionReport:
    """How good the prediction of one load was."""

    load: Tensor
    """Predicted assignments from source rank r to logical expert e, int64 [R, E]."""
    load_accuracy: float
    """`metrics.load_accuracy` of it."""
    choice_accuracy: float
    """Part of this rank's assignments that were predicted for the same token and expert. 1 if there
    are none."""
    hit_replicas: int
    """Sent ahead and used."""
    topped_up_replicas: int
    """Used, and moved when the load was known."""
    wasted_replicas: int
    """Sent ahead and not used."""
    sent_ahead_bytes: int
    """Weights of the replicas sent ahead: off the critical path, beside the layer before."""
    topped_up_bytes: int
    """Weights of the replicas topped up: on the critical path, behind the plan."""


@dataclass(frozen=True)
class Prediction:
    """What a layer is told by the one before it; lives until its own forward begins."""

    routing_map: Tensor
    """Predicted choices of this rank's tokens, bool [N, E]."""
    load: Tensor
    """Predicted assignments, int64 [R, E], equal on all ranks."""
    sent: SentAhead
    """The replicas on their way."""

    def report(
        self, routing_map: Tensor, load: Tensor, plan: BalancePlan, expert_bytes: int
    ) -> PredictionReport:
        """Compare with what came: choices bool [N, E], load int64 [R, E], and its plan.

        `expert_bytes` are those of one expert's weights.
        """
        right = (self.routing_map & routing_map).sum()
        use = {name: int(count) for name, count in replica_use(self.sent.slots, plan).items()}
        return PredictionReport(
            load=self.load,
            load_accuracy=load_accuracy(self.load, load),
            choice_accuracy=_ratio(right, routing_map.sum()),
            sent_ahead_bytes=expert_bytes * (use["hit_replicas"] + use["wasted_replicas"]),
            topped_up_bytes=expert_bytes * use["topped_up_replicas"],
            **use,
        )


class LayerOrder:
    """Which balanced layer runs after which; one for all layers that are made from a spec."""

    def __init__(self) -> None:
        self._last: weakref.ref[BalancedMoELayer] | None = None

    def enter(self, layer: BalancedMoELayer) -> BalancedMoELayer | None:
        """Note that `layer` runs now; return the layer before it in the same forward of a chunk."""
        before = self._last() if self._last is not None else None
        self._last = weakref.ref(layer)
        if before is None or layer.chunk is None or before.chunk != layer.chunk:
            return None
        return before if before.layer_number < layer.layer_number else None

    def forget(self) -> None:
        """Forget an aborted forward."""
        self._last = None


class Lookahead:
    """One layer's part: what it was told by the layer before it, and tells the one after it.

    Args:
        layer: The layer; makes this for strategies that predict.
        order: Shared with the other layers.
    """

    def __init__(self, layer: BalancedMoELayer, order: LayerOrder) -> None:
        self._layer = weakref.ref(layer)
        self._order = order
        self._after: Lookahead | None = None
        self._prediction: Prediction | None = None
        self.slot_set = 0
        """Which of the two sets of slots the layer uses; settled when its first forward begins."""

    def arrive(self) -> Prediction | None:
        """Begin the layer's forward; return what was predicted of it, if anything was."""
        if in_backward():
            return None
        layer = self._layer()
        assert layer is not None, "a layer runs that is gone"
        before = self._order.enter(layer)
        if before is None or before.lookahead is None:
            self._drop()
            return None
        prediction, self._prediction = self._prediction, None
        if before.lookahead._after is None and not layer.has_slots:
            before.lookahead._after = self
            self.slot_set = 1 - before.lookahead.slot_set
        return prediction

    def tell_next(self, hidden_states: Tensor) -> None:
        """Predict the next layer's load and send its replicas ahead; all EP ranks call.

        Args:
            hidden_states: The layer's input, [s, b, H].
        """
        if self._after is not None and not in_backward():
            self._after._hear(hidden_states)

    def forget(self) -> None:
        """Forget an aborted step."""
        self._prediction = None
        self._order.forget()

    def _drop(self) -> None:
        """Drop a prediction that its forward never came for, on all EP ranks."""
        if self._prediction is not None:
            self._prediction.sent.wait()
            self._prediction = None

    @torch.no_grad()
    def _hear(self, hidden_states: Tensor) -> None:
        layer = self._layer()
        if layer is None:
            return
        self._drop()
        routing_map = predict_routing(layer.router, hidden_states)
        load = gather_load(routing_map, layer.ep_group)
        sent = layer.send_ahead(load)
        self._prediction = Prediction(routing_map, load, sent)


def predict_routing(router: Any, hidden_states: Tensor) -> Tensor:
    """Return a router's choices for another layer's input, bool [N, E].

    Leaves no trace: without gradients Megatron's router counts nothing and adds no loss, and the
    jitter of its input, which would draw random numbers, is left out.

    Args:
        router: Megatron's router.
        hidden_states: [s, b, H].
    """
    finish_parameter_gather(router)
    with torch.no_grad():
        _, routing_map = router.routing(router.gating(hidden_states))
    return routing_map


def in_backward() -> bool:
    """Whether autograd runs a backward in this thread: a forward is then a recomputed one."""
    return torch._C._current_graph_task_id() != -1


def _ratio(part: Tensor, whole: Tensor) -> float:
    return float(part) / float(whole) if whole else 1.0
