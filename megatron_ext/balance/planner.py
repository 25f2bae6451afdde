"""Plans one layer's microbatches, and keeps the history that some strategies need.

Only `LayerPlanner` keeps a history: the strategies themselves are pure functions. Legend: R ranks
of the EP group, E logical experts, S slots per rank, B loads.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from megatron_ext.balance.layout import ExpertLayout
from megatron_ext.balance.plan import BalancePlan, check_load, with_spare_slots
from megatron_ext.balance.reruns import can_take_back
from megatron_ext.balance.strategies import get_planner, get_strategy
from megatron_ext.balance.strategies.strategy import (
    FromHistory,
    FromPlacement,
    FromPrediction,
    PlanSettings,
    Solves,
)
from megatron_ext.config import HistorySettings


def plan_layout(
    strategy: str, *, num_experts: int, ep_size: int, slots: int, nvlink_domain: int | None
) -> ExpertLayout:
    """Return the layout that a strategy plans for; the strategy may change the number of slots.

    Without `nvlink_domain`, all ranks are one domain.

    Raises:
        ValueError: There is no such strategy, or the numbers do not fit each other.
    """
    asked = ExpertLayout(
        num_experts=num_experts,
        ep_size=ep_size,
        slots=slots,
        nvlink_domain=ep_size if nvlink_domain is None else nvlink_domain,
    )
    num_slots = get_strategy(strategy).num_slots
    return dataclasses.replace(asked, slots=num_slots(slots, asked.mains_per_rank))


class LayerPlanner:
    """Plans the loads of one MoE layer, and keeps its history for strategies that plan from it.

    Each layer has a planner of its own on every rank of the EP group. The history consists of
    loads, which are equal on these ranks, so all ranks plan alike. Checkpoints do not have the
    history: plans never change the result of an expert, and a continued run gathers a new history.
    If the settings have costs, the planner plans for the least time. `layer` is the layer's number
    in the placement, if the settings have a placement.

    Raises:
        ValueError: There is no such planner, it has no tolerance that costs could choose, or it
            needs a placement that is not given or does not fit the layout.
    """

    def __init__(
        self, strategy: str, layout: ExpertLayout, settings: PlanSettings, *, layer: int = 0
    ) -> None:
        planner = get_planner(strategy, for_time=settings.costs is not None)
        self._first_placed = torch.full((layout.ep_size, layout.slots), -1, dtype=torch.int32)
        self._whole_layout = layout
        if isinstance(planner, FromPlacement):
            if settings.placement is None:
                raise ValueError(
                    f"strategy {strategy!r} needs a placement: `megatron-ext place craft` makes one"
                )
            if layout.slots > 0:
                self._first_placed = settings.placement.replicas(layer, layout)
        elif settings.placement is not None:
            used = min(layout.slots, settings.placement.slot_limit(layer))
            layout = dataclasses.replace(layout, slots=used)
            self._first_placed = self._first_placed[:, :used]
        self._layout = layout  # Plans may use fewer slots.
        self._num_spare_slots = self._whole_layout.slots - layout.slots
        self._settings = settings
        if settings.costs is not None:
            # Imported here, because only objective `time` needs the module.
            from megatron_ext.balance.strategies.fastest import solver_for_time

            assert isinstance(planner, Solves), "`get_planner` refused what does not solve"
            planner = Solves(solver_for_time(planner.solve))
        self._planner = planner
        self.forget()
        can_take_back(self)

    def forget(self) -> None:
        """Forget the history: ranks may have seen different parts of an aborted step."""
        self._placed = self._first_placed
        self._expert_load = torch.zeros(self._layout.num_experts, dtype=torch.int64)
        self._num_observed = 0

    def mark(self) -> tuple[Any, ...]:
        """See `HoldsCounts`. Tensors of the history are replaced, and never changed."""
        return self._placed, self._expert_load, self._num_observed

    def take_back(self, mark: tuple[Any, ...]) -> None:
        """See `HoldsCounts`."""
        self._placed, self._expert_load, self._num_observed = mark

    def expect(self, predicted: Tensor) -> Tensor:
        """Place the replicas of a load that is only predicted; the history stays as it is.

        The load is int64 [R, E], equal on all ranks of the EP group. The result is an
        `experts_in_slots`, int32 [R, S], on the CPU.

        Raises:
            TypeError: If `predicted` is not int64.
            ValueError: If it does not fit the layout or, on a CPU, holds impossible values.
        """
        assert isinstance(self._planner, FromPrediction), "others place nothing by a prediction"
        check_load(predicted, self._layout)
        placed = self._planner.place(predicted, self._layout, self._settings)
        return functional.pad(placed, (0, self._num_spare_slots), value=-1)

    def solve(self, load: Tensor, placed: Tensor | None = None) -> BalancePlan:
        """Plan a load, or a batch of loads, from the history so far, which stays as it is.

        Args:
            load: Assignments, int64 [R, E] or [B, R, E], equal on all ranks of the EP group.
            placed: Replicas that were placed for this load, from `expect`; by default those placed
                from the history. A planner that predicts has none by default.

        Raises:
            TypeError: If `load` is not int64.
            ValueError: If `load` does not fit the layout or, on a CPU, holds impossible values.
        """
        check_load(load, self._layout)
        if isinstance(self._planner, Solves):
            plan = self._planner.solve(load, self._layout, self._settings)
        else:
            placed = self._placed if placed is None else placed[..., : self._layout.slots]
            plan = self._planner.share(load, placed.to(load.device), self._layout, self._settings)
        return with_spare_slots(plan, self._num_spare_slots)

    def observe(self, load: Tensor) -> None:
        """Add the load of one microbatch, int64 [R, E], to the history: after its plan, once.

        Every `interval` microbatches the replicas are placed anew, by the sum of the loads since
        the last time.
        """
        if not isinstance(self._planner, FromHistory):
            return
        self._expert_load = self._expert_load.to(load.device) + load.sum(-2)
        self._num_observed += 1
        if self._num_observed % self._settings.section(HistorySettings).interval == 0:
            self._placed = self._planner.place(
                self._expert_load.cpu(), self._layout, self._settings
            )
            self._expert_load = torch.zeros_like(self._expert_load)
