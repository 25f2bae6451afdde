"""What a balanced layer holds from its first forward on: slots, plans in flight, planner and costs.

Nothing of it can be made earlier: only then have wrappers settled the dtype and the device of the
weights, and Megatron has told the layer its number. Slots, transport and agreement are shared with
the other layers of the group.

Legend: N local tokens, E logical experts, R ranks of the EP group, T ranks of an expert-TP group.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron_ext.balance.agreement import Agreement, shared_agreement
from megatron_ext.balance.costs import LayerCosts
from megatron_ext.balance.in_flight import InFlightPlans
from megatron_ext.balance.layout import ExpertLayout
from megatron_ext.balance.main_weights import MainWeights
from megatron_ext.balance.placement import Placement
from megatron_ext.balance.planner import LayerPlanner
from megatron_ext.balance.replicas import NO_SLOTS
from megatron_ext.balance.slots import SlotBuffers, shared_slot_buffers
from megatron_ext.balance.strategies import PlanSettings
from megatron_ext.config import COST_UNITS, BalanceConfig
from megatron_ext.mcore.experts import ExpertWeights, finish_parameter_gather, run_experts
from megatron_ext.mcore.measure import CostMeter, measure_costs
from megatron_ext.mcore.schedule import ring_size
from megatron_ext.transport import GathersRows, TransportOptions
from megatron_ext.transport.reach import gather

GradDtypes = tuple[torch.dtype | None, ...]
"""See `MainWeights.grad_dtypes`."""


class SlotState(NamedTuple):
    """The slots of a layer, and its plans that wait for their backward."""

    buffers: SlotBuffers
    in_flight: InFlightPlans


@dataclass(kw_only=True, eq=False)
class LayerState:
    """State of one layer between its forwards. Made in its first forward, by all EP ranks."""

    layer_number: int
    """1-based, as in Megatron."""
    is_for_mtp: bool
    """Whether it is a layer of multi-token prediction."""
    config: Any
    """Megatron's TransformerConfig."""
    balance: BalanceConfig
    placement: Placement | None
    layout: ExpertLayout
    transport: str
    """Name of the transport of replicas."""
    slot_set: int
    """Which of the sets of slots it uses."""
    ep_group: ProcessGroup
    planning_group: ProcessGroup
    """The ranks that plan alike."""
    experts: nn.Module
    """Megatron's module with this rank's experts."""
    expert_weights: ExpertWeights
    dtype: torch.dtype
    """Of the experts' weights, and so of the slots."""
    device: torch.device
    """Where they are."""
    measured: dict[str, float] = field(default_factory=dict, init=False)
    """Measured costs that plans are chosen by, by their setting."""
    to_measure: tuple[str, ...] = field(default=(), init=False)
    """Costs that are still to be measured, before the first plan."""
    agreement: Agreement = field(init=False)
    slots: SlotState | None = field(default=None, init=False)
    """None without slots."""
    _grad_dtypes: GradDtypes | None = field(default=None, init=False)
    """What the EP ranks have agreed on."""

    def __post_init__(self) -> None:
        # Where no replica can go anywhere, all plans are the same.
        has_choice = self.layout.slots > 0 and self.layout.nvlink_domain > 1
        self.to_measure = self.balance.costs_to_measure if has_choice else ()
        self.agreement = shared_agreement(self.planning_group, self.device, self.num_shards)
        if self.layout.slots > 0:
            self.slots = self._make_slots()

    def _make_slots(self) -> SlotState:
        buffers = shared_slot_buffers(
            self.layout,
            self.expert_weights.segments,
            dtype=self.dtype,
            device=self.device,
            ep_group=self.ep_group,
            transport=self.transport,
            options=TransportOptions(
                push_blocks=self.balance.copying_blocks,
                grad_reduce_share=self.balance.adding_share,
                timeout_s=self.balance.wait_limit_s,
                domain_ranks=self.layout.nvlink_domain,
                symmetric_memory=self.balance.symmetric_backend,
            ),
            slot_set=self.slot_set,
        )
        num_plans = ring_size(
            self.balance,
            self.config,
            pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
            is_for_mtp=self.is_for_mtp,
        )
        in_flight = InFlightPlans(
            self.layout,
            ring_size=num_plans,
            layer_number=self.layer_number,
            first_virtual_layer_id=buffers.reserve_virtual_layers(num_plans),
            device=self.device,
        )
        return SlotState(buffers, in_flight)

    @property
    def num_shards(self) -> int:
        """Ranks that share an expert (T)."""
        return self.planning_group.size() // self.layout.ep_size

    @property
    def rows(self) -> GathersRows | None:
        """What gathers of all ranks that plan alike without a collective; None if nothing does."""
        if self.slots is None or self.planning_group is not self.ep_group:
            return None
        return self.slots.buffers.transport.rows

    @cached_property
    def planner(self) -> LayerPlanner:
        """Makes the layer's plans; asked for when costs are measured."""
        assert not self.to_measure, "costs are measured before the first plan"
        settings = PlanSettings.of(self.balance, self._costs(), self.placement)
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
        return LayerCosts(
            expert_bytes=self.expert_bytes,
            token_bytes=self.dtype.itemsize * self._expert_width,
            **costs,
        )

    def measure_costs(self, mains: MainWeights, load: Tensor, probs_dtype: torch.dtype) -> None:
        """Measure the costs that are needed and not given; all EP ranks call.

        Args:
            mains: This rank's main weights.
            load: Of the microbatch that is to be planned: int64 [R, E], equal on all ranks.
            probs_dtype: Dtype of the router's probabilities.
        """
        assert self.slots is not None, "without slots there is nothing to measure"
        finish_parameter_gather(self.experts)
        meter = CostMeter(
            buffers=self.slots.buffers,
            mains=mains,
            run_mains=partial(run_experts, self.experts, self.expert_weights, NO_SLOTS),
            width=self._expert_width,
            probs_dtype=probs_dtype,
            load=load,
            group=self.planning_group,
        )
        self.measured = measure_costs(self.to_measure, meter, f"layer {self.layer_number}")
        self.to_measure = ()

    def grad_dtypes(self, mains: MainWeights) -> GradDtypes:
        """Return by segment in which dtype replicas' gradients are computed; all EP ranks call.

        None for a segment whose mains get no gradient on any EP rank. The ranks tell each other in
        their first forward with gradients, and again when mains are trained that were all frozen:
        what is frozen on all ranks is thawed on all ranks at once.

        Raises:
            ValueError: A segment has gradients of several dtypes.
        """
        mine = mains.grad_dtypes
        if not torch.is_grad_enabled():
            return (None,) * len(mine)
        agreed = self._grad_dtypes
        if agreed is None or any(own not in (None, a) for own, a in zip(mine, agreed, strict=True)):
            by_rank = gather(mine, self.ep_group)
            agreed = self._grad_dtypes = tuple(map(self._only_dtype, zip(*by_rank, strict=True)))
        return agreed

    def _only_dtype(self, by_rank: tuple[torch.dtype | None, ...]) -> torch.dtype | None:
        found = dict.fromkeys(dtype for dtype in by_rank if dtype is not None)
        if len(found) > 1:
            raise ValueError(
                f"layer {self.layer_number}: expert gradients must have one dtype, got {by_rank} "
                "by EP rank: give all ranks the same gradient_accumulation_fusion and "
                "grad_reduce_in_fp32"
            )
        return next(iter(found), None)

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert's weights, which a replica moves."""
        num_elements = sum(math.prod(segment.shape) for segment in self.expert_weights.segments)
        return self.dtype.itemsize * num_elements

    @property
    def _expert_width(self) -> int:
        """Elements of an expert's input, and of its output, for an assignment."""
        return int(self.config.moe_latent_size or self.config.hidden_size)

    def forget_step(self) -> None:
        """Drop what an aborted step left, except in what layers share."""
        if self.slots is not None:
            self.slots.in_flight.clear()
