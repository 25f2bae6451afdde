"""Chains: assignments that move over several ranks until one with room is reached."""

from __future__ import annotations

from typing import NamedTuple

from tests.reference.domain import Moves, Replica, rounds_of

CHAIN_STEPS = 5


class Step(NamedTuple):
    """Assignments that move from one rank to another."""

    kind: str  # "grow" a replica of `to`, "return" from one of `giver`, or a "new" one
    giver: int
    to: int
    expert: int


def move_along_chain(moves: Moves, rank: int, whole: int, at_least: int) -> bool:
    """Move up to `whole` off `rank` along the widest chain, if that is more than `at_least`."""
    ranks = range(moves.domain.ranks)
    width = [whole if v == rank else 0 for v in ranks]
    arrival: dict[int, Step] = {}
    moves.spend(rounds_of(len(ranks)))
    last, carried = None, at_least
    for _ in range(CHAIN_STEPS):
        wider = _one_step_further(moves, width, arrival)
        if wider == width:
            break
        width = wider
        end = max(ranks, key=lambda t: min(width[t], moves.room[t]))
        if min(width[end], moves.room[end]) > carried:
            last, carried = end, min(width[end], moves.room[end])
        if carried >= whole:
            break
    if last is None:
        return False
    steps = [arrival[last]]
    while steps[-1].giver != rank:
        steps.append(arrival[steps[-1].giver])
    # A rank on the way may since be reached by more, but over more ranks.
    if len(steps) > CHAIN_STEPS:
        return False
    carried = _whole_replicas_only(moves, steps, carried)
    if carried <= at_least:
        return False
    _take(moves, steps, carried)
    return True


def _one_step_further(moves: Moves, width: list[int], arrival: dict[int, Step]) -> list[int]:
    """What can be carried to each rank from what is carried to the others now.

    `arrival` gets the step to each rank that is now reached by more.
    """
    offers = _offers(moves, width)
    moves.spend(6 * rounds_of(len(width)) + rounds_of(len(width) * moves.domain.slots))
    wider = list(width)
    for t, to_t in enumerate(offers):
        value, step = max(to_t, key=lambda offer: offer[0], default=(0, None))
        if step is not None and value > width[t]:
            wider[t], arrival[t] = value, step
    return wider


def _offers(moves: Moves, width: list[int]) -> list[list[tuple[int, Step]]]:
    """For each rank, what steps to it carry; of equals the first counts.

    Replicas there are come first, by rank and slot, as they cost nothing.
    """
    offers: list[list[tuple[int, Step]]] = [[] for _ in width]
    for t, held in enumerate(moves.held):
        for replica in held:
            expert, giver = replica.expert, moves.domain.home_of(replica.expert)
            grows = min(width[giver], moves.kept[expert])
            offers[t].append((grows, Step("grow", giver, t, expert)))
            shrinks = min(width[t], replica.amount)
            offers[giver].append((shrinks, Step("return", t, giver, expert)))
    new = {v: min(width[v], moves.kept[moves.hottest(v)]) for v in range(len(width))}
    able = [v for v in new if new[v] >= moves.domain.min_quota]
    # Only the best two are asked for a new replica, of their hottest main: the second for those
    # that hold the first's. What the second could give the first, the first has already.
    best_two = sorted(able, key=lambda v: -new[v])[:2]
    for t in range(len(width)):
        giver = next((v for v in best_two if not moves.holds(t, moves.hottest(v))), t)
        if giver != t and moves.can_take(t):
            offers[t].append((new[giver], Step("new", giver, t, moves.hottest(giver))))
    return offers


def _whole_replicas_only(moves: Moves, steps: list[Step], carried: int) -> int:
    """What the chain may carry so that each replica has `min_quota` assignments or none.

    The steps are given from the last to the first, here and below.
    """
    min_quota = moves.domain.min_quota
    changed = min_quota > 1
    while changed and carried > 0:
        changed = False
        for step in steps:
            if step.kind == "new" and carried < min_quota:
                return 0
            if step.kind == "return":
                amount = _replica(moves, step.giver, step.expert).amount
                if carried < amount and amount - carried < min_quota:
                    carried = amount - min_quota
                    changed = True
    return carried


def _take(moves: Moves, steps: list[Step], carried: int) -> None:
    for kind, giver, to, expert in steps:
        if kind == "new":
            moves.place(expert, to, carried)
        elif kind == "grow":
            _replica(moves, to, expert).amount += carried
            moves.kept[expert] -= carried
        else:
            _replica(moves, giver, expert).amount -= carried
            moves.kept[expert] += carried
    for kind, giver, _, expert in steps:
        if kind == "return":
            _drop_if_empty(moves, giver, expert)
    moves.room[steps[-1].giver] += carried
    moves.room[steps[0].to] -= carried
    moves.spend(2 * len(steps) * rounds_of(moves.domain.ranks))


def _replica(moves: Moves, t: int, expert: int) -> Replica:
    return next(replica for replica in moves.held[t] if replica.expert == expert)


def _drop_if_empty(moves: Moves, t: int, expert: int) -> None:
    """Its slot gets what is in the last one."""
    held, replica = moves.held[t], _replica(moves, t, expert)
    if replica.amount == 0:
        held[held.index(replica)] = held[-1]
        held.pop()
