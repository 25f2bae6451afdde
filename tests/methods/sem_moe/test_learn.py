"""Sem-MoE: tables and clusters by hand, properties, gains on routes with known topics."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.files.routes import Routes, read_routes, write_routes
from megatron_ext.methods.sem_moe.learn import (
    STEPS,
    check_batches,
    check_fit,
    co_cluster,
    compare,
    learn,
    measure,
    place_experts,
    place_samples,
    ranks_of_tokens,
    transitions,
)
from megatron_ext.methods.sem_moe.semantics import read_semantics, write_semantics
from tests import workloads

TOPICAL = dict(samples=64, topics=4, layers=3, experts=16, top_k=2)


def two_topics() -> Routes:
    """Four samples of two tokens on two layers of four experts, one choice each.

    Ids 0 and 1 go to experts 0 and 2, ids 2 and 3 to experts 1 and 3; id 4 is not there. Samples 0
    and 2 are of the first kind.
    """
    token = np.array([0, 1, 2, 3, 1, 0, 3, 2])
    choice = np.array([[0, 2, 1, 3, 2, 0, 3, 1], [2, 0, 3, 1, 0, 2, 1, 3]], dtype=np.int16)
    return Routes(token, np.array([0, 0, 1, 1, 2, 2, 3, 3]), (1, 2), choice[..., None], 5, 4)


def test_two_topics_by_hand():
    """On each rank the experts and samples of one topic; nothing travels and ranks are even."""
    semantics = learn(two_topics(), 2)
    # Sample 0 is on rank 0, as its experts come first by load and number.
    assert semantics.expert.tolist() == [[0, 2, 1, 3], [0, 2, 1, 3]]
    assert semantics.home().tolist() == [[0, 1, 0, 1], [0, 1, 0, 1]]
    assert semantics.affinity.tolist() == [[1, 0], [1, 0], [0, 1], [0, 1], [0.5, 0.5]]
    assert semantics.token_rank.tolist() == [[0, 0, 1, 1, 0]] * 2
    # Seen twice, and once more on either rank alike: (2 + 1 / 2) / 3. Id 4 was not seen.
    np.testing.assert_allclose(semantics.token_confidence, [[5 / 6] * 4 + [0.5]] * 2)
    assert semantics.transition.shape == (0, 2, 2, 2)
    compared = compare(two_topics(), semantics, 4)
    even = {"imbalance": 1.0, "load_imbalance_rate": 1.0}
    assert compared["round robin"] == {"local_activation_rate": 0.5, **even}
    assert compared["both"] == {"local_activation_rate": 1.0, **even}


def test_measured_by_hand():
    """All samples on rank 0 that holds experts 0 and 1: half of the choices are there."""
    routes, home = two_topics(), np.array([[0, 0, 1, 1], [0, 0, 1, 1]])
    assert measure(routes, home, np.zeros(4, dtype=np.int64), 2, 4) == {
        "local_activation_rate": 0.5,
        "imbalance": 1.0,
        "load_imbalance_rate": 1.0,
    }
    # Experts 0, 1 and 2 on rank 0: 6 of 8 choices, 1.5 times the mean.
    home = np.array([[0, 0, 0, 1], [0, 0, 0, 1]])
    assert measure(routes, home, np.zeros(4, dtype=np.int64), 2, 4) == {
        "local_activation_rate": 0.75,
        "imbalance": 1.5,
        "load_imbalance_rate": 1.5,
    }


def test_samples_that_make_no_batch_are_not_measured():
    """Expert 0 is alone on rank 0: a choice each of samples 0 and 2, of six without sample 3."""
    home = np.array([[0, 1, 1, 1], [0, 1, 1, 1]])
    measured = measure(two_topics(), home, np.zeros(4, dtype=np.int64), 2, 3)
    assert measured["local_activation_rate"] == pytest.approx(2 / 6)


def test_tokens_after_two_layers():
    """Six tokens on two ranks; of those that went 0, 1 two go to 1 and one to 0."""
    rank_of = np.array([[0, 0, 0, 1, 1, 0], [1, 1, 1, 0, 0, 0], [1, 1, 0, 0, 0, 1]])
    table = transitions(rank_of, 2)
    assert table.shape == (1, 2, 2, 2)
    np.testing.assert_allclose(table[0, 0, 1], [1 / 3, 2 / 3])
    assert table[0, 1, 0].tolist() == [1, 0]
    assert table[0, 0, 0].tolist() == [0, 1]
    assert table[0, 1, 1].tolist() == [0.5, 0.5]  # Never seen.


def test_the_rank_of_a_token_has_most_of_its_experts():
    choice = np.array([[[0, 2, 3], [0, 1, 2], [0, 1, 3]]], dtype=np.int16)
    routes = Routes(np.zeros(3, dtype=np.int64), np.zeros(3, dtype=np.int64), (1,), choice, 1, 4)
    assert ranks_of_tokens(routes, np.array([[0, 0, 1, 1]]), 2).tolist() == [[1, 0, 0]]


predictions = st.tuples(
    st.integers(1, 4), st.integers(1, 3), st.integers(0, 9), st.integers(1, 3), st.integers(0, 999)
)


@given(drawn=predictions)
def test_ranks_get_equally_many_experts_and_samples(drawn):
    ranks, mains, more_samples, layers, seed = drawn
    rng = np.random.default_rng(seed)
    shape = (ranks + more_samples, layers, ranks * mains)
    predicted = rng.integers(0, 4, shape) * rng.random(shape)
    calls: list[int] = []
    home, sample_rank = co_cluster(predicted, ranks, on_layer=calls.append)
    assert sum(calls) == STEPS * layers
    for of_layer in home:
        assert np.bincount(of_layer, minlength=ranks).tolist() == [mains] * ranks
    assert np.ptp(np.bincount(sample_rank, minlength=ranks)) <= 1
    assert sample_rank.shape == shape[:1]


@given(drawn=predictions)
def test_no_swap_of_two_experts_is_better(drawn):
    ranks, mains, more_samples, _, seed = drawn
    rng = np.random.default_rng(seed)
    predicted = rng.random((ranks + more_samples, ranks * mains)) ** 3
    sample_rank = rng.permutation(np.arange(ranks + more_samples) % ranks)
    home = place_experts(predicted, sample_rank, ranks)

    def cost(home):
        local = predicted[home[None, :] == sample_rank[:, None]].sum()
        return predicted.sum() - local + np.bincount(home, predicted.sum(0)).max()

    for one in range(len(home)):
        for other in range(one):
            swapped = home.copy()
            swapped[[one, other]] = home[[other, one]]
            assert cost(swapped) >= cost(home) - 1e-6


def test_samples_by_hand():
    """The longest chooses first; what has no room goes to the other rank."""
    predicted = np.array([[3.0, 0.0], [9.0, 1.0], [4.0, 1.0], [0.0, 2.0]])[:, None, :]
    assert place_samples(predicted, np.array([[0, 1]]), 2).tolist() == [1, 0, 0, 1]


def test_samples_go_to_samples_like_them():
    """Each choice of samples 1 to 3 is as near on either rank; sample 0 is on rank 1, as is 1."""
    predicted = np.array([[0.9, 1.1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]])
    home = np.array([[0, 1, 0, 1]])
    assert place_samples(predicted[:, None, :], home, 2).tolist() == [1, 1, 0, 0]


def test_experts_go_to_experts_chosen_with_them():
    """Both kinds of samples are on both ranks, so only what is chosen together tells."""
    kinds = np.array([[3.0, 0.0, 0.0, 3.0], [0.0, 3.0, 3.0, 0.0]])
    home = place_experts(np.concatenate([kinds, kinds]), np.array([0, 0, 1, 1]), 2)
    assert home.tolist() == [0, 1, 1, 0]


def test_a_round_that_makes_it_worse_is_not_kept():
    """Rounds end at 28 choices that travel or are on the busiest rank; as they are it is 27."""
    predicted = np.array([[3.0, 2, 2, 2], [2, 3, 2, 3], [2, 2, 1, 3]])[:, None, :]
    home, sample_rank = co_cluster(predicted, 2)
    on_rank = predicted[:, 0] @ np.eye(2)[home[0]]
    stay = on_rank[np.arange(3), sample_rank].sum()
    assert predicted.sum() - stay + on_rank.sum(0).max() == 27
    assert home.tolist() == [[0, 0, 1, 1]]


@pytest.mark.parametrize("fidelity", [0.9, 0.5])
def test_topics_are_found_and_used_on_unseen_samples(fidelity):
    """Both together beat round robin by far; either alone does not help: it is the pair."""
    seen, unseen = _halves(workloads.topical_routes(**TOPICAL, fidelity=fidelity))
    compared = compare(unseen, learn(seen, 4), 16)
    rate = {name: one["local_activation_rate"] for name, one in compared.items()}
    assert rate["round robin"] == pytest.approx(0.25, abs=0.03)
    assert rate["experts"] < 0.32
    assert rate["samples"] < 0.32
    assert rate["both"] > 0.25 + 0.6 * 0.75 * fidelity


def test_nothing_is_found_where_there_is_nothing():
    routes = workloads.topical_routes(**TOPICAL, fidelity=0.0)
    first, second = _halves(routes)
    compared = compare(second, learn(first, 4), 16)
    assert compared["both"]["local_activation_rate"] == pytest.approx(0.25, abs=0.02)


def _halves(routes: Routes) -> tuple[Routes, Routes]:
    """The first and the second half of the samples."""
    middle = routes.num_samples // 2
    parts = []
    for kept in (routes.sample < middle, routes.sample >= middle):
        sample = routes.sample[kept] - routes.sample[kept].min()
        parts.append(
            dataclasses.replace(
                routes, token=routes.token[kept], sample=sample, choice=routes.choice[:, kept]
            )
        )
    return parts[0], parts[1]


@pytest.mark.parametrize(("ranks", "message"), [(3, r"experts \(4\).*ranks \(3\)"), (0, "ranks")])
def test_wrong_ranks(ranks, message):
    with pytest.raises(ValueError, match=message):
        learn(two_topics(), ranks)


def test_too_few_samples():
    routes = dataclasses.replace(two_topics(), sample=np.zeros(8, dtype=np.int64))
    with pytest.raises(ValueError, match=r"samples \(1\) must be .*ranks"):
        learn(routes, 2)


@pytest.mark.parametrize(
    ("changed", "message"),
    [({"layers": (2, 3)}, r"layers \(2, 3\)"), ({"vocab_size": 9}, "9 ids do not fit")],
)
def test_routes_of_another_model(changed, message):
    with pytest.raises(ValueError, match=message):
        check_fit(dataclasses.replace(two_topics(), **changed), two_topics())


@pytest.mark.parametrize(
    ("global_batch", "message"),
    [(3, r"\(3\) must be a multiple of ranks \(2\)"), (8, r"at most the samples there are \(4\)")],
)
def test_batches_that_cannot_be_compared(global_batch, message):
    with pytest.raises(ValueError, match=message):
        check_batches(two_topics(), 2, global_batch)


class TestFiles:
    def test_routes(self, tmp_path):
        path, routes = tmp_path / "routes.npz", workloads.topical_routes(**TOPICAL, fidelity=0.5)
        write_routes(path, routes)
        found = read_routes(path)
        for name, value in vars(routes).items():
            np.testing.assert_array_equal(getattr(found, name), value)

    @pytest.mark.parametrize(
        ("changed", "message"),
        [
            (
                {"token": np.zeros(3, dtype=np.int64)},
                r"token must be \[8\] beside choice of \[2, 8, 1\], got shape \[3\]",
            ),
            ({"choice": np.zeros((2, 8, 1), dtype=np.int32)}, "choice must be int16"),
            ({"choice": np.zeros((2, 8), dtype=np.int16)}, r"choice must be \[L, N, K\]"),
            ({"choice": np.full((2, 8, 1), 4, dtype=np.int16)}, "choice must be from 0 to 3"),
            ({"token": np.full(8, -1)}, "token must be from 0 to 4, is from -1 to -1"),
            ({"sample": np.full(8, 1)}, "samples must be numbered from 0 without gaps"),
            ({"layer": np.array([1, 1])}, r"layers must differ, got \[1, 1\]"),
        ],
    )
    def test_other_routes(self, tmp_path, changed, message):
        path = tmp_path / "routes.npz"
        write_routes(path, two_topics())
        with np.load(path) as arrays:
            np.savez(path, **(dict(arrays) | changed))
        with pytest.raises(ValueError, match=message):
            read_routes(path)

    def test_semantics(self, tmp_path):
        path = tmp_path / "semantics.npz"
        semantics = learn(workloads.topical_routes(**TOPICAL, fidelity=0.5), 4)
        write_semantics(path, semantics)
        found = read_semantics(path)
        for name, value in vars(semantics).items():
            np.testing.assert_array_equal(getattr(found, name), value)

    @pytest.mark.parametrize(
        ("changed", "message"),
        [
            ({"affinity": np.zeros((5, 2))}, "affinity must be float32, got float64"),
            ({"affinity": np.zeros((5, 3), np.float32)}, r"transition must be \[0, 3, 3, 3\]"),
            ({"token_rank": np.zeros((2, 4), np.int16)}, r"token_rank must be \[2, 5\]"),
            ({"token_rank": np.full((2, 5), 2, np.int16)}, "token_rank must be from 0 to 1"),
            (
                {"affinity": np.full((5, 2), np.nan, np.float32)},
                "affinity must be finite and >= 0",
            ),
            (
                {"token_confidence": np.full((2, 5), -1, np.float32)},
                "token_confidence must be finite and >= 0",
            ),
            ({"token_confidence": np.ones((2, 5))}, "token_confidence must be float32"),
            ({"expert": np.zeros(4, np.int64)}, r"expert must be \[L, E\]"),
            ({"expert": np.array([[0, 1, 2, 3], [0, 0, 1, 2]])}, "expert of layer 2 must be every"),
            ({"layer": np.array([1])}, r"layer must be \[2\]"),
        ],
    )
    def test_other_semantics(self, tmp_path, changed, message):
        path = tmp_path / "semantics.npz"
        write_semantics(path, learn(two_topics(), 2))
        with np.load(path) as arrays:
            np.savez(path, **(dict(arrays) | changed))
        with pytest.raises(ValueError, match=message):
            read_semantics(path)
