"""Sends each sample to the rank that has the experts of its tokens (Sem-MoE's data scheduling).

The samples of a step stay the same, and every rank has equally many samples; only the rank that
computes a sample changes. An affinity is the share of a token id's choices that go to a rank of the
EP group: float32 [V, R]. Legend: Q samples, V vocabulary, R ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
from torch import Tensor

from megatron_ext.data.mixing import MixedDataset


def scores(tokens: np.ndarray, affinity: np.ndarray) -> np.ndarray:
    """Add up the affinities [V, R] of the ids [Q, tokens] of each sample: float64 [Q, R]."""
    return np.asarray(affinity[tokens].sum(1, dtype=np.float64))


def schedule(score: np.ndarray) -> np.ndarray:
    """Place the samples of a global batch on ranks, equally many on each: int64 [Q].

    A sample's gain is its best score less its mean score. The sample with the largest gain chooses
    first; each sample goes to the rank of highest score that has room. Scores are float64 [Q, R]; R
    divides Q.

    >>> schedule(np.array([[0.6, 0.4], [0.8, 0.2], [0.7, 0.3], [0.5, 0.5]])).tolist()
    [1, 0, 0, 1]

    Source: Sem-MoE, Algorithm 2. There every R consecutive samples go to R different ranks; here
    the whole global batch is known, so that ranks are even over the batch, in any order.
    """
    num_samples, ranks = score.shape
    rank_of = np.empty(num_samples, dtype=np.int64)
    room = np.full(ranks, num_samples // ranks)
    for sample in np.argsort(score.mean(1) - score.max(1), kind="stable").tolist():
        rank = int(np.argmax(np.where(room > 0, score[sample], -np.inf)))
        rank_of[sample] = rank
        room[rank] -= 1
    return rank_of


def scheduled_microbatches(
    dataset: MixedDataset,
    affinity: np.ndarray,
    *,
    consumed_samples: int,
    global_batch_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
) -> Iterator[dict[str, Tensor]]:
    """Return the microbatches of one data-parallel rank, from where a run stands, without end.

    The global batches are those of `microbatches`, sample by sample. Every rank reads the whole
    global batch to find its own samples. Data-parallel rank d is rank d mod R of its EP group; R
    divides the data-parallel ranks.
    """
    ep_ranks = np.arange(data_parallel_size) % affinity.shape[1]
    for start in itertools.count(consumed_samples, global_batch_size):
        windows = dataset.windows(range(start, start + global_batch_size))
        rank_of = schedule(scores(windows[:, :-1], affinity)[:, ep_ranks])
        own = windows[rank_of == data_parallel_rank]
        for first in range(0, len(own), dataset.micro_batch_size):
            yield dataset.as_microbatch(own[first : first + dataset.micro_batch_size])
