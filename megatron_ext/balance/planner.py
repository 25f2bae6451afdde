"""Planning one layer's microbatches in their order, for strategies that remember and that do not.

The only place where planning remembers: the strategies themselves are pure functions. Legend: R
ranks of the EP group, E logical experts, S slots per rank, B loads.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import torch
from torch import Tensor

from megatron_ext.balance.costs import fastest_plan
from megatron_ext.balance.layout import ExpertLayout
from megatron_ext.balance.plan import BalancePlan, check_load, stack_plans, with_spare_slots
from megatron_ext.balance.strategies import get_planner
from megatron_ext.balance.strategies.fastest import TIME
from megatron_ext.balance.strategies.strategy import PlanSettings


class LayerPlanner:
    """Plans the loads of one MoE layer, and keeps the past for strategies that plan from it.

    One for each layer, on every rank of the EP group. What it remembers are loads, which are equal
    on these ranks, so all of them plan alike. It is not part of a checkpoint: plans change where
    something is computed, never what, and a continued run gathers its history anew.

    Args:
        strategy: A planner of `megatron_ext.balance.strategies`.
        layout: Where experts and slots are.
        settings: What is asked for. With costs, the fastest plan.
        layer: The layer's number, by which a placement knows it.

    Raises:
        ValueError: There is no such planner, it has no tolerance that costs could choose, or it
            needs a placement that is not given or does not fit the layout.
    """

    def __init__(
        self, strategy: str, layout: ExpertLayout, settings: PlanSettings, *, layer: int = 0
    ) -> None:
        planner = get_planner(strategy, for_time=settings.costs is not None)
        self._slots = torch.full((layout.ep_size, layout.slots), -1, dtype=torch.int32)
        self._num_spare_slots = 0
        if planner.needs_placement:
            if settings.placement is None:
                raise ValueError(
                    f"strategy {strategy!r} needs a placement: `megatron-ext place craft` makes one"
                )
            if layout.slots > 0:
                self._slots = settings.placement.replicas(layer, layout)
        elif settings.placement is not None:
            used = min(layout.slots, settings.placement.slot_limit(layer))
            self._num_spare_slots = layout.slots - used
            layout = dataclasses.replace(layout, slots=used)
            self._slots = self._slots[:, :used]
        self._layout = layout
        self._settings = settings
        self._place, self._fill, self._solve = planner.place, planner.fill, planner.solve
        if settings.costs is not None and strategy != TIME.name:
            self._solve = partial(_solve_fastest, strategy=strategy)
        self._expert_load = torch.zeros(layout.num_experts, dtype=torch.int64)
        self._num_observed = 0

    def solve(self, load: Tensor) -> BalancePlan:
        """Plan a load, or a batch of loads, from what is remembered now; remembers nothing.

        Args:
            load: Assignments, int64 [R, E] or [B, R, E], equal on all ranks of the EP group.

        Returns:
            The plan, on `load`'s device.

        Raises:
            TypeError: If `load` is not int64.
            ValueError: If `load` does not fit the layout or, on a CPU, holds impossible values.
        """
        check_load(load, self._layout)
        if self._fill is not None:
            slots = self._slots.to(load.device)
            plan = self._fill(load, slots, self._layout, self._settings)
        else:
            assert self._solve is not None, "a planner solves or fills"
            plan = self._solve(load, self._layout, self._settings)
        return with_spare_slots(plan, self._num_spare_slots)

    def observe(self, load: Tensor) -> None:
        """Remember the load of one microbatch, int64 [R, E]: after its plan, once.

        Every `interval` microbatches the replicas are placed anew, by the sum of the loads since
        the last time.
        """
        if self._place is None:
            return
        self._expert_load = self._expert_load.to(load.device) + load.sum(-2)
        self._num_observed += 1
        if self._num_observed % self._settings.interval == 0:
            self._slots = self._place(self._expert_load.cpu(), self._layout, self._settings)
            self._expert_load = torch.zeros_like(self._expert_load)

    def plan_in_order(self, load: Tensor) -> BalancePlan:
        """Plan and remember each load of a batch [B, R, E] in turn, or the one load [R, E]."""
        if load.dim() == 2 or self._place is None:
            plan = self.solve(load)
            if load.dim() == 2:
                self.observe(load)
            return plan
        check_load(load, self._layout)
        plans = [self.plan_in_order(one) for one in load]
        layout = dataclasses.replace(self._layout, slots=self._layout.slots + self._num_spare_slots)
        return stack_plans(plans, layout)


def _solve_fastest(
    load: Tensor, layout: ExpertLayout, settings: PlanSettings, *, strategy: str
) -> BalancePlan:
    assert settings.costs is not None, "planning for time needs costs"
    return fastest_plan(
        load, layout, settings.costs, strategy=strategy, min_quota=settings.min_quota
    )
