"""The one door through which tests see what a balanced layer holds, and where they step into it.

A layer has little that programs may use: its settings, groups, layout, observers. All else is named
here once, so that the plug-in's inside may change without its tests. Functions take a layer and say
what it holds. Constants name functions of the plug-in: `mock.patch(SOLVE, other)` replaces one for
all layers of a process, and `original(SOLVE)` is the one that was there.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

GATHER_LOAD = "megatron_ext.balance.agreement.Agreement.gather_counts"
"""Stage 1: what all ranks count. Returns the counts first."""
SOLVE = "megatron_ext.balance.planner.LayerPlanner.solve"
"""Stage 2: the plan of a load, by the `planner` of a layer."""
SHARE = "megatron_ext.balance.agreement.Agreement.share"
"""A rank's shares of a plan, sealed for the comparison with other ranks'."""
CANCEL_WAITS = "megatron_ext.transport.transport.Transport.cancel"
FORGET_SEALS = "megatron_ext.balance.agreement.Agreement.forget"
REROUTE = "megatron_ext.mcore.moe_layer.reroute"
"""Stage 3, where the router chose by a map."""
RUN_EXPERTS = "megatron_ext.mcore.experts.ExpertWeights.run"
"""Stage 6, of a layer's forward, and the experts that run to be measured."""

MAKE_SLOTS = "megatron_ext.mcore.balancer.shared_slot_buffers"
"""Makes the slots of a layer, or finds those it shares: layout first, then what the layer asks."""
MAKE_TRANSPORT = "megatron_ext.balance.slots.make_transport"
RESET_SLOTS = "megatron_ext.balance.slots.SlotBuffers.reset"
START_MATERIALIZE = "megatron_ext.balance.forward.Forward.push"
"""Stage 4, in a forward: of the plan of its first argument, but for what is there already."""
PUSH = "megatron_ext.transport.shared_memory.SharedMemoryTransport.push"
"""Stage 4, in a forward or backward: only if something has to move."""
MATERIALIZED = "megatron_ext.balance.slots.Materializing.wait"
START_REMATERIALIZE = "megatron_ext.balance.forward.Forward._rematerialize"
"""Stage 4, in a backward; its first argument is what `is_rematerializing` asks."""
START_REDUCTION = "megatron_ext.balance.forward.Forward._start_reduction"
"""Stage 8 in autograd's backward; with delayed weight gradients, `START_REDUCE` comes later."""
START_REDUCE = "megatron_ext.balance.slots.SlotBuffers.reduce_replica_grads"
"""Stage 8, whose end is `REDUCED`."""
REDUCED = "megatron_ext.balance.slots.Reducing.wait"
"""The end of stage 8; its first argument is what `is_reducing` and `sums_of` ask."""
SET_ASIDE = "megatron_ext.balance.main_weights.MainWeights.set_aside"
"""Sets the mains' gradients so far aside, by main."""

KEEP_PLAN = "megatron_ext.balance.forward.VirtualLayers.lend"
"""Keeps the plan of a forward, its second argument, for its backward."""
RELEASE_PLAN = "megatron_ext.balance.forward.Forward.release_plan"
RECALL_REPLICAS = "megatron_ext.balance.forward.Forward.replicas_of_backward"
"""The replicas of a forward's plan, for its backward."""

SEND_AHEAD = "megatron_ext.methods.libra.lookahead.LookaheadMoELayer.send_ahead"
"""Sends replicas of predicted choices to a layer. Returns a prediction, whose end is `ARRIVED`."""
PLACE_PREDICTED = "megatron_ext.balance.planner.LayerPlanner.expect"
"""Places those replicas, when the predicted load is known."""
ARRIVED = "megatron_ext.methods.libra.lookahead.Prediction.wait"
TELL_NEXT = "megatron_ext.methods.libra.lookahead.LookaheadMoELayer.hear"
"""Has a layer send ahead what the input of the layer before it predicts."""


def original(point: str) -> Callable[..., Any]:
    """Return the function that a constant of this file names."""
    function: Callable[..., Any] = pkgutil.resolve_name(point)
    return function


def noting(point: str, event: str, events: list[str]) -> Any:
    """Add an event to a list at each call of a function, as long as the block."""
    function = original(point)

    def noted(*args: Any, **kwargs: Any) -> Any:
        events.append(event)
        return function(*args, **kwargs)

    return mock.patch(point, noted)


