"""Shedding: the excess of an overloaded rank goes to replicas on other ranks."""

from __future__ import annotations

from tests.reference.chain import move_along_chain
from tests.reference.domain import Moves, rounds_of


def relieve(moves: Moves, rank: int, *, pairs: bool) -> bool:
    """Bring `rank` down to what it may keep; False if nothing relieves it or the work is spent."""
    while moves.room[rank] < 0:
        if moves.is_spent():
            return False
        moves.spend(8 * rounds_of(moves.domain.ranks))
        if not (_shed_to_fitting(moves, rank, pairs=pairs) or _shed_a_piece(moves, rank)):
            return False
    return True


def _shed_to_fitting(moves: Moves, rank: int, *, pairs: bool) -> bool:
    """Steps 1 and 2: all of it to the tightest host or, its larger part, to a pair of them."""
    whole, hot = -moves.room[rank], moves.hottest(rank)
    # A replica that must carry more than the excess may: nobody is hurt by room.
    needed = max(whole, moves.domain.min_quota)
    if moves.kept[hot] < needed:
        return False
    fitting = [t for t in _hosts_for(moves, hot) if moves.room[t] >= needed]
    if fitting:
        moves.add(hot, fitting[0], needed)
        return True
    larger = _larger_of_tightest_pair(moves, hot, whole) if pairs else None
    if larger is None:
        return False
    moves.add(hot, larger, moves.room[larger])
    return True


def _hosts_for(moves: Moves, expert: int) -> list[int]:
    return [t for t in moves.hosts() if not moves.holds(t, expert)]


def _larger_of_tightest_pair(moves: Moves, expert: int, whole: int) -> int | None:
    """Of the two hosts that take `whole` together with least room left over, the roomier one."""
    room = moves.room
    moves.spend(6 * rounds_of(sum(room[t] < whole for t in moves.hosts())))
    hosts = [t for t in _hosts_for(moves, expert) if room[t] < whole]
    left_over = {}
    for place, larger in enumerate(hosts):
        sums = [room[partner] + room[larger] for partner in hosts[:place]]
        if enough := [both for both in sums if both >= whole]:
            left_over[larger] = min(enough) - whole
    return min(left_over, key=lambda t: left_over[t], default=None)


def _shed_a_piece(moves: Moves, rank: int) -> bool:
    """Steps 3 and 4: the largest piece a host takes, or more by a chain; or a swap."""
    whole, hot = -moves.room[rank], moves.hottest(rank)
    host = _host_of_largest_piece(moves, hot, whole)
    piece = 0 if host is None else min(moves.kept[hot], moves.room[host], whole)
    if piece < min(whole, max(moves.room)) and move_along_chain(moves, rank, whole, piece):
        return True
    if host is None:
        return _swap(moves, rank, whole)
    moves.add(hot, host, piece)
    return True


def _host_of_largest_piece(moves: Moves, expert: int, whole: int) -> int | None:
    """The tightest host that takes all of `expert`, else the roomiest; of equals the last."""
    most = min(moves.kept[expert], whole)
    hosts = _hosts_for(moves, expert)
    if most < moves.domain.min_quota or not hosts:
        return None
    return next((t for t in hosts if moves.room[t] >= most), hosts[-1])


def _swap(moves: Moves, rank: int, whole: int) -> bool:
    """Move less than `min_quota`: give so much more than is taken back in return."""
    min_quota = moves.domain.min_quota
    if min_quota == 1 or not moves.can_take(rank):
        return False
    pieces = {}
    for t in range(moves.domain.ranks):
        if moves.room[t] <= 0 or not moves.can_take(t):
            continue
        piece = min(moves.room[t], whole)
        there, back = moves.main_for(rank, t), moves.main_for(t, rank)
        if there is None or moves.kept[there] < min_quota + piece:
            continue
        if back is not None and moves.kept[back] >= min_quota:
            pieces[t] = (piece, there, back)
    if not pieces:
        return False
    host = max(pieces, key=lambda t: pieces[t][0])
    piece, there, back = pieces[host]
    moves.add(there, host, min_quota + piece)
    moves.add(back, rank, min_quota)
    return True
