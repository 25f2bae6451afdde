"""Predicts the load of the next balanced layer, and sends that layer's replicas ahead.

A hidden state changes little from layer to layer, so the next layer's router already knows most of
its choices from this layer's input. While a layer computes, the replicas of the predicted load move
to the next layer's slots. The next layer waits for these replicas, plans with the exact load, and
moves only the missing ones.

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
from megatron_ext.balance.layer_report import LayerReport
from megatron_ext.balance.load import gather_counts, load_of
from megatron_ext.balance.plan import BalancePlan
from megatron_ext.balance.predictions import PredictionReport, replica_use
from megatron_ext.balance.ranges import PUSH_START, stage
from megatron_ext.balance.reroute import as_map
from megatron_ext.balance.slots import Materializing, timed
from megatron_ext.balance.stage_times import TIMES, Mark
from megatron_ext.config import BalanceConfig
from megatron_ext.mcore.experts import finish_parameter_gather
from megatron_ext.mcore.moe_layer import BalancedMoELayer
from megatron_ext.mcore.recompute import in_backward
from megatron_ext.transport import Transfers


@dataclass(frozen=True, eq=False)
class Prediction:
    """A prediction of one forward by the layer before; lives until the combine of that forward."""

    forward: Forward
    """The predicted forward."""
    routing_map: Tensor
    """Predicted choices of this rank's tokens, bool [N, E]."""
    load: Tensor
    """Predicted assignments, int64 [R, E], equal on all ranks."""
    placed: Tensor
    """Logical expert in each slot once the replicas have arrived, or -1: int32 [R, S]."""
    pending: Materializing
    """The replicas on their way."""
    sent: Mark
    """The start of the push; None if the push is not timed."""

    def wait(self) -> None:
        """Return when the slots hold the replicas; called once."""
        with timed("materialize", self.sent):
            self.pending.wait()


class LayerOrder:
    """Keeps the order of a spec's balanced layers, as they are built, and one prediction."""

    def __init__(self) -> None:
        self._last: weakref.ref[LookaheadMoELayer] | None = None
        # The layer that is predicted, and the prediction.
        self._told: tuple[weakref.ref[LookaheadMoELayer], Prediction] | None = None

    def add(self, layer: LookaheadMoELayer) -> LookaheadMoELayer | None:
        """Note that a layer is built; return the layer before it in the same chunk."""
        before = self._last() if self._last is not None else None
        self._last = weakref.ref(layer)
        if before is None or before.first_layer_of_chunk != layer.first_layer_of_chunk:
            return None
        # Another model of the spec begins with a first layer.
        return before if before.layer_number < layer.layer_number else None

    def tell(self, layer: LookaheadMoELayer, prediction: Prediction) -> None:
        """Keep a prediction for the layer that runs next."""
        self._told = weakref.ref(layer), prediction

    def told(self, layer: LookaheadMoELayer) -> Prediction | None:
        """Return the prediction for a layer that begins; drop the prediction for another layer."""
        if self._told is None:
            return None
        (told, prediction), self._told = self._told, None
        if told() is layer:
            return prediction
        prediction.wait()
        return None

    def forget(self) -> None:
        """Forget an aborted forward."""
        self._told = None


