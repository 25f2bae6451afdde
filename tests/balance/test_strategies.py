"""The registry, and the two balancers that do not plan: nothing and even routing forced."""

from dataclasses import fields

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.balance.strategies import STRATEGIES, get_planner, get_strategy
from megatron_ext.balance.strategies.ideal import force_even
from megatron_ext.balance.strategies.strategy import (
    ForcesEven,
    FromHistory,
    FromPlacement,
    FromPrediction,
    Solves,
    StaysMegatron,
)
from megatron_ext.config import BalanceConfig
from tests import workloads


def test_registry():
    assert {name: type(strategy.kind) for name, strategy in STRATEGIES.items()} == {
        "none": StaysMegatron,
        "quota": Solves,
        "exact": Solves,
        "quota_paper": Solves,
        "quota_shipped": Solves,
        "eplb": FromHistory,
        "eplb_exact": Solves,
        "lplb": FromHistory,
        "llep": Solves,
        "moonep": Solves,
        "taot": Solves,
        "craft": FromPlacement,
        "libra": FromPrediction,
        "libra_paper": FromPrediction,
        "sem_moe": StaysMegatron,
        "ideal": ForcesEven,
    }
    assert all(name == strategy.name for name, strategy in STRATEGIES.items())
    assert get_planner("quota") is get_strategy("quota").kind


def test_what_makes_no_plans_is_no_planner():
    for name in ("ideal", "sem_moe"):
        with pytest.raises(ValueError, match=f"strategy '{name}' makes no plans; planners: craft"):
            get_planner(name)


def test_unknown_name_lists_the_known():
    with pytest.raises(
        ValueError, match="unknown strategy 'quotas'; known: craft, eplb, eplb_exact, exact"
    ):
        get_strategy("quotas")


@given(
    tokens=st.integers(0, 40),
    experts=st.integers(1, 9),
    top_k=st.integers(1, 3),
    first=st.integers(0, 99),
    seed=st.integers(0, 99),
)
def test_even_routing_is_even_and_keeps_the_probabilities(tokens, experts, top_k, first, seed):
    top_k = min(top_k, experts)
    routed = workloads.routing_map(tokens, experts, top_k, seed)
    probs = (torch.rand(tokens, experts) + 0.1) * routed
    even_probs, even = force_even(probs, routed, first)
    counts = even.sum(0)
    assert even.dtype == torch.bool
    assert torch.equal(even.sum(1), routed.sum(1))
    assert int(counts.max() - counts.min()) <= 1
    assert torch.equal(even_probs != 0, even)
    assert torch.equal(even_probs.sort(1).values, probs.sort(1).values)
    for n in range(tokens):
        chosen = probs[n][routed[n]]
        for k in range(top_k):
            assert even_probs[n, (first + n * top_k + k) % experts] == chosen[k]


def test_even_routing_with_unequal_choices_per_token():
    routed = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 0], [1, 0, 0, 0]]).bool()
    _, even = force_even(routed.double(), routed)
    assert even.int().tolist() == [[1, 1, 0, 0], [0, 0, 0, 0], [1, 0, 1, 1], [0, 1, 0, 0]]


def test_even_routing_is_differentiable():
    routed = workloads.routing_map(9, 4, 2)
    probs = (torch.rand(9, 4, dtype=torch.float64) * routed).requires_grad_()
    assert torch.autograd.gradcheck(lambda p: force_even(p, routed)[0], probs)


def test_no_two_settings_are_told_under_one_name():
    """Reports of plans tell the settings of all sections side by side."""
    told = ["tolerance", "min_quota", "costs", "placement"]
    told += [field.name for section in BalanceConfig().sections() for field in fields(section)]
    assert len(set(told)) == len(told)
