"""Plans loads that are all there already, one after the other: of a file, or of a program.

Legend: R ranks of the EP group, E logical experts, S slots per rank, B loads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ext.balance.batches import stack_plans
from megatron_ext.balance.layout import ExpertLayout
from megatron_ext.balance.plan import BalancePlan, check_load
from megatron_ext.balance.planner import LayerPlanner
from megatron_ext.balance.strategies import PlanSettings
from megatron_ext.balance.strategies.strategy import FromHistory, FromPrediction


class PlannerInOrder(LayerPlanner):
    """Plans the loads of one layer in their order; arguments and errors as of `LayerPlanner`."""

    def __init__(
        self, strategy: str, layout: ExpertLayout, settings: PlanSettings, *, layer: int = 0
    ) -> None:
        super().__init__(strategy, layout, settings, layer=layer)
        # A placement may let plans use fewer slots.
        self._whole_layout = layout
        self._previous_load: Tensor | None = None

    def expect_in_order(self, predicted: Tensor | None = None) -> Tensor | None:
        """Place the replicas of the next load as `expect` does; None if it does not predict.

        Without `predicted`, the last load that was planned in order is the prediction. Before the
        first load there are no replicas.
        """
        if not isinstance(self._planner, FromPrediction):
            return None
        predicted = self._previous_load if predicted is None else predicted
        if predicted is None:
            held = self._whole_layout
            return torch.full((held.ep_size, held.slots), -1, dtype=torch.int32)
        return self.expect(predicted)

    def plan_in_order(self, load: Tensor, placed: Tensor | None = None) -> BalancePlan:
        """Plan one load, or each load of a batch, and add each to the history after its plan.

        For one load, `placed` is by default the result of `expect_in_order`.
        """
        if load.dim() == 2:
            plan = self.solve(load, self.expect_in_order() if placed is None else placed)
            self.observe(load)
            self._previous_load = load
            return plan
        if not isinstance(self._planner, FromHistory | FromPrediction):
            return self.solve(load)
        check_load(load, self._whole_layout)
        return stack_plans([self.plan_in_order(one) for one in load], self._whole_layout)
