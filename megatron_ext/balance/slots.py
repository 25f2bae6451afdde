"""Stages 4 and 8: main weights into slots, slot gradients into mains.

Replication is a linear map from main weights to slots, and the gradient reduction is its adjoint.
Autograd sees both (`MaterializeFunction`), so a main expert's gradient reaches Megatron's hooks as
the sum of its own part and its replicas' part: autograd adds them before it accumulates. The
reduction is started where the slots' gradients are complete and joined where its sums are handed to
the mains, which `JoinFunction` does further down the backward, so that router and attention run
meanwhile.

The slots are shared by all layers, so by the time of a layer's backward another layer's replicas
are in them. `RematerializeFunction` stands behind the experts: in backward the slots are filled
again from the saved plan before the experts' backward reads them. `StartRematerializeFunction`
stands behind the combine and starts that, beside the combine's backward.

Needs: a plan, the mains' weights. Gives: slot weights as tensors in the graph. Gradients of slots
are stored and added in float32 (float64 for float64 weights), in rank order of the replicas, then
rounded once to the weights' dtype.

Legend: E logical experts, R ranks, M mains per rank, S slots per rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.balance.in_flight import InFlightPlans, PlanHandle
from megatron_ext.balance.layout import ExpertLayout
from megatron_ext.balance.plan import BalancePlan
from megatron_ext.balance.reroute import RoutingMaps
from megatron_ext.transport import Pending, Transfers, Transport, make_transport


@dataclass(frozen=True)
class Segment:
    """One named part of an expert's state."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class MainWeights:
    """This rank's main expert weights, segment by segment.

    `per_segment[g]` is either the list of M parameters [*shape], or one stacked parameter [M,
    *shape]: the two ways in which experts keep their weights. Indexing it with m gives main m in
    both.
    """

    per_segment: tuple[Tensor | list[Tensor], ...]

    def parameters(self) -> list[Tensor]:
        """The parameters in a fixed order: what autograd must see as inputs."""
        return [
            parameter
            for segment in self.per_segment
            for parameter in ([segment] if isinstance(segment, Tensor) else segment)
        ]

    def rows(self) -> list[list[Tensor]]:
        """`rows()[g][m]`: the values of segment g of main m, without gradient."""
        return [[row.detach() for row in segment] for segment in self.per_segment]

    def slot_views(self, buffers: Sequence[Tensor]) -> list[Tensor]:
        """Slot weights as autograd outputs, held as the parameters are: slot by slot, or stacked.

        Slot by slot, an unused slot costs no gradient.
        """
        # `.data` has a version counter of its own: other layers overwrite these buffers before this
        # layer's backward reads them, which is right, because RematerializeFunction restores them.
        return [
            view
            for segment, buffer in zip(self.per_segment, buffers, strict=True)
            for view in ([buffer.data] if isinstance(segment, Tensor) else buffer.data.unbind())
        ]

    def by_segment(self, flat: Sequence[Any], num_slots: int) -> list[Any]:
        """Group what goes with `slot_views` again: for each segment, indexed by slot."""
        values = iter(flat)
        return [
            next(values)
            if isinstance(segment, Tensor)
            else [next(values) for _ in range(num_slots)]
            for segment in self.per_segment
        ]

    def gradients(self, sums: dict[int, list[Tensor]]) -> list[Tensor | None]:
        """Gradients of `parameters()` from the sums over replicas; None where none was made."""
        gradients: list[Tensor | None] = []
        for segment_idx, segment in enumerate(self.per_segment):
            if not isinstance(segment, Tensor):
                gradients += [
                    sums[m][segment_idx].to(parameter.dtype) if m in sums else None
                    for m, parameter in enumerate(segment)
                ]
            elif sums:
                stacked = torch.zeros_like(segment)
                for m, total in sums.items():
                    stacked[m].copy_(total[segment_idx])
                gradients.append(stacked)
            else:
                gradients.append(None)
        return gradients


