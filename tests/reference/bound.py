"""What no plan can beat."""

from __future__ import annotations

from bisect import bisect_left

from megatron_ext.balance.bounds import target_load
from tests.reference.domain import Domain, Matrix

MOST_MOVED = 2**51  # more is not told apart, for sums to fit 64 bits: a bound may be too low


def lower_bound(load: Matrix, *, num_slots: int, nvlink_domain: int) -> int:
    """Assignments of the busiest rank in every legal plan; docs/method.md has the proofs.

    >>> lower_bound([[6, 1, 1, 0], [4, 2, 1, 1]], num_slots=1, nvlink_domain=2)
    8
    """
    mains = len(load[0]) // len(load)
    expert_load = [sum(column) for column in zip(*load, strict=True)]
    size = nvlink_domain * mains
    return max(
        domain_bound(
            Domain(expert_load[first : first + size], nvlink_domain, num_slots, 1, even=True)
        )
        for first in range(0, len(expert_load), size)
    )


def domain_bound(domain: Domain) -> int:
    """What the busiest rank of a domain has at least."""
    by_senders = (_by_senders(domain, k) for k in range(1, domain.ranks + 1))
    return max(_by_receivers(domain), *by_senders)


def _by_receivers(domain: Domain) -> int:
    """The least threshold at which what is above it finds room below it.

    A rank gets at most what the domain's S hottest experts bring.
    """
    brought = sum(sorted(domain.expert_load, reverse=True)[: domain.slots])

    def finds_room(threshold: int) -> bool:
        excess = sum(max(own - threshold, 0) for own in domain.home_load)
        rooms = (min(max(threshold - own, 0), brought) for own in domain.home_load)
        return sum(min(room, MOST_MOVED) for room in rooms) >= min(excess, MOST_MOVED)

    thresholds = range(target_load(sum(domain.home_load), domain.ranks, 0), domain.before())
    return thresholds.start + bisect_left(thresholds, True, key=finds_room)


def _by_senders(domain: Domain, senders: int) -> int:
    """What the `senders` busiest ranks keep at least, per rank and rounded up.

    The slots of the others take no more than the so many hottest experts of theirs.
    """
    busiest = domain.busiest_first[:senders]
    loads = sorted(
        (domain.expert_load[e] for r in busiest for e in domain.mains_of(r)), reverse=True
    )
    taken = sum(loads[: domain.slots * (domain.ranks - senders)])
    return -(-(sum(loads) - taken) // senders)
