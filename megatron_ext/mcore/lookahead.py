"""From one balanced layer to the next: a prediction of its load, and replicas sent ahead.

A hidden state changes little from layer to layer, so the next layer's router already knows most of
its choices from this layer's input. The replicas that a planner places by that prediction are moved
while this layer computes. The next layer waits for them, plans with the exact load, and moves only
what is missing.

    layer i      materialize, wait; predict layer i + 1, start its replicas
                 dispatch, experts, combine             (the replicas of layer i + 1 move)
    layer i + 1  attention, route, gather load          (and move)
                 wait for them; solve plan; materialize what is missing, wait; predict layer i + 2

Replicas of layer i + 1 arrive while those of layer i are used, so the layers of a chunk take two
sets of slots in turn. Nothing is sent ahead over the end of a chunk, nor in a forward that is
recomputed in backward, where layers do not come one after the other.

Source: Libra, section 3.2 and 4 (lookahead predictor, even and odd buffers).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron_ext.balance.metrics import load_accuracy, replica_use
from megatron_ext.balance.plan import BalancePlan
from megatron_ext.balance.reroute import as_map
from megatron_ext.balance.slots import SentAhead
from megatron_ext.mcore.experts import finish_parameter_gather
from megatron_ext.mcore.recompute import in_backward


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
class Prediction:
    """What a layer is told by the layer before it; lives until the layer's own forward ends."""

    routing_map: Tensor
    """Predicted choices of this rank's tokens, bool [N, E]."""
    load: Tensor
    """Predicted assignments, int64 [R, E], equal on all ranks."""
    sent: SentAhead
    """The replicas on their way."""

    def report(
        self, routing_map: Tensor, load: Tensor, plan: BalancePlan, expert_bytes: int
    ) -> PredictionReport:
        """Compare with the actual choices bool [N, E], load int64 [R, E], and its plan.

        `expert_bytes` are those of one expert's weights. The host waits for nothing.
        """
        placed = self.sent.slots.to(plan.slots.device, non_blocking=True)
        return PredictionReport(
            load=self.load,
            exact_load=load,
            num_choices=routing_map.sum(),
            num_right_choices=(self.routing_map & routing_map).sum(),
            replica_use=replica_use(placed, plan),
            expert_bytes=expert_bytes,
        )


class LayerPlace(NamedTuple):
    """Where a layer stands in its model."""

    chunk: int | None
    """Layers before the first layer of its chunk; None if unknown."""
    layer_number: int
    """1-based, as in Megatron."""


class LayerOrder:
    """Which balanced layer runs after which; shared by all layers that are made from a spec."""

    def __init__(self) -> None:
        self._last: weakref.ref[Lookahead] | None = None
        self._last_place = LayerPlace(None, 0)

    def enter(self, layer: Lookahead, place: LayerPlace) -> Lookahead | None:
        """Note that a layer runs now; return the layer before it in the same forward of a chunk."""
        before, place_before = self._last() if self._last is not None else None, self._last_place
        self._last, self._last_place = weakref.ref(layer), place
        if place.chunk is None or place_before.chunk != place.chunk:
            return None
        return before if place_before.layer_number < place.layer_number else None

    def forget(self) -> None:
        """Forget an aborted forward."""
        self._last = None


class Lookahead:
    """One layer's part: what the layer before it told, and what it tells the next layer.

    Args:
        order: Shared with the other layers.
        router: Megatron's router of the layer.
        send_ahead: Method of the layer that gathers the load, int64 [R, E], of this rank's
            predicted choices, bool [N, E], and starts to move its replicas into the layer's slots.
            This reference does not keep the layer alive.
    """

    def __init__(
        self,
        order: LayerOrder,
        *,
        router: nn.Module,
        send_ahead: Callable[[Tensor], tuple[Tensor, SentAhead]],
    ) -> None:
        self._order = order
        self._router = router
        self._send_ahead = weakref.WeakMethod(send_ahead)
        self._after: Lookahead | None = None
        self._prediction: Prediction | None = None
        self._slot_set = 0
        self._is_settled = False

    @property
    def is_idle(self) -> bool:
        """Whether there is no prediction for the layer's next forward."""
        return self._prediction is None

    def settle_slot_set(self) -> int:
        """Return which of the two sets of slots the layer uses, from its first forward on."""
        self._is_settled = True
        return self._slot_set

    def arrive(self, place: LayerPlace) -> Prediction | None:
        """Begin the layer's forward; return its prediction, if there is one."""
        if in_backward():
            return None
        before = self._order.enter(self, place)
        if before is None:
            self._drop()
            return None
        prediction, self._prediction = self._prediction, None
        if before._after is None and not self._is_settled:
            before._after = self
            self._slot_set = 1 - before._slot_set
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
        """Drop a prediction whose forward never came, on all EP ranks."""
        if self._prediction is not None:
            self._prediction.sent.wait()
            self._prediction = None

    @torch.no_grad()
    def _hear(self, hidden_states: Tensor) -> None:
        send_ahead = self._send_ahead()
        if send_ahead is None:  # The layer is gone.
            return
        self._drop()
        predicted = predict_routing(self._router, hidden_states)
        self._prediction = Prediction(predicted, *send_ahead(predicted))


def predict_routing(router: Any, hidden_states: Tensor) -> Tensor:
    """Return a router's choices for another layer's input, bool [N, E].

    The call changes nothing: without gradients Megatron's router counts nothing and adds no loss,
    and the jitter of its input, which would draw random numbers, is skipped.

    Args:
        router: Megatron's router.
        hidden_states: [s, b, H].
    """
    finish_parameter_gather(router)
    with torch.no_grad():
        _, choices = router.routing(router.gating(hidden_states))
    return as_map(choices, router.config.num_moe_experts)
