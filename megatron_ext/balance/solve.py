"""Stage 2: plans for loads, by the name of a strategy.

In training a layer has a `LayerPlanner` of its own, which keeps a history; here each call begins
without one.
Legend: R ranks of the EP group, E logical experts, S slots per rank, B independent loads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import Tensor

from megatron_ext.balance.costs import LayerCosts
from megatron_ext.balance.layout import ExpertLayout
from megatron_ext.balance.placement import Placement
from megatron_ext.balance.plan import BalancePlan
from megatron_ext.balance.planner import LayerPlanner
from megatron_ext.balance.strategies import PlanSettings, get_strategy
from megatron_ext.config import BalanceConfig, Section

_DEFAULTS = BalanceConfig()


def solve_plan(
    load: Tensor,
    layout: ExpertLayout,
    *,
    strategy: str = _DEFAULTS.strategy,
    tolerance: float = _DEFAULTS.tolerance,
    min_quota: int = _DEFAULTS.min_quota,
    sections: Sequence[Section] = (),
    costs: LayerCosts | None = None,
    placement: Placement | None = None,
) -> BalancePlan:
    """Choose replicas and split each expert's load over its instances.

    The plan is legal (see `check_plan`) and never worse than no balancing. How close to the mean it
    comes depends on the strategy; see `megatron_ext.balance.strategies`. A strategy that plans from
    history takes a batch for the first microbatches of one layer, in order.

    Args:
        load: Assignments from each source rank to each logical expert, int64 [R, E] or a batch [B,
            R, E], >= 0. Must be equal on every rank of the EP group: each rank solves alone and
            must agree.
        layout: Where experts and slots are.
        strategy: A planner of `megatron_ext.balance.strategies`.
        tolerance: How far above the mean the busiest rank may be, as a fraction of the mean;
            resolved to 1e-6.
        min_quota: Fewest assignments a replica may carry.
        sections: Strategies' own settings, where they are not their defaults.
        costs: Costs of the layer; if given, the objective is time.
        placement: Replicas placed before; see `PlanSettings.placement`.

    Returns:
        The plan, on `load`'s device. `plan.quota.sum(-1)` equals `load.sum(-2)`; equal input gives
        bit-equal output.

    Raises:
        TypeError: If `load` is not int64.
        ValueError: If `load` does not fit the layout or, on a CPU, holds impossible values, or a
            setting is out of range.

    >>> import torch
    >>> layout = ExpertLayout(num_experts=4, ep_size=2, slots=1, nvlink_domain=2)
    >>> plan = solve_plan(torch.tensor([[6, 1, 1, 0], [4, 2, 1, 1]]), layout)
    >>> plan.quota[0].tolist(), plan.slots.tolist(), plan.rank_loads().tolist()
    ([5, 5], [[-1], [0]], [8, 8])
    """
    asked = PlanSettings(
        tolerance=tolerance,
        min_quota=min_quota,
        sections=tuple(sections),
        costs=costs,
        placement=placement,
    )
    return LayerPlanner(strategy, layout, asked).plan_in_order(load)


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

    Args:
        load: Assignments, int64 [R, E] or [B, R, E], >= 0.
        ep_size: Ranks of the EP group (R).
        slots: Replicas a rank can hold (S); strategies `exact` and `moonep` take E / R instead.
        strategy: A planner of `megatron_ext.balance.strategies`.
        tolerance: How far above the mean the busiest rank may be, as a fraction of the mean.
        min_quota: Fewest assignments a replica may carry.
        nvlink_domain: Ranks per NVLink domain; one domain if None.
        sections: Strategies' own settings, where they are not their defaults: `LlepSettings(...)`.
        costs: Costs of the layer; if given, the objective is time. Each load gets the tolerance at
            which the modelled layer is fastest, and `tolerance` counts for nothing.
        placement: Replicas placed before; see `PlanSettings.placement`.

    Returns:
        The plan, or a batch of plans with a leading [B], on `load`'s device.

    Raises:
        TypeError: If `load` is no int64 tensor.
        ValueError: If a shape, a value or a setting is out of range; the message names it.

    >>> import torch
    >>> plan = solve(torch.tensor([[6, 1, 1, 0], [4, 2, 1, 1]]), ep_size=2, slots=1)
    >>> plan.rank_loads().tolist()
    [8, 8]
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
    return solve_plan(
        load,
        layout,
        strategy=strategy,
        tolerance=tolerance,
        min_quota=min_quota,
        sections=sections,
        costs=costs,
        placement=placement,
    )


def plan_layout(
    strategy: str, *, num_experts: int, ep_size: int, slots: int, nvlink_domain: int | None
) -> ExpertLayout:
    """Return the layout that a strategy plans for: it may need other slots than those asked for.

    Args:
        strategy: A balancer of `megatron_ext.balance.strategies`.
        num_experts: Logical experts (E).
        ep_size: Ranks of the EP group (R).
        slots: Replicas a rank can hold (S), as asked for.
        nvlink_domain: Ranks per NVLink domain; one domain if None.

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


def idle_slots(
    slots: int, *, num_experts: int, ep_size: int, nvlink_domain: int | None
) -> str | None:
    """Return a message if a rank has more slots than replicas to hold; None if it has not.

    Args:
        slots: Slots of a rank (S).
        num_experts: Logical experts (E).
        ep_size: Ranks of the EP group (R).
        nvlink_domain: Ranks per NVLink domain; one domain if None.

    >>> idle_slots(29, num_experts=32, ep_size=8, nvlink_domain=None)
    'slots (29) beyond 28 stay empty: a rank has no more experts to borrow'
    """
    ranks = ep_size if nvlink_domain is None else nvlink_domain
    most = num_experts // ep_size * (ranks - 1)
    if slots <= most:
        return None
    return f"slots ({slots}) beyond {most} stay empty: a rank has no more experts to borrow"
