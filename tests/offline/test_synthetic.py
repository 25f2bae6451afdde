"""What every kind of generated load promises."""

import re

import numpy as np
import pytest
import torch

from megatron_ext.balance.metrics import home_loads, imbalance
from megatron_ext.offline.synthetic import (
    KINDS,
    LoadSpec,
    chances,
    generate,
    make_spec,
    place_on_line,
)


def spec(**changes):
    return LoadSpec(**{"ranks": 8, "experts": 32, "tokens": 2048, "top_k": 4, "batch": 4} | changes)


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"w4-source-ragged"}))
def test_every_token_makes_its_choices(kind):
    load = generate(kind, spec()).load
    assert load.shape == (4, 8, 32)
    assert load.dtype == torch.int64
    assert bool((load.sum(-1) == 2048 * 4).all())
    assert int(load.max()) <= 2048
    assert int(load.min()) >= 0
    # Ranks differ by chance only.
    assert not torch.equal(load[:, 0], load[:, 1])
    shares = load.double() / load.sum((1, 2), keepdim=True)
    assert float((shares * 8 - shares.sum(1, keepdim=True)).abs().max()) < 0.02


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_seeds(kind):
    first, same, other = (generate(kind, spec(seed=seed)).load for seed in (1, 1, 2))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(
    "kind", sorted(name for name, kind in KINDS.items() if "imbalance" in kind.settings)
)
@pytest.mark.parametrize("wanted", [1.5, 1.8])
@pytest.mark.parametrize("tokens", [256, 8192])
def test_target_imbalance(kind, wanted, tokens):
    """Each load has it, chance included: of 256 tokens that alone would be several percent."""
    loads = generate(kind, spec(tokens=tokens, imbalance=wanted, seed=3)).load
    for load in loads:
        assert imbalance(home_loads(load)) == pytest.approx(wanted, rel=0.01)
        assert load.sum(1).tolist() == [tokens * 4] * 8


def test_unreachable_imbalance_names_the_range():
    with pytest.raises(ValueError, match=r"imbalance \(7.9\) cannot be had within 1%") as caught:
        generate("zipf", spec(imbalance=7.9, batch=1))
    low, high = map(float, re.search(r"give (.*) to (.*), nearest", str(caught.value)).groups())
    for wanted in (low, high):
        load = generate("zipf", spec(imbalance=wanted, batch=1)).load[0]
        assert imbalance(home_loads(load)) == pytest.approx(wanted, rel=0.01)
    with pytest.raises(ValueError, match="cannot be had"):
        generate("zipf", spec(imbalance=high * 1.02, batch=1))
    # So few tokens are never as even as that.
    with pytest.raises(ValueError, match=r"give 1\.0[0-9]+ to [0-9.]+, nearest 1\.0") as caught:
        generate("zipf", spec(imbalance=1.0, tokens=64))
    nearest = float(str(caught.value).split()[-1])
    load = generate("zipf", spec(imbalance=nearest, tokens=64, batch=1)).load[0]
    assert imbalance(home_loads(load)) == pytest.approx(nearest, rel=0.01)
    # The steepest: every token chooses all experts of the hot rank.
    hottest = generate("hot-rank", spec(imbalance=8.0, batch=1)).load[0]
    assert imbalance(home_loads(hottest)) == pytest.approx(8.0, rel=0.01)


def test_settings_that_mean_nothing_are_refused():
    with pytest.raises(ValueError, match="imbalance is no setting of drift; it has exponent"):
        generate("drift", spec(imbalance=2.0))
    with pytest.raises(ValueError, match="imbalance is no setting of drift"):
        make_spec("drift", ranks=8, experts=32, imbalance=2.0)
    with pytest.raises(ValueError, match="share is no setting of zipf; it has exponent, imbalance"):
        make_spec("zipf", ranks=8, experts=32, share=0.5)
    with pytest.raises(ValueError, match=r"batch \(1\) must be >= 2 for domain-shift"):
        generate("domain-shift", spec(batch=1))


def test_kinds_have_defaults():
    assert make_spec("few-tokens", ranks=8, experts=32).tokens == 256
    assert make_spec("few-tokens", ranks=8, experts=32, tokens=1024).tokens == 1024
    assert make_spec("drift", ranks=8, experts=32).batch > 1
    assert make_spec("zipf", ranks=8, experts=32) == LoadSpec(ranks=8, experts=32)


