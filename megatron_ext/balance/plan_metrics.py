"""Numbers by which plans are compared: what they send, and how uneven ranks stay.

Legend: R ranks of the EP group, E logical experts, S slots per rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ext.balance.plan import BalancePlan


def max_fanouts(plan: BalancePlan) -> Tensor:
    """Return the number of replicas of the expert with most replicas: int64 [...]."""
    held = plan.experts_in_slots.flatten(-2).long() + 1  # 0 is an empty slot
    counts = held.new_zeros(*held.shape[:-1], plan.layout.num_experts + 1)
    return counts.scatter_add_(-1, held, torch.ones_like(held))[..., 1:].amax(-1)


def home_ranks(plan: BalancePlan) -> Tensor:
    """Return the home rank of the replica in each slot, or -1: int32 [..., R, S]."""
    held = plan.experts_in_slots
    return torch.where(held >= 0, held // plan.layout.mains_per_rank, -1)


def rank_sends(plan: BalancePlan) -> Tensor:
    """Return how many replicas each rank sends, of all its mains: int64 [..., R].

    Source: UltraEP, Eq. 5.
    """
    home = home_ranks(plan).flatten(-2)
    ranks = torch.arange(plan.layout.ep_size, device=home.device)
    return (home[..., None] == ranks).sum(-2)


def remote_assignments(load: Tensor, plan: BalancePlan) -> Tensor:
    """Return how many assignments of a load another rank than the token's computes: int64 [...].

    Each such assignment costs a trip there and back. The split serves a rank's own assignments
    first, so the smaller of load and quota stays on the rank.

    >>> from megatron_ext.balance.solve import solve
    >>> load = torch.tensor([[6, 1, 1, 0], [4, 2, 1, 1]])
    >>> int(remote_assignments(load, solve(load, ep_size=2, slots=1)))
    4
    """
    local = torch.minimum(load, plan.quota.mT)
    return load.sum((-2, -1)) - local.sum((-2, -1))


def load_imbalance_rates(rank_loads: Tensor) -> Tensor:
    """Return the busiest rank's assignments / median, float64 [...], of rank loads [..., R].

    A median below one assignment counts as one. Without assignments the rate is 1.0.

    Source: Sem-MoE, section 4.6 (load-imbalance rate of Figure 5b).

    >>> load_imbalance_rates(torch.tensor([[10, 4, 4, 0], [0, 0, 0, 0]])).tolist()
    [2.5, 1.0]
    """
    median = rank_loads.double().quantile(0.5, dim=-1).clamp(min=1)
    return torch.where(rank_loads.sum(-1) > 0, rank_loads.amax(-1) / median, 1.0)
