"""CRAFT: the example of its Figure 10, allocation against all choices, assignment by its promises.

The text of the paper does not have the figure's loads; those here are others that fit its caption:
4 ranks with 8 experts, 16 units a layer, experts that are not hot have 1.
"""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.balance.layout import ExpertLayout
from megatron_ext.balance.strategies import PlanSettings
from megatron_ext.files.loads import Loads
from megatron_ext.methods.craft.place import allocate, assign, knee, place, replica_counts
from tests import workloads

LAYOUT = ExpertLayout(num_experts=8, ep_size=4, slots=1, nvlink_domain=4)
FIGURE_10 = [
    [1, 1, 5, 1, 1, 1, 5, 1],  # moderately skewed: ranks have 2, 6, 2, 6
    [5, 1, 1, 1, 5, 1, 1, 1],  # moderately skewed: 6, 2, 6, 2
    [9, 1, 1, 1, 1, 1, 1, 1],  # most skewed: 10, 2, 2, 2
    [2, 2, 2, 2, 2, 2, 2, 2],  # balanced
]


def figure_10() -> Loads:
    load = torch.zeros(4, 4, 8, dtype=torch.int64)
    load[:, 0] = torch.tensor(FIGURE_10)
    return Loads(load, {"layer": torch.arange(1, 5)})


@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize("budget", [2, None])
def test_figure_10(budget, even):
    """Half of the replicas of uniform replication, and all layers balanced."""
    crafted = place(figure_10(), LAYOUT, PlanSettings(tolerance=0.0), budget=budget, even=even)
    assert crafted.compared.tolist() == [1, 2, 4]
    # Mean 4 / busiest. In layers 1 and 2 two ranks have 6: one replica leaves the other at 6. In
    # layer 3 rank 0 has 10, the others 2: one replica makes that 6 and 6; two 5, 5 and 4; three 4.
    np.testing.assert_allclose(crafted.baseline, [4 / 6, 4 / 6, 4 / 10, 1])
    np.testing.assert_allclose(
        crafted.baseline[:, None] + crafted.gains,
        [[4 / 6, 1, 1], [4 / 6, 1, 1], [4 / 6, 4 / 5, 1], [1, 1, 1]],
    )
    assert crafted.budget == 2
    assert crafted.counts.tolist() == [2, 2, 4, 0]
    assert crafted.placement.layers == (1, 2, 3, 4)
    # Layer 1's on ranks 0 and 2, layer 2's on ranks 1 and 3, as in the figure. The fourth replica
    # of layer 3 would be one of an expert that has 1 unit, on its own home rank.
    assert crafted.placement.experts_in_slots.squeeze(-1).tolist() == [
        [2, -1, 6, -1],
        [-1, 0, -1, 4],
        [-1, 0, 0, 0],
        [-1, -1, -1, -1],
    ]
    assert [crafted.placement.slot_limit(layer) for layer in (1, 2, 3, 4)] == [1, 1, 1, 0]
    assert crafted.achieved.tolist() == [1.0, 1.0, 1.0, 1.0]


def test_gain_times_replicas_would_not_choose_figure_10():
    """Why the objective is the sum of the gains: with the product, 0 for layer 2 is as good."""
    crafted = place(figure_10(), LAYOUT, PlanSettings(tolerance=0.0), budget=2, even=False)
    by_count = dict(zip(crafted.compared.tolist(), crafted.gains.T, strict=True))

    def product(*counts):
        return sum(n * by_count[n][layer] for layer, n in enumerate(counts) if n)

    def total(*counts):
        return sum(by_count[n][layer] for layer, n in enumerate(counts) if n)

    assert product(2, 2, 4, 0) == pytest.approx(product(4, 0, 4, 0))
    assert total(2, 2, 4, 0) > total(4, 0, 4, 0) + 0.3


@given(
    gains=st.lists(
        st.lists(st.sampled_from([0.0, 0.1, 0.25, 0.3, 0.7]), min_size=3, max_size=3),
        min_size=1,
        max_size=4,
    ),
    counts=st.sampled_from([(1, 2, 4), (1, 2, 3), (2, 3, 7)]),
    capacity=st.integers(0, 12),
)
def test_allocation_is_the_best_of_all(gains, counts, capacity):
    best = allocate(np.array(gains), np.array(counts), capacity)
    for limit in range(capacity + 1):
        choices = [
            (sum(gains[layer][counts.index(n)] for layer, n in enumerate(chosen) if n), chosen)
            for chosen in itertools.product((0, *counts), repeat=len(gains))
            if sum(chosen) <= limit
        ]
        most = max(gain for gain, _ in choices)
        found = tuple(best.counts(limit).tolist())
        assert best.gain[limit] == pytest.approx(most)
        assert sum(found) <= limit
        gain_of = {chosen: gain for gain, chosen in choices}
        assert gain_of[found] == pytest.approx(most)


