"""The generated workloads are what their names say; numbers against their definitions."""

import pytest
import torch

from megatron_ext.balance.metrics import home_loads, imbalance
from megatron_ext.lab.synthetic import generate, make_spec
from tests import workloads

RANKS, EXPERTS, PER_RANK = 4, 16, 1000

LOADS = {
    "uniform": lambda seed: workloads.uniform(RANKS, EXPERTS, PER_RANK, seed),
    "zipf": lambda seed: workloads.zipf(RANKS, EXPERTS, PER_RANK, 1.2, seed),
    "power_law": lambda seed: workloads.power_law(RANKS, EXPERTS, PER_RANK, 1.0, seed),
    "one_hot_expert": lambda seed: workloads.one_hot_expert(RANKS, EXPERTS, PER_RANK, 5),
    "given_imbalance": lambda seed: workloads.given_imbalance(RANKS, EXPERTS, PER_RANK, 2.0, seed),
    "cold_ranks": lambda seed: workloads.cold_ranks(RANKS, EXPERTS, PER_RANK, 1),
}


@pytest.mark.parametrize("name", LOADS)
def test_every_source_rank_has_its_assignments(name):
    load = LOADS[name](0)
    assert load.dtype == torch.int64
    assert load.shape == (RANKS, EXPERTS)
    assert (load >= 0).all()
    assert load.sum(1).tolist() == [PER_RANK] * RANKS
    assert torch.equal(load, LOADS[name](0))


@pytest.mark.parametrize("name", ["uniform", "zipf", "power_law", "given_imbalance"])
def test_another_seed_is_another_load(name):
    assert not torch.equal(LOADS[name](0), LOADS[name](1))


def test_skew_grows_with_the_parameter():
    def hottest(load):
        return int(load.sum(0).max())

    flat, mild, steep = (workloads.zipf(RANKS, EXPERTS, PER_RANK, s) for s in (0.0, 0.8, 1.6))
    assert hottest(flat) < hottest(mild) < hottest(steep)
    assert hottest(workloads.power_law(RANKS, EXPERTS, PER_RANK, 5.0)) < hottest(
        workloads.power_law(RANKS, EXPERTS, PER_RANK, 0.5)
    )


def test_zipf_follows_its_weights():
    load = workloads.zipf(1, 4, 100_000, 1.0).sum(0).sort(descending=True).values
    expected = 100_000 / torch.tensor([1.0, 2.0, 3.0, 4.0]) / (1 + 1 / 2 + 1 / 3 + 1 / 4)
    # Five standard deviations of a binomial count are below 5 * sqrt(100_000 / 4).
    assert (load - expected).abs().max() < 5 * (100_000 / 4) ** 0.5


@pytest.mark.parametrize("wanted", [1.0, 1.3, 2.0, 3.5, 4.0])
def test_given_imbalance_is_met_up_to_rounding(wanted):
    load = workloads.given_imbalance(RANKS, EXPERTS, PER_RANK, wanted)
    # Each of the busy rank's experts is rounded by less than 1 per source rank.
    rounding = EXPERTS * 1.0 / PER_RANK
    assert abs(imbalance(home_loads(load)) - wanted) <= rounding


def test_given_imbalance_rejects_the_impossible():
    with pytest.raises(
        ValueError, match=r"imbalance \(5.0\) must be from 1 to the number of ranks"
    ):
        workloads.given_imbalance(RANKS, EXPERTS, PER_RANK, 5.0)


def test_cold_ranks_are_cold():
    assert home_loads(workloads.cold_ranks(RANKS, EXPERTS, 1200, 1)).tolist() == [
        1600,
        1600,
        1600,
        0,
    ]


def test_one_hot_expert_is_alone():
    assert workloads.one_hot_expert(RANKS, EXPERTS, PER_RANK, 5).sum(0).nonzero().tolist() == [[5]]


def test_routing_map_rows():
    chosen = workloads.routing_map(50, 8, 3)
    assert chosen.dtype == torch.bool
    assert chosen.sum(1).tolist() == [3] * 50
    assert workloads.routing_map(0, 8, 3).shape == (0, 8)


def test_zipf_top_k_chooses_different_experts():
    load = workloads.zipf_top_k(4, 16, 300, 3, 1.2, seed=1)
    assert load.sum(1).tolist() == [900] * 4
    assert int(load.max()) <= 300
    assert torch.equal(load, workloads.zipf_top_k(4, 16, 300, 3, 1.2, seed=1))
    counts = load.sum(0).sort(descending=True).values
    assert int(counts[0]) > 3 * int(counts[-1])


def test_of_kind_has_the_defaults_of_the_kind():
    spec = make_spec("w6-rotating-hotspot", ranks=8, experts=32, tokens=64, seed=3)
    load = workloads.of_kind("w6-rotating-hotspot", 8, 32, tokens=64, seed=3)
    assert load.shape == (12, 8, 32)
    assert torch.equal(load, generate("w6-rotating-hotspot", spec).load)


@pytest.mark.parametrize(("ranks", "experts"), [(8, 8), (8, 64), (72, 288), (512, 512)])
def test_hard_loads_are_loads(ranks, experts):
    top_k = max(min(8, experts // 8), 1)
    loads = dict(workloads.hard_loads(ranks, experts, tokens=128))
    for name, load in loads.items():
        tokens = load.sum(1, keepdim=True) // top_k
        assert (load.dtype, load.shape) == (torch.int64, (ranks, experts)), name
        assert bool((load.sum(1, keepdim=True) == tokens * top_k).all()), name
        assert bool(((load >= 0) & (load <= tokens)).all()), name
        cold = int((home_loads(load) == 0).sum())
        for text, share in (("1/8", 8), ("1/4", 4), ("1/2", 2)):
            if name.startswith(f"cold {text}") and "zipf" not in name:
                assert cold == ranks // share, name
    assert [load.sum(1).unique().numel() > 1 for load in loads.values()].count(True) == 1
    assert loads["few tokens, 64"].sum(1).tolist() == [64 * top_k] * ranks
    assert loads["few tokens, 256"].sum(1).tolist() == [256 * top_k] * ranks


def test_hard_loads_have_the_same_names_at_all_sizes():
    names = [name for name, _ in workloads.hard_loads(8, 16, tokens=8)]
    assert len(names) == len(set(names))
    assert names == [name for name, _ in workloads.hard_loads(64, 256, tokens=8)]
    assert {name[:2] for name in names} >= {f"W{number}" for number in range(8)}


def test_hard_loads_repeat_with_the_seed():
    first, same, other = (
        torch.stack([load for _, load in workloads.hard_loads(8, 64, seed, tokens=256)])
        for seed in (1, 1, 2)
    )
    assert torch.equal(first, same)
    changed = (first != other).flatten(1).any(1)
    assert changed.tolist() == [name != "W0 balanced" for name, _ in workloads.hard_loads(8, 64)]


def test_hard_loads_of_too_few_ranks():
    with pytest.raises(ValueError, match=r"share \(0.125\) of .* must be"):
        list(workloads.hard_loads(2, 64))
