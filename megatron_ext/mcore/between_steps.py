"""Checks and resets all balanced layers of a model, between two steps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from megatron_ext.balance.agreement import Agreement
from megatron_ext.mcore import failures
from megatron_ext.mcore.balancer import LayerBalancer
from megatron_ext.mcore.moe_layer import BalancedMoELayer


def check_agreement(model: Iterable[nn.Module]) -> None:
    """Check that the ranks that plan alike made the same last plan; all ranks of the model call.

    A program calls this at the end of a run and before a checkpoint. Otherwise the ranks compare
    the plans of a layer in the next layer, and those of a step's last layer in the next step. The
    call also looks for failed waits for replicas.

    Raises:
        RuntimeError: Ranks had different loads or plans, or a wait for replicas has failed.
    """
    model = list(model)
    failures.count_and_look(model)
    for agreement in _agreements(_balanced_layers(model)):
        agreement.check_last_plan()


def reset_after_abort(model: Iterable[nn.Module]) -> None:
    """Make the balanced layers ready for the next step after a step that ended with an error.

    An error may leave the ranks of an EP group at different points of a step, with plans in flight
    and replicas half moved. Every rank of the group calls this with its chunks of the model, once
    it has left the step. Megatron's own collectives must have ended, or a rank still waits in one.
    After this call a `main_grad` may hold a part of the step, or be emptied: the caller calls
    `zero_grad_buffer` and repeats the whole step.
    """
    model = list(model)
    failures.forget()
    _drop_delayed_gradients(model)
    layers = _balanced_layers(model)
    for layer in layers:
        layer.forget_step()
    # Layers share slot buffers, and a reset is collective: once for each, in the layers' order.
    shared = dict.fromkeys(b.buffers for b in _started(layers) if b.buffers is not None)
    for buffers in shared:
        buffers.transport.cancel()
    for buffers in shared:
        buffers.reset()
    # After these resets no device waits for a peer any more.
    for agreement in _agreements(layers):
        agreement.forget()


def _drop_delayed_gradients(model: list[nn.Module]) -> None:
    """Drop the products that linears of Transformer Engine keep for later: they come in order."""
    for chunk in model:
        for module in chunk.modules():
            store: Any = getattr(module, "wgrad_store", None)
            while store is not None and store.context is not None and not store.context.empty():
                store.context.get()


def _agreements(layers: list[BalancedMoELayer]) -> list[Agreement]:
    return list(dict.fromkeys(balancer.agreement for balancer in _started(layers)))


def _started(layers: list[BalancedMoELayer]) -> list[LayerBalancer]:
    """The balancers of the layers that had a forward."""
    return [layer.balancer for layer in layers if layer.is_started]


def _balanced_layers(model: Iterable[nn.Module]) -> list[BalancedMoELayer]:
    return [m for chunk in model for m in chunk.modules() if isinstance(m, BalancedMoELayer)]
