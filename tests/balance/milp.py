"""The exact judge: optimal plans by mixed-integer programming (HiGHS), for small cases.

The rules are those of `check_plan`. Quotas are real numbers here, which changes nothing: for fixed
replicas they are a flow, and its demands, capacities and lower limits (`min_quota`) are whole, so a
whole threshold that real quotas meet is met by whole ones.

HiGHS works in floating point, so every optimum is checked from the other side: with the replicas
found, fixed, a plan must reach it. A verdict that does not pass is a bound and says so.

Legend: R ranks, E logical experts, P pairs of an expert and a rank that may hold a replica of it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, OptimizeResult, milp
from scipy.sparse import block_array, coo_array, csr_array, diags_array, eye_array
from torch import Tensor

from megatron_ext.balance.layout import ExpertLayout
from megatron_ext.balance.metrics import home_loads


class Judged(NamedTuple):
    value: int
    """The optimum, or a proven bound below it."""

    is_optimal: bool
    """Whether `value` is the optimum; False if the time ran out before that was proven."""


def least_busiest(
    load: Tensor, layout: ExpertLayout, *, min_quota: int = 1, time_limit_s: float = 20.0
) -> Judged:
    """Least load of the busiest rank over all legal plans."""
    judged = _Problem(load, layout, min_quota).judge("busiest", None, time_limit_s)
    assert judged is not None, "no plan at all: not even the one without replicas"
    return judged


def least_replicas(
    load: Tensor,
    layout: ExpertLayout,
    busiest: int,
    *,
    min_quota: int = 1,
    time_limit_s: float = 20.0,
) -> Judged | None:
    """Fewest replicas of legal plans whose busiest rank has at most `busiest`; None if none has."""
    return _Problem(load, layout, min_quota).judge("replicas", busiest, time_limit_s)


def least_sends(
    load: Tensor,
    layout: ExpertLayout,
    busiest: int,
    *,
    min_quota: int = 1,
    time_limit_s: float = 20.0,
) -> Judged | None:
    """As `least_replicas`, of the replicas that the busiest sender has to fill."""
    return _Problem(load, layout, min_quota).judge("sends", busiest, time_limit_s)


class _Problem:
    """Variables: u [P] quota of a replica, y [P] 1 where it exists, and the goal.

    The main of an expert computes what its replicas leave.
    """

    def __init__(self, load: Tensor, layout: ExpertLayout, min_quota: int) -> None:
        self.layout, self.min_quota = layout, min_quota
        self.expert_load = load.sum(0).numpy()
        self.home_load = home_loads(load).numpy()
        experts, ranks = layout.num_experts, layout.ep_size
        expert, rank = np.divmod(np.arange(experts * ranks), ranks)
        home, domain = expert // layout.mains_per_rank, layout.nvlink_domain
        allowed = (rank != home) & (rank // domain == home // domain)
        self.expert, self.rank, self.home = expert[allowed], rank[allowed], home[allowed]
        self.pairs = int(allowed.sum())

    def judge(self, goal: str, busiest: int | None, time_limit_s: float) -> Judged | None:
        """Minimize the goal: "busiest", "replicas" or "sends"."""
        if self.pairs == 0:  # HiGHS wants variables
            reached = int(self.home_load.max())
            if busiest is not None and reached > busiest:
                return None
            return Judged(reached if goal == "busiest" else 0, True)
        best = self._solve(goal, busiest, np.zeros(self.pairs), np.ones(self.pairs), time_limit_s)
        if best.status == 2:
            return None  # infeasible
        assert best.status in (0, 1), best.message
        if best.status == 1:  # time ran out
            proven = best.mip_dual_bound
            is_bound = proven is not None and np.isfinite(proven)
            return Judged(_whole(proven) if is_bound else 0, False)
        held = np.round(best.x[self.pairs : -1])
        again = self._solve(goal, busiest, held, held, time_limit_s)
        confirmed = again.status == 0 and _whole(again.fun) == _whole(best.fun)
        return Judged(_whole(best.fun), confirmed)

    def _solve(
        self,
        goal: str,
        busiest: int | None,
        fewest: np.ndarray,
        most: np.ndarray,
        time_limit_s: float,
    ) -> OptimizeResult:
        """With `y` between `fewest` and `most`, [P] each."""
        ranks, each = self.layout.ep_size, eye_array(self.pairs)
        threshold = int(self.home_load.max()) if busiest is None else busiest
        most_quota = np.minimum(self.expert_load[self.expert], threshold).astype(float)
        to_expert = self._incidence(self.expert, self.layout.num_experts)
        to_rank = self._incidence(self.rank, ranks)
        from_home = self._incidence(self.home, ranks)
        # Coefficients of u, y and the goal, and what their sum may be at most.
        rows = [
            ([to_expert, None, None], self.expert_load),
            ([each, -diags_array(most_quota), None], np.zeros(self.pairs)),
            ([-each, self.min_quota * each, None], np.zeros(self.pairs)),
            ([None, to_rank, None], np.full(ranks, self.layout.slots)),
        ]
        goal_of_each = -np.ones((ranks, 1))
        moved = to_rank - from_home
        if goal == "busiest":
            rows.append(([moved, None, goal_of_each], -self.home_load))
        else:
            rows.append(([moved, None, None], threshold - self.home_load))
        if goal == "sends":
            rows.append(([None, from_home, goal_of_each], np.zeros(ranks)))
        if goal == "replicas":
            rows.append(([None, np.ones((1, self.pairs)), -np.ones((1, 1))], np.zeros(1)))
        return milp(
            np.concatenate([np.zeros(2 * self.pairs), np.ones(1)]),
            constraints=LinearConstraint(
                csr_array(block_array([blocks for blocks, _ in rows])),
                ub=np.concatenate([limit for _, limit in rows]),
            ),
            bounds=Bounds(
                np.concatenate([np.zeros(self.pairs), fewest, np.zeros(1)]),
                np.concatenate([most_quota, most, np.full(1, np.inf)]),
            ),
            integrality=np.concatenate([np.zeros(self.pairs), np.ones(self.pairs), np.zeros(1)]),
            # HiGHS would stop at 1e-4, which can be many assignments.
            options={"time_limit": time_limit_s, "mip_rel_gap": 0.0},
        )

    def _incidence(self, row: np.ndarray, rows: int) -> coo_array:
        """[rows, P], 1 where the pair is of that row."""
        return coo_array((np.ones(self.pairs), (row, np.arange(self.pairs))), (rows, self.pairs))


def _whole(value: float) -> int:
    """Rounded up, but for the errors of floating point."""
    return int(np.ceil(value - 1e-4))
