"""What re-batching would save on routes: by hand, and on routes with known topics."""

import dataclasses

import numpy as np
import pytest

from megatron_ext.files.routes import Routes
from megatron_ext.methods.sem_moe.learn import learn
from megatron_ext.methods.sem_moe.savings import compare_tokens
from megatron_ext.methods.sem_moe.semantics import Semantics
from tests import workloads


def test_by_hand():
    """Ids 0 and 1 go to experts 0 and 1 of rank 0, ids 2 and 3 to the others, in every layer.

    In the sequence 2 0 3 1 half of each rank's choices are its own, token by token; re-batching
    exchanges the first token with the last, and everything is local.
    """
    token = np.array([2, 0, 3, 1] * 2)
    choice = np.broadcast_to(token.astype(np.int16)[:, None], (3, 8, 1))
    routes = Routes(token, np.repeat([0, 1], 4), (1, 2, 3), choice, 4, 4)
    semantics = dataclasses.replace(learn(routes, 2), expert=np.tile(np.arange(4), (3, 1)))
    semantics = dataclasses.replace(
        semantics, token_rank=np.tile(np.array([0, 0, 1, 1], np.int16), (3, 1))
    )
    compared = compare_tokens(routes, semantics)
    dealt = {"local_activation_rate": 1.0, "moved": 0.5, "sent": 0.5, "imbalance": 1.0}
    assert compared["by id"] == dealt
    assert compared["sequence order"] == {
        "local_activation_rate": 0.5,
        "moved": 0.0,
        "sent": 0.5,
        "imbalance": 1.0,
    }
    # Token i to rank i mod 2: 2 and 3 to rank 0, 0 and 1 to rank 1.
    assert compared["round robin"]["local_activation_rate"] == 0.0


def test_paths_by_hand():
    """All tokens have one id that tells nothing. Two go to ranks 1, 0, 1, two to 0, 1, 0.

    In the sequence the first two are on rank 0: only the second layer's choices are local. In the
    third, what went 1 and then 0 is known to go to 1, and the other way round.
    """
    rank_LN = np.array([[1, 1, 0, 0], [0, 0, 1, 1], [1, 1, 0, 0]])
    choice = (2 * rank_LN).astype(np.int16)[..., None]
    routes = Routes(np.zeros(4, np.int64), np.zeros(4, np.int64), (1, 2, 3), choice, 1, 4)
    semantics = Semantics(
        (1, 2, 3),
        np.tile(np.arange(4), (3, 1)),
        np.full((1, 2), 0.5, np.float32),
        np.zeros((3, 1), np.int16),
        np.full((3, 1), 0.5, np.float32),
        np.array([[[[0.5, 0.5], [1, 0]], [[0, 1], [0.5, 0.5]]]], np.float32),
    )
    compared = compare_tokens(routes, semantics)
    rate = {name: one["local_activation_rate"] for name, one in compared.items()}
    assert rate["sequence order"] == rate["by id"] == pytest.approx(1 / 3)
    assert rate["re-batched"] == pytest.approx(2 / 3)


def test_ids_that_prefer_ranks_go_there():
    """Samples of mixed topics, so that every rank has takers; the imbalance does not change."""
    routes = workloads.topical_routes(
        samples=64, topics=4, layers=4, experts=16, top_k=2, fidelity=0.9
    )
    # The j-th tokens of all samples, one after the other, become samples with all topics.
    mixed = np.argsort(np.arange(len(routes.token)) % 32, kind="stable")
    samples = dataclasses.replace(routes, token=routes.token[mixed], choice=routes.choice[:, mixed])
    compared = compare_tokens(samples, learn(routes, 4))
    rate = {name: one["local_activation_rate"] for name, one in compared.items()}
    assert rate["sequence order"] < 0.35
    assert rate["round robin"] < 0.35
    assert rate["by id"] > 0.8
    assert rate["re-batched"] > 0.8
    assert len({one["imbalance"] for one in compared.values()}) == 1


def test_samples_shorter_than_ranks():
    routes = workloads.topical_routes(
        samples=8, sample_tokens=2, topics=4, layers=3, experts=16, top_k=2, fidelity=0.9
    )
    with pytest.raises(ValueError, match=r"at least as many tokens as ranks \(4\)"):
        compare_tokens(routes, learn(routes, 4))
