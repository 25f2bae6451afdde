"""An NVLink domain, the state of a try to plan it, and the moves that change that state."""

from __future__ import annotations

from dataclasses import dataclass

Matrix = list[list[int]]

Replicas = list[list[tuple[int, int]]]
"""(expert, assignments) in each slot in use of each rank of a domain."""


def rounds_of(count: int) -> int:
    """Work of a pass over `count` indices: a warp's operations on 32 of them."""
    return -(-count // 32)


class Domain:
    """One NVLink domain: its loads, and what a plan may do there."""

    def __init__(
        self, expert_load: list[int], ranks: int, slots: int, min_quota: int, *, even: bool
    ) -> None:
        self.expert_load = expert_load
        self.ranks = ranks
        self.slots = slots
        self.min_quota = min_quota
        self.even = even
        self.mains = len(expert_load) // ranks
        self.home_load = [sum(expert_load[e] for e in self.mains_of(r)) for r in range(ranks)]
        self.busiest_first = sorted(range(ranks), key=lambda r: -self.home_load[r])

    def mains_of(self, rank: int) -> range:
        """The experts whose main is on that rank."""
        return range(rank * self.mains, (rank + 1) * self.mains)

    def home_of(self, expert: int) -> int:
        """The rank that has its main."""
        return expert // self.mains

    def before(self) -> int:
        """The busiest rank's load without any replica."""
        return max(self.home_load)


def domains_of(
    load: Matrix, *, num_slots: int, nvlink_domain: int, min_quota: int, even: bool
) -> list[Domain]:
    """The NVLink domains of a load, [R][E]."""
    mains = len(load[0]) // len(load)
    expert_load = [sum(row[e] for row in load) for e in range(len(load[0]))]
    size = nvlink_domain * mains
    return [
        Domain(expert_load[first : first + size], nvlink_domain, num_slots, min_quota, even=even)
        for first in range(0, len(expert_load), size)
    ]


def as_plan(domains: list[Domain], plans: list[Replicas]) -> tuple[Matrix, Matrix]:
    """Quota [E][R] and slots [R][S] of what the domains hold; no replicas where a plan is empty."""
    mains = domains[0].mains
    loads = [own for domain in domains for own in domain.expert_load]
    ranks = len(loads) // mains
    quota = [[own if t == e // mains else 0 for t in range(ranks)] for e, own in enumerate(loads)]
    slots = [[-1] * domain.slots for domain in domains for _ in range(domain.ranks)]
    for idx, (domain, plan) in enumerate(zip(domains, plans, strict=True)):
        first = idx * domain.ranks
        for rank, replicas in enumerate(plan):
            for slot, (expert, amount) in enumerate(replicas):
                e = first * mains + expert
                quota[e][e // mains] -= amount
                quota[e][first + rank] = amount
                slots[first + rank][slot] = e
    return quota, slots


@dataclass(eq=False)
class Replica:
    """What is in a slot."""

    expert: int
    amount: int  # assignments


class Moves:
    """The state of a try: who keeps what, which replicas there are, and the work it took.

    Fields:
        room: Assignments a rank may still take; below 0 it has to shed some, [D].
        kept: Assignments that stay with the main, [D * M].
        held: Replicas of a rank, from slot 0, [D].
        work: Rounds of a warp so far.
    """

    def __init__(self, domain: Domain, work_limit: int) -> None:
        self.domain = domain
        self.work_limit = work_limit
        self.work = 0

    def reset(self, threshold: int) -> None:
        """Nothing has moved, and every rank may keep `threshold`.

        For an even plan that leaves less than one spare assignment a rank, the coldest ranks stay
        below it, so that nothing is spare.
        """
        domain = self.domain
        spare = threshold * domain.ranks - sum(domain.home_load)
        coldest = spare if domain.even and spare < domain.ranks else 0
        self.room = [threshold - own for own in domain.home_load]
        for rank in domain.busiest_first[domain.ranks - coldest :]:
            self.room[rank] -= 1
        self.kept = list(domain.expert_load)
        self.held: list[list[Replica]] = [[] for _ in range(domain.ranks)]
        self.spend(rounds_of(len(self.kept)) + 3 * rounds_of(domain.ranks))

    def spend(self, rounds: int) -> None:
        """Count work."""
        self.work += rounds

    def is_spent(self) -> bool:
        """Whether the try has to give up."""
        return self.work >= self.work_limit

    def add(self, expert: int, t: int, amount: int) -> None:
        """Give rank t a replica of `expert`, and that many assignments of the main."""
        self.place(expert, t, amount)
        self.room[self.domain.home_of(expert)] += amount
        self.room[t] -= amount

    def place(self, expert: int, t: int, amount: int) -> None:
        """The same as part of a chain, which accounts for room itself."""
        self.held[t].append(Replica(expert, amount))
        self.kept[expert] -= amount

    def can_take(self, t: int) -> bool:
        """Whether rank t has a free slot."""
        return len(self.held[t]) < self.domain.slots

    def holds(self, t: int, expert: int) -> bool:
        """Whether rank t has a replica of it."""
        return any(replica.expert == expert for replica in self.held[t])

    def hosts(self) -> list[int]:
        """Ranks with a free slot and room for the smallest replica, the tightest first."""
        ranks = [
            r
            for r in range(self.domain.ranks)
            if self.can_take(r) and self.room[r] >= self.domain.min_quota
        ]
        return sorted(ranks, key=lambda r: self.room[r])

    def hottest(self, rank: int) -> int:
        """The main of `rank` that keeps most."""
        return max(self.domain.mains_of(rank), key=lambda e: self.kept[e])

    def main_for(self, rank: int, t: int) -> int | None:
        """The main of `rank` that keeps most of those that are not on rank t."""
        free = [e for e in self.domain.mains_of(rank) if not self.holds(t, e)]
        return max(free, key=lambda e: self.kept[e], default=None)

    def sends(self) -> list[int]:
        """Replicas of each rank's mains, which that rank has to fill."""
        givers = [self.domain.home_of(replica.expert) for held in self.held for replica in held]
        return [givers.count(r) for r in range(self.domain.ranks)]

    def replicas(self) -> Replicas:
        """The plan as it is now."""
        return [[(replica.expert, replica.amount) for replica in held] for held in self.held]
