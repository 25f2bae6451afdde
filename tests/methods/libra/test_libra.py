"""Libra's placement and sharding by hand; its top-up for any prediction, and beside the optimum.

Layer 1. Compared with worked examples, the paper's two algorithms line by line, `check_plan`, the
quota planner, and all splits of small loads.
"""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.balance.layout import ExpertLayout
from megatron_ext.balance.metrics import home_loads
from megatron_ext.balance.predictions import replica_use
from megatron_ext.balance.solve import PlannerInOrder, solve
from megatron_ext.balance.strategies import get_strategy, quota
from megatron_ext.balance.strategies.strategy import PlanSettings
from megatron_ext.config import LibraSettings
from megatron_ext.methods.craft import craft
from megatron_ext.methods.libra import libra, libra_paper
from tests import workloads
from tests.balance.instances import instances
from tests.balance.rules import check_plan

# Homes: e0 e1 on rank 0, e2 e3 on rank 1, e4 e5 on rank 2. Rank loads at home 1, 14, 9; mean 8.
LOAD = torch.tensor([[0, 0, 2, 0, 6, 0], [1, 0, 6, 1, 0, 0], [0, 0, 5, 0, 2, 1]])
LAYOUT = ExpertLayout(num_experts=6, ep_size=3, slots=2, nvlink_domain=3)
PLACED = [[4, 2], [0, -1], [2, -1]]


def layout(ranks, mains, slots=1, domain=None):
    return ExpertLayout(
        num_experts=ranks * mains, ep_size=ranks, slots=slots, nvlink_domain=domain or ranks
    )


def slots_of(*rows):
    return torch.tensor(rows, dtype=torch.int32)


class TestPlace:
    def test_both_phases(self):
        """As in the paper's Figure 6, rank 0 takes e4 for its own tokens, and later e2 by load.

        First each rank takes what it asks for most: e4, e0 and e2. Rank loads are 6, 10, 8. Rank 1
        computes 2 of e2 for others; rank 0 has room for its own 2 of them.
        """
        assert libra.place(LOAD, LAYOUT, PlanSettings()).tolist() == PLACED

    def test_locality_alone(self):
        asked = PlanSettings(sections=(LibraSettings(locality_share=1.0),))
        assert libra.place(LOAD, LAYOUT, asked).tolist() == [[4, 2], [0, -1], [2, -1]]

    def test_load_alone(self):
        """Rank loads 1, 14, 9: e2 to rank 0, now 3, 12, 9; then rank 2 has no room for e2."""
        placed = libra.place(
            LOAD, LAYOUT, PlanSettings(sections=(LibraSettings(locality_share=0.0),))
        )
        assert placed.tolist() == [[2, -1], [-1, -1], [-1, -1]]

    def test_share_is_rounded_down(self):
        asked = PlanSettings(sections=(LibraSettings(locality_share=0.99),))
        assert libra.place(LOAD, layout(3, 2, slots=1), asked).tolist() == [[2], [-1], [-1]]

    def test_replicas_stay_in_their_domain(self):
        load = torch.tensor([[0, 0, 0, 9], [0, 0, 9, 0], [0, 5, 0, 0], [5, 0, 0, 0]])
        placed = libra.place(
            load,
            layout(4, 1, domain=2),
            PlanSettings(sections=(LibraSettings(locality_share=1.0),)),
        )
        assert placed.tolist() == [[-1]] * 4

    def test_nothing_is_asked_for(self):
        assert (libra.place(LOAD * 0, LAYOUT, PlanSettings()) == -1).all()