class SlotBuffers:
    """The slots of this rank: weights and gradients of S experts, shared by all layers.

    Not parameters: no optimizer state, in no gradient bucket, in no checkpoint.

    Args:
        layout: Experts and slots of the EP group.
        segments: Parts of one expert's state.
        dtype: Of the weights. Gradients are float32, or float64 if the weights are.
        device: Of both.
        ep_rank: This rank in the EP group.
        transport: Allocates the buffers and moves bytes between ranks.

    Attributes:
        weights: One tensor a segment, [S, *shape].
        grads: One tensor a segment, [S, *shape].
    """

    def __init__(
        self,
        layout: ExpertLayout,
        segments: Sequence[Segment],
        *,
        dtype: torch.dtype,
        device: torch.device,
        ep_rank: int,
        transport: Transport,
    ) -> None:
        self.layout = layout
        self.segments = tuple(segments)
        self.ep_rank = ep_rank
        self.transport = transport
        grad_dtype = torch.promote_types(dtype, torch.float32)
        shapes = [(layout.slots, *segment.shape) for segment in segments]
        self.weights = [transport.allocate(shape, dtype, device) for shape in shapes]
        self.grads = [transport.allocate(shape, grad_dtype, device) for shape in shapes]
        self._resident: tuple[int, int] | None = None
        self._reducing: Reducing | None = None
        self._num_virtual_layers = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers on this rank."""
        return sum(buffer.nbytes for buffer in (*self.weights, *self.grads))

    def reserve_virtual_layers(self, count: int) -> int:
        """Return the first of `count` virtual layer ids that no other layer uses."""
        first = self._num_virtual_layers
        self._num_virtual_layers += count
        return first

    def send_ahead(self, slots: Tensor, mains: MainWeights, label: str) -> SentAhead:
        """Start filling this rank's slots before the plan is known; every EP rank calls.

        Args:
            slots: Logical expert in each slot, or -1: int32 [R, S].
            mains: This rank's mains; must not change before `wait()` returns.
            label: Which layer this is for, to be named in errors.

        Returns:
            The transfer under way, for the `start_materialize` that comes next.
        """
        self._resident = None
        return SentAhead(slots, self._push(slots, mains, label))

    def start_materialize(
        self,
        plan: BalancePlan,
        mains: MainWeights,
        handle: PlanHandle | None,
        sent: SentAhead | None = None,
    ) -> Materializing:
        """Start filling this rank's slots as `plan` says; every rank of the EP group calls.

        Moves nothing if the slots still hold what `handle` names: the last layer's backward follows
        its forward, and a recomputed forward is followed by its own backward. All ranks see the
        same order of calls, so all decide alike.

        Args:
            plan: Where replicas go.
            mains: This rank's mains; must not change before `wait()` returns.
            handle: Name of the kept plan; None when no backward will come.
            sent: Replicas that were sent ahead into these slots; is waited for, and what the plan
                has in the same slot is not moved again.

        Returns:
            The transfer under way; the slots may be read after its `wait()`.
        """
        key = (handle.virtual_layer_id, handle.generation) if handle else None
        if key is not None and key == self._resident:
            return Materializing(self, key, None)
        # Until the last byte is here the slots belong to nobody: an aborted transfer must not look
        # complete.
        self._resident = None
        missing = plan.slots
        if sent is not None:
            sent.wait()
            missing = torch.where(plan.slots == sent.slots.to(plan.slots.device), -1, plan.slots)
        return Materializing(self, key, self._push(missing, mains, _label(handle)))

    def reduce_replica_grads(
        self, slots: Tensor, slot_grads: Sequence[Any], handle: PlanHandle | None = None
    ) -> Reducing:
        """Start adding the gradients of all replicas; every rank of the EP group calls.

        The gradient slots are shared by all layers: a reduction under way is ended first.

        Args:
            slots: Logical expert in each slot, or -1, in the forward that the gradients belong to:
                int32 [R, S], on the host, which allocates sums for experts with replicas only.
            slot_grads: One a segment, which slot s indexes; None, whole or for a slot, where
                nothing was computed.
            handle: Name of the kept plan, for messages.

        Returns:
            The reduction under way.
        """
        if self._reducing is not None:
            self._reducing.wait()
        transfers = list(Transfers(slots, self.layout.mains_per_rank))
        used = [t.slot_idx for t in transfers if t.replica_rank == self.ep_rank]
        for buffer, grad in zip(self.grads, slot_grads, strict=True):
            for slot_idx in used:
                assert grad is not None, f"slot {slot_idx} has a replica but no gradient"
                assert grad[slot_idx] is not None, f"slot {slot_idx} has a replica but no gradient"
                buffer[slot_idx].copy_(grad[slot_idx])
        sums = {
            t.main_idx: [torch.empty_like(buffer[0]) for buffer in self.grads]
            for t in transfers
            if t.home_rank == self.ep_rank
        }
        pending = self.transport.pull_add(transfers, self.grads, sums, _label(handle))
        self._reducing = Reducing(sums, pending)
        return self._reducing

    def _push(self, slots: Tensor, mains: MainWeights, label: str) -> Pending:
        # Not listed here: whoever needs the list waits for the device that makes the plan.
        transfers = Transfers(slots, self.layout.mains_per_rank)
        return self.transport.push(transfers, mains.rows(), self.weights, label)

    def reset(self) -> None:
        """Forget an aborted step; every rank of the EP group calls before the next one."""
        self._resident = None
        self._reducing = None
        self.transport.reset()


def _label(handle: PlanHandle | None) -> str:
    if handle is None:
        return "a forward without backward"
    return f"layer {handle.layer_number}, virtual layer {handle.virtual_layer_id}"


class SentAhead:
    """Replicas on their way into slots before their plan is known.

    Attributes:
        slots: Logical expert in each slot, or -1: int32 [R, S].
    """

    def __init__(self, slots: Tensor, pending: Pending) -> None:
        self.slots = slots
        self._pending = pending

    def wait(self) -> None:
        """Return when the slots hold them; called once."""
        self._pending.wait()


class Materializing:
    """Replicas on their way into the slots."""

    def __init__(
        self, buffers: SlotBuffers, key: tuple[int, int] | None, pending: Pending | None
    ) -> None:
        self._buffers = buffers
        self._key = key
        self._pending = pending

    def wait(self) -> None:
        """Return when the slots hold the replicas."""
        if self._pending is not None:
            self._pending.wait()
            self._buffers._resident = self._key


class Reducing:
    """Replica gradients on their way into the mains' sums."""

    def __init__(self, sums: dict[int, list[Tensor]], pending: Pending) -> None:
        self._sums = sums
        self._pending: Pending | None = pending

    def wait(self) -> dict[int, list[Tensor]]:
        """Return, when they are complete, the sums of each main with replicas, segment by segment.

        In the dtype of `SlotBuffers.grads`. May be called again.
        """
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        return self._sums


