"""Refilling: fills hosts instead of emptying senders."""

from __future__ import annotations

from tests.reference.domain import Moves, rounds_of

MOST_ROOM = 2**51  # what more a rank has is not counted as spare, for the sum to fit 64 bits


def refill(moves: Moves, detour: int) -> bool:
    """Bring every rank down; False if that fails.

    Args:
        moves: The state of a try in which nothing has moved.
        detour: The step that takes the second best giver, or -1.
    """
    domain, room = moves.domain, moves.room
    spare = sum(max(min(own, MOST_ROOM), -MOST_ROOM) for own in room)
    done: set[int] = set()  # ranks that were filled: they give nothing any more
    step = 0
    while min(room) < 0:
        hosts = moves.hosts()
        if moves.is_spent() or not hosts:
            return False
        moves.spend(8 * rounds_of(domain.ranks) + 2 * rounds_of(domain.mains))
        t = max(hosts, key=lambda r: room[r])
        main = _main_to_fill(moves, t, done, spare, take_second=step == detour)
        if main is None:
            return False
        moves.add(main, t, min(room[t], moves.kept[main]))
        if room[t] == 0 or not moves.can_take(t):
            done.add(t)
            spare -= room[t]
            if spare < 0:
                return False
        step += 1
    return True


def _main_to_fill(
    moves: Moves, t: int, done: set[int], spare: int, *, take_second: bool
) -> int | None:
    """The busiest giver's coolest main that fills rank t as far as must be.

    Failing that, where another slot is left to fill the rest, the hottest main there is.
    """
    domain, room, kept = moves.domain, moves.room, moves.kept
    enough = max(room[t] - spare, domain.min_quota)
    givers = [
        r
        for r in range(domain.ranks)
        if r != t and r not in done and not moves.holds(t, moves.hottest(r))
    ]
    filling = [r for r in givers if kept[moves.hottest(r)] >= enough and room[r] < room[t]]
    filling.sort(key=lambda r: room[r])
    if len(filling) > take_second:
        mains = domain.mains_of(filling[take_second])
        fit = [e for e in mains if kept[e] >= enough and not moves.holds(t, e)]
        return min(fit, key=lambda e: kept[e])
    if len(moves.held[t]) + 1 == domain.slots:
        return None
    hottest = [moves.hottest(r) for r in givers]
    large = [e for e in hottest if kept[e] >= domain.min_quota]
    return max(large, key=lambda e: kept[e], default=None)
