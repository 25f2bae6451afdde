"""Stages 4 and 8 as autograd sees them: main weights into slots, slot gradients into mains.

Replication is a linear map from main weights to slots, and the gradient reduction is its adjoint.
Autograd sees both (`MaterializeFunction`), so data-parallel reduction hears of a main's gradient
when both its own part and its replicas' part are there. The replicas' part is added to `main_grad`
where data-parallel training has made one, else autograd adds both. With gradient accumulation
fusion, slot gradients are added to the slots' buffers where they are computed.

The reduction starts where the slots' gradients are complete. `JoinFunction`, further down the
backward, waits for it and hands its sums to the mains, so that router and attention run meanwhile.

The slots are shared by all layers, so by the time of a layer's backward another layer's replicas
are in them. `RematerializeFunction` stands behind the experts: in backward it materializes the
replicas of the saved plan again before the experts' backward reads them.
`StartRematerializeFunction` stands behind the combine and starts that, beside the combine's
backward.

Needs: a plan, the mains' weights (main_weights.py), slots (slots.py). Gives: slot weights as
tensors in the graph. Sums of gradients are rounded once, to the dtype of `main_grad` or of the
weights.

Legend: R ranks, S slots per rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_ext.balance.in_flight import InFlightPlans, PlanHandle
from megatron_ext.balance.main_weights import Aside, MainWeights
from megatron_ext.balance.plan import BalancePlan
from megatron_ext.balance.ranges import (
    PUSH_START,
    PUSH_WAIT,
    REDUCE_START,
    REDUCE_WAIT,
    stage,
    stage_of_backward,
)
from megatron_ext.balance.reroute import RoutingMaps
from megatron_ext.balance.slots import Materializing, Reducing, SentAhead, SlotBuffers


class Joint:
    """Where a layer's backward hands the replicas' gradients to the mains: made by `join_later`.

    It lives in the autograd graph of one forward. It holds the reduction from when the slots'
    gradients are complete until the backward has come to the layer's input.
    """

    def __init__(self, mains: MainWeights, layer_number: int) -> None:
        self.mains = mains
        self.layer_number = layer_number
        self.reducing: Reducing | None = None


@dataclass
class Replication:
    """What one microbatch's replicas are made from; lives in the autograd graph until backward.

    `handle` is None when no backward will come (evaluation). `joint` is None where the backward
    is to wait for the reduction at once.
    """

    buffers: SlotBuffers
    in_flight: InFlightPlans
    mains: MainWeights
    plan: BalancePlan
    handle: PlanHandle | None
    grads: Sequence[Tensor | None]
    """`SlotBuffers.grads` of the segments that are trained; None for one that is frozen."""
    joint: Joint | None = None
    rematerializing: Materializing | None = None
    """The transfer that begins beside the combine's backward and ends before the experts'."""
    aside: Aside | None = None
    """With fused gradients, until the reduction: what the mains had from other microbatches."""
    reduces: bool = False
    """Whether the backward has a reduction, or only computes with the slots' weights."""

    @property
    def bytes_of_one(self) -> tuple[int, int]:
        """Bytes of one replica's weights and gradients on this rank."""
        weights, grads = (
            sum(buffer[0].nbytes for buffer in buffers if buffer is not None)
            for buffers in (self.buffers.weights, self.grads)
        )
        return weights, grads

    def slot_weights(self, *, trained: bool) -> list[Tensor | None]:
        """The slots' weights, [S, *shape] a segment; None for one that is trained, or that is not.

        Args:
            trained: Which segments are asked for.
        """
        pairs = zip(self.buffers.weights, self.grads, strict=True)
        return [weight if (grad is not None) == trained else None for weight, grad in pairs]

    def start_materialize(self, sent: SentAhead | None = None) -> Materializing:
        """Start materializing for the forward the replicas that were not sent ahead."""
        with stage(PUSH_START):
            return self.buffers.start_materialize(self.plan, self.mains, self.handle, sent)

    def start_rematerialize(self) -> Materializing:
        """Start materializing for the backward, once; return the transfer under way."""
        if self.rematerializing is None:
            handle = _required(self.handle)
            with stage_of_backward(PUSH_START, handle.layer_number):
                plan = self.in_flight.recall(handle)
                self.rematerializing = self.buffers.start_materialize(
                    plan, self.mains, handle, slots_on_host=self.in_flight.recall_slots(handle)
                )
        return self.rematerializing

    def materialized(self, tokens: Tensor) -> tuple[Tensor, list[Any]]:
        """Return the tokens and, by segment, the slots' weights.

        Trained ones are parts of the autograd graph.
        """
        frozen = self.slot_weights(trained=False)
        constants = self.mains.by_segment(self.mains.slot_views(frozen), frozen)
        if all(grad is None for grad in self.grads):
            return tokens, constants
        # With a joint the mains get these gradients there, and must not wait for them here.
        parameters = self.mains.parameters() if self.joint is None else ()
        tokens, *views = MaterializeFunction.apply(self, tokens, *parameters)
        self.reduces = tokens.requires_grad
        if self.mains.fused:
            # Where the slots' gradients are added as the mains' are. Nothing is to be told that it
            # was done, so a view has no `grad_added_to_main_grad`, and autograd gets None.
            for view, grad in zip(views, self.mains.slot_views(self.grads), strict=True):
                view.main_grad = grad
        variables = self.mains.by_segment(views, self.grads)
        pairs = zip(variables, constants, strict=True)
        return tokens, [one if one is not None else other for one, other in pairs]

    def routing_maps(self) -> RoutingMaps | None:
        """Memory for this microbatch's routing maps; None where no backward will come."""
        return self.in_flight.routing_maps(self.handle) if self.handle is not None else None

    def kept_in_place(self) -> AbstractContextManager[None]:
        """Hide the slots' weights from hooks on saved tensors; see `kept_in_place`."""
        return kept_in_place(self.buffers.weights)

    def rematerialize_before(self, output: Tensor) -> Tensor:
        """Return the experts' output; before their backward the slots are as in the forward."""
        behind: Tensor = RematerializeFunction.apply(self, output)
        return behind

    def start_rematerialize_before(self, output: Tensor) -> Tensor:
        """Return the combine's output; its backward starts to materialize the replicas."""
        behind: Tensor = StartRematerializeFunction.apply(self, output)
        return behind


