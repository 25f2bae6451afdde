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

import dataclasses
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from torch import Tensor, nn

from megatron_ext.balance.agreement import Agreement, name_ranks, shared_agreement
from megatron_ext.balance.costs import LayerCosts
from megatron_ext.balance.in_flight import InFlightPlans, Moves, PlanHandle
from megatron_ext.balance.layout import ExpertLayout
from megatron_ext.balance.load import gather_load, load_of
from megatron_ext.balance.main_weights import MainWeights
from megatron_ext.balance.placement import Placement
from megatron_ext.balance.plan import BalancePlan, Shares, share_plan
from megatron_ext.balance.planner import LayerPlanner
from megatron_ext.balance.ranges import (
    EXPERTS,
    LOAD,
    PLAN,
    PUSH_START,
    PUSH_WAIT,
    REROUTE,
    stage,
)
from megatron_ext.balance.replicas import (
    NO_SLOTS,
    Joint,
    NoReplication,
    Replication,
    join_later,
)
from megatron_ext.balance.reroute import as_map, assign, reroute, reroute_ids
from megatron_ext.balance.slots import SentAhead, SlotBuffers, shared_slot_buffers
from megatron_ext.balance.solve import plan_layout
from megatron_ext.balance.stage_times import TIMES
from megatron_ext.balance.strategies import PlanSettings, get_strategy
from megatron_ext.balance.strategies.ideal import force_even
from megatron_ext.config import COST_UNITS, BalanceConfig
from megatron_ext.mcore import failures
from megatron_ext.mcore.dispatcher import (
    Part,
    Planned,
    dispatcher_kind,
    physical_dispatcher,
    release_graph,
    release_maps,
)
from megatron_ext.mcore.experts import expert_weights, finish_parameter_gather, run_experts
from megatron_ext.mcore.in_place import check_in_place
from megatron_ext.mcore.limits import validate_for_balancing
from megatron_ext.mcore.lines import BalanceLines
from megatron_ext.mcore.lookahead import (
    LayerOrder,
    LayerPlace,
    Lookahead,
    Prediction,
    PredictionReport,
)
from megatron_ext.mcore.measure import CostMeter, measure_costs
from megatron_ext.mcore.recompute import (
    LeftBehind,
    first_pass_under_way,
    leave,
    refuse_other_checkpoints,
    take,
)
from megatron_ext.mcore.schedule import ring_size
from megatron_ext.mcore.stages import NamedStages
from megatron_ext.transport import GathersRows, TransportOptions, settle_transport


@dataclass(frozen=True)
class LayerReport:
    """What one layer did with one microbatch; given to the layer's observers."""

    layer_number: int
    """1-based, as in Megatron."""
    load: Tensor
    """Assignments from source rank r to logical expert e, int64 [R, E]."""
    rank_loads_after: Tensor
    """Assignments that each rank computes, int64 [R]."""
    slots: Tensor
    """Logical expert in each slot of each rank by the plan, or -1, int32 [R, S]."""
    prediction: PredictionReport | None = None
    """How good the prediction by the layer before was; None without a prediction, as in a
    recomputed forward."""
    layout: ExpertLayout | None = None
    """Where experts and slots are; None for routing that was forced even."""
    weight_bytes: int = 0
    """Bytes of one replica's weights, over all shards."""
    grad_bytes: int = 0
    """Bytes of its gradients."""
    moves: Moves = field(default_factory=Moves)
    """How often its replicas have moved; complete when the step is over."""

    @property
    def num_replicas(self) -> int:
        """Slots in use. Waits for the device, so it is better read after the step."""
        return int((self.slots >= 0).sum())


Observer = Callable[[LayerReport], None]

PlanObserver = Callable[[BalancePlan, Tensor | None], None]
"""Is called with a plan, and the slots int32 [R, S] that were sent ahead for it, or None."""