class TestSharding:
    def test_local_assignments_stay(self):
        plan = libra_paper.share(LOAD, slots_of(*PLACED), LAYOUT, PlanSettings(tolerance=0.0))
        assert plan.quota.tolist() == [
            *([0, 1, 0], [0, 0, 0], [2, 6, 5]),
            *([0, 1, 0], [6, 0, 2], [0, 0, 1]),
        ]

    def test_remote_assignments_move_up_to_the_mean(self):
        """Mean 4. Rank 0 computes 12 of e0 for ranks 2 and 3; rank 1 has room for 3 of them."""
        load = torch.tensor([[0, 0, 0, 0], [0, 1, 0, 0], [6, 0, 1, 0], [6, 0, 0, 2]])
        plan = libra_paper.share(
            load, slots_of([-1], [0], [-1], [-1]), layout(4, 1), PlanSettings(tolerance=0.0)
        )
        assert plan.quota[0].tolist() == [9, 3, 0, 0]

    def test_the_hottest_expert_moves_first(self):
        """Mean 5. Rank 0 computes 6 of e0 and 4 of e1 for rank 2; rank 1 has both, room for 3."""
        load = torch.tensor([[0, 0, 0, 0, 0, 0], [0, 0, 2, 0, 0, 0], [6, 4, 0, 0, 3, 0]])
        placed = slots_of([-1, -1], [0, 1], [-1, -1])
        plan = libra_paper.share(load, placed, LAYOUT, PlanSettings(tolerance=0.0))
        assert plan.quota[:2].tolist() == [[3, 3, 0], [4, 0, 0]]

    def test_a_rank_keeps_its_own_assignments_however_busy(self):
        """Only remote assignments are shared: e0 is asked for by its home rank alone."""
        load = torch.tensor([[10, 0], [0, 2]])
        plan = libra_paper.share(load, slots_of([-1], [0]), layout(2, 1), PlanSettings())
        assert (plan.rank_loads().tolist(), plan.num_replicas()) == ([10, 2], 0)
        assert libra.share(
            load, slots_of([-1], [0]), layout(2, 1), PlanSettings()
        ).rank_loads().tolist() == [6, 6]

    @pytest.mark.parametrize(("tolerance", "after"), [(0.34, [8, 5, 5]), (0.33, [7, 6, 5])])
    def test_within_the_tolerance_nothing_moves(self, tolerance, after):
        """Mean 6, busiest 8; rank 1 has an instance of e0 and room for 1 of the 4 from rank 2."""
        load = torch.tensor([[4, 0, 0], [0, 5, 0], [4, 0, 5]])
        where, placed = layout(3, 1), slots_of([-1], [0], [-1])
        near = PlanSettings(tolerance=tolerance)
        assert libra_paper.share(load, placed, where, near).rank_loads().tolist() == after

    def test_a_placement_that_makes_it_worse_is_not_used(self):
        """Rank 1 is the busy one, and would take its own 5 of e0 on top."""
        load = torch.tensor([[1, 0], [5, 7]])
        plan = libra_paper.share(load, slots_of([-1], [0]), layout(2, 1), PlanSettings())
        assert plan.rank_loads().tolist() == [6, 7]


class TestTopUp:
    def test_a_hit_needs_nothing_else(self):
        plan = libra.share(LOAD, slots_of(*PLACED), LAYOUT, PlanSettings(tolerance=0.0))
        assert plan.rank_loads().tolist() == [8, 8, 8]
        assert {k: int(v) for k, v in replica_use(slots_of(*PLACED), plan).items()} == {
            "hit_replicas": 2,
            "topped_up_replicas": 0,
            "wasted_replicas": 2,
        }

    def test_what_was_missed_is_added_in_a_free_slot(self):
        """Rank 1 has 14, and 6 too many; rank 0 has e4 only, which takes 1 from rank 2."""
        placed = slots_of([4, -1], [-1, -1], [-1, -1])
        plan = libra.share(LOAD, placed, LAYOUT, PlanSettings(tolerance=0.0))
        assert plan.rank_loads().tolist() == [8, 8, 8]
        assert plan.experts_in_slots.tolist() == [[4, 2], [-1, -1], [-1, -1]]

    def test_what_is_added_carries_most(self):
        """Rank 0 has 12, and 6 too many: all of them e0's, where e1 has only 4."""
        load = torch.tensor([[8, 4, 0, 0], [0, 0, 0, 0]])
        empty = torch.full((2, 2), -1, dtype=torch.int32)
        plan = libra.share(load, empty, layout(2, 2, slots=2), PlanSettings(tolerance=0.0))
        assert plan.quota.tolist() == [[2, 6], [4, 0], [0, 0], [0, 0]]
        assert plan.experts_in_slots.tolist() == [[-1, -1], [0, -1]]

    def test_an_empty_slot_is_filled_before_an_unused_one(self):
        load = torch.tensor([[12, 0, 0, 0], [0, 0, 0, 0]])
        placed = slots_of([-1, -1], [1, -1])
        plan = libra.share(load, placed, layout(2, 2, slots=2), PlanSettings(tolerance=0.0))
        assert plan.experts_in_slots.tolist() == [[-1, -1], [-1, 0]]

    def test_too_little_for_a_replica_goes_home(self):
        """In pieces of 3 the best is 4 and 6: to move only the 1 that is above 6 is no plan."""
        load = torch.tensor([[7, 0, 0, 0], [0, 0, 2, 1]])
        settings = PlanSettings(tolerance=0.0, min_quota=3)
        plan = libra.share(load, slots_of([-1], [0]), layout(2, 2), settings)
        check_plan(load, plan, min_quota=3)
        assert plan.rank_loads().tolist() == [4, 6]

    def test_chain_through_placed_replicas(self):
        """Rank 0 sheds e0 to rank 1, which sheds e1 to rank 2."""
        load = torch.tensor([[9, 0, 0], [0, 6, 0], [0, 0, 3]])
        placed = slots_of([-1], [0], [1])
        plan = libra.share(load, placed, layout(3, 1), PlanSettings(tolerance=0.0))
        assert plan.quota.tolist() == [[6, 3, 0], [0, 3, 3], [0, 0, 3]]
        assert plan.experts_in_slots.tolist() == placed.tolist()

    def test_without_prediction(self):
        empty = torch.full((3, 2), -1, dtype=torch.int32)
        plan = libra.share(LOAD, empty, LAYOUT, PlanSettings(tolerance=0.0))
        assert plan.rank_loads().tolist() == [8, 8, 8]


