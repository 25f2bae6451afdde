"""Assignment against `reference.assign`, token by token; gradients against the routing itself."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.balance.batches import split_quota
from megatron_ext.balance.layout import ExpertLayout
from megatron_ext.balance.plan import Shares
from megatron_ext.balance.reroute import RoutingMaps, assign, reroute
from tests import reference, workloads
from tests.balance.instances import plan_for


def make_case(ranks=3, mains=2, slots=2, tokens=(20, 0, 13), top_k=2, seed=0, dtype=torch.float64):
    """Routing maps and probabilities of all ranks, and the plan for them."""
    experts = ranks * mains
    maps = [workloads.routing_map(n, experts, top_k, seed + r) for r, n in enumerate(tokens)]
    load = torch.stack([routed.sum(0) for routed in maps])
    layout = ExpertLayout(num_experts=experts, ep_size=ranks, slots=slots, nvlink_domain=ranks)
    plan = plan_for(load, layout, tolerance=0.0)
    generator = torch.Generator().manual_seed(seed)
    probs = [(torch.rand(m.shape, generator=generator) + 0.1).to(dtype) * m for m in maps]
    return maps, probs, load, plan


def shares_of(plan, load, rank):
    return Shares(split_quota(load, plan, rank), plan.physical_index())


def assigned(plan, load, rank, routed, top_k=2):
    return assign(routed, shares_of(plan, load, rank), top_k)


def rerouted(plan, load, rank, probs, routed, maps, top_k=2):
    shares = shares_of(plan, load, rank)
    return reroute(probs, routed, shares, top_k, plan.layout.num_physical, maps=maps)


def run(plan, load, rank, probs, routed):
    return rerouted(plan, load, rank, probs, routed, None)


@given(
    ranks=st.integers(1, 4),
    mains=st.integers(1, 3),
    slots=st.integers(0, 3),
    tokens=st.lists(st.integers(0, 25), min_size=4, max_size=4),
    top_k=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
@settings(max_examples=100)
def test_equals_the_reference_and_meets_the_quotas(ranks, mains, slots, tokens, top_k, seed):
    top_k = min(top_k, ranks * mains)
    maps, probs, load, plan = make_case(ranks, mains, slots, tokens[:ranks], top_k, seed)
    physical_index = plan.physical_index()
    arrived = torch.zeros(plan.layout.num_physical, dtype=torch.int64)
    for rank, (routed, prob) in enumerate(zip(maps, probs, strict=True)):
        assignment = assigned(plan, load, rank, routed, top_k)
        logical, physical = reference.assign(
            routed.int().tolist(), split_quota(load, plan, rank).tolist(), physical_index.tolist()
        )
        for table, expected in ((assignment.logical, logical), (assignment.physical, physical)):
            assert table.dtype == torch.int32
            assert table.tolist() == [row + [-1] * (top_k - len(row)) for row in expected]
        probs_NP, routing_NP = rerouted(plan, load, rank, prob, routed, None, top_k)
        assert routing_NP.dtype == torch.bool
        # Rows keep their number of choices and their probabilities, bit by bit.
        assert torch.equal(routing_NP.sum(1), routed.sum(1))
        assert torch.equal(probs_NP.sort(1).values[:, -top_k:], prob.sort(1).values[:, -top_k:])
        assert torch.equal(probs_NP != 0, routing_NP)
        arrived += routing_NP.sum(0)
    placed = physical_index >= 0
    assert torch.equal(arrived[physical_index[placed]], plan.quota[placed])
    assert int(arrived.sum()) == int(plan.quota.sum())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_probabilities_keep_their_dtype_and_bits(dtype):
    maps, probs, load, plan = make_case(dtype=dtype)
    probs_NP, routing_NP = run(plan, load, 0, probs[0], maps[0])
    assert probs_NP.dtype == dtype
    # Row-wise order differs between the two spaces, so compare each row as a sorted list.
    assert torch.equal(
        probs_NP[routing_NP].view(-1, 2).sort(1).values,
        probs[0][maps[0]].view(-1, 2).sort(1).values,
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_gradients_come_back_over_the_same_table(dtype):
    maps, probs, load, plan = make_case(dtype=dtype)
    for rank, (routed, prob) in enumerate(zip(maps, probs, strict=True)):
        prob = prob.requires_grad_()
        probs_NP, routing_NP = run(plan, load, rank, prob, routed)
        # A gradient of a different whole number for every place of the output.
        grad_NP = torch.arange(1, probs_NP.numel() + 1).view_as(probs_NP).to(dtype) * routing_NP
        (grad_NE,) = torch.autograd.grad(probs_NP, prob, grad_NP)
        physical_index = plan.physical_index()
        expected = torch.zeros_like(prob)
        for n, e in routed.nonzero().tolist():
            instances = physical_index[e][physical_index[e] >= 0]
            expected[n, e] = grad_NP[n, instances].sum()  # one of them is the token's, the others 0
        assert torch.equal(grad_NE, expected)


def test_gradcheck():
    maps, probs, load, plan = make_case(tokens=(5, 3, 4))
    assert torch.autograd.gradcheck(
        lambda p: run(plan, load, 0, p, maps[0])[0], probs[0].requires_grad_()
    )


def test_no_tokens():
    maps, probs, load, plan = make_case(tokens=(20, 0, 13))
    prob = probs[1].requires_grad_()
    probs_NP, routing_NP = run(plan, load, 1, prob, maps[1])
    assert probs_NP.shape == routing_NP.shape == (0, plan.layout.num_physical)
    probs_NP.sum().backward()
    assert prob.grad.shape == prob.shape


def test_a_plan_of_another_microbatch_is_noticed():
    _, _, load, plan = make_case(seed=0)
    other_maps, other_probs, other_load, _ = make_case(seed=100)
    assert not torch.equal(load[0], other_load[0])
    with pytest.raises(RuntimeError, match="not the same microbatch"):
        run(plan, load, 0, other_probs[0], other_maps[0])
    # Fewer tokens than the plan was made for, which only the sums show.
    with pytest.raises(RuntimeError, match="not the same microbatch"):
        assigned(plan, load, 0, torch.zeros_like(other_maps[0]))


def test_more_choices_than_top_k_are_noticed():
    maps, _, load, plan = make_case(top_k=2)
    with pytest.raises(RuntimeError, match=r"more than top_k \(1\) choices"):
        assigned(plan, load, 0, maps[0], top_k=1)


@pytest.mark.parametrize("shares", [(50, 50), (70, 30), (34, 33, 33), (97, 1, 1, 1)])
def test_consecutive_tokens_are_spread_over_the_instances(shares):
    """In every stretch of tokens an instance has its share, give or take a few."""
    ranks, tokens = len(shares), sum(shares)
    routed = torch.zeros(tokens, ranks, dtype=torch.bool)
    routed[:, 0] = True
    quota = torch.zeros(ranks, ranks, dtype=torch.int64)
    quota[0] = torch.tensor(shares)
    physical_index = torch.arange(ranks * ranks).view(ranks, ranks)
    physical = assign(routed, Shares(quota, physical_index), top_k=1).physical[:, 0]
    for instance, share in enumerate(shares):
        taken = (physical == instance).cumsum(0)
        assert int(taken[-1]) == share
        even = torch.arange(1, tokens + 1) * share / tokens
        assert float((taken - even).abs().max()) <= 4


class TestRoutingMaps:
    def test_the_same_memory_is_written_again(self):
        maps, probs, load, plan = make_case()
        memory = RoutingMaps()
        first, _ = rerouted(plan, load, 0, probs[0], maps[0], memory)
        place, kept = first.data_ptr(), first.clone()
        again, routing = rerouted(plan, load, 0, probs[0], maps[0], memory)
        assert again.data_ptr() == place
        assert torch.equal(again, kept)
        fewer, routing = rerouted(plan, load, 2, probs[2], maps[2], memory)
        assert fewer.data_ptr() == place
        expected, expected_routing = run(plan, load, 2, probs[2], maps[2])
        assert torch.equal(fewer, expected)
        assert torch.equal(routing, expected_routing)

    def test_it_grows_and_follows_the_dtype(self):
        maps, probs, load, plan = make_case()
        memory = RoutingMaps()
        for rank in (1, 2, 0):
            expected, _ = run(plan, load, rank, probs[rank], maps[rank])
            assert torch.equal(
                rerouted(plan, load, rank, probs[rank], maps[rank], memory)[0], expected
            )
        single = rerouted(plan, load, 0, probs[0].float(), maps[0], memory)[0]
        assert single.dtype == torch.float32

    def test_gradients_of_successive_microbatches(self):
        """What an earlier microbatch saved of its own is not what is overwritten."""
        maps, probs, load, plan = make_case()
        memory = RoutingMaps()
        for _ in range(2):
            prob = probs[0].clone().requires_grad_()
            placed, _ = rerouted(plan, load, 0, prob, maps[0], memory)
            (placed * placed).sum().backward()
            assert torch.equal(prob.grad, 2 * probs[0] * maps[0])
