"""Compiled copies reach every destination once, and no rank sends much more than sqrt(n) times.

Layer 1. Random transfers, and the worst ones: one rank that sends everything.
"""

from __future__ import annotations

import math
import random

import pytest

from megatron_ext.transport import Transfer
from megatron_ext.transport.relay import Copy, compile_copies

MAINS, SLOTS = 4, 3


def random_transfers(generator: random.Random, num_ranks: int, hot: bool) -> list[Transfer]:
    """Legal replicas; with `hot`, most are of the experts of one rank."""
    transfers = []
    for rank in range(num_ranks):
        homes = [0] if hot and rank and generator.random() < 0.9 else range(num_ranks)
        foreign = [(home, m) for home in homes if home != rank for m in range(MAINS)]
        chosen = generator.sample(foreign, min(generator.randint(0, SLOTS), len(foreign)))
        transfers += [Transfer(home, m, rank, slot) for slot, (home, m) in enumerate(chosen)]
    return transfers


def num_sends(copies: list[Copy]) -> int:
    return sum(len(copy.destinations) for copy in copies)


@pytest.mark.parametrize("hot", [False, True])
@pytest.mark.parametrize("threshold", [0, 4, 1000])
def test_every_slot_is_filled_once_from_what_holds_its_expert(threshold: int, hot: bool) -> None:
    generator = random.Random(threshold)
    for _ in range(200):
        num_ranks = generator.randint(2, 16)
        transfers = random_transfers(generator, num_ranks, hot)
        copies = compile_copies(transfers, num_ranks, threshold)
        wanted = {(t.replica_rank, t.slot_idx): (t.home_rank, t.main_idx) for t in transfers}
        filled = {}
        for rank, own in enumerate(copies):
            kinds = [copy.relay_slot_idx is not None for copy in own]
            assert kinds == sorted(kinds), "copies from mains come first"
            for copy in own:
                if copy.relay_slot_idx is None:
                    assert copy.home_rank == rank
                else:
                    held = wanted[rank, copy.relay_slot_idx]
                    assert held == (copy.home_rank, copy.main_idx)
                    source = filled_by_home(copies, rank, copy.relay_slot_idx)
                    assert source == copy.home_rank, "a relay is filled by the home rank itself"
                for place in copy.destinations:
                    assert place not in filled, "filled twice"
                    filled[place] = (copy.home_rank, copy.main_idx)
        assert filled == wanted


def filled_by_home(copies: list[list[Copy]], rank: int, slot_idx: int) -> int | None:
    for home, own in enumerate(copies):
        for copy in own:
            if copy.relay_slot_idx is None and (rank, slot_idx) in copy.destinations:
                return home
    return None


@pytest.mark.parametrize("num_ranks", [8, 16, 64])
@pytest.mark.parametrize("num_hot", [1, 2, 3])
def test_one_sender_of_everything_is_relieved(num_ranks: int, num_hot: int) -> None:
    transfers = [Transfer(0, m, rank, m) for rank in range(1, num_ranks) for m in range(num_hot)]
    direct = compile_copies(transfers, num_ranks, relay_threshold=len(transfers))
    relayed = compile_copies(transfers, num_ranks, relay_threshold=4)
    assert num_sends(direct[0]) == len(transfers)
    limit = math.sqrt(len(transfers)) + num_hot
    assert max(map(num_sends, relayed)) <= limit
    assert sum(map(num_sends, relayed)) == len(transfers)


def test_ranks_below_the_threshold_send_directly() -> None:
    transfers = [Transfer(0, 0, 1, 0), Transfer(0, 1, 2, 0), Transfer(1, 0, 2, 1)]
    copies = compile_copies(transfers, 3, relay_threshold=2)
    assert all(copy.relay_slot_idx is None for own in copies for copy in own)


def test_busy_ranks_are_not_chosen_as_relays() -> None:
    everywhere = [Transfer(0, 0, rank, 0) for rank in range(1, 8)]
    busy = [Transfer(1, 0, rank, 1) for rank in (2, 3, 4)]
    copies = compile_copies([*everywhere, *busy], 8, relay_threshold=4)
    assert num_sends(copies[1]) == 3, "only its own"
