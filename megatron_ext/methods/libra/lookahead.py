"""From one balanced layer to the next: a prediction of its load, and replicas sent ahead.

A hidden state changes little from layer to layer, so the next layer's router already knows most of
its choices from this layer's input. A layer moves the next layer's replicas by that prediction,
while it computes. The next layer waits for them, plans with the exact load, and moves only what is
missing.

    layer i      plan, push; predict layer i + 1, start its replicas
                 dispatch, experts, combine             (the replicas of layer i + 1 move)
    layer i + 1  attention, route, gather load          (and move)
                 solve plan; wait for them; push what is missing; predict layer i + 2

Replicas of layer i + 1 arrive while those of layer i are used, so the layers of a chunk take two
sets of slots in turn. Nothing is sent ahead over the end of a chunk, nor in a forward that is
recomputed in backward, where layers do not come one after the other.

Source: Libra, section 3.2 and 4 (lookahead predictor, even and odd buffers).
"""

from __future__ import annotations

import dataclasses
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_ext.balance.forward import Forward
from megatron_ext.balance.layer_report import LayerReport, PredictionReport
from megatron_ext.balance.load import gather_counts, load_of
from megatron_ext.balance.metrics import replica_use
from megatron_ext.balance.plan import BalancePlan
from megatron_ext.balance.ranges import PUSH_START, stage
from megatron_ext.balance.reroute import as_map
from megatron_ext.balance.slots import Materializing, timed
from megatron_ext.balance.stage_times import TIMES, Mark
from megatron_ext.config import BalanceConfig
from megatron_ext.mcore.experts import finish_parameter_gather
from megatron_ext.mcore.moe_layer import BalancedMoELayer
from megatron_ext.mcore.recompute import in_backward


@dataclass(frozen=True, eq=False)
class Prediction:
    """What the layer before tells a layer; lives until the layer's own forward begins anew."""

    forward: Forward
    """The forward that it is for."""
    routing_map: Tensor
    """Predicted choices of this rank's tokens, bool [N, E]."""
    load: Tensor
    """Predicted assignments, int64 [R, E], equal on all ranks."""
    placed: Tensor
    """Logical expert in each slot once the replicas have arrived, or -1: int32 [R, S]."""
    pending: Materializing
    """The replicas on their way."""
    started: Mark
    """When they were sent; None if that is not timed."""

    def wait(self) -> None:
        """Return when the slots hold the replicas; called once."""
        with timed("materialize", self.started):
            self.pending.wait()


class LayerOrder:
    """Which balanced layer runs after which; shared by all layers that are made from a spec."""

    def __init__(self) -> None:
        self._last: weakref.ref[LookaheadMoELayer] | None = None

    def enter(self, layer: LookaheadMoELayer) -> LookaheadMoELayer | None:
        """Note that a layer runs now; return the layer before it in the same forward of a chunk."""
        before = self._last() if self._last is not None else None
        self._last = weakref.ref(layer)
        chunk = layer.first_layer_of_chunk
        if before is None or chunk is None or before.first_layer_of_chunk != chunk:
            return None
        return before if before.layer_number < layer.layer_number else None

    def forget(self) -> None:
        """Forget an aborted forward."""
        self._last = None


