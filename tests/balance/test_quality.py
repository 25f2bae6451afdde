"""How good the planner's plans are: against bounds, the published greedies, and exact optima.

The grid is that of the papers: 8192 tokens a rank with 8 choices each, Zipf-distributed experts.
Choices are drawn with and without replacement; the latter, as routers choose, for fewer tokens,
which are then counted 16 times.
"""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from megatron_ext.balance.bounds import lower_bound, replicas_lower_bound
from megatron_ext.balance.layout import ExpertLayout
from megatron_ext.balance.metrics import home_loads, imbalance, max_rank_sends
from megatron_ext.balance.plan import BalancePlan, check_plan, solve
from tests import workloads
from tests.balance.milp import least_busiest, least_replicas

PER_RANK = 8192 * 8
EP_SIZES = (8, 16, 32, 64)
GRID = list(itertools.product((64, 128, 256), (0.4, 0.8, 1.2), range(2)))
"""Experts, exponent of Zipf's law, seed."""


def one_domain(ranks: int, experts: int, slots: int) -> ExpertLayout:
    return ExpertLayout(num_experts=experts, ep_size=ranks, slots=slots, nvlink_domain=ranks)


def busiest(plan: BalancePlan) -> int:
    return int(plan.rank_loads().max())


def grid(ranks: int) -> list[Tensor]:
    return [workloads.zipf(ranks, experts, PER_RANK, a, seed) for experts, a, seed in GRID] + [
        16 * workloads.zipf_top_k(ranks, experts, 512, 8, a, seed) for experts, a, seed in GRID
    ]


@pytest.mark.parametrize("ranks", EP_SIZES)
def test_figures_of_the_grid(ranks: int) -> None:
    """Within 1 %, with few replicas, and in nothing behind Algorithm 1 of UltraEP."""
    ratios, plain_ratios, missed = [], [], []
    for load, slots in itertools.product(grid(ranks), (1, 2, 4)):
        layout = one_domain(ranks, load.shape[1], slots)
        plan = solve(load, ep_size=ranks, slots=slots)
        mean = int(load.sum()) / ranks
        if imbalance(plan.rank_loads()) > 1.01:
            missed.append((slots, imbalance(plan.rank_loads())))
        paper = solve(load, ep_size=ranks, slots=slots, strategy="quota_paper")
        assert busiest(plan) <= max(busiest(paper), 1.01 * mean)
        if busiest(paper) <= busiest(plan):
            assert plan.num_replicas() <= paper.num_replicas()
            assert max_rank_sends(plan) <= max_rank_sends(paper)
        if slots == 2:
            bound = replicas_lower_bound(load, layout, int(1.01 * mean))
            assert plan.num_replicas() >= bound
            ratios.append(plan.num_replicas() / bound)
            plain_ratios.append(plan.num_replicas() / counted_hosts(load, int(1.01 * mean)))
    # With one slot and 8 ranks there is one load with a plan within 1 % that is not found.
    assert len(missed) <= (1 if ranks == 8 else 0)
    assert all(slots == 1 and after <= 1.016 for slots, after in missed)
    limit = 1.15 if ranks >= 32 else 1.20
    assert sum(ratios) / len(ratios) <= limit
    # A weaker bound gives larger ratios; they stay near.
    assert sum(plain_ratios) / len(plain_ratios) <= limit + 0.06


def counted_hosts(load: Tensor, busiest: int) -> int:
    """The plainest bound: as many replicas as ranks with excess, and as roomy ranks needed."""
    excess = home_loads(load) - busiest
    rooms = (-excess).clamp(min=0).sort(descending=True).values.cumsum(0)
    needed = int((rooms < int(excess.clamp(min=0).sum())).sum()) + 1
    return max(int((excess > 0).sum()), needed)


