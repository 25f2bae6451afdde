"""Computes the reported numbers: imbalance, replicas, sends, traffic, accuracy of predictions.

Legend: R ranks of the EP group, E logical experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_ext.balance.plan import BalancePlan


def imbalance(rank_loads: Tensor) -> float:
    """Return the busiest rank's assignments / mean, of rank loads int64 [R]: 1.0 is perfect.

    It is 1.0 without assignments, too.

    >>> imbalance(torch.tensor([13, 3])), imbalance(torch.tensor([0, 0]))
    (1.625, 1.0)
    """
    return float(imbalances(rank_loads))


def imbalances(rank_loads: Tensor) -> Tensor:
    """Return the imbalance, float64 [...], of rank loads, int64 [..., R].

    >>> imbalances(torch.tensor([[13, 3], [8, 8]])).tolist()
    [1.625, 1.0]
    """
    total = rank_loads.sum(-1)
    busiest = rank_loads.amax(-1).double() * rank_loads.shape[-1]
    return torch.where(total > 0, busiest / total.clamp(min=1), 1.0)


def load_imbalance_rates(rank_loads: Tensor) -> Tensor:
    """Return the busiest rank's assignments / median, float64 [...], of rank loads [..., R].

    A median below one assignment counts as one. Without assignments the rate is 1.0.

    Source: Sem-MoE, section 4.6 (load-imbalance rate of Figure 5b).

    >>> load_imbalance_rates(torch.tensor([[10, 4, 4, 0], [0, 0, 0, 0]])).tolist()
    [2.5, 1.0]
    """
    median = rank_loads.double().quantile(0.5, dim=-1).clamp(min=1)
    return torch.where(rank_loads.sum(-1) > 0, rank_loads.amax(-1) / median, 1.0)


def load_accuracy(predicted: Tensor, load: Tensor) -> float:
    """Return the part of the predicted assignments that fit the experts' exact loads.

    Both loads are int64 [R, E]. An expert's predicted assignments count up to the expert's exact
    load, from any token. The result is 1 without predictions.

    >>> load_accuracy(torch.tensor([[3, 1], [0, 0]]), torch.tensor([[1, 0], [1, 2]]))
    0.75
    """
    fits = torch.minimum(predicted.sum(0), load.sum(0)).sum()
    return float(fits) / float(predicted.sum()) if predicted.any() else 1.0


def home_loads(load: Tensor) -> Tensor:
    """Return the assignments of each rank without balancing, int64 [..., R]; load [..., R, E].

    >>> home_loads(torch.tensor([[6, 1, 1, 0], [4, 2, 1, 1]])).tolist()
    [13, 3]
    """
    return load.sum(-2).unflatten(-1, (load.shape[-2], -1)).sum(-1)


def home_imbalances(loads: Sequence[Tensor]) -> Tensor:
    """Return the imbalances without balancing, float64 [len(loads)], of layers' loads [R, E].

    Layers may differ in E. A few operations compute all loads of one E together.

    >>> wide, narrow = torch.tensor([[6, 1, 1, 0], [4, 2, 1, 1]]), torch.tensor([[1, 1], [1, 1]])
    >>> home_imbalances([wide, narrow, wide]).tolist()
    [1.625, 1.625, 1.0]
    """
    alike: dict[int, list[Tensor]] = {}
    for load in loads:
        alike.setdefault(load.shape[-1], []).append(load)
    return torch.cat([imbalances(home_loads(torch.stack(each))) for each in alike.values()])


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


def replica_use(placed: Tensor, plan: BalancePlan) -> dict[str, Tensor]:
    """Count the replicas, placed before the load was known, that the load's plan uses.

    `placed` is the logical expert in each slot, or -1: int32 [..., R, S]. A placed replica that the
    plan uses stays in its slot. Counts are int64 [...]: `hit_replicas` were placed and are used,
    `topped_up_replicas` used and not placed, `wasted_replicas` placed and not used.

    >>> from megatron_ext.balance.layout import ExpertLayout
    >>> layout = ExpertLayout(num_experts=4, ep_size=2, slots=2, nvlink_domain=2)
    >>> used = torch.tensor([[2, -1], [0, 1]], dtype=torch.int32)
    >>> plan = BalancePlan(layout, torch.zeros(4, 2, dtype=torch.int64), used)
    >>> use = replica_use(torch.tensor([[2, 3], [-1, 0]], dtype=torch.int32), plan)
    >>> {name: int(count) for name, count in use.items()}
    {'hit_replicas': 1, 'topped_up_replicas': 2, 'wasted_replicas': 2}
    """
    was_placed, is_used = placed >= 0, plan.experts_in_slots >= 0
    is_hit = was_placed & (placed == plan.experts_in_slots)
    return {
        "hit_replicas": is_hit.sum((-2, -1)),
        "topped_up_replicas": (is_used & ~is_hit).sum((-2, -1)),
        "wasted_replicas": (was_placed & ~is_hit).sum((-2, -1)),
    }
