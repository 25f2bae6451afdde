"""What a layer's planner remembers: the loads it was told of, and nothing else."""

import pytest
import torch

from megatron_ext.balance.layout import ExpertLayout
from megatron_ext.balance.solve import PlannerInOrder
from megatron_ext.balance.strategies.strategy import PlanSettings
from megatron_ext.config import HistorySettings, LlepSettings
from megatron_ext.lab.planning import read_name
from tests import workloads
from tests.balance.instances import TIME, needs_of

LAYOUT = ExpertLayout(num_experts=16, ep_size=4, slots=2, nvlink_domain=4)
LOADS = [workloads.zipf(4, 16, 300, 1.0, seed) for seed in range(6)]


def planner(strategy="eplb", **settings):
    return PlannerInOrder(strategy, LAYOUT, PlanSettings(**settings))


def from_history(interval: int) -> PlannerInOrder:
    return planner(sections=(HistorySettings(interval=interval),))


def test_no_replicas_before_the_first_placement():
    one = from_history(3)
    for load in LOADS[:3]:
        assert one.solve(load).num_replicas() == 0
        one.observe(load)
    assert one.solve(LOADS[3]).num_replicas() > 0


def test_placements_follow_the_loads_since_the_last_one():
    """Six loads at interval 3 place as the last three alone do."""
    long, short = (
        from_history(3),
        from_history(3),
    )
    for load in LOADS:
        long.observe(load)
    for load in LOADS[3:]:
        short.observe(load)
    assert long.solve(LOADS[0]).digest() == short.solve(LOADS[0]).digest()


def test_solving_remembers_nothing():
    asked, silent = (
        from_history(2),
        from_history(2),
    )
    for load in LOADS[:3]:
        for _ in range(3):
            asked.solve(load)
        asked.observe(load)
        silent.observe(load)
    assert asked.solve(LOADS[3]).digest() == silent.solve(LOADS[3]).digest()


@pytest.mark.parametrize("strategy", ["quota", "eplb_exact", TIME])
def test_without_history_every_load_is_planned_alike(strategy):
    one = planner(read_name(strategy)[0], **needs_of(strategy, LAYOUT))
    before = one.solve(LOADS[0]).digest()
    for load in LOADS:
        one.observe(load)
    assert one.solve(LOADS[0]).digest() == before


def test_a_batch_in_order_is_its_loads_in_order():
    batch = from_history(2).plan_in_order(torch.stack(LOADS))
    one = from_history(2)
    assert [plan.digest() for plan in batch.unbatch()] == [
        one.plan_in_order(load).digest() for load in LOADS
    ]


def test_objective_time_needs_a_tolerance_to_choose():
    with pytest.raises(ValueError, match=r"'eplb' .*without a tolerance .*time"):
        planner(**needs_of(TIME, LAYOUT))


def test_time_is_an_objective():
    with pytest.raises(ValueError, match=r"'time' is no strategy .*balance\.objective=time"):
        planner("time")


@pytest.mark.parametrize(
    ("section", "setting", "value", "message"),
    [
        (HistorySettings, "interval", 0, r"interval \(0\) must be >= 1"),
        (LlepSettings, "alpha", 0.9, r"alpha \(0.9\) must be from 1 to"),
        (LlepSettings, "alpha", float("nan"), r"alpha \(nan\) must be a finite number from 1 to"),
        (LlepSettings, "min_tokens_per_gemm", 0, r"min_tokens_per_gemm \(0\) must be >= 1"),
    ],
)
def test_settings_out_of_range(section, setting, value, message):
    with pytest.raises(ValueError, match=message):
        PlanSettings(sections=(section(**{setting: value}),))
