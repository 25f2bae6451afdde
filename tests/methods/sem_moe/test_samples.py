"""Samples by affinity: the same global batches as in turn, other ranks; assignments by hand."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.data.manifest import Manifest
from megatron_ext.data.mixing import MixedDataset, microbatches
from megatron_ext.methods.sem_moe.samples import schedule, scheduled_microbatches, scores
from tests.trainer.dataset import build

RANKS, GLOBAL_BATCH = 4, 16


def test_scores_by_hand():
    affinity = np.array([[1.0, 0.0], [0.25, 0.75], [0.5, 0.5]], dtype=np.float32)
    tokens = np.array([[0, 1, 1], [2, 2, 0]])
    assert scores(tokens, affinity).tolist() == [[1.5, 1.5], [2.0, 1.0]]


def test_the_surest_choose_first():
    """Both places on rank 0 go to samples 2 and 1, though sample 0 comes first and wants it too."""
    score = np.array([[0.6, 0.4], [0.8, 0.2], [0.9, 0.1], [0.55, 0.45]])
    assert schedule(score).tolist() == [1, 0, 0, 1]


@given(ranks=st.integers(1, 5), rounds=st.integers(1, 5), seed=st.integers(0, 999))
def test_ranks_get_equally_many_and_gain_by_it(ranks, rounds, seed):
    score = np.random.default_rng(seed).random((ranks * rounds, ranks))
    rank_of = schedule(score)
    assert np.bincount(rank_of, minlength=ranks).tolist() == [rounds] * ranks
    # The surest sample has its way.
    first = int(np.argmax(score.max(1) - score.mean(1)))
    assert rank_of[first] == score[first].argmax()


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> MixedDataset:
    folder: Path = build(tmp_path_factory.mktemp("text"))
    return MixedDataset(
        Manifest.load(folder),
        split="train",
        sequence_length=16,
        micro_batch_size=2,
        seed=1,
        weights={},
        mix_by="microbatch",
        validation_fraction=0.0,
    )


def rows(batches, count):
    """The samples of the next microbatches, each as its tokens and its last label."""
    taken = itertools.islice(batches, count)
    return [
        (*tokens.tolist(), int(labels[-1]))
        for batch in taken
        for tokens, labels in zip(batch["tokens"], batch["labels"], strict=True)
    ]


@pytest.mark.parametrize("ep_size", [2, 4])
def test_global_batches_are_the_same(dataset, ep_size):
    affinity = np.random.default_rng(0).random((257, ep_size), dtype=np.float32)
    per_rank = GLOBAL_BATCH // RANKS // dataset.micro_batch_size
    by_affinity, in_turn = [], []
    for rank in range(RANKS):
        place = dict(
            consumed_samples=3 * GLOBAL_BATCH, data_parallel_rank=rank, data_parallel_size=RANKS
        )
        in_turn.append(microbatches(dataset, **place))
        by_affinity.append(
            scheduled_microbatches(dataset, affinity, global_batch_size=GLOBAL_BATCH, **place)
        )
    for _ in range(3):
        found = [rows(batches, per_rank) for batches in by_affinity]
        expected = [rows(batches, per_rank) for batches in in_turn]
        assert sorted(itertools.chain(*found)) == sorted(itertools.chain(*expected))
        assert found != expected
        # More of what a rank's experts want is on it than if samples were dealt in turn.
        gains = []
        for samples in (found, expected):
            tokens = np.array(samples)[..., :-1]
            on = [scores(tokens[rank], affinity)[:, rank % ep_size].sum() for rank in range(RANKS)]
            gains.append(sum(on))
        assert gains[0] > gains[1]
