"""Stage 2 by the algorithm of UltraEP's paper, to compare with."""

from __future__ import annotations

from megatron_ext.balance.bounds import target_load
from tests.reference.attempt import NO_LIMIT
from tests.reference.domain import Domain, Matrix, Moves, Replicas, as_plan, domains_of
from tests.reference.published import shed_to_roomiest


def solve_paper(
    load: Matrix, *, num_slots: int, nvlink_domain: int, tolerance_ppm: int, min_quota: int
) -> tuple[Matrix, Matrix]:
    """Choose replicas and quotas by UltraEP's Algorithm 1, to compare with.

    Source: UltraEP, Algorithm 1 (SolveReplication). Differs in that the search starts from the
    target instead of the mean, tests the target itself first (with enough slots that one probe is
    the whole search), and keeps replicas in the home rank's NVLink domain.

    Args:
        load: Assignments, [R][E], >= 0.
        num_slots: Replicas a rank can hold (S).
        nvlink_domain: Ranks per NVLink domain; divides R.
        tolerance_ppm: Tolerance in millionths of the mean rank load.
        min_quota: Fewest assignments a replica may carry, >= 1.

    Returns:
        `quota` [E][R] and `slots` [R][S] (logical expert or -1, filled from slot 0).

    >>> quota, slots = solve_paper([[6, 1, 1, 0], [4, 2, 1, 1]],
    ...                            num_slots=1, nvlink_domain=2, tolerance_ppm=10_000, min_quota=1)
    >>> quota, slots
    ([[5, 5], [3, 0], [0, 2], [0, 1]], [[-1], [0]])
    """
    domains = domains_of(
        load, num_slots=num_slots, nvlink_domain=nvlink_domain, min_quota=min_quota, even=False
    )
    best: list[Replicas] = [[] for _ in domains]  # without any replica every rank keeps its load
    low = target_load(sum(map(sum, load)), len(load), tolerance_ppm)
    high = max(domain.before() for domain in domains)
    threshold = low
    while low < high:
        plans = [_plan_for(domain, threshold) for domain in domains]
        reached = [plan for plan in plans if plan is not None]
        if len(reached) == len(domains):
            best, high = reached, threshold
        else:
            low = threshold + 1
        threshold = low + (high - low) // 2
    return as_plan(domains, best)


def _plan_for(domain: Domain, threshold: int) -> Replicas | None:
    """A plan that brings every rank of the domain down to `threshold`; None if there is none."""
    moves = Moves(domain, NO_LIMIT)
    moves.reset(threshold)
    return moves.replicas() if shed_to_roomiest(moves) else None
