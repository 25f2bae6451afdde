"""Token re-batching as arithmetic: a worked example, and properties over generated guesses.

Layer 1. Guesses are compared exactly; what a permutation promises is counted.
"""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.methods.sem_moe.semantics import Semantics
from megatron_ext.methods.sem_moe.tokens import Guess, LayerTables, predict, rebatch, resume

# Three layers, ids 0 to 2, two ranks. Id 0 goes to rank 0, id 1 to rank 1 for sure; id 2 is new.
SEMANTICS = Semantics(
    (1, 2, 3),
    np.tile(np.arange(4), (3, 1)),
    np.full((3, 2), 0.5, np.float32),
    np.tile(np.array([0, 1, 0], np.int16), (3, 1)),
    np.tile(np.array([0.75, 1.0, 0.5], np.float32), (3, 1)),
    # After ranks a, b: to 1 after 0, 0; to 1 after 0, 1; not known after 1, 0; to 1 after 1, 1.
    np.array([[[[0.125, 0.875], [0.25, 0.75]], [[0.5, 0.5], [0.25, 0.75]]]], np.float32),
)


def test_by_hand():
    """Eight tokens on two ranks of four places each; tokens 0 to 3 are rank 0's own.

    Five want rank 1: 4 (0.9, its own), 0 (0.9), 2 (0.8) and 3 (0.7) find room, 1 (0.6) does not.
    Two want rank 0: 6 and 5. Token 7 wants nothing. Token 1 stays on its own rank 0, where there
    is room; token 7's own rank 1 is full, so it fills the last place on rank 0.
    """
    rank = torch.tensor([1, 1, 1, 1, 1, 0, 0, 1])
    confidence = torch.tensor([0.9, 0.6, 0.8, 0.7, 0.9, 0.6, 0.9, 0.5])
    permutation = rebatch(Guess(rank, confidence), 2)
    assert permutation.tolist() == [1, 5, 6, 7, 0, 2, 3, 4]
    assert resume(permutation).tolist() == [4, 0, 5, 6, 7, 1, 2, 3]


def test_the_surer_table_decides():
    """Line 2 of Algorithm 3; of equally sure ones the path."""
    ids = torch.tensor([0, 0, 0, 1, 2, 2])
    went = torch.tensor([0, 0, 1, 0, 1, 0]), torch.tensor([0, 1, 0, 0, 1, 0])
    tables = LayerTables.of(SEMANTICS, 2, torch.device("cpu"))
    guess = predict(tables, ids, 2, went)
    #                       path     equal  id    id   path  path
    assert guess.rank.tolist() == [1, 1, 0, 1, 1, 1]
    assert guess.confidence.tolist() == [0.875, 0.75, 0.75, 1.0, 0.75, 0.875]


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_without_a_path_the_id_decides(layer):
    tables = LayerTables.of(SEMANTICS, layer, torch.device("cpu"))
    guess = predict(tables, torch.tensor([2, 1, 0]), 2)
    assert guess.rank.tolist() == [0, 1, 0]
    assert guess.confidence.tolist() == [0.5, 1.0, 0.75]
    assert (tables.by_path is None) == (layer < 2)


def test_every_layer_has_its_own_paths():
    other = SEMANTICS.transition[..., ::-1]
    four = dataclasses.replace(
        SEMANTICS,
        token_rank=np.tile(SEMANTICS.token_rank[0], (4, 1)),
        token_confidence=np.tile(SEMANTICS.token_confidence[0], (4, 1)),
        transition=np.concatenate([SEMANTICS.transition, other]),
    )
    third, fourth = (LayerTables.of(four, layer, torch.device("cpu")) for layer in (2, 3))
    assert third.by_path is not None
    assert fourth.by_path is not None
    known = [0, 1, 3]
    assert third.by_path.rank[known].tolist() == [1, 1, 1]
    assert fourth.by_path.rank[known].tolist() == [0, 0, 0]


guesses = st.tuples(st.integers(1, 6), st.integers(0, 12), st.integers(1, 5), st.integers(0, 9999))


def draw(drawn):
    """Guesses with many equal confidences, and some that know nothing."""
    ranks, size, levels, seed = drawn
    generator = torch.Generator().manual_seed(seed)
    rank = torch.randint(ranks, (ranks * size,), generator=generator)
    level = torch.randint(levels, rank.shape, generator=generator)
    confidence = torch.tensor(1 / ranks).float() + level / levels * (1 - 1 / ranks)
    return ranks, size, Guess(rank, confidence)


@given(drawn=guesses)
def test_everyone_gets_equally_many_and_nobody_is_lost(drawn):
    ranks, size, guess = draw(drawn)
    permutation = rebatch(guess, ranks)
    assert torch.equal(permutation.sort().values, torch.arange(ranks * size))
    by_rank = permutation.view(ranks, size)
    assert torch.equal(by_rank, by_rank.sort(1).values), "a rank's tokens are in order"
    assert torch.equal(permutation[resume(permutation)], torch.arange(ranks * size))
    assert torch.equal(rebatch(guess, ranks), permutation)


@given(drawn=guesses)
def test_who_does_not_get_its_rank_is_no_surer_than_who_does(drawn):
    ranks, size, guess = draw(drawn)
    rank_of = resume(rebatch(guess, ranks)) // max(size, 1)
    own = torch.arange(ranks).repeat_interleave(size)
    wishes = guess.confidence > 1 / ranks
    for rank in range(ranks):
        wanted = wishes & (guess.rank == rank)
        got = rank_of == rank
        assert int((wanted & got).sum()) == min(int(wanted.sum()), size)
        if bool((wanted & ~got).any()):
            least = guess.confidence[wanted & got].min()
            refused = guess.confidence[wanted & ~got]
            assert refused.max() <= least
            # Of equally sure ones, nobody leaves a rank for one that comes to it.
            leaves = wanted & ~got & (own == rank) & (guess.confidence == least)
            comes = wanted & got & (own != rank) & (guess.confidence == least)
            assert not (bool(leaves.any()) and bool(comes.any()))


@given(drawn=guesses)
def test_who_is_indifferent_stays_if_there_is_room(drawn):
    ranks, size, guess = draw(drawn)
    rank_of = resume(rebatch(guess, ranks)) // max(size, 1)
    own = torch.arange(ranks).repeat_interleave(size)
    indifferent = guess.confidence <= 1 / ranks
    for rank in range(ranks):
        left_home = indifferent & (own == rank) & (rank_of != rank)
        wanted = (guess.rank == rank) & ~indifferent
        strangers = (rank_of == rank) & (own != rank) & ~wanted
        assert not (bool(left_home.any()) and bool(strangers.any()))


@given(ranks=st.integers(1, 7), size=st.integers(0, 9))
def test_who_knows_nothing_moves_nothing(ranks, size):
    rank = torch.zeros(ranks * size, dtype=torch.int64)
    guess = Guess(rank, torch.full(rank.shape, 1 / ranks))
    assert torch.equal(rebatch(guess, ranks), torch.arange(ranks * size))


def test_ranks_that_do_not_divide_the_tokens():
    guess = Guess(torch.zeros(5, dtype=torch.int64), torch.ones(5))
    with pytest.raises(ValueError, match=r"tokens \(5\) must be a multiple of ranks \(2\)"):
        rebatch(guess, 2)
