"""What every kind of generated load promises."""

import re

import numpy as np
import pytest
import torch

from megatron_ext.balance.metrics import home_loads, imbalance
from megatron_ext.lab.synthetic import (
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
    beyond = high * 1.02
    with pytest.raises(ValueError, match=rf"imbalance \({beyond}\) cannot be had"):
        generate("zipf", spec(imbalance=beyond, batch=1))
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
    with pytest.raises(ValueError, match="share is no setting of w0-balanced; it has none"):
        make_spec("w0-balanced", ranks=8, experts=32, share=0.5)


@pytest.mark.parametrize(
    ("kind", "needed"),
    [
        ("drift", 2),
        ("domain-shift", 2),
        ("cold-shift", 2),
        ("w6-rotating-hotspot", 4),
        ("w7-burst", 4),
    ],
)
def test_change_takes_several_loads(kind, needed):
    with pytest.raises(ValueError, match=rf"batch \({needed - 1}\) must be >= {needed} for {kind}"):
        generate(kind, spec(batch=needed - 1))
    loads = generate(kind, spec(batch=needed, by_chance=False))
    assert loads.trace["step"].tolist() == list(range(needed))
    assert not torch.equal(loads.load[0], loads.load[-1])


def test_kinds_have_defaults():
    assert make_spec("few-tokens", ranks=8, experts=32).tokens == 256
    assert make_spec("few-tokens", ranks=8, experts=32, tokens=1024).tokens == 1024
    assert make_spec("drift", ranks=8, experts=32).batch > 1
    assert make_spec("w5-zero-expert-rank", ranks=8, experts=32).share == 0.5
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


def test_cold_shift_changes_which_ranks_are_cold():
    cold = [home_loads(load) == 0 for load in generate("cold-shift", spec(share=0.5)).load]
    assert torch.equal(cold[0], cold[1])
    assert torch.equal(cold[2], ~cold[0])
    assert torch.equal(cold[3], ~cold[0])
    first, *_, last = generate("cold-shift", spec(share=0.25)).load
    assert ((home_loads(first) == 0).sum(), (home_loads(last) == 0).sum()) == (2, 2)
    assert not ((home_loads(first) == 0) & (home_loads(last) == 0)).any()


def test_log_normal_is_what_it_is_called():
    """Logarithms are linear in the exponent. One choice a token, so that no chance is cut at 1."""
    many = {"ranks": 1, "tokens": 2**20, "top_k": 1, "batch": 1, "by_chance": False}
    one, two = (
        generate("log-normal", spec(exponent=a, **many)).load.sum((0, 1)).double().log()
        for a in (1.0, 2.0)
    )
    # A count is rounded by less than 1, its logarithm by less than 1 / count; means add the same.
    rounding = 2 * float(2 * (-one.min()).exp() + (-two.min()).exp())
    assert rounding < 0.1
    torch.testing.assert_close(2 * (one - one.mean()), two - two.mean(), rtol=0, atol=rounding)
    # Of 32 normal numbers: five standard deviations of what is estimated.
    assert abs(float(one.std()) - 1) < 5 / (2 * 32) ** 0.5


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


@pytest.mark.parametrize("kind", ["zipf", "cold-ranks", "w0-balanced", "w5-zero-expert-rank"])
def test_without_chance_only_rounding_is_left(kind):
    (load,) = generate(kind, spec(by_chance=False, batch=1, exponent=0.0)).load
    alive = load[:, load.sum(0) > 0]
    assert int(alive.max() - alive.min()) <= 1
    assert int(alive.sum(0).max() - alive.sum(0).min()) <= 1
    assert load.sum(1).tolist() == [2048 * 4] * 8


def test_without_chance_a_wanted_imbalance_is_met():
    (load,) = generate("zipf", spec(by_chance=False, batch=1, imbalance=1.5)).load
    assert imbalance(home_loads(load)) == pytest.approx(1.5, rel=0.01)


def public(kind, **changes):
    """Expected loads of one of w0 to w7, up to rounding: of each expert, over its mean [B, E]."""
    given = {"ranks": 8, "experts": 32, "tokens": 2**14, "top_k": 4, "by_chance": False} | changes
    totals = generate(kind, make_spec(kind, **given)).load.sum(1).double()
    return totals / totals.mean(1, keepdim=True)


HOT = 3.25  # three quarters of the tokens on a quarter of the experts, and a quarter on all
COLD = 0.25


def assert_heat(found, wanted):
    """2 ** 17 tokens with 4 choices each are 2 ** 14 per expert: rounding is below 2 ** -14."""
    torch.testing.assert_close(found, wanted.double(), rtol=0, atol=2.0**-14)


def test_w0_has_no_skew_whatever_the_seed():
    assert_heat(public("w0-balanced"), torch.ones(1, 32))
    first, other = (
        generate("w0-balanced", make_spec("w0-balanced", ranks=8, experts=32, seed=seed)).load
        for seed in (1, 2)
    )
    assert torch.equal(first, other)


def test_w1_heats_a_quarter_of_the_experts():
    assert_heat(public("w1-hot-expert-set"), torch.tensor([[HOT] * 8 + [COLD] * 24]))


def test_w1_heats_as_many_as_a_token_chooses():
    hot, cold = public("w1-hot-expert-set", top_k=16)[0].split(16)
    assert_heat(hot, torch.full((16,), 0.75 * 2 + 0.25))
    assert_heat(cold, torch.full((16,), 0.25))


@pytest.mark.parametrize("name", ["w1-hot-expert-set", "w2-hot-rank", "w3-spread-hot-experts"])
def test_tokens_that_choose_all_experts_leave_none_hot(name):
    assert_heat(public(name, top_k=32), torch.ones(1, 32))


@pytest.mark.parametrize("ranks", [4, 8, 32])
def test_w2_heats_one_rank_as_w1_does(ranks):
    found = public("w2-hot-rank", ranks=ranks)[0]
    mains = 32 // ranks
    assert_heat(found[:mains], torch.full((mains,), HOT))
    others = (32 - HOT * mains) / (32 - mains)
    assert others > COLD or ranks == 4
    assert_heat(found[mains:], torch.full((32 - mains,), others))


@pytest.mark.parametrize("ranks", [1, 2])
def test_w2_is_w1_where_one_rank_has_all_hot_experts(ranks):
    first, second = (public(kind, ranks=ranks) for kind in ("w1-hot-expert-set", "w2-hot-rank"))
    assert torch.equal(first, second)


def test_w3_spreads_the_heat_of_w1():
    one, three = public("w1-hot-expert-set")[0], public("w3-spread-hot-experts")[0]
    assert_heat(three.sort().values, one.sort().values)
    assert_heat(three[::4], torch.full((8,), HOT))
    assert_heat(three.unflatten(0, (8, 4)).mean(1), torch.ones(8))
    assert_heat(one.unflatten(0, (8, 4)).mean(1), torch.tensor([HOT] * 2 + [COLD] * 6))


def test_w4_has_ragged_sources():
    loads = generate("w4-source-ragged", spec(tokens=700, batch=2, seed=1)).load
    rows = loads.sum(2)
    tokens = rows // 4
    assert tokens.sort().values.tolist() == [[0, 100, 200, 300, 400, 500, 600, 700]] * 2
    assert torch.equal(rows, tokens * 4)
    assert bool((loads <= tokens[..., None]).all())
    assert tokens[0].tolist() != sorted(tokens[0].tolist())
    other = generate("w4-source-ragged", spec(tokens=700, batch=1, seed=2)).load[0].sum(1) // 4
    assert not torch.equal(tokens[0], other)
    # Each rank's shares are rounded by themselves.
    totals = generate("w4-source-ragged", spec(tokens=700, by_chance=False)).load.sum(1)
    assert int(totals.max() - totals.min()) <= 8
    (alone,) = generate("w4-source-ragged", spec(ranks=1, tokens=700, batch=1)).load
    assert alone.sum().item() == 2800


@pytest.mark.parametrize(("share", "cold"), [(0.5, 4), (0.125, 1)])
def test_w5_leaves_experts_and_ranks_without_load(share, cold):
    wanted = torch.tensor([[0.0] * 4 * cold + [8 / (8 - cold)] * 4 * (8 - cold)])
    assert_heat(public("w5-zero-expert-rank", share=share), wanted)


def test_w5_of_an_odd_number_of_ranks_cuts_one_in_two():
    found = public("w5-zero-expert-rank", ranks=3, experts=12, top_k=3)[0]
    assert (found == 0).tolist() == [True] * 6 + [False] * 6


def test_w6_moves_after_every_third_step():
    hot = public("w6-rotating-hotspot", batch=13) > 1
    first = [int(step.nonzero()[0]) for step in hot]
    assert first == [0, 0, 0, 8, 8, 8, 16, 16, 16, 24, 24, 24, 0]
    for step, begin in zip(hot, first, strict=True):
        assert step.nonzero().flatten().tolist() == list(range(begin, begin + 8))
    assert_heat(public("w6-rotating-hotspot")[:1], public("w1-hot-expert-set"))


def test_w6_goes_on_from_the_first_expert():
    """Ten experts at a time of 32, as a token chooses ten."""
    hot = public("w6-rotating-hotspot", top_k=10)[9] > 1
    assert hot.nonzero().flatten().tolist() == [*range(8), 30, 31]


def test_w7_bursts_in_every_fourth_step():
    found = public("w7-burst")
    assert len(found) == 8
    for step, heat in enumerate(found):
        burst = [2.5] * 8 + [0.5] * 24
        assert_heat(heat, torch.tensor(burst if step in (3, 7) else [1.0] * 32))


@pytest.mark.parametrize("kind", sorted(kind for kind in KINDS if re.match(r"w\d-", kind)))
@pytest.mark.parametrize(
    ("ranks", "experts", "top_k"),
    [(2, 4, 1), (8, 64, 8), (9, 72, 8), (64, 64, 8), (72, 288, 8), (512, 512, 8), (512, 4096, 8)],
)
def test_public_kinds_at_all_sizes(kind, ranks, experts, top_k):
    loads = generate(
        kind, make_spec(kind, ranks=ranks, experts=experts, top_k=top_k, tokens=64, batch=4)
    ).load
    assert loads.shape == (4, ranks, experts)
    rows = loads.sum(2, keepdim=True)
    assert bool((rows % top_k == 0).all())
    assert bool((loads <= rows // top_k).all())
    assert int(rows.max()) == 64 * top_k
    assert int(rows.min()) == (0 if kind == "w4-source-ragged" else 64 * top_k)


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
        ({"imbalance": float("inf")}, r"imbalance \(inf\) must be a finite"),
        ({"imbalance": float("nan")}, r"imbalance \(nan\) must be a finite"),
        ({"share": 1.0}, r"share \(1.0\) must be > 0 and < 1"),
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
        ("cold-shift", {"share": 0.95}, r"share \(0.95\) of 8 ranks must be 1 to 7"),
        ("w5-zero-expert-rank", {"share": 0.1}, r"of 32 experts must be at least the 4 of a rank"),
        ("w5-zero-expert-rank", {"ranks": 1, "share": 0.5}, "must be at least the 32 of a rank"),
        ("w5-zero-expert-rank", {"share": 0.9}, r"leaves 3 experts for top_k \(4\) choices"),
    ],
)
def test_wrong_kinds(kind, changes, message):
    with pytest.raises(ValueError, match=message):
        generate(kind, spec(**changes))
