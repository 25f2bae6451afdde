"""Handing over, last of all: hosts of a busy sender fill slots in its place; no load changes."""

from __future__ import annotations

from tests.reference.domain import Moves, Replica, rounds_of


def hand_over(moves: Moves) -> None:
    """Spare the busiest sender, whoever that is, until nobody can take anything off it."""
    while not moves.is_spent():
        sends = moves.sends()
        moves.spend(rounds_of(len(sends)))
        if max(sends) == 0 or not _spare(moves, sends.index(max(sends)), sends):
            return


def _spare(moves: Moves, sender: int, sends: list[int]) -> bool:
    """Let the host that sends least, of those that can, fill a slot instead of the sender."""
    domain = moves.domain
    hosts = [t for t in range(domain.ranks) if any(_given_by(moves, sender, t))]
    asked = [t for t in hosts if sends[t] + 1 < sends[sender]]
    for via in sorted(asked, key=lambda t: sends[t]):
        if moves.is_spent():
            return False
        moves.spend(3 * rounds_of(domain.ranks) + rounds_of(domain.ranks * domain.slots))
        if _fill_instead(moves, sender, via):
            return True
    return False


def _given_by(moves: Moves, sender: int, t: int) -> list[Replica]:
    """The replicas that rank t holds of the sender's mains."""
    return [r for r in moves.held[t] if moves.domain.home_of(r.expert) == sender]


def _fill_instead(moves: Moves, sender: int, via: int) -> bool:
    """Hand the smallest replica that `via` can take over from the sender to it."""
    choices = []
    for t in range(moves.domain.ranks):
        for replica in _given_by(moves, sender, t) if t != via else []:
            grown = _replica_that_grows(moves, sender, via, replica)
            main = moves.main_for(via, t)
            if grown is not None and main is not None and moves.kept[main] >= replica.amount:
                choices.append((replica, grown, main))
    if not choices:
        return False
    replica, grown, main = min(choices, key=lambda choice: choice[0].amount)
    grown.amount += replica.amount
    moves.kept[replica.expert] += replica.amount
    moves.kept[grown.expert] -= replica.amount
    moves.kept[main] -= replica.amount
    replica.expert = main
    return True


def _replica_that_grows(moves: Moves, sender: int, via: int, replica: Replica) -> Replica | None:
    """The replica on `via` that takes as much of the sender as it gets back."""
    growing = (
        own
        for own in _given_by(moves, sender, via)
        if own.expert == replica.expert or moves.kept[own.expert] >= replica.amount
    )
    return next(growing, None)
