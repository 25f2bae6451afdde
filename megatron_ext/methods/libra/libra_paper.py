"""Libra as published: replicas from a predicted load, and no others; adaptive token sharding.

Legend: R ranks of the EP group, E logical experts, S slots per rank.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_ext.balance.batches import plan_each
from megatron_ext.balance.layout import ExpertLayout
from megatron_ext.balance.plan import BalancePlan
from megatron_ext.balance.strategies import none
from megatron_ext.balance.strategies.strategy import FromPrediction, PlanSettings, Strategy
from megatron_ext.methods.libra import libra


def share(
    load: Tensor, placed: Tensor, layout: ExpertLayout, settings: PlanSettings
) -> BalancePlan:
    """Plan assignments on their source rank if it has an instance; share the others.

    A rank with an instance of an expert computes its own assignments to the expert; all other
    assignments begin at home. While the busiest rank is above the tolerance, each rank above the
    mean takes the expert that it computes most for other ranks, and hands assignments to the least
    loaded rank that holds this expert, up to the mean.

    A replica below `min_quota` is dropped; its assignments stay at home. A load whose busiest rank
    ends higher than without balancing is planned without replicas.

    >>> layout = ExpertLayout(num_experts=4, ep_size=2, slots=1, nvlink_domain=2)
    >>> load = torch.tensor([[6, 1, 1, 0], [4, 2, 1, 1]])
    >>> plan = share(load, torch.tensor([[2], [0]], dtype=torch.int32), layout, PlanSettings())
    >>> plan.quota.tolist(), plan.rank_loads().tolist()
    ([[6, 4], [3, 0], [1, 1], [0, 1]], [10, 6])

    Source: Libra, Algorithm 2; differs from it in that the mean is rounded up, and taken over the
    ranks of each NVLink domain, which replicas do not leave.
    """
    placed = placed.cpu()
    plan = plan_each(load, layout, lambda one: _shard(one, placed, layout, settings))
    return none.unless_worse(load, plan)


def _shard(
    load: Tensor, placed: Tensor, layout: ExpertLayout, settings: PlanSettings
) -> BalancePlan:
    """Plan one load, without comparing the plan with no balancing."""
    experts, ranks, mains = layout.num_experts, layout.ep_size, layout.mains_per_rank
    holds = torch.zeros(experts, ranks, dtype=torch.bool)
    home = torch.arange(experts) // mains
    holds[torch.arange(experts), home] = True
    host, slot = (placed >= 0).nonzero(as_tuple=True)
    holds[placed[host, slot].long(), host] = True

    local = torch.where(holds, load.T, 0)
    remote = torch.zeros_like(local)
    remote[torch.arange(experts), home] = torch.where(holds, 0, load.T).sum(1)
    for first in range(0, ranks, layout.nvlink_domain):
        group = range(first, first + layout.nvlink_domain)
        _share_remote(local, remote, holds, group, settings.tolerance)
    quota = local + remote

    too_small = quota[placed[host, slot].long(), host] < settings.min_quota
    for rank, index in zip(host[too_small].tolist(), slot[too_small].tolist(), strict=True):
        expert = int(placed[rank, index])
        quota[expert, home[expert]] += quota[expert, rank]
        quota[expert, rank] = 0
    kept = placed.clone()
    kept[host[too_small], slot[too_small]] = -1
    return BalancePlan(layout, quota, kept)


def _share_remote(
    local: Tensor, remote: Tensor, holds: Tensor, ranks: range, tolerance: float
) -> None:
    """Balance the assignments computed for other ranks: changes `remote`, int64 [E, R]."""
    loads = (local + remote).sum(0).tolist()
    total = sum(loads[rank] for rank in ranks)
    mean = math.ceil(total / len(ranks))
    while max(loads[rank] for rank in ranks) > (1 + tolerance) * total / len(ranks):
        has_moved = False
        busy = sorted((r for r in ranks if loads[r] > mean), key=lambda r: -loads[r])
        for source in busy:
            for expert in remote[:, source].argsort(descending=True, stable=True).tolist():
                hosts = [r for r in ranks if r != source and holds[expert, r]]
                target = min(hosts, key=loads.__getitem__, default=source)
                amount = min(int(remote[expert, source]), mean - loads[target])
                if amount > 0:
                    remote[expert, source] -= amount
                    remote[expert, target] += amount
                    loads[source] -= amount
                    loads[target] += amount
                    has_moved = True
                    break
        if not has_moved:
            break


LIBRA_PAPER = Strategy(
    name="libra_paper",
    summary="Libra: replicas from a predicted load; adaptive token sharding",
    kind=FromPrediction(libra.place, share),
)