class LookaheadMoELayer(BalancedMoELayer):
    """A balanced layer that predicts the next layer's load, and sends replicas ahead to it.

    All layers of a spec share the order.
    """

    def __init__(self, *args: Any, order: LayerOrder, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._order = order
        # A reference that does not make the layer after this one a part of it.
        self._after: weakref.ref[LookaheadMoELayer] | None = None
        self._told: Prediction | None = None  # For the next forward.
        self._prediction: Prediction | None = None  # Of the forward under way.

    @classmethod
    def shared_by_layers(cls, balance: BalanceConfig) -> dict[str, Any]:
        """See `BalancedMoELayer.shared_by_layers`."""
        return {**super().shared_by_layers(balance), "order": LayerOrder()}

    def begin(self, device: torch.device) -> Forward:
        """Begin a forward with what the layer before predicted of it, if it did."""
        self._prediction = None
        if self.layout.slots > 0 and not in_backward():
            before = self._order.enter(self)
            if before is None:
                self._drop_told()
            else:
                self._prediction, self._told = self._told, None
                if before._after is None and self.balancer is None:
                    before._after = weakref.ref(self)
                    self.set_name = "" if before.set_name else "odd"
        return self._prediction.forward if self._prediction else super().begin(device)

    def solve(self, load: Tensor) -> BalancePlan:
        """Plan the load with the replicas that were sent ahead."""
        prediction = self._prediction
        return self.started.planner.solve(load, prediction.placed if prediction else None)

    def push(self, forward: Forward, there: Tensor | None = None) -> None:
        """Wait for what was sent ahead, and materialize what it lacks."""
        if self._prediction is not None:
            self._prediction.wait()
            there = self._prediction.placed
        super().push(forward, there)

    def before_dispatch(self, forward: Forward, hidden_states: Tensor, chosen: Tensor) -> None:
        """Report as every layer, and predict the next layer's load; all EP ranks call."""
        super().before_dispatch(forward, hidden_states, chosen)
        after = self._after() if self._after is not None else None
        if after is not None and not in_backward():
            after.hear(hidden_states)

    def report(self, forward: Forward, load: Tensor, chosen: Tensor) -> LayerReport:
        """Tell also how good the prediction was; the host waits for nothing."""
        report, prediction = super().report(forward, load, chosen), self._prediction
        if prediction is None:
            return report
        placed = prediction.placed.to(forward.plan.experts_in_slots.device, non_blocking=True)
        of_prediction = PredictionReport(
            load=prediction.load,
            exact_load=load,
            num_choices=chosen.sum(),
            num_right_choices=(prediction.routing_map & chosen).sum(),
            replica_use=replica_use(placed, forward.plan),
            expert_bytes=self.started.expert_bytes,
        )
        return dataclasses.replace(report, prediction=of_prediction)

    def drop_forward(self) -> None:
        """Let go of the forward under way, and of what was predicted of it."""
        self._prediction = None
        super().drop_forward()

    def forget_step(self) -> None:
        """Drop what an aborted step left in this layer."""
        self._told = None
        self._order.forget()
        super().forget_step()

    @torch.no_grad()
    def hear(self, hidden_states: Tensor) -> None:
        """Predict this layer's load by the input [s, b, H] of the layer before; send replicas."""
        self._drop_told()
        self._told = self.send_ahead(predict_routing(self.router, hidden_states))

    def send_ahead(self, predicted: Tensor) -> Prediction:
        """Start materializing the replicas of predicted choices, bool [N, E]; all EP ranks call."""
        mains = self.expert_weights.mains()
        # The layer's first forward may have been aborted before it came to either.
        balancer = self.balancer or self.start(mains.parameters()[0])
        label = f"layer {self.layer_number}, sent ahead"
        counts, _ = gather_counts(predicted, self.planning_group, rows=balancer.rows, label=label)
        load = load_of(counts, self.layout.ep_size)
        balancer.prepare_planner(mains, load, mains.parameters()[0].dtype)
        placed = balancer.planner.expect(load)
        finish_parameter_gather(self.experts)
        assert balancer.buffers is not None, "without slots nothing is predicted"
        with stage(PUSH_START):
            pending = balancer.buffers.push(placed, mains, label)
        started = TIMES.mark() if self.training else None
        forward = balancer.new_forward(mains)
        return Prediction(forward, predicted, load, placed, pending, started)

    def _drop_told(self) -> None:
        """Drop a prediction whose forward never came, on all EP ranks."""
        if self._told is not None:
            self._told.wait()
            self._told = None


def predict_routing(router: Any, hidden_states: Tensor) -> Tensor:
    """Return the choices of Megatron's router for another layer's input [s, b, H]: bool [N, E].

    The call changes nothing: without gradients Megatron's router counts nothing and adds no loss,
    and the jitter of its input, which would draw random numbers, is skipped.
    """
    finish_parameter_gather(router)
    with torch.no_grad():
        _, choices = router.routing(router.gating(hidden_states))
    return as_map(choices, router.config.num_moe_experts)
