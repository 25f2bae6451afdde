"""Stage 2 by the algorithm of UltraEP's paper, to compare with."""

from __future__ import annotations

from megatron_ext.balance.bounds import target_load
from tests.reference.domain import Matrix


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
    ranks, experts = len(load), len(load[0])
    mains = experts // ranks
    expert_load = [sum(row[e] for row in load) for e in range(experts)]
    rank_load = [sum(expert_load[r * mains : (r + 1) * mains]) for r in range(ranks)]

    best: list[tuple[int, int, int]] = []  # without any transfer every rank keeps its own load
    low = target_load(sum(rank_load), ranks, tolerance_ppm)
    high = max(rank_load)
    threshold = low
    while low < high:
        transfers = _drain(
            expert_load,
            rank_load,
            threshold,
            num_slots=num_slots,
            nvlink_domain=nvlink_domain,
            min_quota=min_quota,
        )
        if transfers is None:
            low = threshold + 1
        else:
            best, high = transfers, threshold
        threshold = low + (high - low) // 2

    quota = [[0] * ranks for _ in range(experts)]
    slots: Matrix = [[] for _ in range(ranks)]
    for e in range(experts):
        quota[e][e // mains] = expert_load[e]
    for expert, target, amount in best:
        quota[expert][expert // mains] -= amount
        quota[expert][target] = amount
        slots[target].append(expert)
    return quota, [held + [-1] * (num_slots - len(held)) for held in slots]


def _drain(
    expert_load: list[int],
    rank_load: list[int],
    threshold: int,
    *,
    num_slots: int,
    nvlink_domain: int,
    min_quota: int,
) -> list[tuple[int, int, int]] | None:
    """Bring every rank down to `threshold`: transfers (expert, target, amount), None if stuck."""
    ranks = len(rank_load)
    mains = len(expert_load) // ranks
    slack = [max(threshold - own, 0) for own in rank_load]
    held: list[set[int]] = [set() for _ in range(ranks)]
    transfers: list[tuple[int, int, int]] = []
    for home in sorted(range(ranks), key=lambda r: -rank_load[r]):
        excess = max(rank_load[home] - threshold, 0)
        domain = home // nvlink_domain
        for expert in sorted(
            range(home * mains, (home + 1) * mains), key=lambda e: -expert_load[e]
        ):
            movable = expert_load[expert]
            while excess > 0 and movable > 0:
                hosts = [
                    t
                    for t in range(domain * nvlink_domain, (domain + 1) * nvlink_domain)
                    if slack[t] > 0 and len(held[t]) < num_slots and expert not in held[t]
                ]
                if not hosts:
                    break
                target = max(hosts, key=lambda t: slack[t])
                amount = min(excess, slack[target], movable)
                if amount < min_quota:
                    break
                transfers.append((expert, target, amount))
                held[target].add(expert)
                excess -= amount
                slack[target] -= amount
                movable -= amount
        if excess > 0:
            return None
    return transfers
