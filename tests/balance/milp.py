"""The exact judge: optimal plans by mixed-integer programming (HiGHS), for small cases.

The rules are those of `check_plan`. For fixed replicas the quotas are a flow with whole capacities,
so an optimum in real numbers for a whole threshold is one in whole numbers too, as long as
`min_quota` is 1; where it is more, only integrality of the flow is lost, so the value is a bound.

Legend: R ranks, E logical experts.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array, lil_array
from torch import Tensor

from megatron_ext.balance.layout import ExpertLayout


def least_busiest(load: Tensor, layout: ExpertLayout, *, time_limit_s: float = 20.0) -> int:
    """Least load of the busiest rank over all legal plans.

    Returns:
        The optimum, rounded up to a whole number; if time runs out, a proven bound below it.
    """
    problem = _Problem(load, layout)
    # The threshold is the last variable and the objective.
    objective = np.zeros(problem.num_variables + 1)
    objective[-1] = 1.0
    matrix = problem.constraints(threshold=None)
    return _whole(problem.solve(objective, matrix, time_limit_s))


def least_replicas(
    load: Tensor, layout: ExpertLayout, busiest: int, *, time_limit_s: float = 20.0
) -> int | None:
    """Fewest replicas of legal plans whose busiest rank has at most `busiest`; None if none has.

    If time runs out, a proven bound below the optimum.
    """
    problem = _Problem(load, layout)
    objective = np.zeros(problem.num_variables)
    objective[problem.is_replica] = 1.0
    value = problem.solve(objective, problem.constraints(busiest), time_limit_s)
    return None if value is None else _whole(value)


def _whole(value: float | None) -> int:
    assert value is not None, "no plan at all: not even the one without replicas"
    return int(np.ceil(value - 1e-4))


class _Problem:
    """Variables: u[e, t], then y[e, t], which is 1 where rank t holds a replica of e."""

    def __init__(self, load: Tensor, layout: ExpertLayout) -> None:
        self.layout = layout
        self.expert_load = load.sum(0).numpy().astype(float)
        self.before = float(load.sum(0).view(layout.ep_size, -1).sum(1).max())
        experts, ranks = layout.num_experts, layout.ep_size
        self.size = experts * ranks
        self.num_variables = 2 * self.size
        expert, rank = np.divmod(np.arange(self.size), ranks)
        home = expert // layout.mains_per_rank
        domain = layout.nvlink_domain
        self.allowed = (rank != home) & (rank // domain == home // domain) & (layout.slots > 0)
        self.is_replica = np.concatenate([np.zeros(self.size, bool), self.allowed])
        self.expert, self.rank, self.is_main = expert, rank, rank == home

    def constraints(self, threshold: int | None) -> tuple[csr_array, np.ndarray, np.ndarray]:
        """Rows of the constraints; with a variable threshold as the last column if None."""
        experts, ranks, size = self.layout.num_experts, self.layout.ep_size, self.size
        rows = experts + ranks + size + ranks
        matrix = lil_array((rows, self.num_variables + (threshold is None)))
        low, high = np.full(rows, -np.inf), np.zeros(rows)
        u, y = np.arange(size), size + np.arange(size)
        matrix[self.expert, u] = 1.0  # every assignment is computed
        low[:experts] = high[:experts] = self.expert_load
        loads = experts + np.arange(ranks)
        matrix[experts + self.rank, u] = 1.0  # no rank computes more than the threshold
        if threshold is None:
            matrix[loads, self.num_variables] = -1.0
        else:
            high[loads] = threshold
        links = experts + ranks + np.arange(size)
        matrix[links, u] = 1.0  # quota only where an instance is
        matrix[links, y] = -self.expert_load[self.expert]
        high[links[self.is_main]] = np.inf
        held = experts + ranks + size + np.arange(ranks)
        matrix[held[self.rank], y] = 1.0  # no more replicas than slots
        high[held] = self.layout.slots
        return csr_array(matrix), low, high

    def solve(
        self,
        objective: np.ndarray,
        constraints: tuple[csr_array, np.ndarray, np.ndarray],
        time_limit_s: float,
    ) -> float | None:
        extra = len(objective) - self.num_variables
        upper = np.concatenate(
            [
                np.where(self.is_main | self.allowed, self.expert_load[self.expert], 0.0),
                self.allowed.astype(float),
                np.full(extra, self.before),
            ]
        )
        integrality = np.concatenate([np.zeros(self.size), np.ones(self.size), np.zeros(extra)])
        result = milp(
            objective,
            constraints=LinearConstraint(*constraints),
            bounds=Bounds(0, upper),
            integrality=integrality,
            options={"time_limit": time_limit_s},
        )
        if result.status == 2:
            return None  # infeasible
        assert result.status in (0, 1), result.message
        return float(result.fun if result.status == 0 else result.mip_dual_bound)
