"""Two published planners, as tries of their own."""

from __future__ import annotations

from tests.reference.domain import Moves, rounds_of


def shed_to_roomiest(moves: Moves, *, stays: int = 0, by_need: bool = False) -> bool:
    """UltraEP, Algorithm 1: the busiest rank first, always to the roomiest host.

    Its release keeps `stays` assignments with every main, and in some tries (`by_need`) gives none
    of the hosts less than an equal part of what the rank has to shed.
    """
    for rank in moves.domain.busiest_first:
        if moves.room[rank] >= 0:
            return True
        if not _shed_by_falling_load(moves, rank, stays, by_need):
            return False
    return True


def _shed_by_falling_load(moves: Moves, rank: int, stays: int, by_need: bool) -> bool:
    domain, room = moves.domain, moves.room
    for expert in sorted(domain.mains_of(rank), key=lambda e: -domain.expert_load[e]):
        while room[rank] < 0 and moves.kept[expert] > stays and (hosts := moves.hosts()):
            moves.spend(4 * rounds_of(domain.ranks))
            t = max(hosts, key=lambda r: room[r])
            piece = min(-room[rank], room[t], moves.kept[expert] - stays)
            equal_part = -(room[rank] // len(hosts))  # rounded up
            if piece < domain.min_quota or (by_need and piece < equal_part):
                break
            moves.add(expert, t, piece)
    return room[rank] >= 0


def fill_exactly(moves: Moves) -> bool:
    """MoonEP's exact fill: the busiest rank gives the roomiest one all that it lacks."""
    domain, room = moves.domain, moves.room
    ranks = range(domain.ranks)
    while min(room) < 0:
        rank = min(ranks, key=lambda r: room[r])
        t = max((r for r in ranks if not moves.held[r]), key=lambda r: room[r], default=rank)
        if room[t] <= 0:
            return False
        while room[t] > 0:
            moves.spend(5 * rounds_of(domain.ranks))
            hot = moves.main_for(rank, t) if moves.can_take(t) else None
            piece = 0 if hot is None else min(room[t], moves.kept[hot])
            if hot is None or piece < domain.min_quota:
                return False
            moves.add(hot, t, piece)
    return True
