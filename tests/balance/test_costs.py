"""The modelled time of a layer by hand, and that the fastest plan is the fastest of all tried."""

import pytest
import torch

from megatron_ext.balance.costs import LayerCosts
from megatron_ext.balance.metrics import home_loads
from megatron_ext.balance.solve import solve
from megatron_ext.balance.strategies.fastest import TOLERANCES
from megatron_ext.config import BalanceConfig, LlepSettings
from tests import workloads
from tests.balance.rules import check_plan


def costs(**changes):
    return LayerCosts(
        **{
            "expert_bytes": 50_000_000,
            "link_bandwidth": 4e11,
            "assignment_time": 1e-7,
            "token_bytes": 8192,
            **changes,
        }
    )


def test_time_by_hand():
    load = torch.tensor([[6, 1, 1, 0], [4, 2, 1, 1]])
    numbers = costs(expert_bytes=30, link_bandwidth=10.0, assignment_time=2.0, token_bytes=5)
    # Nothing moves: rank 0 has 13 assignments and receives 6 of them.
    none = solve(load, ep_size=2, slots=1, strategy="none")
    assert int(numbers.layer_time(load, none)) == (6 * 2 * 5 // 10 + 13 * 2) * 10**12
    # One replica from rank 0; 8 assignments each; rank 0 receives 2, rank 1 receives 2.
    plan = solve(load, ep_size=2, slots=1)
    assert int(numbers.layer_time(load, plan)) == (30 // 10 + 2 * 2 * 5 // 10 + 8 * 2) * 10**12


@pytest.mark.parametrize("expert_bytes", [0, 10_000_000, 100_000_000, 10**12])
def test_no_tolerance_is_faster(expert_bytes):
    loads = torch.stack([workloads.zipf(16, 64, 4096, 0.8, seed) for seed in range(3)])
    numbers = costs(expert_bytes=expert_bytes)
    chosen = numbers.layer_time(loads, solve(loads, ep_size=16, costs=numbers))
    times = [
        numbers.layer_time(loads, solve(loads, ep_size=16, tolerance=tolerance))
        for tolerance in TOLERANCES
    ]
    times.append(numbers.layer_time(loads, solve(loads, ep_size=16, strategy="none")))
    assert torch.equal(chosen, torch.stack(times).amin(0))


def test_dear_weights_stay_and_free_weights_go():
    load = workloads.zipf(16, 64, 4096, 0.8)
    dear = solve(load, ep_size=16, costs=costs(expert_bytes=10**12))
    free = solve(load, ep_size=16, costs=costs(expert_bytes=0, token_bytes=0))
    between = solve(load, ep_size=16, costs=costs())
    assert dear.num_replicas() == 0
    assert int(free.rank_loads().max()) == -(-int(load.sum()) // 16)
    assert 0 < between.num_replicas() < free.num_replicas()
    for plan in (dear, free, between):
        check_plan(load, plan)


def test_a_batch_is_its_loads_one_by_one():
    loads = torch.stack([workloads.zipf(8, 32, 4096, exponent) for exponent in (0.2, 0.8, 1.4)])
    together = solve(loads, ep_size=8, costs=costs()).unbatch()
    for load, plan in zip(loads, together, strict=True):
        assert plan.digest() == solve(load, ep_size=8, costs=costs()).digest()


def test_min_quota_holds():
    load = workloads.zipf(8, 32, 4096, 0.9)
    plan = solve(load, ep_size=8, min_quota=500, costs=costs())
    check_plan(load, plan, min_quota=500)
    assert int(plan.rank_loads().max()) < int(home_loads(load).max())


def test_what_else_is_asked_for_holds():
    """LLEP has no tolerance to choose; its own settings count, with costs as without."""
    load = workloads.zipf(8, 32, 4096, 0.9)
    asked = dict(strategy="llep", sections=(LlepSettings(alpha=1.0, min_tokens_per_gemm=1),))
    plan = solve(load, ep_size=8, **asked, costs=costs(expert_bytes=0))
    assert plan.digest() == solve(load, ep_size=8, **asked).digest()
    assert plan.digest() != solve(load, ep_size=8, strategy="llep").digest()


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("expert_bytes", -1, ">= 0"),
        ("token_bytes", -1, ">= 0"),
        ("expert_bytes", "1", "a whole number >= 0"),
        ("link_bandwidth", 0.0, "> 0"),
        ("link_bandwidth", float("nan"), "a finite number > 0"),
        ("assignment_time", float("inf"), "a finite number > 0"),
    ],
)
def test_wrong_costs(name, value, rule):
    with pytest.raises(ValueError, match=rf"{name} \({value!r}\) must be {rule}$"):
        costs(**{name: value})


def test_settings_of_the_objective():
    with pytest.raises(ValueError, match=r"objective \('speed'\) must be one of tolerance, time"):
        BalanceConfig(objective="speed")


def test_costs_that_are_not_given_are_to_be_measured():
    both = ("link_bandwidth", "assignment_time")
    assert BalanceConfig().costs_to_measure == ()
    assert BalanceConfig(objective="time").costs_to_measure == both
    link = BalanceConfig(objective="time", link_bandwidth=4 * 10**11)
    assert link.costs_to_measure == ("assignment_time",)
    assert BalanceConfig(objective="time", link_bandwidth=4e11, assignment_time=1e-7)


@pytest.mark.parametrize("name", ["link_bandwidth", "assignment_time"])
def test_wrong_costs_in_a_config(name):
    for value in (0.0, -1):
        rule = rf"balance.{name} \({value}\) must be > 0 with balance.objective=time"
        with pytest.raises(ValueError, match=rule):
            BalanceConfig(**{"objective": "time", name: value})
    for value in ("fast", "", None, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=rf"balance.{name} \({value!r}\) must be 'auto' or a"):
            BalanceConfig(**{name: value})
    # What earlier versions wrote into `config.yaml` of runs that do not plan for time.
    assert getattr(BalanceConfig(**{name: 0.0}), name) == 0.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expert_bytes": -1}, r"expert_bytes \(-1\) must be >= 0"),
        ({"link_bandwidth": float("nan")}, r"link_bandwidth \(nan\) must be a finite number"),
        ({"assignment_time": 1e300}, r"assignment_time \(1e\+300 s\) must be <= 100 s"),
        ({"link_bandwidth": 1e-300}, r"expert_bytes / link_bandwidth \(5e\+307 s\) must be <="),
        ({"token_bandwidth": 1.0}, r"2 token_bytes / token_bandwidth \(16384 s\) must be <= 100 s"),
    ],
)
def test_impossible_costs(changes, message):
    with pytest.raises(ValueError, match=message):
        costs(**changes)
