"""The split over source ranks: exact sums, own tokens first, rows alone and all together."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.balance.batches import split_quota
from megatron_ext.balance.load import load_of
from megatron_ext.balance.plan import share_plan
from megatron_ext.balance.plan_metrics import remote_assignments
from megatron_ext.balance.solve import solve
from tests import workloads
from tests.balance.instances import instances, plan_for, worked_example


@given(instance=instances())
@settings(max_examples=150)
def test_rows_and_columns_are_exact_and_local_comes_first(instance):
    load = instance.load
    plan = plan_for(load, instance.layout, **instance.settings)
    split = split_quota(load, plan)
    assert (split >= 0).all()
    assert torch.equal(split.sum(2), load)
    assert torch.equal(split.sum(0), plan.quota)
    local = split.diagonal(dim1=0, dim2=2)  # [E, R]: what stays on its rank
    assert torch.equal(local, torch.minimum(load.T, plan.quota))
    assert int(load.sum() - local.sum()) == remote_assignments(load, plan)
    for source_rank in range(instance.layout.ep_size):
        shares = share_plan(source_rank, load, plan)
        assert torch.equal(shares.split, split[source_rank])
        assert torch.equal(split_quota(load, plan, source_rank), shares.split)
        assert torch.equal(shares.physical_index, plan.physical_index())
        first = source_rank * instance.layout.physical_per_rank
        arriving = torch.zeros_like(shares.arriving)
        for place in range(instance.layout.physical_per_rank):
            expert, rank = (shares.physical_index == first + place).nonzero().T
            assert (rank == source_rank).all()
            arriving[:, place] = split[:, expert, source_rank].sum(1)
        assert torch.equal(shares.arriving, arriving)
        assert torch.equal(shares.arrivals, torch.cat([arriving.sum(1), arriving.sum(0)]))


@given(instance=instances(), num_shards=st.integers(1, 4), seed=st.integers(0, 99))
@settings(max_examples=150)
def test_ranks_with_shards_of_the_same_experts_share_in_proportion(instance, num_shards, seed):
    ranks = instance.layout.ep_size
    factors = torch.randint(4, (ranks * num_shards, 1), generator=torch.manual_seed(seed))
    counts = instance.load.repeat_interleave(num_shards, 0) * factors
    load = load_of(counts, ranks)
    plan = plan_for(load, instance.layout, **instance.settings)
    shares = torch.stack([share_plan(rank, counts, plan).split for rank in range(len(counts))])
    assert (shares >= 0).all()
    assert torch.equal(shares.sum(2), counts)
    split = split_quota(load, plan)
    assert torch.equal(shares.unflatten(0, (ranks, num_shards)).sum(1), split)
    of_ep_rank = load.repeat_interleave(num_shards, 0).clamp(min=1)[..., None]
    even = split.repeat_interleave(num_shards, 0) * counts[..., None] / of_ep_rank
    # Every rank's turn rounds both ends of a piece.
    assert ((shares - even).abs() < 2 * num_shards).all()


def test_worked_example():
    instance = worked_example()
    plan = plan_for(instance.load, instance.layout)
    split = split_quota(instance.load, plan)
    assert split[0, 0].tolist() == [5, 1]
    assert split[1, 0].tolist() == [0, 4]
    assert remote_assignments(instance.load, plan) == 4


def test_residuals_meet_in_rank_order_with_the_home_rank_first():
    # Expert 2 lives on rank 1. Ranks 0 and 2 host replicas; only rank 3 has tokens for it.
    load = torch.zeros(4, 8, dtype=torch.int64)
    load[3, 2] = 12
    plan = solve(load, ep_size=4, slots=1, tolerance=0.0)
    assert plan.quota[2].tolist() == [3, 3, 3, 3]
    assert split_quota(load, plan, 3)[2].tolist() == [3, 3, 3, 3]
    load[3, 2], load[0, 2], load[2, 2] = 4, 4, 4
    plan = solve(load, ep_size=4, slots=1, tolerance=0.0)
    split = split_quota(load, plan)
    # Each source keeps 3; the left-over 1 of ranks 0, 2 and 3 fills the home's 3.
    assert split[:, 2].tolist() == [[3, 1, 0, 0], [0, 0, 0, 0], [0, 1, 3, 0], [0, 1, 0, 3]]


def test_a_source_rank_without_tokens_and_an_empty_load():
    load = workloads.zipf(4, 8, 100, 1.0)
    load[2] = 0
    plan = solve(load, ep_size=4)
    assert not split_quota(load, plan, 2).any()
    nothing = torch.zeros(4, 8, dtype=torch.int64)
    assert not split_quota(nothing, solve(nothing, ep_size=4)).any()


@pytest.mark.parametrize("source_rank", [-1, 2])
def test_wrong_source_rank(source_rank):
    instance = worked_example()
    plan = plan_for(instance.load, instance.layout)
    with pytest.raises(ValueError, match=rf"source_rank \({source_rank}\) must be from 0 to 1"):
        split_quota(instance.load, plan, source_rank)


def test_wrong_shapes():
    instance = worked_example()
    plan = plan_for(instance.load, instance.layout)
    with pytest.raises(ValueError, match=r"load must be .* quota \[E, R\], got \[2, 2\] and"):
        split_quota(instance.load[:, :2], plan)
    with pytest.raises(ValueError, match="load must be int64, got Int"):
        split_quota(instance.load.int(), plan)
