"""No balancing: in a model, Megatron's own layer; offline, the plan that leaves experts at home."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ext.balance.batches import pick_plans
from megatron_ext.balance.layout import ExpertLayout
from megatron_ext.balance.metrics import home_loads
from megatron_ext.balance.plan import BalancePlan
from megatron_ext.balance.strategies.strategy import PlanSettings, Solves, StaysMegatron, Strategy


def solve(load: Tensor, layout: ExpertLayout, settings: PlanSettings) -> BalancePlan:
    """Leave every assignment on its expert's home rank, with any tolerance.

    >>> layout = ExpertLayout(num_experts=4, ep_size=2, slots=1, nvlink_domain=2)
    >>> load = torch.tensor([[6, 1, 1, 0], [4, 2, 1, 1]])
    >>> solve(load, layout, PlanSettings()).quota.tolist()
    [[10, 0], [3, 0], [0, 2], [0, 1]]
    """
    ranks, batch = layout.ep_size, load.shape[:-2]
    quota = load.new_zeros(*batch, layout.num_experts, ranks)
    home = torch.arange(layout.num_experts, device=load.device) // layout.mains_per_rank
    home = home.expand(*batch, -1)[..., None]
    quota.scatter_(-1, home, load.sum(-2)[..., None])
    empty = torch.full((*batch, ranks, layout.slots), -1, dtype=torch.int32, device=load.device)
    return BalancePlan(layout, quota, empty)


def unless_worse(load: Tensor, plan: BalancePlan) -> BalancePlan:
    """Replace each plan by no balancing where its busiest rank has more than without balancing."""
    is_worse = plan.rank_loads().amax(-1) > home_loads(load).amax(-1)
    return pick_plans(is_worse, solve(load, plan.layout, PlanSettings()), plan)


NONE = Strategy(
    name="none",
    summary="no balancing: Megatron's own layer",
    kind=StaysMegatron(offline=Solves(solve)),
)