def exact_fill(load: Tensor, ranks: int) -> int:
    """Replicas of MoonEP's plan: the most overloaded rank fills the roomiest one, and so on."""
    expert_load = load.sum(0).tolist()
    mains = len(expert_load) // ranks
    home = [sum(expert_load[r * mains : (r + 1) * mains]) for r in range(ranks)]
    mean, extra = divmod(sum(home), ranks)
    limit = [mean] * ranks
    for rank in sorted(range(ranks), key=lambda r: -home[r])[:extra]:
        limit[rank] += 1
    now, kept, replicas = list(home), list(expert_load), 0
    while any(own > most for own, most in zip(now, limit, strict=True)):
        giver = max(range(ranks), key=lambda r: now[r] - limit[r])
        taker = max(range(ranks), key=lambda r: limit[r] - now[r])
        while now[taker] < limit[taker]:
            hottest = max(range(giver * mains, (giver + 1) * mains), key=lambda e: kept[e])
            amount = min(kept[hottest], limit[taker] - now[taker])
            kept[hottest] -= amount
            now[giver] -= amount
            now[taker] += amount
            replicas += 1
    return replicas


@pytest.mark.parametrize("ranks", EP_SIZES)
def test_exact_is_even_and_needs_no_more_replicas_than_the_exact_fill(ranks: int) -> None:
    for load in grid(ranks):
        plan = solve(load, ep_size=ranks, strategy="exact")
        loads = plan.rank_loads()
        assert int(loads.max() - loads.min()) <= 1
        assert plan.num_replicas() <= exact_fill(load, ranks)
        assert plan.slots.shape == (ranks, load.shape[1] // ranks)


def nearly_cold(ranks: int, mains: int, cold: int, seed: int) -> Tensor:
    """The last ranks get nothing, the others about the same."""
    generator = torch.Generator().manual_seed(seed)
    load = workloads.cold_ranks(ranks, ranks * mains, PER_RANK, cold)
    noise = torch.randint(900, 1101, load.shape[1:], generator=generator)
    return load * noise // 1000


@pytest.mark.parametrize("share", [1 / 8, 1 / 4, 3 / 8])
@pytest.mark.parametrize(("ranks", "mains"), [(8, 2), (8, 4), (16, 2), (16, 4)])
def test_cold_ranks_come_within_two_percent_of_the_optimum(
    ranks: int, mains: int, share: float
) -> None:
    for load in (
        workloads.cold_ranks(ranks, ranks * mains, PER_RANK, int(share * ranks)),
        nearly_cold(ranks, mains, int(share * ranks), seed=1),
    ):
        plan = solve(load, ep_size=ranks, slots=2)
        check_plan(load, plan)
        optimum = least_busiest(load, plan.layout, time_limit_s=4)
        target = int(1.01 * int(load.sum()) / ranks)
        assert busiest(plan) <= max(1.02 * optimum, target)


@pytest.mark.parametrize("share", [1 / 8, 1 / 4, 3 / 8])
@pytest.mark.parametrize("mains", [1, 2, 4])
def test_many_cold_ranks_are_filled_where_the_slots_allow_it(share: float, mains: int) -> None:
    ranks = 64
    for load in (
        workloads.cold_ranks(ranks, ranks * mains, PER_RANK, int(share * ranks)),
        nearly_cold(ranks, mains, int(share * ranks), seed=2),
    ):
        plan = solve(load, ep_size=ranks, slots=2)
        bound = int(lower_bound(load, plan.layout))
        mean = int(load.sum()) / ranks
        # What cold ranks cannot hold stays where it is: that is the bound.
        assert busiest(plan) <= 1.02 * max(bound, mean)


SMALL = [
    (workloads.zipf(ranks, ranks * mains, 300, exponent, seed), slots, domain)
    for seed, (ranks, mains, slots, domain, exponent) in enumerate(
        [
            (4, 2, 1, 4, 1.0),
            (4, 3, 1, 2, 1.3),
            (6, 2, 1, 3, 0.8),
            (6, 1, 1, 6, 1.2),
            (6, 3, 2, 6, 1.5),
            (8, 2, 1, 8, 0.6),
            (8, 2, 2, 4, 1.0),
            (5, 2, 0, 5, 1.0),
        ]
    )
]


@pytest.mark.parametrize(("load", "slots", "domain"), SMALL)
def test_bounds_are_below_the_optimum_and_plans_close_above(
    load: Tensor, slots: int, domain: int
) -> None:
    ranks = load.shape[0]
    plan = solve(load, ep_size=ranks, slots=slots, nvlink_domain=domain, tolerance=0.0)
    optimum = least_busiest(load, plan.layout)
    assert int(lower_bound(load, plan.layout)) <= optimum <= busiest(plan)
    assert busiest(plan) <= 1.02 * optimum
    loose = solve(load, ep_size=ranks, slots=slots, nvlink_domain=domain, tolerance=0.05)
    fewest = least_replicas(load, plan.layout, busiest(loose))
    assert fewest is not None
    bound = replicas_lower_bound(load, plan.layout, busiest(loose))
    assert bound <= fewest <= loose.num_replicas() <= fewest + 1


def test_the_judge_knows_what_cannot_be() -> None:
    """The judge itself, on a case that can be done by hand."""
    load = torch.tensor([[6, 1, 1, 0], [4, 2, 1, 1]])
    layout = one_domain(2, 4, 1)
    assert least_busiest(load, layout) == 8
    assert least_replicas(load, layout, 8) == 1
    assert least_replicas(load, layout, 7) is None
    assert least_busiest(load, one_domain(2, 4, 0)) == 13


@pytest.mark.parametrize("tokens", [256, 512, 1024])
def test_few_tokens_and_one_slot(tokens: int) -> None:
    for exponent, seed in itertools.product((0.4, 0.8, 1.2), range(3)):
        load = workloads.zipf(64, 256, tokens * 8, exponent, seed)
        plan = solve(load, ep_size=64, slots=1)
        assert imbalance(plan.rank_loads()) <= 1.01


def test_small_domains_come_close_to_what_they_allow() -> None:
    for exponent in (0.4, 0.8, 1.2):
        load = workloads.zipf(64, 256, PER_RANK, exponent)
        plan = solve(load, ep_size=64, slots=2, nvlink_domain=8)
        check_plan(load, plan)
        bound = int(lower_bound(load, plan.layout))
        assert bound > 1.1 * int(load.sum()) / 64  # the domains are the limit here
        assert busiest(plan) <= 1.01 * bound


@pytest.mark.parametrize("min_quota", [16, 1024])
def test_min_quota_is_honoured_and_costs_little(min_quota: int) -> None:
    for load in grid(16):
        plan = solve(load, ep_size=16, slots=2, min_quota=min_quota)
        check_plan(load, plan, min_quota=min_quota)
        assert imbalance(plan.rank_loads()) <= 1.03


def test_the_largest_sizes() -> None:
    """512 ranks, 4096 experts, 16 slots, loads of 2**31 on one expert."""
    load = workloads.zipf(512, 4096, 4096, 0.8)
    load = load * (2**31 // int(load.sum(0).max()))
    plan = solve(load, ep_size=512, slots=16)
    assert torch.equal(plan.quota.sum(1), load.sum(0))
    assert int(plan.quota.min()) >= 0
    assert imbalance(plan.rank_loads()) <= 1.01
    instances = plan.physical_index() >= 0
    assert not bool(plan.quota[~instances].any())
    assert int(instances.sum()) == 4096 + plan.num_replicas()
    assert int(home_loads(load).max()) > 1.3 * int(load.sum()) / 512


def test_equal_plans_in_another_process() -> None:
    code = (
        "from megatron_ext.balance.plan import solve\n"
        "from tests import workloads\n"
        "load = workloads.zipf(16, 64, 5000, 1.1)\n"
        "print(*(solve(load, ep_size=16, slots=s).digest() for s in (1, 2)))"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    ).stdout
    load = workloads.zipf(16, 64, 5000, 1.1)
    assert [int(word) for word in output.split()] == [
        solve(load, ep_size=16, slots=slots).digest() for slots in (1, 2)
    ]
