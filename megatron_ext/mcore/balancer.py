"""What a balanced layer holds between its forwards: slots, planner, virtual layers, agreement.

A layer makes its balancer in its first forward, and not earlier: only then have wrappers settled
the dtype and the device of the weights, and Megatron has told the layer its number. If a program
casts or moves the weights later, the layer makes another one.

Legend: N local tokens, E logical experts, R ranks of the EP group, T ranks of an expert-TP group.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.balance import reruns
from megatron_ext.balance.agreement import Agreement, shared_agreement
from megatron_ext.balance.forward import Forward, VirtualLayers
from megatron_ext.balance.layout import ExpertLayout
from megatron_ext.balance.main_weights import MainWeights, Segment
from megatron_ext.balance.planner import LayerPlanner, plan_layout
from megatron_ext.balance.slots import SlotBuffers, shared_slot_buffers
from megatron_ext.balance.strategies import PlanSettings
from megatron_ext.config import COST_UNITS, BalanceConfig, unless_auto
from megatron_ext.mcore.experts import ExpertWeights, finish_parameter_gather
from megatron_ext.transport import GathersRows, TransportOptions
from megatron_ext.transport.reach import gather

if TYPE_CHECKING:
    from megatron_ext.balance.costs import LayerCosts
    from megatron_ext.balance.placement import Placement


@dataclass(kw_only=True, eq=False)
class LayerBalancer:
    """Holds slots, planner and virtual layers of one layer; all EP ranks make it together.

    The layers of an EP group share slots, transport and agreement.
    """

    layer_number: int
    """1-based, as in Megatron."""
    balance: BalanceConfig
    placement: Placement | None
    layout: ExpertLayout
    transport: str
    """Name of the transport of replicas."""
    set_name: str
    """Layers of one name share their slots."""
    ep_group: ProcessGroup
    planning_group: ProcessGroup
    """The ranks that plan alike."""
    expert_weights: ExpertWeights
    width: int
    """Elements of an expert's input, and of its output, for an assignment."""
    dtype: torch.dtype
    """Of the experts' weights, and so of the slots."""
    device: torch.device
    """Where they are."""
    agreement: Agreement = field(init=False)
    buffers: SlotBuffers | None = field(default=None, init=False)
    """None without slots."""
    virtual_layers: VirtualLayers = field(init=False)
    planner: LayerPlanner = field(init=False)
    """Made by `prepare_planner`, before the first plan."""
    measured: dict[str, float] = field(default_factory=dict, init=False)
    """Measured costs that plans are chosen by, by their setting."""
    _grad_dtypes: tuple[torch.dtype | None, ...] | None = field(default=None, init=False)
    """The `MainWeights.grad_dtypes` that the EP ranks have agreed on."""

    def __post_init__(self) -> None:
        self._require_warm_up("slots")
        self.agreement = shared_agreement(self.planning_group, self.device, self.num_shards)
        if self.layout.slots > 0:
            self.buffers = shared_slot_buffers(
                self.layout,
                self.expert_weights.segments,
                dtype=self.dtype,
                device=self.device,
                ep_group=self.ep_group,
                transport=self.transport,
                options=TransportOptions(
                    push_blocks=unless_auto(self.balance.push_blocks),
                    grad_reduce_share=unless_auto(self.balance.grad_reduce_share),
                    timeout_s=self.balance.wait_limit_s,
                    domain_ranks=self.layout.nvlink_domain,
                    symmetric_memory=unless_auto(self.balance.symmetric_memory),
                ),
                set_name=self.set_name,
            )
        self.virtual_layers = VirtualLayers(unless_auto(self.balance.max_in_flight))

    @property
    def num_shards(self) -> int:
        """Ranks that share an expert (T)."""
        return self.planning_group.size() // self.layout.ep_size

    @property
    def has_planner(self) -> bool:
        """Whether a microbatch was planned."""
        return hasattr(self, "planner")

    @property
    def rows(self) -> GathersRows | None:
        """Gathers one row per rank through peer memory; None if the transport cannot."""
        if self.buffers is None or self.planning_group is not self.ep_group:
            return None
        return self.buffers.transport.rows

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert's weights, which a replica moves; 0 without slots."""
        return self.buffers.weight_bytes if self.buffers is not None else 0

    def fits(self, mains: MainWeights) -> bool:
        """Whether the weights have the dtype and the device that the balancer was made for."""
        example = mains.parameters()[0]
        return (example.dtype, example.device) == (self.dtype, self.device)

    def new_forward(self, mains: MainWeights) -> Forward:
        """Return the object of a forward that begins."""
        return Forward(self.layer_number, mains, self.buffers, self.agreement, self.rows)

    def prepare_planner(self, mains: MainWeights, load: Tensor, probs_dtype: torch.dtype) -> None:
        """Make the planner before the first plan, and measure the costs that are set to `auto`.

        All EP ranks call, with the load [R, E] that is to be planned.
        """
        if self.has_planner:
            return
        costs = self._costs(mains, load, probs_dtype)
        settings = PlanSettings.of(self.balance, costs, self.placement)
        self.planner = LayerPlanner(
            self.balance.strategy, self.layout, settings, layer=self.layer_number
        )

    def _costs(
        self, mains: MainWeights, load: Tensor, probs_dtype: torch.dtype
    ) -> LayerCosts | None:
        """Return the costs for objective `time`; None for another one, or if no replica can move.

        A cost is the setting's value, or the measured value if that is `auto`.
        """
        names = self.balance.costs_to_measure
        # Where no replica can go anywhere, all plans are the same.
        if names and self.buffers is not None and self.layout.nvlink_domain > 1:
            from megatron_ext.mcore.measure import CostMeter, measure_costs

            finish_parameter_gather(self.expert_weights.experts)
            meter = CostMeter(
                buffers=self.buffers,
                mains=mains,
                expert_weights=self.expert_weights,
                width=self.width,
                probs_dtype=probs_dtype,
                load=load,
                group=self.planning_group,
            )
            self.measured = measure_costs(names, meter, f"layer {self.layer_number}")
        costs = {name: getattr(self.balance, name) for name in COST_UNITS} | self.measured
        if not self.balance.plans_for_time or "auto" in costs.values():
            return None
        from megatron_ext.balance.costs import LayerCosts

        return LayerCosts(
            expert_bytes=self.expert_bytes, token_bytes=self.dtype.itemsize * self.width, **costs
        )

    def agree_on_slot_grads(self, mains: MainWeights) -> list[Tensor | None]:
        """Return the slots' gradients by segment; all EP ranks call.

        A segment gets None if its mains get no gradient on any EP rank. The ranks exchange their
        dtypes in the first forward with gradients, and again when a segment `has_changed`. All
        ranks must change such a segment in the same step.

        Raises:
            ValueError: A segment has gradients of several dtypes, or of none on some ranks that
                must train it alike.
            RuntimeError: Some ranks only have changed a segment (`Agreement.say_changed`).
        """
        assert self.buffers is not None
        mine = mains.grad_dtypes
        if not torch.is_grad_enabled():
            return [None] * len(mine)
        agreed = self._grad_dtypes
        if agreed is None or self.has_changed(mains):
            self._require_warm_up("slots' gradients")
            if agreed is not None:
                self.agreement.require_agreement()
            by_rank = zip(*gather(mine, self.ep_group), strict=True)
            segments = self.expert_weights.segments
            agreed = self._grad_dtypes = tuple(
                map(self._only_dtype, segments, by_rank, mains.are_trained_alike)
            )
        return self.buffers.allocate_grads(agreed)

    def has_changed(self, mains: MainWeights) -> bool:
        """Whether this rank trains a segment that was frozen on all ranks when they agreed.

        Or, where ranks must train it alike, has frozen a segment that was trained.
        """
        agreed = self._grad_dtypes
        segments = zip(mains.grad_dtypes, agreed or (), mains.are_trained_alike, strict=False)
        return any(own != a and (own is not None or alike) for own, a, alike in segments)

    def forget_step(self) -> None:
        """Forget an aborted step, of which ranks may have seen different parts; all ranks call."""
        self.virtual_layers.forget_step()
        if self.has_planner:
            self.planner.forget()

    def _require_warm_up(self, what: str) -> None:
        if reruns.is_capturing:
            raise RuntimeError(
                f"layer {self.layer_number} makes its {what} in the first step, and a CUDA graph "
                "captures that step: train one step before (--cuda-graph-warmup-steps)"
            )

    def _only_dtype(
        self, segment: Segment, by_rank: tuple[torch.dtype | None, ...], alike: bool
    ) -> torch.dtype | None:
        found = dict.fromkeys(dtype for dtype in by_rank if alike or dtype is not None)
        if len(found) > 1:
            way_out = (
                "freeze a linear of all ranks' experts or of none (or leave out --moe-grouped-gemm)"
                if None in found
                else "give all ranks the same gradient_accumulation_fusion and grad_reduce_in_fp32"
            )
            raise ValueError(
                f"layer {self.layer_number}: gradients of {segment.name} must have one dtype, got "
                f"{by_rank} by EP rank: {way_out}"
            )
        return next(iter(found), None)


def layout_of(config: Any, balance: BalanceConfig, ep_size: int) -> ExpertLayout:
    """Return a layer's layout of experts and slots, with the domains of `balance`."""
    layout = plan_layout(
        balance.strategy,
        num_experts=config.num_moe_experts,
        ep_size=ep_size,
        slots=balance.slots,
        nvlink_domain=balance.domain_ranks,
    )
    # One rank has nobody to share its load with.
    has_slots = ep_size > 1 and not config.moe_pad_expert_input_to_capacity
    return layout if has_slots else replace(layout, slots=0)
