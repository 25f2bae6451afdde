"""The balanced MoE layer: the stages of the method in the order a token takes. Read this first.

    forward                                           backward
    route       choose logical experts (Megatron)     postprocess (Megatron)
    preprocess  1 gather load                         combine  4 start materializing from the plan
                  (once: what plans cost, measure.py)
                2 solve plan                          experts  6 experts' backward
                4 start materializing replicas                 8 start reducing replica gradients
                3 reroute: logical -> physical        dispatch (Megatron)
                  wait for the replicas               preprocess  3 gradients of probabilities back
                  tell the next layer (lookahead.py)
    dispatch    5 tokens to physical experts          route (Megatron)
    experts     6 mains and slots
                  (in one part or more: dispatcher.py)
    combine     7 outputs back                        layer's input (backward.py)
                                                               8 sums into the mains

A recomputed forward has the plan of its first pass (recompute.py).

Replicas live for one microbatch in slots that all layers share; parameters, optimizer state and
checkpoints hold logical experts only.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_ext.balance.in_flight import Moves, PlanHandle
from megatron_ext.balance.load import load_of
from megatron_ext.balance.plan import BalancePlan, Shares, share_plan
from megatron_ext.balance.ranges import (
    EXPERTS,
    LOAD,
    PLAN,
    PUSH_WAIT,
    REROUTE,
    stage,
)
from megatron_ext.balance.replicas import NoReplication, Replication, join_later
from megatron_ext.balance.reroute import as_map, assign, reroute, reroute_ids
from megatron_ext.balance.stage_times import TIMES
from megatron_ext.mcore.dispatcher import Part, Planned, release_graph, release_maps
from megatron_ext.mcore.equipped_layer import EquippedMoELayer, Microbatch
from megatron_ext.mcore.experts import finish_parameter_gather, run_experts
from megatron_ext.mcore.in_place import check_main_grads
from megatron_ext.mcore.layer_report import LayerReport
from megatron_ext.mcore.lookahead import LayerPlace, Prediction
from megatron_ext.mcore.planning_group import check_equal_plans
from megatron_ext.mcore.recompute import (
    LeftBehind,
    first_pass_under_way,
    leave,
    refuse_other_checkpoints,
    take,
)
from megatron_ext.mcore.stages import NamedStages


class BalancedMoELayer(NamedStages, EquippedMoELayer):
    """Megatron's MoE layer whose EP ranks compute equally many assignments. Made by `balance_spec`.

    What it is made with: `EquippedMoELayer`.
    """

    def join_reduction(self, hidden_states: Tensor) -> Tensor:
        """Let backward wait for the next forward's replica gradients at the layer's input.

        The transformer layer calls it with its own input, so that the reduction runs beside the
        backward of router and attention. Without this call, backward waits where the reduction
        starts.
        """
        # A recomputed MoE layer has a backward of its own inside the layer's: parameters must get
        # all of their gradient in one of the two.
        if self.layout.slots > 0 and torch.is_grad_enabled() and not self.moe_layer_recompute:
            self._check_in_place(hidden_states.device)
            microbatch = self._begin()
            hidden_states, microbatch.joint = join_later(
                hidden_states, microbatch.mains, self.layer_number
            )
        return hidden_states

    def preprocess(
        self, hidden_states: Tensor, probs: Tensor, routing_map: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Stages 1 to 4: from logical to physical routing, with the replicas in their slots.

        Args:
            hidden_states: The layer's input, [s, b, H].
            probs: The router's probabilities, [N, E] with a map and [N, K] with ids.
            routing_map: The router's choices: a map bool [N, E], or ids [N, K] of an integer dtype.
                The dispatcher gets physical choices in the same form.
        """
        self._check_padding()
        self._check_in_place(hidden_states.device)
        microbatch = self._begin()
        chosen = as_map(routing_map, self.layout.num_experts)
        left = take(self)
        started = TIMES.mark() if self.training else None
        with stage(PLAN):
            counts, marks, plan, shares, handle = (
                self._make_plan(microbatch, chosen, probs.dtype)
                if left is None
                else self._recall(left, chosen)
            )
        if started is not None:
            TIMES.add("plan", started, TIMES.mark())
        sent = microbatch.prediction.sent if microbatch.prediction is not None else None
        for observer in self.plan_observers:
            observer(plan, sent.slots if sent is not None else None)
        replication = microbatch.replication = self._replicate(microbatch, plan, handle)
        # Between GPUs this does not make the host wait for the plan: it stays on the device, and
        # what the host needs of it in backward is copied meanwhile (in_flight.py).
        materializing = replication.start_materialize(sent)
        # Where a forward is recomputed, its maps live as long as one pass: no entry holds them.
        is_only_pass = torch.is_grad_enabled() and left is None
        maps = replication.routing_maps() if is_only_pass else None
        with stage(REROUTE):
            if routing_map.dtype == torch.bool:
                probs, physical = reroute(
                    probs,
                    chosen,
                    shares,
                    self._most_choices,
                    self.layout.num_physical,
                    marks=marks,
                    maps=maps,
                )
            else:
                assignment = assign(chosen, shares, self._most_choices, marks)
                physical = reroute_ids(routing_map, assignment, self.layout.num_experts)
        with stage(PUSH_WAIT):
            materializing.wait()
        if self.training and torch.is_grad_enabled():
            # Neither evaluation nor the first pass of recompute: every microbatch once.
            load = load_of(counts, self.layout.ep_size)
            self._held.planner.observe(load)
            self._report(chosen, load, plan, replication, microbatch.prediction)
        if self.lookahead is not None:
            self.lookahead.tell_next(hidden_states)
        self.token_dispatcher.planned = self._planned(shares)
        hidden_states, probs = super().preprocess(hidden_states, probs, physical)
        release_graph(self.token_dispatcher)
        return hidden_states, probs

    def _planned(self, shares: Shares) -> Planned | None:
        """What the plan says of the exchange of tokens; None if it says nothing for sure.

        Sizes must fit on all ranks, so ranks compare their plans before it.
        """
        if shares.arriving is None:
            return None
        rows, agreement = self._held.rows, self._held.agreement
        label = f"layer {self.layer_number}, seal"
        return Planned(
            shares.quota,
            shares.arriving,
            partial(agreement.send_seal, rows, label),
            partial(agreement.compare_sent, rows),
        )

    def _make_plan(
        self, microbatch: Microbatch, chosen: Tensor, probs_dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, BalancePlan, Shares, PlanHandle | None]:
        """Stages 1 and 2: what all ranks count, and its plan, kept if a backward will come.

        The marks of this rank's tokens come second, its shares of the plan fourth.
        """
        if self.lookahead is not None:
            place = LayerPlace(self.chunk, self.layer_number)
            microbatch.prediction = self.lookahead.arrive(place)
        held = self._held
        with stage(LOAD):
            counts, marks = held.agreement.gather_counts(
                chosen, held.rows, f"layer {self.layer_number}, load"
            )
        load = load_of(counts, self.layout.ep_size)
        if held.to_measure:
            held.measure_costs(microbatch.mains, load, probs_dtype)
        prediction = microbatch.prediction
        plan = held.planner.solve(load, prediction.sent.slots if prediction is not None else None)
        handle = self._keep(counts, plan)
        on_host = held.slots.in_flight.slots_on_host(handle) if held.slots and handle else None
        shares = held.agreement.share(counts, load, plan, self.layer_number, on_host)
        if self.balance.check_plans:
            check_equal_plans(plan, self.planning_group, self.layer_number)
        return counts, marks, plan, shares, handle

    def _keep(self, counts: Tensor, plan: BalancePlan) -> PlanHandle | None:
        """Keep a plan for the backward, or for the second pass of a forward that is recomputed."""
        checkpoint, slots = first_pass_under_way(), self._held.slots
        if slots is None or not (torch.is_grad_enabled() or checkpoint is not None):
            return None
        refuse_other_checkpoints(self.layer_number)
        handle = slots.in_flight.keep(plan)
        if checkpoint is not None:
            leave(checkpoint, self, LeftBehind(counts, handle))
        return handle

    def _recall(
        self, left: LeftBehind, chosen: Tensor
    ) -> tuple[Tensor, None, BalancePlan, Shares, PlanHandle]:
        """Return what the first pass planned, with shares for these choices; it kept no marks."""
        assert self._held.slots is not None, "the first pass kept its plan there"
        plan = self._held.slots.in_flight.recall(left.handle)
        shares = share_plan(self.planning_group.rank(), left.counts, plan)
        return left.counts, None, plan, shares.fit(chosen.sum(0)), left.handle

    def _replicate(
        self, microbatch: Microbatch, plan: BalancePlan, handle: PlanHandle | None
    ) -> Replication | NoReplication:
        """Gather what the microbatch's replicas need."""
        slots = self._held.slots
        if slots is None:
            return NoReplication()
        if self.training and torch.is_grad_enabled():
            check_main_grads(microbatch.mains)
        finish_parameter_gather(self.experts)
        grads = slots.buffers.allocate_grads(self._held.grad_dtypes(microbatch.mains))
        return Replication(*slots, microbatch.mains, plan, handle, grads, microbatch.joint)

    def routed_experts_compute(self, hidden_states: Any, probs: Any) -> tuple[Any, None]:
        """Stage 6, with the hooks of stages 4 and 8 for backward around it."""
        parts = self._dispatcher_kind.parts(self.token_dispatcher, hidden_states, probs)
        first = next(parts)
        tokens, slot_weights = self._replication.materialized(first.tokens)
        outputs = [self._run_experts(slot_weights, first._replace(tokens=tokens))]
        outputs += [self._run_experts(slot_weights, part) for part in parts]
        return self._dispatcher_kind.outputs(self.token_dispatcher, outputs), None

    def _run_experts(self, slot_weights: list[Any], part: Part) -> Tensor:
        with stage(EXPERTS), self._replication.kept_in_place():
            output = run_experts(self.experts, self.expert_weights, slot_weights, *part)
        # With several parts, the second backward finds the replicas in the slots.
        return self._replication.rematerialize_before(output)

    def combine(self, output: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Stage 7; in backward, stage 4 starts before it."""
        replication, self._microbatch = self._replication, None
        output = super().combine(output, *args, **kwargs)
        return replication.start_rematerialize_before(output)

    def postprocess(self, *args: Any, **kwargs: Any) -> Tensor:
        """The end of a forward (Megatron); layers that are recomputed keep no maps meanwhile."""
        output: Tensor = super().postprocess(*args, **kwargs)
        release_maps(self.token_dispatcher)
        return output

    def _report(
        self,
        chosen: Tensor,
        load: Tensor,
        plan: BalancePlan,
        replication: Replication | NoReplication,
        prediction: Prediction | None,
    ) -> None:
        if not self.observers:
            return
        held = self._held
        weight_bytes, grad_bytes = replication.bytes_of_one
        report = LayerReport(
            self.layer_number,
            load,
            plan.rank_loads(),
            plan.slots,
            None
            if prediction is None
            else prediction.report(chosen, load, plan, held.expert_bytes),
            layout=plan.layout,
            weight_bytes=held.num_shards * weight_bytes,
            grad_bytes=held.num_shards * grad_bytes,
            moves=replication.handle.moves if replication.handle is not None else Moves(),
        )
        for observer in self.observers:
            observer(report)
