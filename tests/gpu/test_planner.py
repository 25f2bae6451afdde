"""The planner and the assignment on a GPU: bit by bit as on the host, and replayed from a graph."""

import pytest
import torch
from hypothesis import given
from hypothesis import settings as runs

from megatron_ext import ops
from megatron_ext.balance.batches import split_quota
from megatron_ext.balance.costs import LayerCosts
from megatron_ext.balance.plan import BalancePlan, Shares, share_plan
from megatron_ext.balance.reroute import assign, reroute
from megatron_ext.balance.solve import solve
from tests import workloads
from tests.balance.instances import instances, plan_for
from tests.gpu.sanitizer import SANITIZERS, needs_sanitizer, sanitize

pytestmark = pytest.mark.gpu

SIZES = [
    # ranks, experts, slots, domain
    (1, 4, 2, 1),
    (8, 64, 1, 8),
    (16, 64, 2, 4),
    (32, 256, 4, 32),
    (64, 256, 2, 64),
    (64, 256, 2, 8),
    (128, 1024, 16, 128),
]


def assert_equal_plans(host, device):
    assert torch.equal(host.quota, device.quota.cpu())
    assert torch.equal(host.experts_in_slots, device.experts_in_slots.cpu())


@pytest.mark.parametrize(("ranks", "experts", "slots", "domain"), SIZES)
@pytest.mark.parametrize("tolerance", [0.0, 0.01, 0.2])
@pytest.mark.parametrize("min_quota", [1, 40])
def test_plans_equal_the_host(ranks, experts, slots, domain, tolerance, min_quota):
    load = torch.stack(
        [workloads.zipf(ranks, experts, 2000, exponent) for exponent in (0.3, 0.8, 1.3)]
        + [workloads.cold_ranks(ranks, experts, 2000, cold=ranks // 3)]
    )
    options = {"slots": slots, "nvlink_domain": domain, "tolerance": tolerance}
    host, device = (
        solve(where, ep_size=ranks, min_quota=min_quota, **options) for where in (load, load.cuda())
    )
    assert_equal_plans(host, device)


@pytest.mark.parametrize(("ranks", "experts", "slots"), [(8, 64, 1), (64, 256, 2), (72, 288, 2)])
@pytest.mark.parametrize("scale", [1, 2**20])
def test_plans_of_hard_loads_equal_the_host(ranks, experts, slots, scale):
    """Searches that spend their budget; with amounts beyond 32 bits too."""
    load = scale * torch.stack([load for _, load in workloads.hard_loads(ranks, experts)])
    host, device = (solve(where, ep_size=ranks, slots=slots) for where in (load, load.cuda()))
    assert_equal_plans(host, device)


@pytest.mark.parametrize(("ranks", "experts", "slots", "domain"), SIZES)
@pytest.mark.parametrize("expert_bytes", [0, 10_000_000, 100_000_000])
def test_fastest_plans_equal_the_host(ranks, experts, slots, domain, expert_bytes):
    load = torch.stack(
        [workloads.zipf(ranks, experts, 2000, exponent) for exponent in (0.3, 0.8, 1.3)]
        + [workloads.cold_ranks(ranks, experts, 2000, cold=ranks // 3)]
    )
    costs = LayerCosts(
        expert_bytes=expert_bytes, link_bandwidth=4e11, assignment_time=1e-6, token_bytes=8192
    )
    options = {"slots": slots, "nvlink_domain": domain, "costs": costs}
    host, device = (solve(where, ep_size=ranks, **options) for where in (load, load.cuda()))
    assert_equal_plans(host, device)


@pytest.mark.parametrize(("ranks", "experts", "slots", "domain"), SIZES)
def test_splits_equal_the_host(ranks, experts, slots, domain):
    load = workloads.zipf(ranks, experts, 2000, 1.0)
    plan = solve(load, ep_size=ranks, slots=slots, nvlink_domain=domain)
    there = BalancePlan(plan.layout, plan.quota.cuda(), plan.experts_in_slots.cuda())
    for source in (0, ranks // 2, ranks - 1):
        shares = share_plan(source, load.cuda(), there)
        assert torch.equal(split_quota(load, plan, source), shares.split.cpu())


@given(instance=instances(max_ranks=8))
@runs(max_examples=100)
def test_small_plans_equal_the_host(instance):
    host, device = (
        plan_for(load, instance.layout, **instance.settings)
        for load in (instance.load, instance.load.cuda())
    )
    assert_equal_plans(host, device)
    for source, split in enumerate(split_quota(instance.load, host)):
        assert torch.equal(split, share_plan(source, instance.load.cuda(), device).split.cpu())


def test_loads_beyond_32_bits():
    load = workloads.zipf(64, 256, 4096, 1.0) * 2**33
    assert_equal_plans(solve(load, ep_size=64), solve(load.cuda(), ep_size=64))


@pytest.mark.parametrize("domain", [1, 2])
def test_more_loads_than_a_launch_takes(domain):
    load = torch.stack([workloads.zipf(2, 4, 50, 1.0, seed) for seed in range(1200)])
    options = {"ep_size": 2, "slots": 1, "nvlink_domain": domain}
    assert_equal_plans(solve(load, **options), solve(load.cuda(), **options))


def case(tokens, experts, ranks, top_k, seed=0):
    maps = [workloads.routing_map(tokens, experts, top_k, seed + r) for r in range(ranks)]
    load = torch.stack([routed.sum(0) for routed in maps])
    return maps[0], load, solve(load, ep_size=ranks, slots=2)


@pytest.mark.parametrize(
    ("tokens", "experts", "ranks", "top_k"),
    [(0, 8, 2, 2), (1, 8, 2, 1), (33, 24, 4, 3), (1000, 256, 8, 8), (8192, 256, 8, 8)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_tokens_go_where_the_host_sends_them(tokens, experts, ranks, top_k, dtype):
    routed, load, plan = case(tokens, experts, ranks, top_k)
    outcomes = []
    for device in ("cpu", "cuda"):
        there = BalancePlan(plan.layout, plan.quota.to(device), plan.experts_in_slots.to(device))
        # As from a gathered load, with a column more.
        rows = torch.cat([load, load[:, :1]], 1).to(device)[:, :-1]
        shares = share_plan(0, rows, there)
        assignment = assign(routed.to(device), shares, top_k)
        of_tables = assign(routed.to(device), Shares(shares.split, shares.physical_index), top_k)
        assert torch.equal(of_tables.physical, assignment.physical)
        probs = (
            torch.rand(routed.shape, generator=torch.Generator().manual_seed(1)) + 0.1
        ) * routed
        probs = probs.to(device, dtype).requires_grad_()
        placed, routing = reroute(probs, routed.to(device), shares, top_k, plan.layout.num_physical)
        (placed * placed).sum().backward()
        values = (assignment.logical, assignment.physical, placed.detach(), routing, probs.grad)
        outcomes.append([value.cpu() for value in values])
    for host, device in zip(*outcomes, strict=True):
        assert torch.equal(host, device)


def test_choices_beyond_shares_or_rows_are_left_out():
    routed, load, plan = case(1000, 24, 4, 3)
    shares, ids = split_quota(load, plan, 0), plan.physical_index()
    whole = assign(routed, Shares(shares, ids), 3)
    narrow = assign(routed.cuda(), Shares(shares.cuda(), ids.cuda()), 2)
    assert torch.equal(narrow.logical.cpu(), whole.logical[:, :2])
    assert torch.equal(narrow.physical.cpu(), whole.physical[:, :2])

    fewer = (shares - 1).clamp(min=0)
    some = assign(routed.cuda(), Shares(fewer.cuda(), ids.cuda()), 3)
    assert torch.equal(some.logical < 0, some.physical < 0)
    taken = torch.bincount(
        some.physical[some.physical >= 0].cpu(), minlength=plan.layout.num_physical
    )
    expected = torch.zeros_like(taken)
    expected[ids[fewer > 0]] = fewer[fewer > 0]
    assert torch.equal(taken, expected)


def test_tensors_on_two_devices_are_rejected():
    routed, load, plan = case(8, 8, 2, 2)
    shares = split_quota(load, plan, 0)
    with pytest.raises(ValueError, match="on one device, got cuda:0 and cpu"):
        assign(routed.cuda(), Shares(shares, plan.physical_index()), 2)
    with pytest.raises(ValueError, match="on one device, got cpu and cuda:0"):
        share_plan(
            0, load, BalancePlan(plan.layout, plan.quota.cuda(), plan.experts_in_slots.cuda())
        )


@pytest.mark.parametrize(("ranks", "experts", "slots", "domain"), SIZES)
def test_seals_equal_the_host(ranks, experts, slots, domain):
    load = workloads.zipf(ranks, experts, 2000, 1.0)
    plan = solve(load, ep_size=ranks, slots=slots, nvlink_domain=domain)
    gathered = torch.zeros(ranks, experts + 1, dtype=torch.int64)
    seals = []
    for wrong in ([], [ranks - 1]):
        gathered[wrong, -1] = 6
        for device in ("cpu", "cuda"):
            difference = torch.zeros(2 + ranks, dtype=torch.int64, pin_memory=device == "cuda")
            tensors = [
                one.to(device) for one in (load, plan.quota, plan.experts_in_slots, gathered)
            ]
            seal = torch.zeros(1, dtype=torch.int64, device=device)
            torch.ops.megatron_ext.share_and_seal(*tensors[:3], 0, tensors[3], 3, difference, seal)
            seals.append(seal.item())
            is_different = bool(wrong) and ranks > 1
            assert difference.tolist() == (
                [1, 3, *gathered[:, -1].tolist()] if is_different else [0] * (2 + ranks)
            )
    assert len(set(seals)) == 1


def test_a_tail_goes_behind_the_counts():
    routed = workloads.routing_map(300, 33, 3)
    counts, _ = torch.ops.megatron_ext.count_load(routed.cuda(), torch.tensor([-7], device="cuda"))
    assert counts.tolist() == [*routed.sum(0).tolist(), -7]


@pytest.mark.parametrize(
    "settings",
    [{}, {"costs": LayerCosts(expert_bytes=10**7, link_bandwidth=4e11, assignment_time=1e-7)}],
    ids=["tolerance", "time"],
)
def test_replay_of_a_graph_follows_the_load(settings):
    ops.load_library()
    native = torch.ops.megatron_ext
    maps = [[workloads.routing_map(2048, 64, 4, 8 * s + r) for r in range(8)] for s in range(3)]
    routed = maps[0][0].cuda()
    others = torch.stack([one.sum(0) for one in maps[0]]).cuda()

    def plan_and_assign():
        load = others.clone()
        load[0], marks = native.count_load(routed)
        plan = solve(load, ep_size=8, slots=2, **settings)
        return plan, assign(routed, share_plan(0, load, plan), 4, marks)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        plan_and_assign()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan, assignment = plan_and_assign()
    for step in maps:
        routed.copy_(step[0])
        others.copy_(torch.stack([one.sum(0) for one in step]))
        graph.replay()
        torch.cuda.synchronize()
        load = torch.stack([one.sum(0) for one in step])
        expected = solve(load, ep_size=8, slots=2, **settings)
        assert_equal_plans(expected, plan)
        on_host = assign(step[0], share_plan(0, load, expected), 4)
        assert torch.equal(on_host.physical, assignment.physical.cpu())


ALONE = (
    "test_plans_equal_the_host[1-0.01-64-256-2-64]",
    "test_splits_equal_the_host[8-64-1-8]",
    "test_seals_equal_the_host[8-64-1-8]",
    "test_a_tail_goes_behind_the_counts",
    "test_choices_beyond_shares_or_rows_are_left_out",
)
"""Kernels of one rank that wait for nobody: planning, shares, seals, counts, reroute."""


@needs_sanitizer
@pytest.mark.parametrize("tool", SANITIZERS)
def test_sanitizers_find_nothing(tool):
    sanitize(tool, *(f"{__file__}::{test}" for test in ALONE))