class NoReplication:
    """The replication of a layer without slots: moves nothing, and adds nothing to the graph."""

    handle = None
    bytes_of_one = 0, 0

    def start_materialize(self, sent: SentAhead | None = None) -> NoReplication:
        """Return a transfer that has nothing to move: itself."""
        return self

    def wait(self) -> None:
        """Return at once."""

    def materialized(self, tokens: Tensor) -> tuple[Tensor, list[Any]]:
        """Return the tokens, and one segment without slots."""
        return tokens, NO_SLOTS

    def routing_maps(self) -> None:
        """None: no plan is kept that the maps could live as long as."""

    def kept_in_place(self) -> AbstractContextManager[None]:
        """Hide nothing."""
        return nullcontext()

    def rematerialize_before(self, output: Tensor) -> Tensor:
        """Return the output."""
        return output

    def start_rematerialize_before(self, output: Tensor) -> Tensor:
        """Return the output."""
        return output


NO_SLOTS: list[Any] = [()]
"""Slot weights, by segment, of a layer without slots."""


class MaterializeFunction(torch.autograd.Function):
    """(tokens, mains) -> (tokens, trained slot weights); its backward reduces slot gradients.

    The tokens pass through so that the backward runs on every rank, also where no slot was used:
    the reduction needs all ranks of the group at the same point of their backward. Where the
    replication has a joint, the mains are not among the inputs.
    """

    @staticmethod
    def forward(
        ctx: Any, replication: Replication, tokens: Tensor, *_parameters: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the tokens and the trained slot weights (`MainWeights.slot_views`)."""
        ctx.replication = replication
        # PyTorch's word, not ours: a gradient that nothing made arrives as None, not as zeros.
        ctx.set_materialize_grads(False)
        views = replication.mains.slot_views(replication.slot_weights(trained=True))
        return (tokens.view_as(tokens), *views)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Start the reduction, wait for it unless there is a joint, and release the plan."""
        replication: Replication = ctx.replication
        handle = _required(replication.handle)
        with stage_of_backward(REDUCE_START, handle.layer_number):
            slots = replication.in_flight.recall_slots(handle)
            slot_grads = replication.mains.by_segment(grads[1:], replication.grads)
            aside, replication.aside = replication.aside, None
            reducing = replication.buffers.reduce_replica_grads(
                slots, replication.grads, slot_grads, handle, aside=aside
            )
        replication.in_flight.release(handle)
        if replication.joint is not None:
            replication.joint.reducing = reducing
            return None, grads[0]
        with stage_of_backward(REDUCE_WAIT, handle.layer_number):
            sums = reducing.wait()
        return (None, grads[0], *replication.mains.hand_over(sums))


@contextmanager
def kept_in_place(buffers: Sequence[Tensor]) -> Iterator[None]:
    """Hide buffers from hooks on saved tensors, as those that offload activations to the host.

    Backward finds the same values there without a copy: `RematerializeFunction` sees to that.
    """
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is None:
        yield
        return
    pack, unpack = hooks
    hidden = {buffer.untyped_storage().data_ptr() for buffer in buffers}

    def pack_others(saved: Tensor) -> tuple[bool, Any]:
        is_hidden = saved.untyped_storage().data_ptr() in hidden
        return is_hidden, saved if is_hidden else pack(saved)

    def unpack_others(packed: tuple[bool, Any]) -> Tensor:
        is_hidden, kept = packed
        return kept if is_hidden else unpack(kept)

    with torch.autograd.graph.saved_tensors_hooks(pack_others, unpack_others):
        yield


def join_later(hidden: Tensor, mains: MainWeights, layer_number: int) -> tuple[Tensor, Joint]:
    """Make the point at which a backward waits for a reduction that it started before.

    Args:
        hidden: The layer's input. Everything that shall run beside the reduction is computed from
            the returned `hidden`.
        mains: The layer's mains.
        layer_number: 1-based, as in Megatron; for profiles.

    Returns:
        `hidden`, to go on with, and the joint to put into the layer's `Replication`.
    """
    joint = Joint(mains, layer_number)
    return JoinFunction.apply(joint, hidden, *mains.parameters()), joint


class JoinFunction(torch.autograd.Function):
    """(hidden, mains) -> hidden; its backward waits for the reduction and hands the sums over.

    The mains are inputs here, so autograd accumulates a main's gradient, and calls the hooks of
    data-parallel reduction, only after this.
    """

    @staticmethod
    def forward(ctx: Any, joint: Joint, hidden: Tensor, *_parameters: Tensor) -> Tensor:
        """Return `hidden` unchanged."""
        ctx.joint = joint
        ctx.set_materialize_grads(False)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        """Wait for the reduction; return its sums as gradients of the mains."""
        joint: Joint = ctx.joint
        sums = {}
        if joint.reducing is not None:
            with stage_of_backward(REDUCE_WAIT, joint.layer_number):
                sums = joint.reducing.wait()
        joint.reducing = None
        return (None, grad, *joint.mains.hand_over(sums))


class StartRematerializeFunction(torch.autograd.Function):
    """Identity behind the combine; its backward starts to materialize the forward's replicas."""

    @staticmethod
    def forward(ctx: Any, replication: Replication, output: Tensor) -> Tensor:
        """Return the output unchanged."""
        ctx.replication = replication
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        """Start to materialize the replicas again; their gradients begin at zero."""
        replication: Replication = ctx.replication
        handle = _required(replication.handle)
        replication.rematerializing = None
        replication.start_rematerialize()
        if not replication.reduces:
            replication.in_flight.release(handle)  # Nothing asks for the plan later.
        elif replication.mains.fused:
            replication.aside = replication.buffers.begin_fused(
                replication.in_flight.recall_slots(handle), replication.grads, replication.mains
            )
        return None, grad


class RematerializeFunction(torch.autograd.Function):
    """Identity behind the experts; before their backward the slots are as in the forward."""

    @staticmethod
    def forward(ctx: Any, replication: Replication, output: Tensor) -> Tensor:
        """Return the output unchanged."""
        ctx.replication = replication
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        """Wait for the replicas; starts to materialize them if nothing has done so yet."""
        replication: Replication = ctx.replication
        rematerializing = replication.start_rematerialize()
        with stage_of_backward(PUSH_WAIT, _required(replication.handle).layer_number):
            rematerializing.wait()
        return None, grad


def _required(handle: PlanHandle | None) -> PlanHandle:
    assert handle is not None, "a backward runs for a forward that kept no plan"
    return handle
