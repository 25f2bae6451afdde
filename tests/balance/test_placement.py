"""Placements before a run: replicas filled by strategy `craft`, slot limits of other planners."""

from itertools import combinations

import pytest
import torch
from hypothesis import given

from megatron_ext.balance.bounds import target_load
from megatron_ext.balance.layout import ExpertLayout
from megatron_ext.balance.metrics import home_loads
from megatron_ext.balance.placement import Placement
from megatron_ext.balance.solve import PlannerInOrder, solve
from megatron_ext.balance.strategies import PlanSettings
from megatron_ext.config import HistorySettings, LlepSettings
from megatron_ext.methods.craft import craft
from tests import workloads
from tests.balance.instances import instances, placement_for
from tests.balance.rules import check_plan

LAYOUT = ExpertLayout(num_experts=8, ep_size=4, slots=2, nvlink_domain=4)


def placement(*layers: list[list[int]]) -> Placement:
    """Of layers 1, 2, ... on 4 ranks with 2 mains each."""
    expert_load = torch.ones(len(layers), 8, dtype=torch.int64)
    placed = torch.tensor(layers, dtype=torch.int32)
    return Placement(tuple(range(1, len(layers) + 1)), placed, expert_load)


def least_busiest(load, placed, layout) -> int:
    """By the theorem of Hall: any ranks have to compute what no other rank can."""
    ranks = range(layout.ep_size)
    hosts = {expert: {layout.home_rank(expert)} for expert in range(layout.num_experts)}
    for rank, held in enumerate(placed.tolist()):
        for expert in held:
            if expert >= 0:
                hosts[expert].add(rank)
    expert_load = load.sum(0).tolist()
    least = 0
    for count in range(1, layout.ep_size + 1):
        for some in combinations(ranks, count):
            theirs = sum(expert_load[e] for e, on in hosts.items() if on <= set(some))
            least = max(least, -(-theirs // count))
    return least


@given(instance=instances())
def test_the_busiest_rank_is_the_least_busy_that_replicas_allow(instance):
    load, layout = instance.load, instance.layout
    placed = placement_for(layout).replicas(0, layout)
    settings = PlanSettings(tolerance=instance.tolerance, min_quota=1)
    plan = craft.share(load, placed, layout, settings)
    check_plan(load, plan)
    target = target_load(int(load.sum()), layout.ep_size, round(instance.tolerance * 1e6))
    least = least_busiest(load, placed, layout)
    busiest = int(plan.rank_loads().max())
    assert busiest <= max(target, least)
    assert busiest >= least
    assert ((plan.experts_in_slots == -1) | (plan.experts_in_slots == placed)).all()


def test_assignments_pass_through_ranks_that_are_neither_busy_nor_idle():
    """Rank 0 has 12 + 0, rank 1 has 6, rank 2 has 0: only e0 on rank 1 and e1 on rank 2 are copied.

    The mean is 6. Rank 0 sheds 6 to rank 1, which sheds its own 6 to rank 2.
    """
    layout = ExpertLayout(num_experts=3, ep_size=3, slots=1, nvlink_domain=3)
    load = torch.tensor([[12, 6, 0], [0, 0, 0], [0, 0, 0]])
    placed = torch.tensor([[-1], [0], [1]], dtype=torch.int32)
    plan = craft.share(load, placed, layout, PlanSettings(tolerance=0.0))
    assert plan.quota.tolist() == [[6, 6, 0], [0, 0, 6], [0, 0, 0]]


def test_replicas_below_the_least_quota_are_left_out():
    layout = ExpertLayout(num_experts=2, ep_size=2, slots=1, nvlink_domain=2)
    load, placed = torch.tensor([[7, 1], [0, 0]]), torch.tensor([[-1], [0]], dtype=torch.int32)
    for min_quota, quota in ((3, [[4, 3], [0, 1]]), (4, [[7, 0], [0, 1]])):
        settings = PlanSettings(tolerance=0.0, min_quota=min_quota)
        assert craft.share(load, placed, layout, settings).quota.tolist() == quota


def test_each_layer_has_its_replicas():
    both = placement([[2, -1], [-1, 0], [-1, -1], [-1, -1]], [[-1, -1]] * 4)
    settings = PlanSettings(placement=both, tolerance=0.0)
    load = torch.zeros(4, 8, dtype=torch.int64)
    load[:, 0] = 100
    held = [
        PlannerInOrder("craft", LAYOUT, settings, layer=layer).solve(load).experts_in_slots
        for layer in (1, 2)
    ]
    # Rank 0's slot for expert 2, which has no load, stays empty.
    assert held[0].tolist() == [[-1, -1], [0, -1], [-1, -1], [-1, -1]]
    assert (held[1] == -1).all()


@pytest.mark.parametrize("strategy", ["quota", "eplb", "eplb_exact", "llep"])
def test_other_planners_keep_to_a_layers_slots(strategy):
    """Two, one and no slots in three layers; the plans have the slots of the layout."""
    limits = placement(
        [[2, 3], [0, -1], [-1, -1], [-1, -1]],
        [[2, -1], [-1, -1], [0, -1], [-1, -1]],
        [[-1, -1]] * 4,
    )
    settings = PlanSettings(
        placement=limits,
        tolerance=0.0,
        sections=(HistorySettings(interval=1), LlepSettings(alpha=1.0, min_tokens_per_gemm=1)),
    )
    loads = torch.stack([workloads.zipf(4, 8, 400, 1.5, seed) for seed in (1, 1)])
    used = []
    for layer in (1, 2, 3):
        plans = PlannerInOrder(strategy, LAYOUT, settings, layer=layer).plan_in_order(loads)
        assert plans.layout == LAYOUT
        assert plans.experts_in_slots.shape == (2, 4, 2)
        for load, plan in zip(loads, plans.unbatch(), strict=True):
            check_plan(load, plan)
        used.append(int((plans.experts_in_slots >= 0).sum(-1).max()))
    # `quota` and `llep` fill no slot that they can do without.
    assert used in ([2, 1, 0], [1, 1, 0])
    assert used[0] == 2 or not strategy.startswith("eplb")
    assert torch.equal(plans.rank_loads(), home_loads(loads))


@pytest.mark.parametrize(
    ("layer", "changed", "message"),
    [
        (3, {}, "the placement has no layer 3; it has 1"),
        (1, {"num_experts": 16}, r"for 8 experts on 4 ranks, the layer has 16 on 4"),
        (1, {"slots": 1}, r"needs 2 slots in layer 1, there are 1"),
        (1, {"nvlink_domain": 2}, r"expert 4 on rank 0, outside the NVLink domain of .* rank 2"),
    ],
)
def test_placements_that_do_not_fit(layer, changed, message):
    sizes = {"num_experts": 8, "ep_size": 4, "slots": 2, "nvlink_domain": 4} | changed
    given_ = placement([[4, 2], [-1, -1], [-1, -1], [-1, -1]])
    with pytest.raises(ValueError, match=message):
        PlannerInOrder("craft", ExpertLayout(**sizes), PlanSettings(placement=given_), layer=layer)


def test_craft_without_a_placement():
    with pytest.raises(ValueError, match="'craft' needs a placement: `megatron-ext place craft`"):
        solve(torch.ones(2, 4, dtype=torch.int64), ep_size=2, strategy="craft")
