"""One forward of a balanced layer and its backward: stages 4 and 8 as autograd sees them.

Replication is a linear map from main weights to slots, and the gradient reduction is its adjoint.
Autograd sees both, at four points of a layer. At each of them `OnBackward` passes tensors on and
calls the forward's object in backward; `push` is a plain call:

    forward, from the first line             backward, from the last line
    join          at the layer's input       8 wait for the sums in the mains' gradients
    push          4 start materializing
    materialized  4 wait; slot weights       8 start reducing the slots' gradients
    before_experts_backward                  4 wait for the replicas
    before_combine_backward                  4 start materializing the same replicas again, if
                                               neither the layer above nor a second pass has

All layers share the slots, so by the time of a layer's backward another layer's replicas are in
them. The backward materializes the replicas of the saved plan again: as soon as the experts of the
layer above have left the slots, else from the combine's backward on, or from where a recomputed
layer begins again. So they move beside the backward of the other layer's attention, and the
gradient reduction beside that of this layer's.

- The join gives `materialized` an edge of the graph. So autograd reaches the join only after the
  reduction has started, even if the MoE layer's input is cut off from the transformer layer's.
- The mains are inputs of the join (without a join, of `materialized`). So autograd and the hooks of
  data-parallel reduction take a main's gradient for complete only with the replicas' part.
- The mains are no inputs of a join that another backward of autograd than the experts' comes to:
  in Megatron's combined schedule, around an MoE layer that is recomputed alone, and with delayed
  weight gradients. There `held_back.py` holds the hooks back instead.
- The reduction adds the replicas' part to the `main_grad` of data-parallel training. If there is
  no `main_grad`, or the addition would round too much, autograd adds both parts.
- With gradient accumulation fusion, the products add slot gradients to the slots' buffers.

Sums of gradients are rounded once, to the dtype of `main_grad` or of the weights. Legend: R ranks,
E logical experts, S slots per rank, N local tokens, P physical experts, T ranks of an expert-TP
group.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from megatron_ext.balance import held_back
from megatron_ext.balance.agreement import Agreement
from megatron_ext.balance.autograd import (
    OnBackward,
    accumulated,
    edge_like,
    is_executed,
    kept_in_place,
    let_leaves_wait,
)
from megatron_ext.balance.main_weights import Aside, InPlace, MainWeights, by_products, everywhere
from megatron_ext.balance.plan import BalancePlan, Shares
from megatron_ext.balance.ranges import (
    PUSH_START,
    PUSH_WAIT,
    REDUCE_START,
    REDUCE_WAIT,
    stage,
    stage_of_backward,
)
from megatron_ext.balance.reroute import RoutingMaps
from megatron_ext.balance.slots import Materializing, Reducing, SlotBuffers
from megatron_ext.transport import GathersRows, Transfers

NO_SLOTS: list[Any] = [()]
"""Slot weights, by segment, of a layer without slots."""


@dataclass(eq=False)
class Moves:
    """How often a forward's replicas have moved; outlives the forward, for telemetry."""

    pushes: int = 0
    """Times that weights were pushed: forward, backward, and a recomputed forward."""


