"""No balancing: in a model, Megatron's own layer; offline, the plan that leaves experts at home."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ext.balance.layout import ExpertLayout
from megatron_ext.balance.plan import BalancePlan
from megatron_ext.balance.strategies.strategy import Strategy


def solve(load: Tensor, layout: ExpertLayout, *, tolerance: float, min_quota: int) -> BalancePlan:
    """Leave every assignment on its expert's home rank, whatever the tolerance.

    >>> layout = ExpertLayout(num_experts=4, ep_size=2, slots=1, nvlink_domain=2)
    >>> load = torch.tensor([[6, 1, 1, 0], [4, 2, 1, 1]])
    >>> solve(load, layout, tolerance=0.0, min_quota=1).quota.tolist()
    [[10, 0], [3, 0], [0, 2], [0, 1]]
    """
    ranks, batch = layout.ep_size, load.shape[:-2]
    quota = load.new_zeros(*batch, layout.num_experts, ranks)
    home = torch.arange(layout.num_experts, device=load.device) // layout.mains_per_rank
    home = home.expand(*batch, -1)[..., None]
    slots = torch.full((*batch, ranks, layout.slots), -1, dtype=torch.int32, device=load.device)
    return BalancePlan(layout, quota.scatter(-1, home, load.sum(-2)[..., None]), slots)


NONE = Strategy(name="none", kind="absent", solve=solve)
