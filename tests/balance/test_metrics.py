"""Reported numbers against their definitions, on cases counted by hand."""

import pytest
import torch

from megatron_ext.balance.bounds import lower_bound
from megatron_ext.balance.layout import ExpertLayout
from megatron_ext.balance.metrics import home_loads, imbalance
from megatron_ext.balance.plan import BalancePlan
from megatron_ext.balance.plan_metrics import max_fanouts, rank_sends, remote_assignments
from megatron_ext.balance.solve import solve


def test_imbalance():
    assert imbalance(torch.tensor([8, 8])) == 1.0
    assert imbalance(torch.tensor([13, 3])) == 1.625
    assert imbalance(torch.tensor([0, 0, 0])) == 1.0
    # Exact integers: 2**53 + 1 is not a float64.
    assert imbalance(torch.tensor([2**53 + 1, 2**53 + 1])) == 1.0


def test_home_loads_of_one_and_of_many():
    load = torch.tensor([[6, 1, 1, 0], [4, 2, 1, 1]])
    assert home_loads(load).tolist() == [13, 3]
    assert home_loads(torch.stack([load, 2 * load])).tolist() == [[13, 3], [26, 6]]


def test_fanout_and_sends():
    layout = ExpertLayout(num_experts=8, ep_size=4, slots=2, nvlink_domain=4)
    held = torch.tensor([[-1, -1], [0, 6], [0, 1], [0, -1]], dtype=torch.int32)
    plan = BalancePlan(layout, torch.zeros(8, 4, dtype=torch.int64), held)
    assert plan.num_replicas() == 5
    assert max_fanouts(plan) == 3  # expert 0
    assert rank_sends(plan).max() == 4  # rank 0 sends experts 0 (three times) and 1
    empty = BalancePlan(layout, plan.quota, torch.full_like(held, -1))
    assert (max_fanouts(empty), rank_sends(empty).max()) == (0, 0)


def test_remote_assignments_without_balancing_are_those_of_other_homes():
    load = torch.tensor([[6, 1, 1, 0], [4, 2, 1, 1]])
    assert remote_assignments(load, solve(load, ep_size=2, strategy="none")) == 1 + 6


@pytest.mark.parametrize(
    ("slots", "domain", "expected"),
    [(1, 4, 9), (1, 2, 15), (0, 4, 30), (1, 1, 30)],
)
def test_lower_bound(slots, domain, expected):
    load = torch.zeros(4, 4, dtype=torch.int64)
    load[1] = torch.tensor([30, 0, 3, 2])
    layout = ExpertLayout(num_experts=4, ep_size=4, slots=slots, nvlink_domain=domain)
    assert lower_bound(load, layout) == expected