class LookaheadMoELayer(BalancedMoELayer):
    """A balanced layer that predicts the next layer's load, and sends replicas ahead to it.

    All layers of a spec share the order.
    """

    def __init__(self, *args: Any, order: LayerOrder, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._order = order
        # A weak reference, because the layer after this one must not become its submodule.
        self._after: weakref.ref[LookaheadMoELayer] | None = None
        self._prediction: Prediction | None = None  # Of the forward under way.

    @classmethod
    def shared_by_layers(cls, balance: BalanceConfig) -> dict[str, Any]:
        """See `BalancedMoELayer.shared_by_layers`."""
        return {**super().shared_by_layers(balance), "order": LayerOrder()}

    def set_chunk(self, first_layer: int) -> None:
        """Take the other set of slots than the layer before, which will send replicas ahead."""
        super().set_chunk(first_layer)
        before = self._order.add(self)
        if before is not None and self.layout.slots > 0:
            before._after = weakref.ref(self)
            self.set_name = "" if before.set_name else "odd"

    def begin(self, device: torch.device) -> Forward:
        """Begin a forward with the prediction of the layer before, if there is one."""
        self._prediction = None if in_backward() else self._order.told(self)
        return self._prediction.forward if self._prediction else super().begin(device)

    def solve(self, load: Tensor) -> BalancePlan:
        """Plan the load with the replicas that were sent ahead."""
        prediction = self._prediction
        return self.balancer.planner.solve(load, prediction.placed if prediction else None)

    def push(self, forward: Forward, there: Tensor | None = None) -> None:
        """Wait for the replicas that were sent ahead, and materialize the missing ones."""
        if self._prediction is not None:
            self._prediction.wait()
            if forward.has_slots:  # No later push has overwritten the replicas.
                there = self._prediction.placed
        super().push(forward, there)

    def before_dispatch(self, forward: Forward, hidden_states: Tensor, chosen: Tensor) -> None:
        """Report as every layer, and predict the next layer's load; all EP ranks call."""
        super().before_dispatch(forward, hidden_states, chosen)
        after = self._after() if self._after is not None else None
        if after is not None and not in_backward():
            after.hear(hidden_states)

    def report(self, forward: Forward, load: Tensor, chosen: Tensor) -> LayerReport:
        """Add the accuracy of the prediction to the report; the host waits for nothing."""
        report, prediction = super().report(forward, load, chosen), self._prediction
        if prediction is None:
            return report
        placed = prediction.placed.to(forward.plan.experts_in_slots.device, non_blocking=True)
        of_prediction = PredictionReport(
            load=prediction.load,
            exact_load=load,
            num_choices=chosen.sum(),
            num_right_choices=(prediction.routing_map & chosen).sum(),
            **replica_use(placed, forward.plan),
            expert_bytes=report.weight_bytes,
        )
        return dataclasses.replace(report, prediction=of_prediction)

    def drop_forward(self) -> None:
        """Let go of the forward under way, and of its prediction."""
        self._prediction = None
        super().drop_forward()

    def forget_step(self) -> None:
        """Drop what an aborted step left in this layer."""
        self._order.forget()
        super().forget_step()

    @torch.no_grad()
    def hear(self, hidden_states: Tensor) -> None:
        """Predict this layer's load by the input [s, b, H] of the layer before; send replicas."""
        self._order.tell(self, self.send_ahead(predict_routing(self.router, hidden_states)))

    def send_ahead(self, predicted: Tensor) -> Prediction:
        """Start materializing the replicas of predicted choices, bool [N, E]; all EP ranks call."""
        balancer, mains = self.balancer_for(predicted.device)
        label = f"layer {self.layer_number}, sent ahead"
        counts, _ = gather_counts(predicted, self.planning_group, rows=balancer.rows, label=label)
        load = load_of(counts, self.layout.ep_size)
        balancer.prepare_planner(mains, load, mains.parameters()[0].dtype)
        placed = balancer.planner.expect(load)
        finish_parameter_gather(self.experts)
        assert balancer.buffers is not None, "without slots nothing is predicted"
        with stage(PUSH_START):
            replicas = Transfers(placed, self.layout.mains_per_rank)
            pending = balancer.buffers.push(replicas, mains, label)
        sent = TIMES.mark() if self.training else None
        forward = balancer.new_forward(mains)
        forward.num_pushes = balancer.buffers.num_pushes
        return Prediction(forward, predicted, load, placed, pending, sent)


def predict_routing(router: Any, hidden_states: Tensor) -> Tensor:
    """Return the choices of Megatron's router for another layer's input [s, b, H]: bool [N, E].

    The call changes nothing: without gradients Megatron's router counts nothing and adds no loss,
    and the jitter of its input, which would draw random numbers, is skipped. So is an adapter that
    a program has put around the router.
    """
    finish_parameter_gather(router)
    router = next(part for part in router.modules() if hasattr(part, "routing"))
    with torch.no_grad():
        _, choices = router.routing(router.gating(hidden_states))
    return as_map(choices, router.config.num_moe_experts)
