"""Stage 2 by UltraEP's planner, as its paper has it and as its authors ship it."""

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


def solve_shipped(
    load: Matrix,
    *,
    num_slots: int,
    nvlink_domain: int,
    tolerance_ppm: int,
    min_quota: int,
    search_min_quota: int,
) -> tuple[Matrix, Matrix]:
    """Choose replicas and quotas as UltraEP's release does, to compare with.

    Source: UltraEP, release 1.0.0 (Dots-Infra/UltraEP at 94cab09), `csrc/kernels/placement.cu` with
    the settings of `ultra_ep/config.py`. Differs in that thresholds are whole numbers and exact,
    where the source has float32, and in that `min_quota` also holds in the first three tests. The
    source has no such floor there.

    Args:
        load, num_slots, nvlink_domain, tolerance_ppm: As of `solve_paper`.
        min_quota: Fewest assignments a replica may carry, >= 1.
        search_min_quota: The same in the search after the first tests; 1,024 in the source.

    Returns:
        As `solve_paper`.

    Rank 0 has 13, rank 1 has 3: 0.01 above the mean of 8 is a threshold of 9.

    >>> quota, slots = solve_shipped([[6, 1, 1, 0], [4, 2, 1, 1]], num_slots=1, nvlink_domain=2,
    ...                              tolerance_ppm=10_000, min_quota=1, search_min_quota=1024)
    >>> quota, slots
    ([[6, 4], [3, 0], [0, 2], [0, 1]], [[-1], [0]])
    """

    def domains(least: int) -> list[Domain]:
        return domains_of(
            load, num_slots=num_slots, nvlink_domain=nvlink_domain, min_quota=least, even=False
        )

    first, later = domains(min_quota), domains(search_min_quota)
    plans = [_shipped_plan(*each, tolerance_ppm) for each in zip(first, later, strict=True)]
    return as_plan(first, plans)


def _shipped_plan(first: Domain, later: Domain, tolerance_ppm: int) -> Replicas:
    """Plan a domain, given with the least quota of the first tests and with that of the search."""
    high = first.before()
    low = -(-sum(first.home_load) // first.ranks)
    threshold = min(high, low - (-low * tolerance_ppm // 1_000_000))
    for _ in range(3):
        if (plan := _shipped_try(first, threshold, by_need=True)) is not None:
            return plan
        threshold = min(high, threshold - (-high // 100))

    best: Replicas = []  # without any replica the busiest rank has `high`
    probes = [low]
    while low < high:
        for probe in probes:
            plan = _shipped_try(later, probe, by_need=False)
            if plan is not None:
                best, high = plan, probe
                break
            low = probe + 1
        probes = (
            list(range(low, high))
            if high - low <= 4
            else [low + (high - low) * part // 5 for part in (1, 2, 3, 4)]
        )
    return best


def _shipped_try(domain: Domain, threshold: int, *, by_need: bool) -> Replicas | None:
    """The release's try of `_plan_for`."""
    moves = Moves(domain, NO_LIMIT)
    moves.reset(threshold)
    is_reached = shed_to_roomiest(moves, stays=1, by_need=by_need)
    return moves.replicas() if is_reached else None
