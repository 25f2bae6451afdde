"""Stage 2: plans loads that are all there already, of a file or of a program, without a layer.

In training, the `LayerPlanner` of each layer keeps a history; here each call of `solve` begins
without one. Legend: R ranks of the EP group, E logical experts, S slots per rank, B loads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_ext.balance.batches import stack_plans
from megatron_ext.balance.costs import LayerCosts
from megatron_ext.balance.placement import Placement
from megatron_ext.balance.plan import BalancePlan, check_load
from megatron_ext.balance.planner import LayerPlanner, plan_layout
from megatron_ext.balance.strategies import PlanSettings
from megatron_ext.balance.strategies.strategy import FromHistory, FromPrediction
from megatron_ext.config import BalanceConfig, Section

_DEFAULTS = BalanceConfig()


def solve(
    load: Tensor,
    *,
    ep_size: int,
    slots: int = _DEFAULTS.slots,
    strategy: str = _DEFAULTS.strategy,
    tolerance: float = _DEFAULTS.tolerance,
    min_quota: int = _DEFAULTS.min_quota,
    nvlink_domain: int | None = None,
    sections: Sequence[Section] = (),
    costs: LayerCosts | None = None,
    placement: Placement | None = None,
) -> BalancePlan:
    """Plan one load or a batch of loads, without processes or Megatron.

    The plan is legal (docs/method.md) and never worse than no balancing. The strategy decides how
    close to the mean the busiest rank comes; see `megatron_ext.balance.strategies`. For a strategy
    that plans from history, a batch holds the first microbatches of one layer, in order.

    Args:
        load: Assignments from each source rank to each logical expert, int64 [R, E] or a batch [B,
            R, E], >= 0.
        ep_size: Ranks of the EP group (R).
        slots: Replicas a rank can hold (S); strategies `exact` and `moonep` take E / R instead.
        strategy: A planner of `megatron_ext.balance.strategies`.
        tolerance: How far above the mean the busiest rank may be, as a fraction of the mean;
            resolved to 1e-6.
        min_quota: Fewest assignments a replica may carry.
        nvlink_domain: Ranks per NVLink domain; one domain if None.
        sections: Strategies' own settings that differ from the defaults: `LlepSettings(...)`.
        costs: Costs of the layer; if given, the objective is time. Each load gets the tolerance at
            which the modelled layer is fastest; `tolerance` has no effect.
        placement: Replicas placed before; see `PlanSettings.placement`.

    Returns:
        The plan, or a batch of plans with a leading [B], on `load`'s device. `plan.quota.sum(-1)`
        equals `load.sum(-2)`; equal input gives bit-equal output.

    Raises:
        TypeError: If `load` is no int64 tensor.
        ValueError: A shape, a value (looked at on a CPU only) or a setting is out of range; the
            message names which.

    >>> import torch
    >>> plan = solve(torch.tensor([[6, 1, 1, 0], [4, 2, 1, 1]]), ep_size=2, slots=1)
    >>> plan.quota[0].tolist(), plan.experts_in_slots.tolist(), plan.rank_loads().tolist()
    ([5, 5], [[-1], [0]], [8, 8])
    """
    if not isinstance(load, Tensor):
        raise TypeError(f"load must be an int64 tensor, got {type(load).__name__}")
    if load.dim() not in (2, 3):
        raise ValueError(f"load must be [R, E] or [B, R, E], got shape {tuple(load.shape)}")
    layout = plan_layout(
        strategy,
        num_experts=load.shape[-1],
        ep_size=ep_size,
        slots=slots,
        nvlink_domain=nvlink_domain,
    )
    asked = PlanSettings(
        tolerance=tolerance,
        min_quota=min_quota,
        sections=tuple(sections),
        costs=costs,
        placement=placement,
    )
    return PlannerInOrder(strategy, layout, asked).plan_in_order(load)


class PlannerInOrder(LayerPlanner):
    """Plans the loads of one layer in their order; arguments and errors as of `LayerPlanner`."""

    _previous_load: Tensor | None = None

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


def idle_slots(
    slots: int, *, num_experts: int, ep_size: int, nvlink_domain: int | None
) -> str | None:
    """Return a message if a rank has more slots than replicas to hold; else None.

    Without `nvlink_domain`, all ranks are one domain.

    >>> idle_slots(29, num_experts=32, ep_size=8, nvlink_domain=None)
    'slots (29) beyond 28 stay empty: a rank has no more experts to borrow'
    """
    ranks = ep_size if nvlink_domain is None else nvlink_domain
    most = num_experts // ep_size * (ranks - 1)
    if slots <= most:
        return None
    return f"slots ({slots}) beyond {most} stay empty: a rank has no more experts to borrow"