def test_steeper_is_more_uneven():
    flat, steep = (generate("zipf", spec(exponent=a)).load.sum(1) for a in (0.0, 1.2))
    assert float(flat.max() / flat.min()) < 1.2
    assert float(steep.max() / steep.min()) > 5


def test_hot_rank():
    for load in generate("hot-rank", spec(imbalance=2.5, tokens=65536)).load:
        loads = home_loads(load).double().sort(descending=True).values
        assert float(loads[0] / loads.mean()) == pytest.approx(2.5, rel=0.01)
        assert float(loads[1] / loads[-1]) < 1.02


def test_cold_ranks_get_nothing():
    for load in generate("cold-ranks", spec(share=0.25)).load:
        assert int((home_loads(load) == 0).sum()) == 2


def test_dead_experts_get_nothing_of_rounding():
    generator = np.random.default_rng(0)
    for _ in range(200):
        is_dead = np.arange(20) % 3 == 1
        is_dead[-4:] = True
        line = place_on_line(np.where(is_dead, 0.0, generator.random(20)), 7)
        assert line[-1] == 7
        assert ((np.diff(line) == 0) == is_dead).all()


def test_dead_experts_get_nothing():
    for load in generate("dead-experts", spec(share=0.5)).load:
        assert int((load.sum(0) == 0).sum()) == 16


def test_drift_is_smooth_and_goes_far():
    loads = generate("drift", spec(batch=32, tokens=65536))
    shares = loads.load.sum(1).double() / loads.load[0].sum()
    steps = (shares[1:] - shares[:-1]).abs().sum(1)
    assert float(steps.max()) < 0.25
    assert float((shares[-1] - shares[0]).abs().sum()) > 3 * float(steps.max())
    assert loads.trace["step"].tolist() == list(range(32))
    assert set(loads.trace) == {"step", "microbatch", "layer"}


def test_domain_shift_happens_once():
    shares = generate("domain-shift", spec(batch=6, tokens=65536)).load.sum(1).double()
    steps = (shares[1:] - shares[:-1]).abs().sum(1) / shares[0].sum()
    assert int(steps.argmax()) == 2
    assert float(steps[2]) > 10 * float(steps[[0, 1, 3, 4]].max())


def test_chances_are_in_proportion_and_at_most_one():
    popularity = np.array([100.0, 10.0, 2.0, 1.0, 0.0])
    assert chances(popularity, 1).tolist() == pytest.approx((popularity / 113).tolist())
    assert chances(popularity, 2).tolist() == pytest.approx([1, 10 / 13, 2 / 13, 1 / 13, 0])
    assert chances(popularity, 3).tolist() == pytest.approx([1, 1, 2 / 3, 1 / 3, 0])
    assert chances(popularity, 4).tolist() == [1, 1, 1, 1, 0]


def test_large_sizes():
    load = generate("zipf", LoadSpec(ranks=512, experts=4096, seed=1)).load
    assert load.shape == (1, 512, 4096)
    assert bool((load.sum(-1) == 65536).all())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ranks": 0}, r"ranks \(0\) must be >= 1"),
        ({"experts": 30}, r"experts \(30\) must be a multiple of ranks \(8\)"),
        ({"top_k": 33}, r"top_k \(33\) must be <= experts \(32\)"),
        ({"tokens": 0}, r"tokens \(0\) must be >= 1"),
        ({"exponent": -1.0}, r"exponent \(-1.0\) must be from 0"),
        ({"seed": -1}, r"seed \(-1\) must be >= 0"),
        ({"imbalance": 0.9}, r"imbalance \(0.9\) must be from 1 to the number of ranks \(8\)"),
        ({"imbalance": float("inf")}, r"imbalance \(inf\) must be from 1"),
        ({"imbalance": float("nan")}, r"imbalance \(nan\) must be from 1"),
        ({"share": 1.0}, r"share \(1.0\) must be between 0 and 1"),
    ],
)
def test_wrong_specs(changes, message):
    with pytest.raises(ValueError, match=message):
        spec(**changes)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("heap", {}, "unknown kind 'heap'; known: cold-ranks, cold-shift"),
        ("cold-ranks", {"share": 0.01}, r"share \(0.01\) of 8 ranks must be 1 to 7"),
        ("dead-experts", {"share": 0.95}, r"leaves 2 experts for top_k \(4\) choices"),
    ],
)
def test_wrong_kinds(kind, changes, message):
    with pytest.raises(ValueError, match=message):
        generate(kind, spec(**changes))