@dataclass
class Microbatch:
    """State of one forward of a layer, from `join_reduction` or `preprocess` to `combine`."""

    mains: MainWeights
    """This rank's main weights in this forward."""
    joint: Joint | None = None
    """Where backward waits for the reduction; None if it waits at once."""
    prediction: Prediction | None = None
    """What the layer before predicted; None if it predicted nothing."""
    replication: Replication | NoReplication = field(default_factory=NoReplication)
    """The replication by its plan."""


class BalancedMoELayer(NamedStages, MoELayer):
    """Megatron's MoE layer whose EP ranks compute equally many assignments. Made by `balance_spec`.

    Args:
        config: Megatron's TransformerConfig.
        submodules: Submodules of Megatron's MoELayer.
        layer_number: 1-based, as in Megatron.
        pg_collection: Process groups; Megatron's global ones by default.
        balance: What the balancer may do; equal on all ranks that plan alike.
        placement: What the file `balance.placement` holds; None if that is empty.
        order: Shared by the layers that may predict each other's loads; None if there is no other
            layer.
        lines: Writes what the layers of a spec do; None writes nothing.
        **kwargs: What later versions of Megatron pass to their MoELayer.

    Raises:
        ValueError: A setting of `config` excludes balancing (`check` says it earlier), or the ranks
            that plan alike disagree about `balance`.
    """

    token_dispatcher: Any

    def __init__(
        self,
        config: Any,
        submodules: Any = None,
        layer_number: int | None = None,
        pg_collection: Any = None,
        *,
        balance: BalanceConfig,
        placement: Placement | None = None,
        order: LayerOrder | None = None,
        lines: BalanceLines | None = None,
        **kwargs: Any,
    ) -> None:
        assert (placement is None) == (not balance.placement), "`balance_spec` reads the file"
        if problems := validate_for_balancing(config, balance):
            # No ConfigError: Megatron raises errors anew, of the same class with a longer text.
            raise ValueError("; ".join(problems))
        if pg_collection is None:
            pg_collection = get_default_pg_collection()
        super().__init__(
            config,
            submodules=submodules,
            layer_number=layer_number,
            pg_collection=pg_collection,
            **kwargs,
        )
        self.planning_group = planning_group(self)
        """The ranks that plan alike: those of the EP group and, with expert tensor parallelism, of
        the expert-TP groups of each."""
        _check_equal_config(balance, self.planning_group)
        self.balance = balance
        self._placement = placement
        self.observers: list[Observer] = []
        """Told of every microbatch that is trained with, once."""
        self.plan_observers: list[PlanObserver] = []
        """Told of the plan of every forward, evaluated and recomputed ones as well."""
        # One rank of a pipeline stage.
        if lines is not None and self.planning_group.rank() == pg_collection.expt_dp.rank() == 0:
            lines.watch(self)
        ep_size = self.ep_group.size()
        self.layout = layout_of(config, balance, ep_size)
        is_padded = bool(config.moe_pad_expert_input_to_capacity)
        # A token may be another expert's padding beside its own choices.
        self._most_choices = config.num_moe_experts if is_padded else config.moe_router_topk
        self._transport = balance.transport
        if self.layout.slots > 0:
            self._transport, domain_ranks = settle_transport(
                balance.transport,
                balance.domain_ranks,
                self.ep_group,
                _experts_device(),
                self.planning_group,
            )
            self.layout = dataclasses.replace(self.layout, nvlink_domain=domain_ranks)
        # One rank has no tokens to send.
        is_local_first = balance.local_first and ep_size > 1
        self._dispatcher_kind = dispatcher_kind("local_first" if is_local_first else "megatron")
        self.token_dispatcher = physical_dispatcher(
            self._dispatcher_kind,
            self.token_dispatcher,
            self.layout,
            config,
            self.ep_group.rank(),
            pg_collection,
        )
        self.expert_weights = expert_weights(self.experts)
        self.measured: dict[str, float] = {}
        """Measured costs that plans are chosen by, by their setting; measured in the first forward,
        equal on all ranks of the EP group."""
        # Where no replica can go anywhere, all plans are the same.
        has_choice = self.layout.slots > 0 and self.layout.nvlink_domain > 1
        self._to_measure = balance.costs_to_measure if has_choice else ()
        self.chunk: int | None = None
        """Layers before the first layer of this chunk; set by the transformer layer."""
        self.lookahead: Lookahead | None = None
        predicts = get_strategy(balance.strategy).predicts
        if predicts and self.layout.slots > 0 and order is not None:
            self.lookahead = Lookahead(
                order,
                router=self.router,
                gather_load=partial(
                    gather_load, group=self.planning_group, ep_size=self.layout.ep_size
                ),
                send_ahead=self.send_ahead,
            )
        # Made in the first forward: only then have wrappers settled the dtype and device of the
        # weights.
        self._slot_buffers: SlotBuffers | None = None
        self._agreement: Agreement | None = None
        self._in_flight: InFlightPlans | None = None
        # The forward that is under way. Here because Megatron calls its stages one by one.
        self._microbatch: Microbatch | None = None

    @property
    def is_for_mtp(self) -> bool:
        """Whether this is a layer of multi-token prediction."""
        return self.layer_number > self.config.num_layers

    def set_layer_number(self, layer_number: int) -> None:
        """Take the number in the model: layers of multi-token prediction follow the decoder's."""
        super().set_layer_number(layer_number)
        # Later versions of Megatron count these from 1; the router knows that by itself.
        if getattr(self, "is_mtp_layer", False):
            self.layer_number = layer_number + self.config.num_layers

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
            self._planner.observe(load)
            self._report(chosen, load, plan, handle, microbatch.prediction)
        if self.lookahead is not None:
            self.lookahead.tell_next(hidden_states)
        self.token_dispatcher.planned = self._planned(shares)
        hidden_states, probs = super().preprocess(hidden_states, probs, physical)
        release_graph(self.token_dispatcher)
        return hidden_states, probs

    def _planned(self, shares: Shares) -> Planned | None:
        """What the plan says of the exchange of tokens; None if it says nothing for sure.

        Sizes must fit on all ranks, so ranks compare their plans before it. Where that takes a
        collective, the dispatcher may as well count.
        """
        rows = self._rows()
        if shares.arriving is None or rows is None:
            return None
        assert self._agreement is not None, "it gave the shares"
        label = f"layer {self.layer_number}, seal"
        return Planned(
            shares.quota,
            shares.arriving,
            partial(self._agreement.send_seal, rows, label),
            partial(self._agreement.compare_sent, rows),
        )

    def _rows(self) -> GathersRows | None:
        """What gathers of all ranks that plan alike without a collective; None if nothing does."""
        if self.layout.slots == 0 or self.planning_group is not self.ep_group:
            return None
        buffers, _ = self._shared_state(self._begin().mains.parameters()[0])
        return buffers.transport.rows

    def _make_plan(
        self, microbatch: Microbatch, chosen: Tensor, probs_dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, BalancePlan, Shares, PlanHandle | None]:
        """Stages 1 and 2: what all ranks count, and its plan, kept if a backward will come.

        The marks of this rank's tokens come second, its shares of the plan fourth.
        """
        if self.lookahead is not None:
            place = LayerPlace(self.chunk, self.layer_number)
            microbatch.prediction = self.lookahead.arrive(place)
        agreement = self._agreement_on(chosen.device)
        label = f"layer {self.layer_number}, load"
        with stage(LOAD):
            counts, marks = agreement.gather_counts(chosen, self._rows(), label)
        load = load_of(counts, self.layout.ep_size)
        if self._to_measure:
            self._measure_costs(load, probs_dtype)
        prediction = microbatch.prediction
        plan = self._planner.solve(load, prediction.sent.slots if prediction is not None else None)
        handle = self._keep(microbatch, counts, plan)
        in_flight = self._in_flight
        on_host = in_flight.slots_on_host(handle) if in_flight and handle else None
        shares = agreement.share(counts, load, plan, self.layer_number, on_host)
        if self.balance.check_plans:
            _check_equal_plans(plan, self.planning_group, self.layer_number)
        return counts, marks, plan, shares, handle

    def _keep(self, microbatch: Microbatch, counts: Tensor, plan: BalancePlan) -> PlanHandle | None:
        """Keep a plan for the backward, or for the second pass of a forward that is recomputed."""
        checkpoint = first_pass_under_way()
        if self.layout.slots == 0 or not (torch.is_grad_enabled() or checkpoint is not None):
            return None
        refuse_other_checkpoints(self.layer_number)
        _, in_flight = self._shared_state(microbatch.mains.parameters()[0])
        handle = in_flight.keep(plan)
        if checkpoint is not None:
            leave(checkpoint, self, LeftBehind(counts, handle))
        return handle

    def _recall(
        self, left: LeftBehind, chosen: Tensor
    ) -> tuple[Tensor, None, BalancePlan, Shares, PlanHandle]:
        """Return what the first pass planned, with shares for these choices; it kept no marks."""
        assert self._in_flight is not None, "the first pass made it"
        plan = self._in_flight.recall(left.handle)
        shares = share_plan(self.planning_group.rank(), left.counts, plan)
        return left.counts, None, plan, shares.fit(chosen.sum(0)), left.handle

    def routed_experts_compute(self, hidden_states: Any, probs: Any) -> tuple[Any, None]:
        """Stage 6, with the hooks of stages 4 and 8 for backward around it."""
        parts = self._dispatcher_kind.parts(self.token_dispatcher, hidden_states, probs)
        first = next(parts)
        tokens, slot_weights = self._under_way.replication.materialized(first.tokens)
        outputs = [self._run_experts(slot_weights, first._replace(tokens=tokens))]
        outputs += [self._run_experts(slot_weights, part) for part in parts]
        return self._dispatcher_kind.outputs(self.token_dispatcher, outputs), None

    def _run_experts(self, slot_weights: list[Any], part: Part) -> Tensor:
        with stage(EXPERTS), self._under_way.replication.kept_in_place():
            output = run_experts(self.experts, self.expert_weights, slot_weights, *part)
        # With several parts, the second backward finds the replicas in the slots.
        return self._under_way.replication.rematerialize_before(output)

    def combine(self, output: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Stage 7; in backward, stage 4 starts before it."""
        replication, self._microbatch = self._under_way.replication, None
        output = super().combine(output, *args, **kwargs)
        return replication.start_rematerialize_before(output)

    def postprocess(self, *args: Any, **kwargs: Any) -> Tensor:
        """The end of a forward (Megatron); layers that are recomputed keep no maps meanwhile."""
        output: Tensor = super().postprocess(*args, **kwargs)
        release_maps(self.token_dispatcher)
        return output

    def _begin(self) -> Microbatch:
        """Return the next forward's microbatch, made at the first call."""
        if self._microbatch is None:
            self._microbatch = Microbatch(self.expert_weights.mains())
        return self._microbatch

    @property
    def _under_way(self) -> Microbatch:
        assert self._microbatch is not None, "preprocess comes first in a forward"
        return self._microbatch

    def _agreement_on(self, device: torch.device) -> Agreement:
        if self._agreement is None:
            num_shards = self.planning_group.size() // self.layout.ep_size
            self._agreement = shared_agreement(self.planning_group, device, num_shards)
        return self._agreement

    @property
    def transport(self) -> str:
        """Name of the transport of replicas, settled where the setting is `auto`."""
        return self._transport

    @property
    def slot_buffers(self) -> SlotBuffers | None:
        """The slots that the layer shares; None before its first forward, or without slots."""
        return self._slot_buffers

    @property
    def num_in_flight(self) -> int:
        """Plans that are kept for a backward to come."""
        return self._in_flight.num_in_flight if self._in_flight is not None else 0

    @property
    def ring_size(self) -> int:
        """Most plans that can be kept; 0 before the first forward, or without slots."""
        return self._in_flight.ring_size if self._in_flight is not None else 0

    def send_ahead(self, predicted: Tensor) -> SentAhead:
        """Start materializing the replicas of a predicted load; all EP ranks call.

        Args:
            predicted: Load of this layer's next forward: int64 [R, E], equal on all ranks.
        """
        slots = self._planner.expect(predicted)
        finish_parameter_gather(self.experts)
        mains = self._begin().mains
        buffers, _ = self._shared_state(mains.parameters()[0])
        with stage(PUSH_START):
            return buffers.send_ahead(slots, mains, f"layer {self.layer_number}, sent ahead")

    def forget_step(self) -> None:
        """Drop what an aborted step left in this layer."""
        if self.lookahead is not None:
            self.lookahead.forget()
        self._microbatch = None
        if self._agreement is not None:
            self._agreement.forget()
        if self._in_flight is not None:
            self._in_flight.clear()

    @cached_property
    def _planner(self) -> LayerPlanner:
        """Made in the first forward: Megatron tells a layer its number after it is made."""
        assert not self._to_measure, "costs are measured before the first plan"
        settings = PlanSettings.of(self.balance, self._costs(), self._placement)
        return LayerPlanner(
            self.balance.strategy, self.layout, settings, layer=self.layer_number or 0
        )

    def _costs(self) -> LayerCosts | None:
        """Costs for the fastest plan; None if it is not asked for, or there is no choice of plans.

        A cost is the setting's value, or the measured value if that is `auto`.
        """
        costs = {name: getattr(self.balance, name) for name in COST_UNITS} | self.measured
        if not self.balance.plans_for_time or "auto" in costs.values():
            return None
        element_size = next(self.experts.parameters()).element_size()
        return LayerCosts(
            expert_bytes=self._expert_bytes,
            token_bytes=element_size * self._expert_width,
            **costs,
        )

    def _measure_costs(self, load: Tensor, probs_dtype: torch.dtype) -> None:
        """Measure the costs that are needed and not given; all EP ranks call."""
        finish_parameter_gather(self.experts)
        mains = self._begin().mains
        buffers, _ = self._shared_state(mains.parameters()[0])
        meter = CostMeter(
            buffers=buffers,
            mains=mains,
            run_mains=partial(run_experts, self.experts, self.expert_weights, NO_SLOTS),
            width=self._expert_width,
            probs_dtype=probs_dtype,
            load=load,
            group=self.planning_group,
        )
        self.measured = measure_costs(self._to_measure, meter, f"layer {self.layer_number}")
        self._to_measure = ()

    @property
    def _expert_width(self) -> int:
        """Elements of an expert's input, and of its output, for an assignment."""
        return int(self.config.moe_latent_size or self.config.hidden_size)

    @property
    def _expert_bytes(self) -> int:
        """Bytes of one expert's weights, which a replica moves."""
        num_elements = sum(math.prod(segment.shape) for segment in self.expert_weights.segments)
        return next(self.experts.parameters()).element_size() * num_elements

    def _replicate(
        self, microbatch: Microbatch, plan: BalancePlan, handle: PlanHandle | None
    ) -> Replication | NoReplication:
        """Gather what the microbatch's replicas need."""
        if self.layout.slots == 0:
            return NoReplication()
        if self.training and torch.is_grad_enabled():
            _check_main_grads(microbatch.mains)
        finish_parameter_gather(self.experts)
        buffers, in_flight = self._shared_state(microbatch.mains.parameters()[0])
        if torch.is_grad_enabled():
            buffers.allocate_grads(microbatch.mains.grad_dtype)
        return Replication(buffers, in_flight, microbatch.mains, plan, handle, microbatch.joint)

    def _check_in_place(self, device: torch.device) -> None:
        """Check, before the first use, that replicas can be copied from where the weights lie."""
        if self.layout.slots > 0 and self._slot_buffers is None:
            check_in_place(self.experts, device, self.layer_number)

    def _shared_state(self, example: Tensor) -> tuple[SlotBuffers, InFlightPlans]:
        if self._slot_buffers is None or self._in_flight is None:
            self._slot_buffers = shared_slot_buffers(
                self.layout,
                self.expert_weights.segments,
                dtype=example.dtype,
                device=example.device,
                ep_group=self.ep_group,
                transport=self._transport,
                options=TransportOptions(
                    push_blocks=self.balance.copying_blocks,
                    grad_reduce_share=self.balance.adding_share,
                    timeout_s=self.balance.wait_limit_s,
                    domain_ranks=self.layout.nvlink_domain,
                    symmetric_memory=self.balance.symmetric_backend,
                ),
                slot_set=self.lookahead.settle_slot_set() if self.lookahead is not None else 0,
            )
            num_plans = self._num_plans()
            self._in_flight = InFlightPlans(
                self.layout,
                ring_size=num_plans,
                layer_number=self.layer_number,
                first_virtual_layer_id=self._slot_buffers.reserve_virtual_layers(num_plans),
                device=example.device,
            )
        return self._slot_buffers, self._in_flight

    def _num_plans(self) -> int:
        """Plans in flight at a time."""
        return ring_size(
            self.balance,
            self.config,
            pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
            is_for_mtp=self.is_for_mtp,
        )

    def _report(
        self,
        chosen: Tensor,
        load: Tensor,
        plan: BalancePlan,
        handle: PlanHandle | None,
        prediction: Prediction | None,
    ) -> None:
        if self.observers:
            buffers, shards = self._slot_buffers, self.planning_group.size() // self.layout.ep_size
            weight_bytes, grad_bytes = buffers.replica_bytes if buffers is not None else (0, 0)
            report = LayerReport(
                self.layer_number,
                load,
                plan.rank_loads(),
                plan.slots,
                None
                if prediction is None
                else prediction.report(chosen, load, plan, self._expert_bytes),
                layout=plan.layout,
                weight_bytes=shards * weight_bytes,
                grad_bytes=shards * grad_bytes,
                moves=handle.moves if handle is not None else Moves(),
            )
            for observer in self.observers:
                observer(report)


def check_agreement(model: Iterable[nn.Module]) -> None:
    """Check that the ranks that plan alike made the same last plan; all ranks of the model call.

    What differs in a layer is noticed in the next layer, but nothing follows the last layer of a
    step until the next step: for the end of a run, and before a checkpoint. The same goes for waits
    for replicas that failed.

    Args:
        model: The model's chunks on this rank.

    Raises:
        RuntimeError: Ranks had different loads or plans, or a wait for replicas has failed.
    """
    model = list(model)
    failures.settle(model)
    layers = [m for chunk in model for m in chunk.modules() if isinstance(m, BalancedMoELayer)]
    for agreement in dict.fromkeys(layer._agreement for layer in layers):
        if agreement is not None:
            agreement.settle()


def reset_after_abort(model: Iterable[nn.Module]) -> None:
    """Make the balanced layers ready for the next step after a step that ended with an error.

    An error may leave the ranks of an EP group at different points of a step, with plans in flight
    and replicas half moved. Every rank of the group calls this once it has left the step, before
    the next step. Megatron's own collectives must have ended, or a rank still waits in one.

    Args:
        model: The model's chunks on this rank.
    """
    failures.forget()
    layers = [m for chunk in model for m in chunk.modules() if isinstance(m, BalancedMoELayer)]
    for layer in layers:
        layer.forget_step()
    # Slots are shared, and their reset is collective: once each, in the layers' order.
    for buffers in dict.fromkeys(layer._slot_buffers for layer in layers):
        if buffers is not None:
            buffers.reset()


class EvenMoELayer(NamedStages, MoELayer):
    """Megatron's MoE layer with even routing forced: the upper bound of what balancing can do.

    Not a way to train: tokens go to experts that the router did not choose.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.observers: list[Observer] = []

    def route(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Route as Megatron does, then hand the choices to experts in turn."""
        probs, routing_map = super().route(*args, **kwargs)
        group, ep_size = planning_group(self), self.ep_group.size()
        # As if all ranks had as many tokens and dropped none; else a few experts get one more.
        dealt_before = group.rank() * len(routing_map) * self.router.topk
        probs, routing_map = force_even(probs, routing_map, dealt_before)
        if self.observers and self.training and torch.is_grad_enabled():
            load = gather_load(routing_map, group, ep_size)
            rank_loads = load.sum(0).view(ep_size, -1).sum(1)
            no_slots = load.new_empty(ep_size, 0, dtype=torch.int32)
            for observer in self.observers:
                observer(LayerReport(self.layer_number, load, rank_loads, no_slots))
        return probs, routing_map


def layout_of(config: Any, balance: BalanceConfig, ep_size: int) -> ExpertLayout:
    """Return where a layer's experts and slots are, with domains as `balance` says them.

    Args:
        config: Megatron's TransformerConfig.
        balance: What the balancer may do.
        ep_size: Ranks of the EP group (R).
    """
    layout = plan_layout(
        balance.strategy,
        num_experts=config.num_moe_experts,
        ep_size=ep_size,
        slots=balance.slots,
        nvlink_domain=balance.domain_ranks,
    )
    # One rank has nobody to share its load with.
    has_slots = ep_size > 1 and not config.moe_pad_expert_input_to_capacity
    return layout if has_slots else dataclasses.replace(layout, slots=0)


def _experts_device() -> torch.device:
    """Where the experts of this rank will be, also if they are still to be moved there."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def planning_group(layer: MoELayer) -> dist.ProcessGroup:
    """Return the ranks that share a layer's experts, those with shards of the same side by side.

    Tokens of all of them meet at the experts. So all plan by the same load, and a replica's shards
    go to the slots of the ranks with these shards: the EP group of each shard.
    """
    dispatcher: Any = layer.token_dispatcher
    if dispatcher.tp_size == 1:
        return layer.ep_group
    group: dist.ProcessGroup = dispatcher.tp_ep_group
    assert group.rank() == layer.ep_group.rank() * dispatcher.tp_size + dispatcher.tp_rank
    return group


def _check_equal_config(balance: BalanceConfig, group: dist.ProcessGroup) -> None:
    """Check that settings are equal on all ranks: ranks plan alone and must plan alike."""
    settings: list[Any] = [None] * group.size()
    dist.all_gather_object(settings, asdict(balance), group=group)
    for rank, other in enumerate(settings):
        for name, value in settings[0].items():
            if other[name] != value:
                raise ValueError(
                    f"balance.{name} must be equal on all ranks that share experts: "
                    f"rank 0 has {value!r}, rank {rank} has {other[name]!r}"
                )


def _check_main_grads(mains: MainWeights) -> None:
    """Check that fused weight gradients have somewhere to go, before a backward looks for it."""
    if not mains.fused:
        return
    if any(main.requires_grad and not hasattr(main, "main_grad") for main in mains.parameters()):
        raise ValueError(
            "gradient_accumulation_fusion (True) adds to `main_grad`, which the experts' weights "
            "do not have: wrap the model in Megatron's DistributedDataParallel before it trains, "
            "or give --no-gradient-accumulation-fusion"
        )


def _check_equal_plans(
    plan: BalancePlan, group: dist.ProcessGroup, layer_number: int | None
) -> None:
    digests: list[Any] = [None] * group.size()
    dist.all_gather_object(digests, plan.digest(), group=group)
    if different := [rank for rank, digest in enumerate(digests) if digest != digests[0]]:
        num_shards = group.size() // plan.layout.ep_size
        raise RuntimeError(
            f"layer {layer_number}: {name_ranks(different, num_shards)} solved another plan than "
            f"rank 0 (digests {digests}); planning must be the same integer arithmetic on the same "
            "load"
        )