class Joint:
    """Where a layer's backward hands the replicas' gradients to the mains: made by `join_later`.

    Lives in the autograd graph of one forward. A reduction is put in when the slots' gradients are
    complete, and taken out where the backward has come to the layer's input.
    """

    def __init__(self, mains: MainWeights) -> None:
        self.mains = mains
        self.reducing: Reducing | None = None


_SHARED: WeakValueDictionary[Any, SlotBuffers] = WeakValueDictionary()


def shared_slot_buffers(
    layout: ExpertLayout,
    segments: Sequence[Segment],
    *,
    dtype: torch.dtype,
    device: torch.device,
    ep_group: ProcessGroup,
    transport: str,
    grad_reduce_share: float,
    slot_set: int,
) -> SlotBuffers:
    """Return `ep_group`'s slot buffers for such experts: made once, gone with the last user.

    Layers of different slot sets have buffers, and a transport, of their own.
    """
    key = (ep_group, layout, tuple(segments), dtype, device, transport, grad_reduce_share, slot_set)
    buffers = _SHARED.get(key)
    if buffers is None:
        buffers = SlotBuffers(
            layout,
            segments,
            dtype=dtype,
            device=device,
            ep_rank=ep_group.rank(),
            transport=make_transport(
                transport, ep_group, device, grad_reduce_share=grad_reduce_share
            ),
        )
        _SHARED[key] = buffers
    return buffers


