"""What every plan of every planner must be, over generated loads, and the corners by hand."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings

from megatron_ext.balance.bounds import lower_bound, target_load
from megatron_ext.balance.layout import ExpertLayout
from megatron_ext.balance.metrics import home_loads, imbalance
from megatron_ext.balance.plan import BalancePlan
from megatron_ext.balance.solve import solve
from megatron_ext.balance.strategies import STRATEGIES
from megatron_ext.config import BalanceConfig
from megatron_ext.lab.planning import read_name
from tests import workloads
from tests.balance.instances import TIME, instances, needs_of, plan_for, worked_example
from tests.balance.rules import check_plan

PLANNERS = sorted([TIME, *(name for name, strategy in STRATEGIES.items() if strategy.planner)])


@pytest.mark.parametrize("planner", PLANNERS)
@given(instance=instances())
@settings(max_examples=150)
def test_plans_are_legal(planner, instance):
    plan = plan_for(
        instance.load,
        instance.layout,
        strategy=read_name(planner)[0],
        **instance.settings_of(planner),
    )
    check_plan(instance.load, plan, min_quota=instance.min_quota)
    assert int(plan.rank_loads().max()) >= lower_bound(instance.load, instance.layout)


@pytest.mark.parametrize("planner", PLANNERS)
def test_plans_of_hard_loads_are_legal(planner):
    layout = ExpertLayout(num_experts=64, ep_size=8, slots=2, nvlink_domain=8)
    for name, load in workloads.hard_loads(8, 64, tokens=1024):
        plan = solve(
            load, ep_size=8, slots=2, strategy=read_name(planner)[0], **needs_of(planner, layout)
        )
        check_plan(load, plan)
        busiest = int(plan.rank_loads().max())
        assert lower_bound(load, plan.layout) <= busiest <= int(home_loads(load).max()), name


@given(instance=instances())
@settings(max_examples=150)
def test_without_limits_on_replicas_the_target_is_met_exactly(instance):
    """With a slot for every foreign expert and one domain the greedy test cannot get stuck."""
    experts, ranks = instance.layout.num_experts, instance.layout.ep_size
    layout = ExpertLayout(num_experts=experts, ep_size=ranks, slots=experts, nvlink_domain=ranks)
    plan = plan_for(instance.load, layout, tolerance=instance.tolerance, min_quota=1)
    total = int(instance.load.sum())
    target = target_load(total, ranks, round(instance.tolerance * 1e6))
    busiest = int(plan.rank_loads().max())
    assert busiest <= max(target, 0)
    assert busiest <= -(-total // ranks) or imbalance(plan.rank_loads()) <= 1 + instance.tolerance


def test_worked_example():
    instance = worked_example()
    plan = plan_for(instance.load, instance.layout)
    assert imbalance(home_loads(instance.load)) == 1.625
    assert plan.quota.tolist() == [[5, 5], [3, 0], [0, 2], [0, 1]]
    assert plan.experts_in_slots.tolist() == [[-1], [0]]
    assert plan.slots is plan.experts_in_slots, "the name in files of plans"
    assert plan.rank_loads().tolist() == [8, 8]
    assert imbalance(plan.rank_loads()) == 1.0
    assert plan.num_replicas() == 1
    assert plan.physical_index().tolist() == [[0, 5], [1, -1], [-1, 3], [-1, 4]]


def test_physical_index_of_a_batch_is_that_of_its_plans():
    loads = torch.stack([workloads.zipf(4, 8, 500, 1.2, seed) for seed in range(3)])
    batch = solve(loads, ep_size=4, slots=2)
    expected = torch.full((3, 8, 4), -1)
    for b, plan in enumerate(batch.unbatch()):
        for expert in range(8):
            home, main = divmod(expert, 2)
            expected[b, expert, home] = 4 * home + main
        for rank, held in enumerate(plan.experts_in_slots.tolist()):
            for slot, expert in enumerate(held):
                if expert >= 0:
                    expected[b, expert, rank] = 4 * rank + 2 + slot
    assert torch.equal(batch.physical_index(), expected)
    assert batch.num_replicas() == sum(plan.num_replicas() for plan in batch.unbatch())


@pytest.mark.parametrize(
    "planner", [n for n in PLANNERS if not STRATEGIES[read_name(n)[0]].predicts]
)
def test_a_batch_is_its_loads_one_by_one(planner):
    loads = torch.stack([workloads.zipf(4, 16, 300, 1.0, seed) for seed in range(5)])
    needs = needs_of(planner, ExpertLayout(num_experts=16, ep_size=4, slots=1, nvlink_domain=4))
    batch = solve(loads, ep_size=4, slots=1, strategy=read_name(planner)[0], **needs)
    assert batch.rank_loads().shape == (5, 4)
    for load, plan in zip(loads, batch.unbatch(), strict=True):
        alone = solve(load, ep_size=4, slots=1, strategy=read_name(planner)[0], **needs)
        assert torch.equal(plan.quota, alone.quota)
        assert torch.equal(plan.experts_in_slots, alone.experts_in_slots)
        assert plan.digest() == alone.digest()
    empty = solve(loads[:0], ep_size=4, slots=1, strategy=read_name(planner)[0], **needs)
    assert empty.quota.shape == (0, 16, 4)
    assert empty.experts_in_slots.shape == (0, *batch.experts_in_slots.shape[1:])


def test_defaults_are_those_of_the_config():
    config = BalanceConfig()
    load = workloads.zipf(4, 16, 4000, 0.9)
    by_default = solve(load, ep_size=4)
    written_out = solve(
        load,
        ep_size=4,
        slots=config.slots,
        strategy=config.strategy,
        tolerance=config.tolerance,
        min_quota=config.min_quota,
        nvlink_domain=4,
    )
    assert by_default.digest() == written_out.digest()


class TestCorners:
    def test_one_rank(self):
        plan = solve(torch.tensor([[5, 0, 2]]), ep_size=1, slots=2)
        assert plan.quota.tolist() == [[5], [0], [2]]
        assert plan.num_replicas() == 0

    def test_no_slots(self):
        load = workloads.zipf(4, 8, 100, 1.0)
        plan = solve(load, ep_size=4, slots=0)
        assert torch.equal(plan.quota, solve(load, ep_size=4, slots=0, strategy="none").quota)
        assert plan.experts_in_slots.shape == (4, 0)
        assert torch.equal(plan.physical_index() >= 0, torch.eye(4).bool().repeat_interleave(2, 0))

    def test_no_assignments(self):
        plan = solve(torch.zeros(4, 8, dtype=torch.int64), ep_size=4)
        assert plan.num_replicas() == 0
        assert imbalance(plan.rank_loads()) == 1.0

    def test_balanced_load_moves_nothing(self):
        plan = solve(torch.full((4, 8), 10), ep_size=4)
        assert plan.num_replicas() == 0

    def test_all_on_one_expert(self):
        plan = solve(
            workloads.one_hot_expert(4, 8, 100, expert=3), ep_size=4, slots=1, tolerance=0.0
        )
        assert plan.quota[3].tolist() == [100, 100, 100, 100]
        assert plan.experts_in_slots.tolist() == [[3], [-1], [3], [3]]

    def test_fewer_assignments_than_ranks(self):
        load = torch.zeros(4, 8, dtype=torch.int64)
        load[2, 0] = 2
        assert solve(load, ep_size=4, slots=1).rank_loads().sort().values.tolist() == [0, 0, 1, 1]

    def test_cold_rank_is_filled(self):
        load = workloads.cold_ranks(4, 16, 1200, cold=1)
        assert imbalance(home_loads(load)) == 4 / 3
        assert imbalance(solve(load, ep_size=4, slots=4, tolerance=0.0).rank_loads()) == 1.0

    def test_domain_of_one_rank_allows_no_replica(self):
        load = workloads.zipf(4, 8, 100, 1.0)
        plan = solve(load, ep_size=4, slots=2, nvlink_domain=1)
        assert plan.num_replicas() == 0

    def test_domains_balance_within_themselves(self):
        load = torch.zeros(4, 4, dtype=torch.int64)
        load[0] = torch.tensor([40, 0, 10, 0])
        plan = solve(load, ep_size=4, slots=1, nvlink_domain=2, tolerance=0.0)
        # The second domain could go down to 5 + 5, but the busiest rank is in the first.
        assert plan.rank_loads()[:2].tolist() == [20, 20]
        assert int(plan.rank_loads().max()) == lower_bound(load, plan.layout) == 20

    def test_min_quota_forbids_small_replicas(self):
        load = torch.tensor([[13, 3], [0, 0]])
        assert solve(load, ep_size=2, slots=1, min_quota=5).quota.tolist() == [[8, 5], [0, 3]]
        # More than the excess has to move, or nothing.
        assert solve(load, ep_size=2, slots=1, min_quota=6).quota.tolist() == [[7, 6], [0, 3]]
        assert solve(load, ep_size=2, slots=1, min_quota=10).num_replicas() == 0

    def test_counts_beyond_32_bits(self):
        load = torch.tensor([[2**40, 0], [0, 2**33]])
        plan = solve(load, ep_size=2, slots=1, tolerance=0.0)
        assert plan.rank_loads().tolist() == [2**39 + 2**32] * 2
        largest = torch.full((2, 2), (2**63 - 1) // 4)
        assert solve(largest, ep_size=2, slots=1).num_replicas() == 0


class TestDeterminism:
    @given(instance=instances())
    def test_same_load_same_plan(self, instance):
        first, second = (
            plan_for(load, instance.layout, **instance.settings)
            for load in (instance.load, instance.load.T.contiguous().T)
        )
        assert torch.equal(first.quota, second.quota)
        assert torch.equal(first.experts_in_slots, second.experts_in_slots)
        assert first.digest() == second.digest()

    def test_digest_is_the_same_in_another_process(self):
        code = (
            "import torch; from megatron_ext.balance.solve import solve; "
            "print(solve(torch.tensor([[6, 1, 1, 0], [4, 2, 1, 1]]), ep_size=2, slots=1).digest())"
        )
        output = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
        ).stdout
        instance = worked_example()
        digest = plan_for(instance.load, instance.layout).digest()
        assert int(output) == digest
        assert 0 <= digest < 2**63

    def test_digest_sees_quota_and_slots(self):
        instance = worked_example()
        plan = plan_for(instance.load, instance.layout)
        other_quota, other_held = plan.quota.clone(), plan.experts_in_slots.clone()
        other_quota[0] = torch.tensor([4, 6])
        other_held[0, 0] = 2
        digests = {
            plan.digest(),
            BalancePlan(plan.layout, other_quota, plan.experts_in_slots).digest(),
            BalancePlan(plan.layout, plan.quota, other_held).digest(),
        }
        assert len(digests) == 3


class TestErrors:
    @pytest.mark.parametrize("dtype", [torch.int32, torch.float32, torch.bool])
    def test_dtype(self, dtype):
        with pytest.raises(TypeError, match=f"load must be int64, got {dtype}"):
            solve(torch.zeros(2, 4, dtype=dtype), ep_size=2)

    @pytest.mark.parametrize("shape", [(4,), (3, 4), (4, 2), (1, 1, 2, 4)])
    def test_shape(self, shape):
        with pytest.raises(ValueError, match=r"load must be \[R, E\]"):
            plan_for(torch.zeros(shape, dtype=torch.int64), worked_example().layout)

    def test_experts_not_divisible(self):
        with pytest.raises(
            ValueError, match=r"num_experts \(5\) must be a multiple of ep_size \(2\)"
        ):
            solve(torch.zeros(2, 5, dtype=torch.int64), ep_size=2)

    def test_ep_size_against_the_load(self):
        with pytest.raises(
            ValueError, match=r"load must be \[R, E\] = \[4, 4\].*got shape \(2, 4\)"
        ):
            solve(torch.zeros(2, 4, dtype=torch.int64), ep_size=4)

    def test_rank_of_load(self):
        with pytest.raises(
            ValueError, match=r"load must be \[R, E\] or \[B, R, E\], got shape \(4,\)"
        ):
            solve(torch.zeros(4, dtype=torch.int64), ep_size=2)

    def test_negative(self):
        with pytest.raises(ValueError, match=r"load has a negative entry \(-3\)"):
            solve(torch.tensor([[1, -3], [0, 0]]), ep_size=2)

    def test_overflow(self):
        limit = (2**63 - 1) // 4
        with pytest.raises(ValueError, match=rf"entry of {limit + 1}; .* at most {limit}"):
            solve(torch.tensor([[limit + 1, 0], [0, 0]]), ep_size=2)

    @pytest.mark.parametrize("tolerance", [-0.1, float("nan"), float("inf"), 2e6])
    def test_tolerance(self, tolerance):
        with pytest.raises(ValueError, match=rf"tolerance \({tolerance}\) must be .*from 0 to"):
            solve(torch.zeros(2, 4, dtype=torch.int64), ep_size=2, tolerance=tolerance)

    def test_min_quota(self):
        with pytest.raises(ValueError, match=r"min_quota \(0\) must be >= 1"):
            solve(torch.zeros(2, 4, dtype=torch.int64), ep_size=2, min_quota=0)

    def test_unknown_strategy(self):
        with pytest.raises(
            ValueError,
            match="unknown strategy 'best'; known: craft, eplb, eplb_exact, exact, ideal, libra",
        ):
            solve(torch.zeros(2, 4, dtype=torch.int64), ep_size=2, strategy="best")

    def test_strategy_without_plans(self):
        with pytest.raises(
            ValueError,
            match="strategy 'ideal' makes no plans; planners: craft, eplb, eplb_exact, exact",
        ):
            solve(torch.zeros(2, 4, dtype=torch.int64), ep_size=2, strategy="ideal")


class TestCheckPlan:
    """Each rule of a legal plan, broken once."""

    def broken(self, *, quota=None, slots=None):
        plan = plan_for(worked_example().load, worked_example().layout)
        return BalancePlan(
            plan.layout,
            plan.quota if quota is None else torch.tensor(quota),
            plan.experts_in_slots if slots is None else torch.tensor(slots, dtype=torch.int32),
        )

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            (
                {"quota": [[5, 4], [3, 0], [0, 2], [0, 1]]},
                "quotas of expert 0 sum to 9; its load is 10",
            ),
            (
                {"quota": [[11, -1], [3, 0], [0, 2], [0, 1]], "slots": [[-1], [-1]]},
                r"\[0, 1\] is -1",
            ),
            (
                {"quota": [[5, 5], [2, 1], [0, 2], [0, 1]]},
                r"quota\[1, 1\] is 1; there is no instance",
            ),
            ({"slots": [[-1], [2]]}, "slot 0 of rank 1 holds expert 2; .*at most one"),
            ({"slots": [[-1], [4]]}, "slot 0 of rank 1 holds expert 4; .*0 to 3"),
            ({"slots": [[3], [0]]}, "slot 0 of rank 0 .*expert 3 .*quota of 0; min_quota is 1"),
            (
                {"quota": [[10, 0], [3, 0], [1, 1], [0, 1]], "slots": [[2], [-1]]},
                "busiest rank has 14",
            ),
            ({"quota": [[5, 5]]}, r"quota must be int64 \[4, 2\], got int64 \[1, 2\]"),
            ({"slots": [[-1, -1], [0, -1]]}, r"slots must be int32 \[2, 1\], got int32 \[2, 2\]"),
        ],
    )
    def test_a_broken_rule_is_named(self, changes, message):
        with pytest.raises(ValueError, match=message):
            check_plan(worked_example().load, self.broken(**changes))

    def test_domains(self):
        plan = self.broken()
        layout = ExpertLayout(num_experts=4, ep_size=2, slots=1, nvlink_domain=1)
        with pytest.raises(ValueError, match=r"slot 0 of rank 1 holds expert 0; .*NVLink domain"):
            check_plan(
                worked_example().load, BalancePlan(layout, plan.quota, plan.experts_in_slots)
            )

    def test_the_plan_itself_passes(self):
        check_plan(worked_example().load, self.broken())


@given(instance=instances())
def test_what_is_within_the_tolerance_is_left_alone(instance):
    plan = plan_for(instance.load, instance.layout, **instance.settings)
    target = target_load(
        int(instance.load.sum()), instance.layout.ep_size, round(instance.tolerance * 1e6)
    )
    if int(home_loads(instance.load).max()) <= target:
        assert plan.num_replicas() == 0