def test_of_equal_gains_fewer_replicas_are_taken():
    best = allocate(np.array([[0.3, 0.3], [0.0, 0.0]]), np.array([1, 2]), 4)
    assert best.counts(4).tolist() == [1, 0]


@given(
    counts=st.lists(st.integers(0, 20), min_size=1, max_size=12),
    ranks=st.sampled_from([1, 2, 3, 4, 8]),
)
def test_assignment_is_even_in_every_layer_and_over_all(counts, ranks):
    assigned = assign(counts, ranks)
    assert assigned.sum(1).tolist() == counts
    assert (np.ptp(assigned, axis=1) <= 1).all()
    assert (np.ptp(assigned.cumsum(0), axis=1) <= 1).all()


def test_assignment_by_hand():
    """Of 8 ranks: every second; of those left every second; then what is left, and ranks 0, 4."""
    assert [np.flatnonzero(row).tolist() for row in assign([4, 2, 4], 8)] == [
        [0, 2, 4, 6],
        [1, 5],
        [0, 3, 4, 7],
    ]
    assert assign([11], 4).tolist() == [[3, 3, 3, 2]]


def test_knee():
    assert knee(np.array([0.0])) == 0
    assert knee(np.zeros(5)) == 0
    assert knee(np.array([0.0, 0.2, 0.4, 0.6])) == 3  # Every replica gains the same.
    assert knee(np.array([0.0, 0.0, 0.6, 0.6, 0.6])) == 2


def test_numbers_that_are_compared():
    for slots, numbers in ((1, [1, 2, 4, 6]), (3, [1, 2, 4, 8, 16, 18])):
        layout = ExpertLayout(num_experts=6, ep_size=6, slots=slots, nvlink_domain=6)
        assert replica_counts(layout).tolist() == numbers


def trace() -> Loads:
    """Three layers on 4 ranks, of rising skew; the third has 2 loads more."""
    layers = [1, 2, 3] * 3 + [3, 3]
    load = torch.stack(
        [
            workloads.zipf(4, 16, 500, 0.6 * (layer - 1), seed=layer)
            + workloads.uniform(4, 16, 40, seed=index)
            for index, layer in enumerate(layers)
        ]
    )
    return Loads(load, {"layer": torch.tensor(layers)})


@pytest.mark.parametrize("domain", [2, 4])
@pytest.mark.parametrize("even", [False, True])
def test_budgets_are_kept(domain, even):
    layout = ExpertLayout(num_experts=16, ep_size=4, slots=2, nvlink_domain=domain)
    before = -1.0
    for budget in range(8):
        replayed = []
        crafted = place(
            trace(), layout, PlanSettings(), budget=budget, even=even, on_load=replayed.append
        )
        assert len(replayed) == 11 * (len(crafted.compared) + 1)
        placement = crafted.placement
        held = (placement.experts_in_slots >= 0).sum(-1)
        assert crafted.counts.sum() <= budget * 4
        assert (held.sum(1).numpy() <= crafted.counts).all()
        if even:
            assert int(held.sum(0).max()) <= budget
        for layer in placement.layers:
            placement.replicas(layer, layout)  # Fits: domains, slots.
        assert placement.expert_load.sum().item() == int(trace().load.sum())
        gain = float(crafted.gains.max(1).clip(0).sum())
        chosen = sum(
            crafted.gains[layer, crafted.compared.tolist().index(n)]
            for layer, n in enumerate(crafted.counts.tolist())
            if n
        )
        assert before <= chosen <= gain + 1e-12
        before = chosen
        if not even:
            # What was estimated is what the placement does.
            np.testing.assert_allclose((crafted.achieved - crafted.baseline).sum(), chosen)
    assert before == pytest.approx(gain)  # A budget of all slots gains all that can be gained.


def test_layers_that_gain_nothing_get_nothing():
    even = Loads(torch.full((2, 4, 16), 10), {"layer": torch.tensor([1, 2])})
    layout = ExpertLayout(num_experts=16, ep_size=4, slots=2, nvlink_domain=4)
    crafted = place(even, layout, PlanSettings(), budget=None, even=False)
    assert crafted.budget == 0
    assert [crafted.placement.slot_limit(layer) for layer in (1, 2)] == [0, 0]


@pytest.mark.parametrize(
    ("changed", "budget", "message"),
    [
        ({"slots": 0}, None, r"slots \(0\) must be >= 1"),
        ({"nvlink_domain": 1}, None, r"domain \(1\) >= 2"),
        ({}, -1, r"budget \(-1\) must be >= 0"),
    ],
)
def test_wrong_settings(changed, budget, message):
    sizes = {"num_experts": 16, "ep_size": 4, "slots": 2, "nvlink_domain": 4} | changed
    with pytest.raises(ValueError, match=message):
        place(trace(), ExpertLayout(**sizes), PlanSettings(), budget=budget, even=False)