def algorithm_1(load, where, share):
    """Experts in the slots of each rank by the paper's Algorithm 1, every load counted anew."""
    ranks, mains, at_most = range(where.ep_size), where.mains_per_rank, where.slots
    extra = [set() for _ in ranks]

    def served_elsewhere(rank, expert):
        return rank != expert // mains and expert in extra[rank]

    def remote(expert):
        home = expert // mains
        sources = [r for r in ranks if r != home and not served_elsewhere(r, expert)]
        return sum(load[r][expert] for r in sources)

    def total(rank):
        own = [*range(rank * mains, (rank + 1) * mains), *extra[rank]]
        here = sum(load[rank][expert] for expert in own)
        return here + sum(remote(e) for e in own if e // mains == rank)

    for first in range(0, where.ep_size, where.nvlink_domain):
        group = range(first, first + where.nvlink_domain)
        experts = range(group.start * mains, group.stop * mains)
        for rank in group:
            away = [e for e in experts if e // mains != rank and load[rank][e] > 0]
            hottest = sorted(away, key=lambda e, rank=rank: -load[rank][e])
            extra[rank] = set(hottest[: math.floor(at_most * share)])
        balanced = sum(map(total, group)) / len(group)
        for _ in range(at_most * len(group)):
            source = max(group, key=total)
            if total(source) <= balanced:
                break
            expert = max(range(source * mains, (source + 1) * mains), key=remote)
            hosts = [r for r in group if r != source and expert not in extra[r]]
            hosts = [r for r in hosts if len(extra[r]) < at_most and remote(expert) > 0]
            target = min(hosts, key=total, default=None)
            if target is not None and total(target) + load[target][expert] <= balanced:
                extra[target].add(expert)
    return extra


def algorithm_2(load, slots, where, tolerance):
    """Quotas by the paper's Algorithm 2, within each domain and with the mean rounded up."""
    ranks, mains = range(where.ep_size), where.mains_per_rank
    experts = range(where.num_experts)
    has = [[e // mains == r or e in slots[r] for r in ranks] for e in experts]
    local = [[load[r][e] if has[e][r] else 0 for r in ranks] for e in experts]
    remote = [[0 for _ in ranks] for _ in experts]
    for e in experts:
        remote[e][e // mains] = sum(load[r][e] for r in ranks if not has[e][r])

    def total(rank):
        return sum(local[e][rank] + remote[e][rank] for e in experts)

    for first in range(0, where.ep_size, where.nvlink_domain):
        group = range(first, first + where.nvlink_domain)
        mean = sum(map(total, group)) / len(group)
        goal, moved = math.ceil(mean), True
        while moved and max(map(total, group)) > (1 + tolerance) * mean:
            moved = False
            for source in sorted((r for r in group if total(r) > goal), key=lambda r: -total(r)):
                for e in sorted(experts, key=lambda e, source=source: -remote[e][source]):
                    hosts = [r for r in group if r != source and has[e][r]]
                    target = min(hosts, key=total, default=None)
                    if remote[e][source] == 0 or target is None or total(target) >= goal:
                        continue
                    amount = min(remote[e][source], goal - total(target))
                    remote[e][source] -= amount
                    remote[e][target] += amount
                    moved = True
                    break
    return [[local[e][r] + remote[e][r] for r in ranks] for e in experts]


@given(first=instances(), data=st.data())
@settings(max_examples=200)
def test_the_papers_algorithms(first, data):
    share = data.draw(st.sampled_from([0.0, 0.5, 1.0]))
    asked = PlanSettings(tolerance=first.tolerance, sections=(LibraSettings(locality_share=share),))
    placed = libra.place(first.load, first.layout, asked)
    found = [set(row) - {-1} for row in placed.tolist()]
    assert found == algorithm_1(first.load.tolist(), first.layout, share)
    mixed = data.draw(st.permutations(range(first.layout.num_experts)))
    for load in (first.load, first.load[:, mixed]):
        quota_ER = torch.tensor(algorithm_2(load.tolist(), found, first.layout, first.tolerance))
        if quota_ER.sum(0).max() <= home_loads(load).max():
            plan = libra_paper.share(load, placed, first.layout, asked)
            assert torch.equal(plan.quota, quota_ER)


@pytest.mark.parametrize("strategy", ["libra", "libra_paper"])
@given(first=instances(), data=st.data())
@settings(max_examples=150)
def test_plans_from_any_prediction_are_legal(strategy, first, data):
    """What was placed for one load is legal, and not worse than nothing, for any other."""
    planner = get_strategy(strategy).planner
    share = data.draw(st.sampled_from([0.0, 0.5, 1.0]))
    asked = PlanSettings(**first.settings, sections=(LibraSettings(locality_share=share),))
    placed = planner.place(first.load, first.layout, asked)
    mixed = data.draw(st.permutations(range(first.layout.num_experts)))
    load = first.load[:, mixed]
    plan = planner.share(load, placed, first.layout, asked)
    check_plan(load, plan, min_quota=first.min_quota)
    assert plan.rank_loads().max() <= home_loads(load).max()
    assert torch.equal(plan.quota, planner.share(load, placed, first.layout, asked).quota)
    use = replica_use(placed, plan)
    assert use["hit_replicas"] + use["topped_up_replicas"] == plan.num_replicas()
    if strategy == "libra_paper":
        assert use["topped_up_replicas"] == 0
    else:
        even = quota.solve(load, first.layout, asked).rank_loads().max()
        within = load.sum() * (1 + first.tolerance) / first.layout.ep_size
        assert plan.rank_loads().max() <= max(even, within.ceil())
        # Nothing is pushed again that is there already, only in another slot.
        hits = ((placed >= 0) & (placed == plan.experts_in_slots)).sum(1).tolist()
        for there, held, mine in zip(
            placed.tolist(), plan.experts_in_slots.tolist(), hits, strict=True
        ):
            assert mine == len(set(held) & set(there) - {-1})


def test_the_split_over_placed_replicas_is_optimal():
    """No other split over the same replicas has a lower busiest rank, by trying all of them."""
    torch.manual_seed(0)
    where, placed = layout(3, 1), slots_of([2], [0], [1])
    for _ in range(20):
        own = torch.randint(0, 9, (3,)).tolist()
        load = torch.diag(torch.tensor(own))
        plan = craft.share(load, placed, where, PlanSettings(tolerance=0.0))
        best = min(
            max(own[0] - x + z, own[1] - y + x, own[2] - z + y)
            for x in range(own[0] + 1)
            for y in range(own[1] + 1)
            for z in range(own[2] + 1)
        )
        assert plan.rank_loads().max() == best
        assert replica_use(placed, plan)["topped_up_replicas"] == 0


def test_a_batch_is_predicted_by_its_loads_in_order():
    loads = torch.stack([workloads.zipf(4, 16, 300, 1.0, seed) for seed in (0, 1, 1)])
    batch = solve(loads, ep_size=4, slots=2, strategy="libra").unbatch()
    where = layout(4, 4, slots=2)
    empty = torch.full((4, 2), -1, dtype=torch.int32)
    expected = [libra.share(loads[0], empty, where, PlanSettings())]
    for before, load in pairwise(loads):
        placed = libra.place(before, where, PlanSettings())
        expected.append(libra.share(load, placed, where, PlanSettings()))
    assert [plan.digest() for plan in batch] == [plan.digest() for plan in expected]
    assert solve(loads[:0], ep_size=4, slots=2, strategy="libra").quota.shape == (0, 16, 4)


def test_expect_checks_the_prediction():
    planner = PlannerInOrder("libra", LAYOUT, PlanSettings())
    assert (planner.expect_in_order() == -1).all()
    with pytest.raises(TypeError, match="int64"):
        planner.expect(LOAD.float())
    with pytest.raises(ValueError, match=r"\[3, 6\]"):
        planner.expect(LOAD[:, :4])


@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan")])
def test_locality_share_out_of_range(share):
    with pytest.raises(ValueError, match=r"locality_share \(.*\) must be .*from 0 to 1"):
        PlanSettings(sections=(LibraSettings(locality_share=share),))
