"""The planning stages in slow, plain Python: the specification.

The native and tensor versions must equal it bit by bit. Lists of Python integers only, so nothing
can overflow and nothing is hidden in a tensor operation. Ties always go to the lowest index.

Legend: R ranks, E logical experts, M = E / R mains per rank, N local tokens; `load[r][e]`
assignments from rank r to expert e, `quota[e][t]` assignments of expert e computed on rank t.
"""

from __future__ import annotations

Matrix = list[list[int]]


def target_load(total: int, ranks: int, tolerance_ppm: int) -> int:
    """Busiest-rank load that is good enough: `(1 + tolerance) * mean`, as far as integers allow.

    Rounded down, so that meeting the target means meeting the tolerance; no plan can go below the
    mean rounded up.

    Args:
        total: Assignments of all ranks together.
        ranks: Ranks that share them.
        tolerance_ppm: Tolerance in millionths of the mean.

    >>> target_load(16, 2, 10_000), target_load(17, 2, 0), target_load(1000, 2, 10_000)
    (8, 9, 505)
    """
    mean_rounded_up = -(-total // ranks)
    return max(mean_rounded_up, total * (1_000_000 + tolerance_ppm) // (ranks * 1_000_000))


def solve_quota(
    load: Matrix, *, num_slots: int, nvlink_domain: int, tolerance_ppm: int, min_quota: int
) -> tuple[Matrix, Matrix]:
    """Choose replicas and quotas by a search over the busiest rank's load with a greedy test.

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

    >>> quota, slots = solve_quota([[6, 1, 1, 0], [4, 2, 1, 1]],
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


def split_quota(load: Matrix, quota: Matrix) -> list[Matrix]:
    """Share every quota among the source ranks: exact rows and columns, own tokens first.

    Per expert, a rank that holds an instance first uses it for its own assignments. What is left of
    the sources (in rank order) and of the quotas (main's rank first, then by rank) is laid on one
    line each; the lines are equally long, and `split[r][e][t]` is how much of r's piece lies over
    t's piece.

    Source: UltraEP, Algorithm 1 (SolveReroute). Differs in that residual demand meets residual
    quota by overlapping intervals: the paper's proportional shares, once rounded, keep the sources'
    sums but not the quotas.

    Returns:
        `split` [R][E][R]: assignments from source rank r to expert e that rank t computes.

    >>> split = split_quota([[6, 1, 1, 0], [4, 2, 1, 1]], [[5, 5], [3, 0], [0, 2], [0, 1]])
    >>> split[0][0], split[1][0]
    ([5, 1], [0, 4])
    """
    ranks, experts = len(load), len(quota)
    mains = experts // ranks
    split = [[[0] * ranks for _ in range(experts)] for _ in range(ranks)]
    for e in range(experts):
        home = e // mains
        for r in range(ranks):
            split[r][e][r] = min(load[r][e], quota[e][r])
        # The two lines, one entry per assignment.
        sources = [r for r in range(ranks) for _ in range(load[r][e] - split[r][e][r])]
        order = [home, *(t for t in range(ranks) if t != home)]
        targets = [t for t in order for _ in range(quota[e][t] - split[t][e][t])]
        for r, t in zip(sources, targets, strict=True):
            split[r][e][t] += 1
    return split


def reroute(
    routing: Matrix, source_quota: Matrix, physical_index: Matrix, num_physical: int
) -> Matrix:
    """Give every routed token an instance, one token at a time, filling instances in order.

    Args:
        routing: [N][E], 1 where the token goes to the logical expert.
        source_quota: This rank's row of the split, [E][R].
        physical_index: Physical id of the instance of expert e on rank t, [E][R], or -1.
        num_physical: Physical experts (P).

    Returns:
        [N][P], 1 where the token goes to the physical expert.

    >>> reroute([[1, 0], [1, 0], [1, 1]], [[2, 1], [0, 1]], [[0, 3], [-1, 2]], 4)
    [[1, 0, 0, 0], [1, 0, 0, 0], [0, 0, 1, 1]]
    """
    ranks, experts = len(source_quota[0]), len(source_quota)
    left = [list(row) for row in source_quota]
    result = [[0] * num_physical for _ in routing]
    for n, row in enumerate(routing):
        for e in range(experts):
            if row[e]:
                home = e // (experts // ranks)
                order = [home, *(t for t in range(ranks) if t != home)]
                rank = next(t for t in order if left[e][t] > 0)
                left[e][rank] -= 1
                result[n][physical_index[e][rank]] = 1
    return result