@dataclass(eq=False)
class Forward:
    """One forward of a balanced layer, until its backward is over.

    Made by the layer where the forward begins. The layer holds it until the combine, the autograd
    graph until the backward, and between the two passes of a recomputed forward the checkpoint's
    context holds it. Without slots nothing is moved, and nothing is added to the graph.
    """

    layer_number: int
    """1-based, as in Megatron."""
    mains: MainWeights
    """This rank's main weights in this forward."""
    buffers: SlotBuffers | None
    """The slots; None if the layer has none."""
    agreement: Agreement
    rows: GathersRows | None
    """Gathers one row a rank through peer memory; None if the transport cannot."""
    counts: Tensor = field(init=False)
    """Assignments of the ranks that plan alike, int64 [R * T, E]: the plan is for their load."""
    plan: BalancePlan = field(init=False)
    is_planned: bool = False
    """Whether there are counts and a plan: in the second pass of a recomputed forward, too."""
    shares: Shares = field(init=False)
    """This rank's shares of the plan; held from the plan to the combine."""
    is_sealed: bool = False
    """Whether the other ranks have this rank's seal, and the seals are not compared yet."""
    slot_grads: Sequence[Tensor | None] = ()
    """`SlotBuffers.slot_grads` of the segments that are trained; None for one that is frozen."""
    virtual_layer: VirtualLayer | None = None
    """None where no backward will come: in evaluation, and without slots."""
    microbatch_idx: int = -1
    """Index of this forward among those of the layer that borrowed a virtual layer."""
    give_back: Callable[[], object] | None = None
    """Gives the virtual layer back; does nothing the second time."""
    moves: Moves = field(default_factory=Moves)
    is_released: bool = False
    """Whether the plan was read for the last time: the reduction starts, or no backward comes."""
    is_joined: bool = False
    """Whether the layer's input waits for the reduction; else backward waits where it starts."""
    is_in_pieces: bool = False
    """Whether a program's backward is several of autograd's: of pieces, or without weight
    gradients."""
    holds_back: bool = False
    """Whether DDP hears of the mains' gradients at the join, and not when autograd has them."""
    leaf: Any | None = None
    """A leaf of the graph that every whole backward of this forward comes to; None in a pass
    without gradients."""
    checkpoint: weakref.ref[Any] | None = None
    """The checkpoint whose second pass begins with this forward; None once it has begun."""
    before: weakref.ref[Forward] | None = None
    """The forward that planned for the slots before this one: mostly the layer below, whose
    backward comes behind this one's."""
    is_before_next: bool = False
    """In a second pass: whether the backward that recomputes this forward then comes to `before`,
    which the inner backward, this forward's own, does not know."""
    delayed: list[Forward] | None = None
    """If weight gradients are delayed, takes this forward when its experts' backward is over. The
    layer calls `reduce_delayed` after the weight gradients."""
    pushing: Materializing | None = None
    """The transfer that begins behind the plan and ends before the experts."""
    rematerializing: Materializing | None = None
    """The transfer that begins in the layer above or with the combine's backward, and ends before
    the experts'."""
    num_pushes: int = 0
    """`SlotBuffers.num_pushes` when the slots got this forward's replicas, or began to."""
    aside: Aside | None = None
    """With fused gradients, until the reduction: `main_grad` of the earlier microbatches."""
    replica_grads: list[Any] = field(default_factory=list)
    """From the experts' backward to the delayed gradients: those that are not delayed."""
    reducing: Reducing | None = None
    """The reduction, until the join."""
    in_place: InPlace = everywhere
    """For which mains the reduction adds to `main_grad`, if there is one; autograd gets the sums of
    the others."""

    @cached_property
    def replicas(self) -> Transfers:
        """Those of the plan."""
        return Transfers(self.plan.experts_in_slots, self.plan.layout.mains_per_rank)

    @property
    def grad_bytes(self) -> int:
        """Bytes of one replica's gradients on this rank."""
        return sum(grad[0].nbytes for grad in self.slot_grads if grad is not None)

    @property
    def label(self) -> str:
        """Name of the forward in errors of the transport."""
        if self.virtual_layer is None:
            return f"layer {self.layer_number}, a forward without backward"
        return f"layer {self.layer_number}, virtual layer {self.virtual_layer.virtual_layer_id}"

    @property
    def reduces(self) -> bool:
        """Whether the backward has a reduction, or only computes with the slots' weights."""
        return any(grad is not None for grad in self.slot_grads)

    def send_seal(self) -> None:
        """Send the seal of this rank's plan to the other ranks."""
        self.is_sealed = True
        self.agreement.send_seal(self.rows, f"layer {self.layer_number}, seal")

    def compare_seals(self) -> None:
        """Compare the seals of all ranks, once; the host waits for the seals.

        Raises:
            RuntimeError: Ranks have planned differently.
        """
        if self.is_sealed:
            self.is_sealed = False
            self.agreement.compare_sent(self.rows)

    @property
    def is_held_back(self) -> bool:
        """Whether there is a join, and DDP hears of the mains' gradients there."""
        return self.is_joined and self.holds_back

    def begin_again(self) -> None:
        """Begin the second pass of a recomputed forward, in the backward of its checkpoint.

        A join outside of the checkpoint counts if the running backward will come to it, and the
        mains are no inputs of it: autograd would not give them the sums of another backward.
        """
        self.is_joined = self.is_held_back and self._is_in_running_backward
        below = self._below
        self.is_before_next = below is not None and below._is_in_running_backward

    def join(self, hidden: Tensor, *, holds_back: bool) -> tuple[Tensor, Tensor]:
        """Make the point at which backward waits for the reduction, and gives the mains the sums.

        Returns the layer's input, and the edge for `materialized`, which has no elements. The
        backward of everything that is computed from the returned input runs beside the reduction.
        Of a backward in pieces autograd cannot give the mains the sums, so gradients are fused, and
        the join `holds_back` the hooks: the experts' is a piece by itself, or inside of a
        checkpoint's, or comes without weight gradients.
        """
        assert self.mains.fused or not holds_back, "autograd has the mains' own part"
        self.is_joined, self.holds_back = True, holds_back
        edge = self._new_edge(hidden)
        mains = () if self.is_held_back else self.mains.parameters()
        if self.is_held_back or hidden.requires_grad:
            return OnBackward.apply(self._add_to_mains, (hidden, edge), hidden, edge, *mains)
        # The layer's input stays without a gradient: a checkpoint in the layer asks for it.
        (edge,) = OnBackward.apply(lambda _: self._add_to_mains(None)[1:], (edge,), edge, *mains)
        return hidden, edge

    def push(self, there: Tensor | None = None) -> None:
        """Start materializing the plan's replicas in this rank's slots; every EP rank calls.

        Between GPUs the plan stays on the device, and the host does not wait for it. `there` has
        the replicas that the slots hold already, int32 [R, S] as in a plan. A replica that the plan
        has in the same slot is not moved again.
        """
        if self.buffers is None or (self.pushing is not None and self.has_slots):
            return  # The layer above has started to, or the second pass where it began.
        with stage(PUSH_START):
            replicas = self.replicas
            if there is not None:
                planned = replicas.experts_in_slots
                missing = torch.where(planned == there.to(planned.device), -1, planned)
                replicas = Transfers(missing, replicas.mains_per_rank)
            self.pushing = self._materialize(replicas)

    def materialized(self, tokens: Tensor, edge: Tensor | None = None) -> tuple[Tensor, list[Any]]:
        """Wait for the replicas; return the tokens and, by segment, the slots' weights.

        Trained slot weights are in the autograd graph. The tokens pass through the same function,
        so that backward starts the reduction on every rank, also on a rank without a used slot: the
        reduction needs all ranks of the group. `edge` comes from `join`, if there is a join.
        """
        if self.buffers is None:
            return tokens, NO_SLOTS
        if not self.has_slots:
            self.push()
        assert self.pushing is not None, "the push comes before the experts"
        with stage(PUSH_WAIT):
            self.pushing.wait()
        self.pushing = None
        frozen, num_slots = self._slot_weights(trained=False), self.buffers.layout.slots
        constants = self.mains.by_segment(self.mains.slot_weights(frozen), frozen, num_slots)
        if not self.reduces:
            if torch.is_grad_enabled():
                (tokens,) = OnBackward.apply(
                    self._end_experts, (tokens,), tokens, edge_like(tokens)
                )
            return tokens, constants
        views = self.mains.slot_weights(self._slot_weights(trained=True))
        if edge is None:
            edge = self._new_edge(tokens)
        # With a join, the mains get the replicas' gradients at the join and not here.
        has_sums_here = not self.is_joined and self.delayed is None
        parameters = self.mains.parameters() if has_sums_here else ()
        tokens, *views = OnBackward.apply(
            self._start_reduction, (tokens, *views), tokens, edge, *parameters
        )
        if self.mains.fused:
            # Fused products add the slots' gradients to `main_grad`, like the mains'. No hook asks
            # for a mark, so a view has no `grad_added_to_main_grad`, and autograd gets None.
            for view, grad in zip(views, self.mains.slot_grads(self.slot_grads), strict=True):
                view.main_grad = grad
                # What linears of Transformer Engine ask beside mains of Megatron-FSDP.
                view.get_main_grad = lambda grad=grad: grad
        trained = self.mains.by_segment(views, self.slot_grads, num_slots)
        pairs = zip(trained, constants, strict=True)
        return tokens, [one if one is not None else other for one, other in pairs]

    def _new_edge(self, like: Tensor) -> Tensor:
        edge = edge_like(like)
        self.leaf = get_gradient_edge(edge).node if edge.requires_grad else None
        return edge

    def hide_slots(self) -> AbstractContextManager[None]:
        """Hide the slots' weights from hooks on saved tensors."""
        if self.buffers is None:
            return nullcontext()
        return kept_in_place(self.buffers.weight_buffers)

    def before_experts_backward(self, output: Tensor) -> Tensor:
        """Return the experts' output; its backward first waits for the forward's replicas.

        Raises:
            RuntimeError: See `_require_slots`.
        """
        if self.buffers is None:
            return output
        self._require_slots()
        self.buffers.transport.note_reads()
        # All ranks run the backward, also of tokens that came to no trained expert of this rank.
        edge = (edge_like(output),) if self.reduces and not output.requires_grad else ()
        (output,) = OnBackward.apply(self._await_replicas, (output,), output, *edge)
        return output

    def before_combine_backward(self, output: Tensor) -> Tensor:
        """Return the combine's output; its backward starts to materialize the replicas again."""
        if self.buffers is None:
            return output
        (output,) = OnBackward.apply(self._begin_backward, (output,), output)
        return output

    def release_plan(self) -> None:
        """Note that no backward reads the plan any more."""
        self.is_released = True
        if self.give_back is not None:
            self.give_back()

    def _begin_backward(self, grad: Tensor | None) -> tuple[Tensor | None]:
        """Start to materialize the replicas again."""
        self.replicas_of_backward()
        self._rematerialize()
        if not self.reduces:
            self.release_plan()
        elif self.mains.fused:
            self._require_whole_backward()
        return (grad,)

    def _require_whole_backward(self) -> None:
        """Check that the running backward is for all leaves: fused products add for all they meet.

        Raises:
            RuntimeError: It is for some inputs only.
        """
        if not self.is_in_pieces and not self._is_in_running_backward:
            raise RuntimeError(
                f"layer {self.layer_number}: with gradient_accumulation_fusion, experts add to "
                "`main_grad` whatever gradients are asked for: call backward() without inputs, or "
                "give --no-gradient-accumulation-fusion"
            )

    def _await_replicas(self, grad: Tensor | None) -> tuple[Tensor | None, None]:
        """Wait for the replicas; starts to materialize them if nothing has done so yet.

        With fusion their gradients begin at zero, once a backward: the experts may run in parts.
        Not in the combine's backward, which the combined schedule has on another stream: what is
        set aside there would be that stream's memory again when the reduction ends, on this one.
        """
        rematerializing = self._rematerialize()
        if self.reduces and self.mains.fused and self.aside is None:
            assert self.buffers is not None
            self.buffers.begin_fused(self.slot_grads)
            self.aside = self.mains.set_aside(
                self.plan.experts_in_slots, self.buffers.ep_rank, in_place=self._fused_in_place
            )
        with stage_of_backward(PUSH_WAIT, self.layer_number):
            rematerializing.wait()
        if self.reduces and self._is_heard_late:
            held_back.hold_back(self.mains.parameters())
        return grad, None

    @property
    def _is_heard_late(self) -> bool:
        """Whether DDP hears of the mains' gradients only when the replicas' part is in them."""
        return self.is_held_back or self.delayed is not None

    @property
    def _fused_in_place(self) -> InPlace:
        """Where fused sums go to `main_grad` itself: not beside a leaf that adds to it at once."""
        return by_products if self._is_heard_late else everywhere

    @property
    def _is_in_running_backward(self) -> bool:
        """Whether the running backward comes to this forward, and is for all leaves of its graph.

        Between the two passes of a recomputed forward: whether it comes to the checkpoint.
        """
        if self.checkpoint is not None:
            return (node := self.checkpoint()) is not None and is_executed(node)
        return self.leaf is not None and is_executed(self.leaf)

    def _end_experts(self, grad: Tensor | None) -> tuple[Tensor | None, None]:
        """Let later pushes wait for the experts' backward, which reads the slots."""
        assert self.buffers is not None
        self._require_slots()
        self.buffers.transport.note_reads()
        return grad, None

    @property
    def _below(self) -> Forward | None:
        """`before`, if its backward is still to come and its mains are there."""
        below = self.before() if self.before is not None else None
        if below is None or below.is_released or below.is_in_pieces or not below.mains.stay:
            return None
        return below

    def _send_ahead(self) -> None:
        """Start to materialize the replicas that the layer below will need, if it comes next.

        So they move beside the backward of attention, and not only beside that of a combine or, if
        it is recomputed, beside its second pass.
        """
        below = self._below
        if below is None or not (self.is_before_next or below._is_in_running_backward):
            return
        if below.checkpoint is None:
            below._rematerialize()
        else:
            with stage_of_backward(PUSH_START, below.layer_number):
                below.pushing = below._materialize(below.replicas)

    def _start_reduction(
        self, grad: Tensor | None, *view_grads: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Start the reduction, and without a join wait for it; the plan is not read any more."""
        result = self._end_experts(grad)
        assert self.buffers is not None
        num_slots = self.buffers.layout.slots
        replica_grads = self.mains.by_segment(view_grads, self.slot_grads, num_slots)
        if self.delayed is not None:
            self.replica_grads = replica_grads
            self.delayed.append(self)
            return result
        self._reduce(replica_grads)
        self._send_ahead()
        return result if self.is_joined else self._add_to_mains(grad)

    def reduce_delayed(self, delayed_grads: Sequence[Sequence[Tensor | None] | None]) -> None:
        """Start the reduction, and without a join wait for it, once the gradients are there.

        `delayed_grads` has those that no fused product has added, by segment and slot.
        """
        pairs = zip(delayed_grads, self.replica_grads, strict=True)
        replica_grads = [now if later is None else _either(later, now) for later, now in pairs]
        self.replica_grads = []
        self._reduce(replica_grads)
        if not self.is_joined:
            self._add_to_mains(None)

    def _reduce(self, replica_grads: Sequence[Any]) -> None:
        assert self.buffers is not None
        with stage_of_backward(REDUCE_START, self.layer_number):
            replicas = self.replicas_of_backward()
            aside, self.aside = self.aside, None
            assert (aside is not None) == self.mains.fused, "`_await_replicas` comes first"
            # In a backward for something else, `main_grad` stays as it was.
            self.in_place = self._fused_in_place if self.mains.fused else accumulated().__contains__
            totals = self.mains.totals(self.slot_grads, in_place=self.in_place)
            self.reducing = self.buffers.reduce_replica_grads(
                replicas, self.slot_grads, replica_grads, totals, self.label, aside=aside
            )
        self.release_plan()

    def _add_to_mains(
        self, grad: Tensor | None, _edge_grad: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        """Wait for the reduction, if there is one.

        Sums that do not go to a `main_grad` are returned for autograd: see
        `MainWeights.hand_over`.

        Raises:
            RuntimeError: The experts' delayed weight gradients are still to come.
        """
        if self.delayed is not None and self in self.delayed:
            raise RuntimeError(
                f"{self.label}: backward has come to the layer's input before the experts' weight "
                "gradients, which are delayed: call the MoE layer's backward_dw() before that"
            )
        gradients: list[Tensor | None] = [None for _ in self.mains.parameters()]
        if self.reducing is not None:
            with stage_of_backward(REDUCE_WAIT, self.layer_number):
                totals = self.reducing.wait()
            if self._is_heard_late:
                self.mains.add_late(totals, in_place=self.in_place)
            else:
                gradients = self.mains.hand_over(totals, in_place=self.in_place)
        self.reducing = None
        if self._is_heard_late:
            held_back.let_go(self.mains.parameters())
            return grad, None
        let_leaves_wait(self.mains.parameters()[0].device)
        # The inputs of `join`, and without a join those of `materialized`.
        return (grad, None, *gradients)

    def _rematerialize(self) -> Materializing:
        """Start materializing for the backward; return the transfer under way.

        Once, unless another push has overwritten the replicas since.
        """
        if self.rematerializing is None or not self.has_slots:
            with stage_of_backward(PUSH_START, self.layer_number):
                self.rematerializing = self._materialize(
                    self.replicas_of_backward(), columnwise=True
                )
        return self.rematerializing

    def _materialize(self, replicas: Transfers, *, columnwise: bool = False) -> Materializing:
        """Start to move the plan's replicas, unless the slots still hold them for this forward.

        The slots still hold the replicas if the backward follows the forward directly: in the last
        layer, and after a recomputed forward; but quantized replicas as a forward reads them,
        mostly, and not as a backward does (`columnwise`). All ranks see the same order of forwards,
        so all ranks decide alike.
        """
        assert self.buffers is not None
        materializing = Materializing(None)
        if not self.buffers.hold_replicas_of(self, columnwise=columnwise):
            has_backward = self.virtual_layer is not None
            self.moves.pushes += has_backward
            materializing = self.buffers.push(
                replicas,
                self.mains,
                self.label,
                owner=self if has_backward else None,
                columnwise=columnwise,
            )
        self.num_pushes = self.buffers.num_pushes
        return materializing

    @property
    def has_slots(self) -> bool:
        """Whether the last push was for this forward. All ranks see the same order of pushes."""
        return self.buffers is not None and self.num_pushes == self.buffers.num_pushes

    def _require_slots(self) -> None:
        """Check that the experts, or their backward, have computed with this forward's replicas.

        Raises:
            RuntimeError: Another forward or backward has come in between.
        """
        if not self.has_slots:
            raise RuntimeError(
                f"{self.label}: another MoE layer or microbatch ran in the middle of this layer's "
                "experts, or of their backward, and overwrote their replicas: run it before or "
                "after the layer (from a hook of the layer, not of its experts)"
            )

    def _slot_weights(self, *, trained: bool) -> list[list[Tensor] | None]:
        """The slots' weights by segment and part; None where `trained` does not fit."""
        assert self.buffers is not None
        pairs = zip(self.buffers.slot_weights, self.slot_grads, strict=True)
        return [weight if (grad is not None) == trained else None for weight, grad in pairs]

    def replicas_of_backward(self) -> Transfers:
        """Return the plan's replicas, for the one backward that a forward has.

        Raises:
            RuntimeError: The backward is over, or the step of the forward was aborted.
        """
        assert self.virtual_layer is not None, "a backward runs for a forward that kept no plan"
        if self.is_released:
            raise RuntimeError(
                f"layer {self.layer_number}: the plan of microbatch {self.microbatch_idx} "
                f"(virtual layer id {self.virtual_layer.virtual_layer_id}) is gone: its backward "
                "is over, or its step was aborted; one forward has one backward"
            )
        return self.replicas


def _either(
    grads: Sequence[Tensor | None], others: Sequence[Tensor | None] | None
) -> list[Tensor | None]:
    """Return a gradient for each slot, from the one or the other."""
    if others is None:
        return list(grads)
    pairs = zip(grads, others, strict=True)
    return [grad if grad is not None else other for grad, other in pairs]


_THREADS_LET_GO_S = 1.0
"""Far longer than a thread needs to leave a finished collective, also on a loaded machine."""


@dataclass(frozen=True, eq=False)
class VirtualLayer:
    """One microbatch in flight of one MoE layer: its name in messages, and its memory.

    Made by `VirtualLayers`, and lent to one forward at a time. The next forward overwrites the
    memory.
    """

    virtual_layer_id: int
    """Number of the pair (MoE layer of this rank, microbatch in flight)."""
    maps: RoutingMaps
    """The microbatch's dense maps over physical experts."""


class VirtualLayers:
    """The virtual layers of one MoE layer: as many as the pipeline schedule has in flight.

    At most `limit` forwards may wait for their backward; any number if it is None.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._num_made = 0
        self._num_lent = 0
        self._free: list[VirtualLayer] = []
        self._borrowers: weakref.WeakSet[Forward] = weakref.WeakSet()

    @property
    def num_in_flight(self) -> int:
        """Forwards whose backward is still to come."""
        return self._num_made - len(self._free)

    def lend(self, forward: Forward) -> None:
        """Give a forward a virtual layer, until its reduction starts or its graph is dropped.

        Raises:
            RuntimeError: As many forwards as the limit allows wait for their backward: the same on
                all ranks, because a dropped graph never counts.
        """
        buffers = forward.buffers
        assert buffers is not None, "without slots no backward needs a plan"
        if not self._free and self._num_made == self._limit:
            self._end_dropped()
        if not self._free:
            if self._num_made == self._limit:
                waiting = sorted(f.microbatch_idx for f in self._borrowers if not f.is_released)
                raise RuntimeError(
                    f"layer {forward.layer_number}: balance.max_in_flight ({self._limit}) must be "
                    f"{self._limit + 1} or more: microbatches {waiting} wait for their backward "
                    f"when the forward of microbatch {self._num_lent} begins"
                )
            self._free.append(VirtualLayer(buffers.new_virtual_layer_id(), RoutingMaps()))
            self._num_made += 1
        # The lowest, so that a schedule that repeats itself finds the same memory again.
        virtual_layer = min(self._free, key=lambda each: each.virtual_layer_id)
        self._free.remove(virtual_layer)
        forward.microbatch_idx = self._num_lent
        forward.virtual_layer = virtual_layer
        forward.give_back = weakref.finalize(forward, self._free.append, virtual_layer)
        forward.before, buffers.last_planned = buffers.last_planned, weakref.ref(forward)
        self._num_lent += 1
        self._borrowers.add(forward)

    def _end_dropped(self) -> None:
        """Let graphs that the program has dropped give back their virtual layers.

        A graph in a cycle of references waits for the garbage collector. A thread of the process
        group may hold another for a moment, with the tensor that it has moved.
        """
        gc.collect()
        deadline = time.monotonic() + _THREADS_LET_GO_S
        while not self._free and time.monotonic() < deadline:
            time.sleep(0.001)

    def forget_step(self) -> None:
        """End all forwards in flight: no backward will come any more."""
        for forward in list(self._borrowers):
            forward.release_plan()
