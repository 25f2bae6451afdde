"""The balanced MoE layer: the stages of the method in the order a token takes. Read this first.

    forward                                           backward
    route       choose logical experts (Megatron)     postprocess (Megatron)
    preprocess  1 gather load                         combine  4 start materializing from the plan
                2 solve plan                          experts  4 wait for the replicas
                4 start materializing replicas                 6 experts' backward
                shared experts (Megatron), if any              8 start reducing replica gradients
                3 reroute: logical -> physical
    dispatch    5 tokens to physical experts          dispatch (Megatron)
    experts     4 wait for the replicas               preprocess  3 gradients of probabilities back
                6 mains and slots                     route (Megatron)
    combine     7 outputs back                        layer's input  8 sums into the mains

The transformer layers around it (transformer_layers.py) let backward wait at the layer's input.

Megatron's combined schedule runs these stages of one microbatch between those of another one's
backward. There stage 4 starts in `dispatch`, once the other's experts have left the slots.

Three kinds of objects hold the state of balancing. The layers of an EP group share `SlotBuffers`,
each layer has a `LayerBalancer`, and each forward has a `Forward` with its plan and its transfers.
A recomputed forward takes the `Forward` of its first pass (recompute.py).

Replicas live for one microbatch in slots that all layers share; parameters, optimizer state and
checkpoints hold logical experts only.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.transformer.moe import moe_layer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor

from megatron_ext.balance.beside import rejoin
from megatron_ext.balance.forward import Forward
from megatron_ext.balance.layer_report import LayerReport
from megatron_ext.balance.load import load_of
from megatron_ext.balance.main_weights import MainWeights, is_fsdp
from megatron_ext.balance.plan import BalancePlan, share_plan
from megatron_ext.balance.ranges import EXPERTS, LOAD, PLAN, REROUTE, stage
from megatron_ext.balance.reroute import as_map, assign, reroute, reroute_ids
from megatron_ext.balance.stage_times import TIMES
from megatron_ext.config import BalanceConfig
from megatron_ext.mcore.balancer import LayerBalancer, layout_of
from megatron_ext.mcore.dispatcher import (
    PlannedDispatcher,
    expert_buffers,
    physical_dispatcher,
    release_graph,
    release_maps,
)
from megatron_ext.mcore.experts import ExpertWeights, expert_weights, finish_parameter_gather
from megatron_ext.mcore.in_place import check_beside_fsdp, check_in_place, check_main_grads
from megatron_ext.mcore.limits import require_valid
from megatron_ext.mcore.planning_group import check_equal_config, check_equal_plans, planning_group
from megatron_ext.mcore.recompute import checkpoint_under_way, leave, refuse_other_checkpoints, take
from megatron_ext.mcore.shared_experts import SharedExpertsLater
from megatron_ext.telemetry.log_lines import BalanceLines
from megatron_ext.transport import agree_on_transport

if TYPE_CHECKING:
    from megatron_ext.balance.placement import Placement

_CAPACITY = "moe_expert_rank_capacity_factor"


class BalancedMoELayer(SharedExpertsLater):
    """Megatron's MoE layer whose EP ranks compute equally many assignments. Made by `balance_spec`.

    The constructor checks the settings and makes a dispatcher over physical experts. The first
    forward makes everything that depends on the weights' dtype and device (`start`). A method may
    bring a subclass that overrides named points: `set_chunk`, `dispatcher_class`, `begin`, `solve`,
    `push`, `before_dispatch`, `report` and `routed_experts_compute`.

    Beside the arguments of Megatron's MoELayer, the constructor takes the settings `balance`, equal
    on all ranks that plan alike; the `placement` from the file `balance.placement`; and `lines`,
    the log of the layers of a spec.

    Raises:
        ValueError: A setting of `config` excludes balancing (`check` says it earlier), or the ranks
            that plan alike disagree about `balance`.
    """

    token_dispatcher: Any
    balancer: LayerBalancer
    """Made by `start`, in the layer's first forward."""
    set_name = ""
    """Layers of one name share their slots."""

    def __init__(
        self,
        config: Any,
        submodules: Any = None,
        layer_number: int | None = None,
        pg_collection: Any = None,
        *,
        balance: BalanceConfig,
        placement: Placement | None = None,
        lines: BalanceLines | None = None,
        **kwargs: Any,
    ) -> None:
        assert (placement is None) == (not balance.placement), "`balance_spec` reads the file"
        require_valid(config, balance)
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
        """The ranks that plan alike: the EP group or, with expert tensor parallelism, the EP groups
        of all shards together."""
        check_equal_config(balance, self.planning_group)
        self.balance = balance
        self._placement = placement
        # One rank of a pipeline stage logs.
        if lines is not None and self.planning_group.rank() == pg_collection.expt_dp.rank() == 0:
            lines.watch(self)
        self.layout = layout_of(config, balance, self.ep_group.size())
        self._is_padded = bool(config.moe_pad_expert_input_to_capacity)
        # A token may be another expert's padding beside its own choices.
        self._most_choices = config.num_moe_experts if self._is_padded else config.moe_router_topk
        self.transport = balance.transport
        """Name of the transport of replicas, chosen where the setting is `auto`."""
        if self.layout.slots > 0:
            self._choose_transport()
        self.token_dispatcher = physical_dispatcher(self, pg_collection)
        self._expert_weights = expert_weights(self.experts)
        self.first_layer_of_chunk: int | None = None
        """Layers before the first layer of this chunk; see `set_chunk`."""
        # The forward under way, and the edge of its join. The layer holds both, because Megatron
        # calls the stages one by one. The forward must not hold the edge, because the edge holds
        # the graph and the graph holds the forward.
        self._forward: Forward | None = None
        self._edge: Tensor | None = None
        # Forwards in backward, whose delayed weight gradients are to come.
        self._delayed: list[Forward] = []

    def _choose_transport(self) -> None:
        """Choose the transport of replicas, and their domains; all ranks that plan alike call."""
        asked = self.balance
        # The experts' device in training; the program may not have moved them there yet.
        here = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
        self.transport, domain_ranks = agree_on_transport(
            asked.transport,
            asked.domain_ranks,
            self.ep_group,
            torch.device(here),
            self.planning_group,
        )
        require_valid(self.config, dataclasses.replace(asked, transport=self.transport))
        self.layout = dataclasses.replace(self.layout, nvlink_domain=domain_ranks)

    @classmethod
    def shared_by_layers(cls, balance: BalanceConfig) -> dict[str, Any]:
        """See `ObservedMoELayer.shared_by_layers`."""
        placement = None
        if balance.placement:
            from megatron_ext.files.placement import read_placement

            placement = read_placement(Path(balance.placement))
        lines = BalanceLines(balance.lines_every) if balance.lines_every else None
        return {"placement": placement, "lines": lines}

    def join_reduction(self, hidden_states: Tensor) -> Tensor:
        """Make backward wait for the replica gradients at the transformer layer's input.

        The transformer layer calls this method with its input, so that the reduction runs beside
        the backward of router and attention. Without the call, backward waits where the reduction
        starts. A second pass knows its plan, so its replicas start here, beside attention.
        """
        self.drop_forward()
        if not self._can_join(hidden_states):
            return hidden_states
        self._forward = self.begin(hidden_states.device)
        holds_back = self.is_in_pieces or self.moe_layer_recompute
        hidden_states, edge = self._forward.join(hidden_states, holds_back=holds_back)
        # With the combined schedule, an edge would take the experts' backward on to the join.
        self._edge = None if self.is_overlapped else edge
        if self._forward.is_planned and self._forward.mains.stay:
            self._forward.push()
        return hidden_states

    def _can_join(self, hidden_states: Tensor) -> bool:
        """Whether a backward will come, and may wait at the layer's input; see `Forward.join`."""
        if self.layout.slots == 0 or not torch.is_grad_enabled():
            return False
        if not self.is_in_pieces and not self.moe_layer_recompute:
            return True
        # A checkpoint passes on no edge, so only the input's gradient leads from the experts there.
        if self.moe_layer_recompute and not hidden_states.requires_grad:
            return False
        return self.expert_weights.take_sums_apart

    def preprocess_behind_graph(
        self, hidden_states: Tensor, probs: Tensor, routing_map: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Stages 1 to 4: from logical to physical routing, with the replicas under way.

        Args:
            hidden_states: The layer's input, [s, b, H].
            probs: The router's probabilities, [N, E] with a map and [N, K] with ids.
            routing_map: The router's choices: a map bool [N, E], or ids [N, K] of an integer dtype.
                The dispatcher gets physical choices in the same form.
        """
        self._check_padding()
        if self._forward is None or not self._forward.is_joined:
            self.drop_forward()
            self._forward = self.begin(hidden_states.device)
        forward = self._forward
        chosen = as_map(routing_map, self.layout.num_experts)
        try:
            with self.beside_shared():
                marks = self._plan(forward, chosen, probs.dtype)
            if not self.is_overlapped:
                self.push(forward)
            if self.has_shared_later:
                self.compute_shared()
        finally:  # After an error, too: a reset waits for the current stream.
            if self.has_shared_later:
                rejoin(self.balancer.device)
        with stage(REROUTE):
            probs, physical = self._reroute(forward, probs, routing_map, chosen, marks)
        self.before_dispatch(forward, hidden_states, chosen)
        self.token_dispatcher.forward_under_way = forward
        hidden_states, probs = super().preprocess_behind_graph(hidden_states, probs, physical)
        release_graph(self.token_dispatcher)
        return hidden_states, probs

    def begin(self, device: torch.device) -> Forward:
        """Named point: return the `Forward` of a pass; a second pass gets that of the first pass.

        `device` is the device of the layer's input.
        """
        if (of_first_pass := take(self)) is not None:
            return of_first_pass
        balancer, mains = self.balancer_for(device)
        forward = balancer.new_forward(mains)
        forward.is_in_pieces = self.is_in_pieces
        return forward

    def _plan(self, forward: Forward, chosen: Tensor, probs_dtype: torch.dtype) -> Tensor | None:
        """Stages 1 and 2: gather the load, solve the plan, and compute this rank's shares.

        Returns:
            The marks of this rank's tokens, for the reroute. None in a second pass, which fits the
            plan of the first pass to its own choices.
        """
        began = TIMES.mark() if self.training else None
        marks = None
        with stage(PLAN):
            if forward.is_planned:
                shares = share_plan(self.planning_group.rank(), forward.counts, forward.plan)
                forward.shares = shares.fit(chosen.sum(0))
            else:
                marks = self._make_plan(forward, chosen, probs_dtype)
        if began is not None:
            TIMES.add("plan", began, TIMES.mark())
        return marks

    def _make_plan(self, forward: Forward, chosen: Tensor, probs_dtype: torch.dtype) -> Tensor:
        balancer = self.balancer
        checkpoint = checkpoint_under_way() if self.layout.slots > 0 else None
        # Replicas' gradients may come in a pass with gradients, or before a second pass.
        has_backward = checkpoint is not None or (self.layout.slots > 0 and torch.is_grad_enabled())
        if has_backward and balancer.has_changed(forward.mains):
            balancer.agreement.say_changed(self.layer_number)
        with stage(LOAD):
            forward.counts, marks = balancer.agreement.gather_counts(
                chosen, balancer.rows, f"layer {self.layer_number}, load"
            )
        load = load_of(forward.counts, self.layout.ep_size)
        if getattr(self.config, _CAPACITY, None) is not None and not balancer.has_planner:
            from megatron_ext.mcore.capacity import require_room

            choices = self._num_choices(chosen)
            require_room(self.config, self.balance, self.layout, choices, balancer.num_shards)
        balancer.prepare_planner(forward.mains, load, probs_dtype)
        forward.plan, forward.is_planned = self.solve(load), True
        if has_backward:  # It reads the plan: lend the forward a virtual layer.
            refuse_other_checkpoints(self.layer_number)
            balancer.virtual_layers.lend(forward)
            if checkpoint is not None:
                leave(checkpoint, self, forward)
        forward.shares = balancer.agreement.share(
            forward.counts, load, forward.plan, self.layer_number
        )
        if self.balance.check_plans:
            check_equal_plans(forward.plan, self.planning_group, self.layer_number)
        return marks

    def solve(self, load: Tensor) -> BalancePlan:
        """Named point, stage 2: plan the load, int64 [R, E], from what the layer knows."""
        return self.balancer.planner.solve(load)

    def push(self, forward: Forward, there: Tensor | None = None) -> None:
        """Named point, stage 4: start materializing the plan's replicas; see `Forward.push`."""
        if forward.buffers is not None:
            if self.training and torch.is_grad_enabled():
                check_main_grads(forward.mains)
            forward.slot_grads = self.balancer.agree_on_slot_grads(forward.mains)
            if self.has_delayed_gradients and forward.mains.fused:
                forward.delayed = self._delayed
        with self.beside_shared():
            if forward.buffers is not None:
                finish_parameter_gather(self.experts)
            forward.push(there)

    def _reroute(
        self,
        forward: Forward,
        probs: Tensor,
        routing_map: Tensor,
        chosen: Tensor,
        marks: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Stage 3: probabilities and choices over physical experts, in the router's form."""
        if routing_map.dtype != torch.bool:
            assignment = assign(chosen, forward.shares, self._most_choices, marks)
            return probs, reroute_ids(routing_map, assignment, self.layout.num_experts)
        # A forward with one pass takes its maps from the memory of its virtual layer. A recomputed
        # forward allocates its maps in both passes.
        is_only_pass = torch.is_grad_enabled() and marks is not None
        kept = forward.virtual_layer if is_only_pass else None
        return reroute(
            probs,
            chosen,
            forward.shares,
            self._most_choices,
            self.layout.num_physical,
            marks=marks,
            maps=kept.maps if kept is not None else None,
        )

    def before_dispatch(self, forward: Forward, hidden_states: Tensor, chosen: Tensor) -> None:
        """Named point between push and dispatch: add to the history, and report to the observers.

        `hidden_states` are the layer's input, [s, b, H], and `chosen` its logical choices, bool
        [N, E].
        """
        # Once for every training microbatch: not in the first pass of a recomputed forward.
        if self.training and torch.is_grad_enabled():
            load = load_of(forward.counts, self.layout.ep_size)
            self.balancer.planner.observe(load)
            if self.observers:
                report = self.report(forward, load, chosen)
                for observer in self.observers:
                    observer(report)

    def dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Stage 5 (Megatron); with the combined schedule, stage 4 starts here.

        Until then, another microbatch's replicas are in the slots, for its experts' backward.
        """
        if self.is_overlapped:
            self.push(self.under_way)
        return super().dispatch(hidden_states, probs)

    def routed_experts_compute(self, hidden_states: Any, probs: Any) -> tuple[Any, None]:
        """Named point, stage 6: wait for the replicas, and run mains and slots."""
        if self._are_beside_dispatch:
            hidden_states = moe_layer._RecordExpertDgradCompletion.apply(
                self._delayed_wgrad_event, hidden_states
            )
        tokens, counts, probs = self.token_dispatcher.dispatch_postprocess(hidden_states, probs)
        release_graph(self.token_dispatcher)
        forward = self.under_way
        tokens, slots = forward.materialized(tokens, self._edge)
        output = self.run_experts(forward, slots, tokens, counts, probs)
        return self.token_dispatcher.combine_preprocess(output), None

    def run_experts(
        self, forward: Forward, slots: list[Any], tokens: Tensor, counts: Tensor, probs: Tensor
    ) -> Tensor:
        """Run mains and slots, with what `forward.materialized` and the dispatcher have returned.

        Their backward first restores the slots.
        """
        buffers = expert_buffers(self.token_dispatcher)
        with stage(EXPERTS), forward.hide_slots():
            output = self.expert_weights.run(slots, tokens, counts, probs, **buffers)
        return forward.before_experts_backward(output)

    def combine(self, output: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Stage 7: outputs back to the tokens' ranks; its backward begins with stage 4."""
        forward = self.under_way
        self.drop_forward()
        del forward.shares
        output = super().combine(output, *args, **kwargs)
        return forward.before_combine_backward(output)

    def postprocess(self, *args: Any, **kwargs: Any) -> Tensor:
        """End the forward (Megatron), and drop the dispatcher's maps, which no backward reads."""
        output: Tensor = super().postprocess(*args, **kwargs)
        release_maps(self.token_dispatcher)
        return output

    def backward_dw(self, routed_experts: bool = True, shared_experts: bool = False) -> None:
        """Compute delayed weight gradients (Megatron), then start reducing those of replicas."""
        compute = partial(super().backward_dw, routed_experts, shared_experts)
        if not routed_experts or not self._delayed:
            compute()
            return
        replica_grads = self.expert_weights.run_delayed(compute, self.layout.slots)
        self._delayed.pop(0).reduce_delayed(replica_grads)

    def report(self, forward: Forward, load: Tensor, chosen: Tensor) -> LayerReport:
        """Named point: return the report of a forward with this load, int64 [R, E]."""
        num_shards = self.balancer.num_shards
        return LayerReport(
            self.layer_number,
            load,
            forward.plan.rank_loads(),
            forward.plan.experts_in_slots,
            layout=forward.plan.layout,
            weight_bytes=num_shards * self.balancer.expert_bytes,
            grad_bytes=num_shards * forward.grad_bytes,
            moves=forward.moves,
            rows_over=self._rows_over(forward, chosen),
        )

    def _rows_over(self, forward: Forward, chosen: Tensor) -> Tensor | None:
        """Rows of each rank beyond Megatron's limit, int64 [R]; None without a limit."""
        # Of the dispatcher, because Megatron lifts the limit where it runs a step again.
        manager = getattr(self.token_dispatcher, "_comm_manager", None)
        if (factor := getattr(manager, _CAPACITY, None)) is None:
            return None
        from megatron_ext.mcore.capacity import RankCapacity

        capacity = RankCapacity.of(self.config, factor)
        return capacity.rows_over(forward.plan.quota, self._num_choices(chosen))

    def _num_choices(self, chosen: Tensor) -> int:
        """Choices of this rank's tokens, bool [N, E], if none is dropped."""
        return len(chosen) * int(self.config.moe_router_topk)

    @property
    def expert_weights(self) -> ExpertWeights:
        """How the layer's experts keep their weights; a program may have replaced the experts.

        Raises:
            ValueError: By experts that cannot be balanced.
        """
        if self.experts is not self._expert_weights.experts:
            self._expert_weights = expert_weights(self.experts)
        return self._expert_weights

    def balancer_for(self, device: torch.device) -> tuple[LayerBalancer, MainWeights]:
        """Return the layer's balancer for an input on this device, and its weights.

        A program that casts or moves the model, or replaces its experts, gets a new one, without
        the loads seen so far; all ranks that plan alike do so between the same forwards.

        Raises:
            ValueError: As `start`; or the experts have what replicas have not.
        """
        if self.layout.slots > 0:
            self.expert_weights.require_still_plain()
        if not self.is_started or self.balancer.expert_weights is not self.expert_weights:
            self.start(device)  # It changes how quantized weights are held.
        mains = self.expert_weights.mains()
        if not self.balancer.fits(mains):
            self.start(device)
            mains = self.expert_weights.mains()
        return self.balancer, mains

    # What the layer keeps is written in training, too, which tensors of inference mode forbid.
    @torch.inference_mode(False)
    def start(self, device: torch.device) -> None:
        """Make the balancer for an input on this device; all ranks that plan alike call.

        Raises:
            ValueError: The experts' weights are not whole, or not on that device.
        """
        if self.layout.slots > 0:
            finish_parameter_gather(self.experts)
            check_in_place(self.experts, device, self.layer_number)
        example = self.expert_weights.mains().parameters()[0]
        if is_fsdp(example):
            check_beside_fsdp(self.config, self.balance)
        self.balancer = LayerBalancer(
            layer_number=self.layer_number,
            balance=self.balance,
            placement=self._placement,
            layout=self.layout,
            transport=self.transport,
            set_name=self.set_name,
            ep_group=self.ep_group,
            planning_group=self.planning_group,
            expert_weights=self.expert_weights,
            width=int(self.config.moe_latent_size or self.config.hidden_size),
            dtype=example.dtype,
            device=example.device,
        )

    @property
    def is_started(self) -> bool:
        """Whether the layer has its balancer."""
        return hasattr(self, "balancer")

    @property
    def under_way(self) -> Forward:
        """The forward under way."""
        assert self._forward is not None, "preprocess comes first in a forward"
        return self._forward

    def drop_forward(self) -> None:
        """Let go of the forward under way."""
        self._forward = self._edge = self.token_dispatcher.forward_under_way = None

    def abandon_forward(self) -> None:
        """Let go of all that a forward has left that ended with an error."""
        self._shared = None
        self.drop_forward()

    def forget_step(self) -> None:
        """Drop what an aborted step left in this layer."""
        self.abandon_forward()
        self._delayed.clear()
        self.expert_weights.forget_step()
        if self.is_started:
            self.balancer.forget_step()

    def set_chunk(self, first_layer: int) -> None:
        """Named point: take the number of layers before this chunk; called in the layers' order."""
        self.first_layer_of_chunk = first_layer

    def dispatcher_class(self, dispatcher: Any) -> type:
        """Named point: the class over physical experts for Megatron's dispatcher."""
        kind = type(dispatcher)
        return PlannedDispatcher if kind is MoEAlltoAllTokenDispatcher else kind

    @property
    def is_overlapped(self) -> bool:
        """Whether Megatron's combined schedule runs two microbatches at a time.

        It runs a forward and another's backward piece by piece, each piece with a backward of its
        own, and without the transformer layer's `forward`.
        """
        return bool(self.config.overlap_moe_expert_parallel_comm)

    @property
    def has_delayed_gradients(self) -> bool:
        """Whether the experts' weight gradients come after their backward, by `backward_dw`."""
        return bool(self.config.delay_wgrad_compute or self._are_beside_dispatch)

    @property
    def is_in_pieces(self) -> bool:
        """See `Forward.is_in_pieces`."""
        return self.is_overlapped or self.has_delayed_gradients

    @property
    def _are_beside_dispatch(self) -> bool:
        """Whether delayed gradients are computed beside the dispatch's backward."""
        # Megatron-Core before 0.17 has no such overlap.
        return bool(getattr(self.config, "overlap_dispatch_backward_with_experts_wgrad", False))

    def _check_padding(self) -> None:
        """Check that the setting of padding has not changed since the layer was made.

        Megatron's text generation changes the setting when it begins to decode.
        """
        if bool(self.config.moe_pad_expert_input_to_capacity) != self._is_padded:
            raise ValueError(
                f"layer {self.layer_number}: moe_pad_expert_input_to_capacity must stay "
                f"{self._is_padded}, as it was when the layer was made: balanced layers cannot "
                "decode with moe_pad_experts_for_cuda_graph_inference (leave it out)"
            )
