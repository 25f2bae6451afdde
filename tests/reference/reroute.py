"""Stage 3: quotas shared among the source ranks, and every token to an instance."""

from __future__ import annotations

from math import gcd

from tests.reference.domain import Matrix


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


def assign(routing: Matrix, source_quota: Matrix, physical_index: Matrix) -> tuple[Matrix, Matrix]:
    """Give every routed token an instance of its expert.

    The instances lie on a line, as long as their shares; the j-th token of an expert with n tokens
    goes to place `j * stride mod n`. Neighbors fall far apart: the stride is the largest number up
    to 0.618034 n (the golden section) that has no factor in common with n.

    Args:
        routing: [N][E], 1 where the token goes to the logical expert.
        source_quota: This rank's row of the split, [E][R].
        physical_index: Physical id of the instance of expert e on rank t, [E][R], or -1.

    Returns:
        For each token its experts, rising, and the instances that take them.

    >>> assign([[1, 0], [1, 0], [1, 1]], [[2, 1], [0, 1]], [[0, 3], [-1, 2]])
    ([[0], [0], [0, 1]], [[0], [0], [3, 2]])
    """
    ranks, experts = len(source_quota[0]), len(source_quota)
    lines = []
    for e in range(experts):
        home = e // (experts // ranks)
        order = [home, *(t for t in range(ranks) if t != home)]
        lines.append([physical_index[e][t] for t in order for _ in range(source_quota[e][t])])
    strides = [
        next((s for s in range(n * 618_034 // 1_000_000, 1, -1) if gcd(s, n) == 1), 1)
        for n in map(len, lines)
    ]
    seen = [0] * experts
    logical: Matrix = []
    physical: Matrix = []
    for row in routing:
        chosen = [e for e in range(experts) if row[e]]
        logical.append(chosen)
        physical.append([lines[e][seen[e] * strides[e] % len(lines[e])] for e in chosen])
        for e in chosen:
            seen[e] += 1
    return logical, physical