def in_flight(layer: Any) -> int:
    """Plans that are kept for a backward to come."""
    return int(layer.balancer.virtual_layers.num_in_flight) if layer.is_started else 0


def plans_kept(layer: Any) -> list[int]:
    """How many places for plans there are, and how often one was used so far."""
    virtual_layers = layer.balancer.virtual_layers
    return [virtual_layers._num_made, virtual_layers._num_lent]


def slot_buffers(layer: Any) -> Any:
    """The slots that the layer shares; None before its first forward, or without slots."""
    return layer.balancer.buffers if layer.is_started else None


def slot_weights(layer: Any) -> list[torch.Tensor]:
    """The weights in the layer's slots, by segment."""
    return list(slot_buffers(layer).weight_buffers)


def slot_grads(layer: Any) -> list[torch.Tensor | None]:
    """The gradients in the layer's slots, by segment; None where none is computed."""
    return list(slot_buffers(layer).slot_grads)


def planner(layer: Any) -> Any:
    """What makes the layer's plans: the first argument of `SOLVE`."""
    return layer.balancer.planner


def num_observed(layer: Any) -> int:
    """Microbatches that the layer's planner has learned from."""
    return int(planner(layer)._num_observed)


def costs(layer: Any) -> Any:
    """Costs that the layer's plans are chosen by; None if they are not chosen by costs."""
    return planner(layer)._settings.costs


def measured(layer: Any) -> dict[str, float]:
    """Those of them that were measured."""
    return dict(layer.balancer.measured) if layer.is_started else {}


def measure(layer: Any, load: torch.Tensor, probs_dtype: torch.dtype) -> None:
    """Measure the costs of plans now, for a load int64 [R, E]; all EP ranks call."""
    balancer, mains = layer.balancer_for(load.device)
    balancer.prepare_planner(mains, load, probs_dtype)


def watch_plans(layer: Any, note: Callable[[Any, torch.Tensor | None], None]) -> None:
    """Have `note` called with every plan of the layer, before it is used, and the slots sent ahead.

    Evaluated and recomputed forwards have plans as well.
    """
    push = layer.push

    def noted(forward: Any) -> None:
        prediction = getattr(layer, "_prediction", None)
        note(forward.plan, prediction.placed if prediction is not None else None)
        push(forward)

    layer.push = noted


def watch_mains(layer: Any, note: Callable[[], None]) -> None:
    """Have `note` called whenever the layer lists its mains."""
    list_mains = layer.expert_weights.mains

    def noted() -> Any:
        note()
        return list_mains()

    layer.expert_weights.mains = noted


def replace_experts(layer: Any, run: Callable[[list[Any], Any], torch.Tensor]) -> None:
    """Have `run` called in place of the layer's experts: with weights in slots, and tokens."""
    layer.run_experts = lambda forward, slot_weights, tokens, counts, probs: run(
        slot_weights, SimpleNamespace(tokens=tokens, probs=probs)
    )


def holds_a_graph(layer: Any) -> bool:
    """Whether the layer itself holds tensors or the forward of an autograd graph."""
    return any(held is not None for held in (layer._forward, layer._edge, layer._shared))


def drop_forward(layer: Any) -> None:
    """Forget the forward under way, in place of all that comes after the experts."""
    layer.drop_forward()


def chunk(layer: Any) -> int | None:
    """Number of the model chunk's first layer; None if the layer was not told."""
    return layer.first_layer_of_chunk  # type: ignore[no-any-return]


def sends_nothing_ahead(layer: Any) -> bool:
    """Whether nothing is on its way to the layer, and nothing waits for it."""
    return layer._order._told is None


def is_rematerializing(forward: Any) -> bool:
    """Whether that forward's replicas are on their way back into the slots."""
    return forward.rematerializing is not None


def is_reducing(reducing: Any) -> bool:
    """Whether that reduction was not waited for yet."""
    return reducing._pending is not None


def sums_of(reducing: Any) -> Any:
    """What that reduction adds to, by segment and main."""
    return reducing._totals


def delay_arrival(sent: Any, around: Callable[[Any], Any]) -> None:
    """Have what waits for replicas sent ahead be what `around` makes of that."""
    sent.pending._pending = around(sent.pending._pending)
