"""LPLB: splits the exact load by a linear program over replicas that were placed from history.

Legend: R ranks of the EP group, E logical experts, S slots per rank, X replicas.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from megatron_ext.balance.batches import plan_each
from megatron_ext.balance.layout import ExpertLayout
from megatron_ext.balance.metrics import home_loads
from megatron_ext.balance.plan import BalancePlan
from megatron_ext.balance.strategies import none
from megatron_ext.balance.strategies.strategy import FromHistory, PlanSettings, Strategy
from megatron_ext.methods.eplb import eplb


def place(expert_load: Tensor, layout: ExpertLayout, settings: PlanSettings) -> Tensor:
    """Place replicas as EPLB does, with at most one replica of an expert: int32 [R, S].

    Source: UltraEP, section 8.1 (LPLB with at most one replica per expert, paired with EPLB).
    """
    return eplb.place_replicas(expert_load, layout, most_replicas=1)


def share(
    load: Tensor, placed: Tensor, layout: ExpertLayout, settings: PlanSettings
) -> BalancePlan:
    """Move assignments from mains to their replicas so that the busiest rank has least.

    HiGHS solves the program, on the CPU, one load after the other. The replicas' quotas are rounded
    to the nearest whole numbers, and mains take the rest; a replica below `min_quota` is dropped.
    If rounding ends worse than no balancing, the load is planned without replicas. EP ranks plan
    alike if all of them run the same HiGHS on the same kind of processor; `balance.check_plans`
    notices ranks that do not.

    Source: DeepSeek LPLB, as described by UltraEP (section 8.1). Here HiGHS is the solver, and EPLB
    places the replicas instead of a fixed topology.
    """
    placed = placed.cpu()
    plan = plan_each(load, layout, lambda one: _plan(one, placed, layout, settings))
    return none.unless_worse(load, plan)


def _plan(
    load: Tensor, placed: Tensor, layout: ExpertLayout, settings: PlanSettings
) -> BalancePlan:
    """Plan one load, without comparing the plan with no balancing."""
    host, slot = (placed >= 0).nonzero(as_tuple=True)
    expert = placed[host, slot].long()
    expert_load = load.sum(0)
    moved = _solve_program(
        home_loads(load), expert_load[expert], expert // layout.mains_per_rank, host
    )
    moved = torch.where(moved >= settings.min_quota, moved, 0)
    quota = none.solve(load, layout, settings).quota
    quota[expert, expert // layout.mains_per_rank] -= moved
    quota[expert, host] += moved
    kept = placed.clone()
    kept[host[moved == 0], slot[moved == 0]] = -1
    return BalancePlan(layout, quota, kept)


def _solve_program(home: Tensor, most: Tensor, source: Tensor, host: Tensor) -> Tensor:
    """Return the assignments to move to each replica so that the busiest rank has least: int64 [X].

    Minimizes T under `0 <= moved <= most`, where every rank has at most T. A rank has its load
    without balancing (`home` [R]), less the assignments that leave the rank, plus those that come.
    `most` [X] is the load of each replica's expert, `source` [X] the expert's home rank.
    """
    # An extra: only this strategy needs SciPy.
    from scipy.optimize import linprog

    replicas = len(host)
    if replicas == 0:
        return host
    change = np.zeros((len(home), replicas + 1))
    change[source.numpy(), np.arange(replicas)] -= 1
    change[host.numpy(), np.arange(replicas)] += 1
    change[:, -1] = -1
    goal = np.zeros(replicas + 1)
    goal[-1] = 1
    bounds = [*((0, int(count)) for count in most), (0, None)]
    solution = linprog(goal, change, -home.numpy(), bounds=bounds, method="highs-ds")
    assert solution.status == 0, f"moving nothing is a solution, yet HiGHS: {solution.message}"
    moved = torch.from_numpy(np.floor(solution.x[:-1] + 0.5).astype(np.int64))
    return torch.minimum(moved.clamp(min=0), most)


LPLB = Strategy(
    name="lplb",
    summary="LPLB: linear program over at most one replica per expert, placed as EPLB does",
    kind=FromHistory(place, share),
    package="scipy",
)
