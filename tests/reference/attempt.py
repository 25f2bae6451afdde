"""One try to bring every rank of an NVLink domain down to a threshold."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from tests.reference.domain import Domain, Moves, Replicas, rounds_of
from tests.reference.hand_over import hand_over
from tests.reference.published import fill_exactly, shed_to_roomiest
from tests.reference.refill import refill
from tests.reference.shed import relieve

NO_LIMIT = 2**31 - 1  # more work than any try takes
WORK_TO_RESTART = 2048  # a try that took as much does not start over


class Method(Enum):
    """How a try goes about it."""

    BEST_FIT = "best fit"
    PAIR_FIT = "pair fit"
    RISING = "rising"
    REMAINDER = "remainder"
    REMAINDER_RISING = "remainder rising"
    REFILL = "refill"
    ROOMIEST = "roomiest"
    FILL = "fill"


class Verdict(NamedTuple):
    """What came of a try."""

    reached: bool  # every rank is within its limit, and the work was not spent
    plan: Replicas  # of use only if reached
    sends: int  # replicas that the busiest sender has to fill
    work: int  # rounds of a warp

    def num_replicas(self) -> int:
        """Slots in use."""
        return sum(len(held) for held in self.plan)


def attempt(
    domain: Domain, threshold: int, method: Method, *, work_limit: int, restarts: int = 0
) -> Verdict:
    """Try to bring every rank of the domain down to `threshold`.

    A rank that no step relieves goes to the front of the order, and the try starts over; so does
    refilling, with a detour.

    Args:
        domain: What to plan.
        threshold: Most assignments of a rank.
        method: How.
        work_limit: A try that takes as many rounds has failed.
        restarts: How often it may start over.
    """
    moves = Moves(domain, work_limit)
    reached = False
    order: list[int] = []
    for restart in range(restarts + 1):
        if restart > 0 and moves.work >= WORK_TO_RESTART:
            break
        moves.reset(threshold)
        if method is Method.REFILL:
            reached = refill(moves, detour=restart - 1)
        elif method in (Method.ROOMIEST, Method.FILL):
            reached = (fill_exactly if method is Method.FILL else shed_to_roomiest)(moves)
        else:
            order = order or _order(moves, method)
            stuck = _relieve_all(moves, order, pairs=method is not Method.BEST_FIT)
            reached = stuck is None
            if stuck == 0:
                break
            if stuck is not None:
                order.insert(0, order.pop(stuck))
        if reached:
            break
    if reached:
        hand_over(moves)
    return Verdict(
        reached and not moves.is_spent(), moves.replicas(), max(moves.sends()), moves.work
    )


def _order(moves: Moves, method: Method) -> list[int]:
    """Overloaded ranks in the method's order, then the others."""
    busiest_first = moves.domain.busiest_first
    if method in (Method.BEST_FIT, Method.PAIR_FIT):
        return list(busiest_first)
    moves.spend(4 * rounds_of(len(busiest_first)))
    excess = [-own for own in moves.room]
    most_room = max(moves.room[busiest_first[-1]], 1)
    overloaded = [r for r in busiest_first if excess[r] > 0]
    if method is Method.REMAINDER:
        overloaded.sort(key=lambda r: -(excess[r] % most_room))
    elif method is Method.RISING:
        overloaded[1:] = sorted(overloaded[1:], key=lambda r: excess[r])
    else:
        overloaded[1:] = sorted(overloaded[1:], key=lambda r: excess[r] % most_room)
    return overloaded + [r for r in busiest_first if excess[r] <= 0]


def _relieve_all(moves: Moves, order: list[int], *, pairs: bool) -> int | None:
    """The place in the order of the first rank that could not be relieved."""
    places = enumerate(order)
    return next((i for i, rank in places if not relieve(moves, rank, pairs=pairs)), None)
