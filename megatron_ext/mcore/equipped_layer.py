"""A balanced layer without its forward: what it is made of, what it holds, and what it tells.

Two times matter. The layer is made with settings, process groups and a dispatcher over physical
experts. In its first forward it gets what hangs on dtype, device and number (layer_state.py).

Legend: R ranks of the EP group, E logical experts.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from torch import Tensor

from megatron_ext.balance.load import gather_counts, load_of
from megatron_ext.balance.main_weights import MainWeights
from megatron_ext.balance.placement import Placement
from megatron_ext.balance.ranges import PUSH_START, stage
from megatron_ext.balance.replicas import Joint, NoReplication, Replication
from megatron_ext.balance.slots import SentAhead, SlotBuffers
from megatron_ext.balance.strategies import get_strategy
from megatron_ext.config import BalanceConfig
from megatron_ext.mcore.dispatcher import dispatcher_kind, physical_dispatcher
from megatron_ext.mcore.experts import expert_weights, finish_parameter_gather
from megatron_ext.mcore.in_place import check_in_place
from megatron_ext.mcore.layer_report import Observer, PlanObserver
from megatron_ext.mcore.layer_state import LayerState, SlotState
from megatron_ext.mcore.limits import require_valid
from megatron_ext.mcore.lines import BalanceLines
from megatron_ext.mcore.lookahead import LayerOrder, Lookahead, Prediction
from megatron_ext.mcore.place import experts_device, layout_of
from megatron_ext.mcore.planning_group import check_equal_config, planning_group
from megatron_ext.transport import settle_transport


@dataclass
class Microbatch:
    """State of one forward of a layer, from `join_reduction` or `preprocess` to `combine`."""

    mains: MainWeights
    """This rank's main weights in this forward."""
    joint: Joint | None = None
    """Where backward waits for the reduction; None if it waits at once."""
    prediction: Prediction | None = None
    """What the layer before predicted; None if it predicted nothing."""
    replication: Replication | NoReplication | None = None
    """The replication by its plan; None before that is made."""


class EquippedMoELayer(MoELayer):
    """Megatron's MoE layer with all that `BalancedMoELayer` balances by.

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
        """The ranks that plan alike: those of the EP group and, with expert tensor parallelism, of
        the expert-TP groups of each."""
        check_equal_config(balance, self.planning_group)
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
        self._is_padded = bool(config.moe_pad_expert_input_to_capacity)
        # A token may be another expert's padding beside its own choices.
        self._most_choices = config.num_moe_experts if self._is_padded else config.moe_router_topk
        self.transport = balance.transport
        """Name of the transport of replicas, settled where the setting is `auto`."""
        if self.layout.slots > 0:
            self.transport, domain_ranks = settle_transport(
                balance.transport,
                balance.domain_ranks,
                self.ep_group,
                experts_device(),
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
        self.chunk: int | None = None
        """Layers before the first layer of this chunk; set by the transformer layer."""
        self.lookahead: Lookahead | None = None
        predicts = get_strategy(balance.strategy).predicts
        if predicts and self.layout.slots > 0 and order is not None:
            self.lookahead = Lookahead(
                order,
                router=self.router,
                send_ahead=self.send_ahead,
            )
        self.state: LayerState | None = None
        """What the layer holds from its first forward on; None before that."""
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

    def _begin(self) -> Microbatch:
        """Return the next forward's microbatch, made at the first call."""
        # One with a plan was left by a forward that ended with an error.
        if self._microbatch is None or self._microbatch.replication is not None:
            self._microbatch = Microbatch(self.expert_weights.mains())
        return self._microbatch

    @property
    def _replication(self) -> Replication | NoReplication:
        """That of the forward that is under way."""
        assert self._microbatch is not None, "preprocess comes first in a forward"
        assert self._microbatch.replication is not None, "preprocess comes first in a forward"
        return self._microbatch.replication

    @property
    def _held(self) -> LayerState:
        """What the layer holds; made at the first call."""
        if self.state is None:
            example = self._begin().mains.parameters()[0]
            self.state = LayerState(
                layer_number=self.layer_number,
                is_for_mtp=self.is_for_mtp,
                config=self.config,
                balance=self.balance,
                placement=self._placement,
                layout=self.layout,
                transport=self.transport,
                slot_set=self.lookahead.settle_slot_set() if self.lookahead is not None else 0,
                ep_group=self.ep_group,
                planning_group=self.planning_group,
                experts=self.experts,
                expert_weights=self.expert_weights,
                dtype=example.dtype,
                device=example.device,
            )
        return self.state

    def _check_padding(self) -> None:
        """Check that experts are padded as they were when the layer was made.

        Megatron's text generation changes that where it begins to decode.
        """
        if bool(self.config.moe_pad_expert_input_to_capacity) != self._is_padded:
            raise ValueError(
                f"layer {self.layer_number}: moe_pad_expert_input_to_capacity must stay "
                f"{self._is_padded}, as it was when the layer was made: balanced layers cannot "
                "decode with moe_pad_experts_for_cuda_graph_inference (leave it out)"
            )

    def _check_in_place(self, device: torch.device) -> None:
        """Check, before the first use, that replicas can be copied from where the weights lie."""
        if self.layout.slots > 0 and self.state is None:
            check_in_place(self.experts, device, self.layer_number)

    def send_ahead(self, predicted: Tensor) -> tuple[Tensor, SentAhead]:
        """Start materializing the replicas of a predicted load; all EP ranks call.

        Args:
            predicted: Choices of this rank's tokens in this layer's next forward, bool [N, E].

        Returns:
            The predicted load, int64 [R, E], equal on all ranks; and its replicas on their way.
        """
        held, label = self._held, f"layer {self.layer_number}, sent ahead"
        assert held.slots is not None, "without slots nothing is predicted"
        counts, _ = gather_counts(predicted, self.planning_group, rows=held.rows, label=label)
        load = load_of(counts, self.layout.ep_size)
        slots = held.planner.expect(load)
        finish_parameter_gather(self.experts)
        with stage(PUSH_START):
            sent = held.slots.buffers.send_ahead(
                slots, self._begin().mains, label, is_timed=self.training
            )
        return load, sent

    def forget_step(self) -> None:
        """Drop what an aborted step left in this layer."""
        if self.lookahead is not None:
            self.lookahead.forget()
        self._microbatch = None
        if self.state is not None:
            self.state.forget_step()

    @property
    def measured(self) -> dict[str, float]:
        """Measured costs that plans are chosen by, by their setting; equal on all EP ranks."""
        return self.state.measured if self.state is not None else {}

    @property
    def _slots(self) -> SlotState | None:
        return self.state.slots if self.state is not None else None

    @property
    def slot_buffers(self) -> SlotBuffers | None:
        """The slots that the layer shares; None before its first forward, or without slots."""
        return self._slots.buffers if self._slots is not None else None

    @property
    def num_in_flight(self) -> int:
        """Plans that are kept for a backward to come."""
        return self._slots.in_flight.num_in_flight if self._slots is not None else 0

    @property
    def ring_size(self) -> int:
        """Most plans that can be kept; 0 before the first forward, or without slots."""
        return self._slots.in_flight.ring_size if self._slots is not None else 0