@dataclass
class Replication:
    """What one microbatch's replicas are made from; lives in the autograd graph until backward.

    `handle` is None when no backward will come (evaluation, first pass of recomputation). `joint`
    is None where the reduction is to be waited for at once.
    """

    buffers: SlotBuffers
    in_flight: InFlightPlans
    mains: MainWeights
    plan: BalancePlan
    handle: PlanHandle | None
    joint: Joint | None = None
    rematerializing: Materializing | None = None
    """Under way between the backward of combine and that of the experts."""

    def start_materialize(self, sent: SentAhead | None = None) -> Materializing:
        """Start filling the slots for the forward, but for what was sent ahead."""
        return self.buffers.start_materialize(self.plan, self.mains, self.handle, sent)

    def start_rematerialize(self) -> Materializing:
        """Start filling the slots for the backward, once; return what is under way."""
        if self.rematerializing is None:
            handle = _required(self.handle)
            plan = self.in_flight.recall(handle)
            self.rematerializing = self.buffers.start_materialize(plan, self.mains, handle)
        return self.rematerializing

    def materialized(self, tokens: Tensor) -> tuple[Tensor, list[Any]]:
        """Return the tokens and, by segment, the slots' weights, as parts of the autograd graph."""
        # With a joint the mains get these gradients there, and must not wait for them here.
        parameters = self.mains.parameters() if self.joint is None else ()
        tokens, *views = MaterializeFunction.apply(self, tokens, *parameters)
        return tokens, self.mains.by_segment(views, self.plan.layout.slots)

    def routing_maps(self) -> RoutingMaps | None:
        """Memory for this microbatch's routing maps; None where no backward will come."""
        return self.in_flight.routing_maps(self.handle) if self.handle is not None else None


class MaterializeFunction(torch.autograd.Function):
    """(tokens, mains) -> (tokens, slot weights); its backward reduces slot gradients into mains.

    The tokens pass through so that the backward runs on every rank, also where no slot was used:
    the reduction needs all ranks of the group at the same place of their backward. Where the
    replication has a joint, the mains are not among the inputs.
    """

    @staticmethod
    def forward(
        ctx: Any, replication: Replication, tokens: Tensor, *_parameters: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the tokens and the slots' weights (`MainWeights.slot_views`)."""
        ctx.replication = replication
        ctx.set_materialize_grads(False)
        views = replication.mains.slot_views(replication.buffers.weights)
        return (tokens.view_as(tokens), *views)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Start the reduction, wait for it unless there is a joint, and release the plan."""
        replication: Replication = ctx.replication
        handle = _required(replication.handle)
        slots = replication.in_flight.recall_slots(handle)
        slot_grads = replication.mains.by_segment(grads[1:], replication.buffers.layout.slots)
        reducing = replication.buffers.reduce_replica_grads(slots, slot_grads, handle)
        replication.in_flight.release(handle)
        if replication.joint is not None:
            replication.joint.reducing = reducing
            return None, grads[0]
        return (None, grads[0], *replication.mains.gradients(reducing.wait()))


def join_later(hidden: Tensor, mains: MainWeights) -> tuple[Tensor, Joint]:
    """Make the place where a backward joins a reduction that it started before.

    Args:
        hidden: What the layer starts from; all that shall run beside the reduction comes after it.
        mains: The layer's mains.

    Returns:
        `hidden`, to go on with, and the joint to put into the layer's `Replication`.
    """
    joint = Joint(mains)
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
        """Join."""
        joint: Joint = ctx.joint
        sums = joint.reducing.wait() if joint.reducing is not None else {}
        joint.reducing = None
        return (None, grad, *joint.mains.gradients(sums))


class StartRematerializeFunction(torch.autograd.Function):
    """Identity behind the combine; its backward starts to fill the slots as in the forward."""

    @staticmethod
    def forward(ctx: Any, replication: Replication, output: Tensor) -> Tensor:
        """Return the output unchanged."""
        ctx.replication = replication
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        """Start."""
        ctx.replication.start_rematerialize()
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
        """Wait for the slots, which are filled now unless that has been started."""
        replication: Replication = ctx.replication
        replication.start_rematerialize().wait()
        replication.rematerializing = None
        return None, grad


def _required(handle: PlanHandle | None) -> PlanHandle:
    assert handle is not None, "a backward runs for a forward that kept no plan"
    return handle
