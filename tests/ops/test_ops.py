"""The native ops against `reference`, bit by bit; their registration against Torch's checks."""

import pytest
import torch
from hypothesis import given, settings

from megatron_ext import ops
from megatron_ext.balance.batches import split_quota
from megatron_ext.balance.layout import ExpertLayout
from megatron_ext.balance.solve import solve
from tests import reference, workloads
from tests.balance.instances import instances, worked_example

ops.load_library()
native = torch.ops.megatron_ext


SOLVERS = ("solve_quota", "solve_paper", "solve_shipped")


def more_of(solver, min_quota):
    """What that solver takes beside the others' arguments."""
    return {"search_min_quota": 4 * min_quota} if solver == "solve_shipped" else {}


def solve_both(solver, load, layout, tolerance_ppm, min_quota):
    expected = getattr(reference, solver)(
        load.tolist(),
        num_slots=layout.slots,
        nvlink_domain=layout.nvlink_domain,
        tolerance_ppm=tolerance_ppm,
        min_quota=min_quota,
        **more_of(solver, min_quota),
    )
    quota, slots = getattr(native, solver)(
        load,
        layout.slots,
        layout.nvlink_domain,
        tolerance_ppm,
        min_quota,
        **more_of(solver, min_quota),
    )
    return (quota, slots), expected


@pytest.mark.parametrize("solver", SOLVERS)
@given(instance=instances(max_ranks=8))
@settings(max_examples=300)
def test_solve_equals_the_reference(solver, instance):
    (quota, slots), expected = solve_both(
        solver, instance.load, instance.layout, round(instance.tolerance * 1e6), instance.min_quota
    )
    assert (quota.dtype, slots.dtype) == (torch.int64, torch.int32)
    assert (quota.tolist(), slots.tolist()) == expected
    split = native.split_quota(instance.load, quota, None)
    assert split.tolist() == reference.split_quota(instance.load.tolist(), quota.tolist())


# More than 16 ranks: below that many equal loads, an unstable sort can pass for a stable one.
RANKS, EXPERTS, PER_RANK = 32, 64, 4096
LARGE = {
    "uniform": workloads.uniform(RANKS, EXPERTS, PER_RANK),
    "zipf": workloads.zipf(RANKS, EXPERTS, PER_RANK, 1.2),
    "power_law": workloads.power_law(RANKS, EXPERTS, PER_RANK, 0.8),
    "one_hot_expert": workloads.one_hot_expert(RANKS, EXPERTS, PER_RANK, expert=63),
    "given_imbalance": workloads.given_imbalance(RANKS, EXPERTS, PER_RANK, 3.0),
    "cold_ranks": workloads.cold_ranks(RANKS, EXPERTS, PER_RANK, cold=8),
}


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("domain", [4, 32])
def test_solve_equals_the_reference_on_workloads(solver, name, slots, domain):
    layout = ExpertLayout(num_experts=EXPERTS, ep_size=RANKS, slots=slots, nvlink_domain=domain)
    (quota, held), expected = solve_both(solver, LARGE[name], layout, 10_000, 16)
    assert (quota.tolist(), held.tolist()) == expected


@pytest.mark.parametrize("seed", range(12))
def test_chains_equal_the_reference(seed):
    """One slot, no tolerance, sizes that do not fit: where most of the planner's code runs."""
    load = workloads.zipf(12, 48, 400, 1.1, seed)
    layout = ExpertLayout(num_experts=48, ep_size=12, slots=1, nvlink_domain=12)
    for tolerance_ppm, min_quota in ((0, 1), (10_000, 1), (2_000, 9)):
        (quota, slots), expected = solve_both("solve_quota", load, layout, tolerance_ppm, min_quota)
        assert (quota.tolist(), slots.tolist()) == expected


@given(instance=instances(max_ranks=8))
def test_a_ladder_is_its_tolerances_one_by_one(instance):
    layout, tolerances = instance.layout, [2_000_000, 300_000, 10_000, 0]
    loads = torch.stack([instance.load, instance.load.flip(0, 1)])
    where = layout.slots, layout.nvlink_domain
    quota, slots = native.solve_ladder(loads, *where, tolerances, instance.min_quota)
    for i, ppm in enumerate(tolerances):
        alone = native.solve_quota(loads, *where, ppm, instance.min_quota)
        assert torch.equal(quota[:, i], alone[0])
        assert torch.equal(slots[:, i], alone[1])


@given(instance=instances(max_ranks=8))
def test_lower_bound_equals_the_reference(instance):
    layout = instance.layout
    bound = native.lower_bound(instance.load, layout.slots, layout.nvlink_domain)
    assert int(bound) == reference.lower_bound(
        instance.load.tolist(), num_slots=layout.slots, nvlink_domain=layout.nvlink_domain
    )


@pytest.mark.parametrize("solver", SOLVERS)
def test_solve_beyond_32_bits_equals_the_reference(solver):
    """Thresholds times a million leave int64 here; a 32-bit or unwidened product would show."""
    load = workloads.zipf(4, 8, 1000, 1.0) * 2**45
    (quota, slots), expected = solve_both(solver, load, worked_like(4, 8), 10_000, 1)
    assert (quota.tolist(), slots.tolist()) == expected


def worked_like(ranks, experts):
    layout = worked_example().layout
    return type(layout)(num_experts=experts, ep_size=ranks, slots=2, nvlink_domain=ranks)


@pytest.mark.parametrize("tokens", [0, 1, 254, 255, 256, 1000])
def test_count_equals_the_sum(tokens):
    routed = workloads.routing_map(tokens, 7, 3)
    assert torch.equal(native.count_load(routed)[0], routed.sum(0))
    every = torch.ones(tokens, 7, dtype=torch.bool)
    assert native.count_load(every)[0].tolist() == [tokens] * 7


def test_a_tail_goes_behind_the_counts():
    routed = workloads.routing_map(300, 7, 3)
    counts, _ = native.count_load(routed, torch.tensor([-(2**62)]))
    assert counts.tolist() == [*routed.sum(0).tolist(), -(2**62)]


def sealed(load, quota, slots):
    """The digest that csrc/include/megatron_ext/seal.h describes, in Python's integers."""
    total = 0
    pairs = zip(load.flatten().tolist(), quota.flatten().tolist(), strict=True)
    words = [count ^ taken << 32 for count, taken in pairs] + slots.flatten().tolist()
    for position, word in enumerate(words, 1):
        mixed = (word + position * 0x9E3779B97F4A7C15) % 2**64
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % 2**64
        total += mixed ^ mixed >> 31
    return total % 2**64


NOTHING_BEFORE = torch.zeros(4, 1, dtype=torch.int64)


def seal(load, quota, slots, gathered=NOTHING_BEFORE, layer=0, difference=None):
    if difference is None:
        difference = torch.zeros(2 + len(gathered), dtype=torch.int64)
    sealed = torch.zeros(1, dtype=torch.int64)
    shares = native.share_and_seal(load, quota, slots, 1, gathered, layer, difference, sealed)
    for one, other in zip(shares, native.share_plan(load, quota, slots, 1), strict=True):
        assert torch.equal(one, other)
    return int(sealed) % 2**64


def planned(ranks, experts, slots):
    load = workloads.zipf(ranks, experts, 500, 1.0)
    return [load, *native.solve_quota(load, slots, ranks, 10_000, 1)]


def test_a_seal_is_the_sum_of_mixed_words():
    for sizes in ((4, 8, 2), (4, 4, 0), (4, 12, 3)):
        assert seal(*planned(*sizes)) == sealed(*planned(*sizes))
    load, quota, slots = planned(4, 8, 2)
    strided = [one.T.contiguous().T for one in (load, quota, slots)]
    assert seal(*strided) == seal(load, quota, slots)
    apart = torch.cat([load, torch.full((4, 1), 7)], 1)[:, :-1]
    assert seal(apart, quota, slots) == seal(load, quota, slots)


def test_one_wrong_word_changes_a_seal():
    plan = planned(4, 8, 2)
    seals = {seal(*plan)}
    count = 1
    for which, tensor in enumerate(plan):
        for place in range(tensor.numel()):
            for bit in (0, 5, 30):
                wrong = [one.clone() for one in plan]
                wrong[which].view(-1)[place] ^= 1 << bit
                seals.add(seal(*wrong))
                count += 1
    assert len(seals) == count


def test_the_first_seals_that_differ_are_kept():
    plan = planned(4, 8, 2)
    difference = torch.zeros(6, dtype=torch.int64)
    gathered = torch.zeros(4, 9, dtype=torch.int64)
    gathered[:, :-1] = torch.arange(32).view(4, 8)  # loads
    seal(*plan, gathered, 3, difference)
    assert not difference.any()
    gathered[:, -1] = torch.tensor([5, 5, -6, 5])
    seal(*plan, gathered, 4, difference)
    assert difference.tolist() == [1, 4, 5, 5, -6, 5]
    gathered[:, -1] = torch.tensor([5, 9, -6, 5])
    seal(*plan, gathered, 5, difference)
    assert difference.tolist() == [1, 4, 5, 5, -6, 5]


def test_seal_rejects():
    load, quota, slots = planned(4, 8, 2)
    with pytest.raises(ValueError, match=r"slots must be int32 \[R, S\] with R = 4, got Long"):
        seal(load, quota, slots.long())
    with pytest.raises(
        ValueError, match=r"load must be .* quota \[E, R\], got \[4, 8\] and \[4, 8\]"
    ):
        seal(load, quota.T.contiguous(), slots)
    with pytest.raises(ValueError, match=r"difference must be contiguous int64 \[6\] .*\[3\]"):
        seal(load, quota, slots, difference=torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"gathered must be .* got non-contiguous Long \[4, 2\]"):
        seal(load, quota, slots, torch.zeros(2, 4, dtype=torch.int64).T)
    with pytest.raises(ValueError, match=r"seal must be one int64 on cpu, got Int \[1\]"):
        native.share_and_seal(
            *planned(4, 8, 2), 1, NOTHING_BEFORE, 1, torch.zeros(6).long(), torch.zeros(1).int()
        )
    with pytest.raises(ValueError, match=r"tail must be one number .*\[2\]"):
        native.count_load(workloads.routing_map(9, 4, 2), torch.zeros(2, dtype=torch.int64))


def test_gradients_of_experts_in_slots_are_set_aside():
    slots = torch.tensor([[-1, 5], [2, -1]], dtype=torch.int32)
    main_grads = [torch.full((2, 3), float(value)).bfloat16() for value in (1, 2, 3)]
    copies = native.set_aside(main_grads, slots, [2, 3, 5])
    assert [each.unique().tolist() for each in main_grads] == [[0.0], [2.0], [0.0]]
    assert [copies[i].unique().tolist() for i in (0, 2)] == [[1.0], [3.0]]
    assert copies[1].shape == (2, 3)
    with pytest.raises(ValueError, match=r"an expert for each .* 3 gradients, 1 experts"):
        native.set_aside(main_grads, slots, [2])
    with pytest.raises(ValueError, match="main_grads must be contiguous on cpu, got non-"):
        native.set_aside([main_grads[0].T], slots, [2])


def test_strided_inputs_are_read_as_they_are():
    load = worked_example().load
    strided = load.T.contiguous().T
    assert not strided.is_contiguous()
    quota, _ = native.solve_quota(load, 1, 2, 10_000, 1)
    assert torch.equal(native.solve_quota(strided, 1, 2, 10_000, 1)[0], quota)
    assert torch.equal(
        native.split_quota(strided, quota.T.contiguous().T, None),
        native.split_quota(load, quota, None),
    )
    routed = workloads.routing_map(9, 4, 2)
    assert torch.equal(native.count_load(routed.T.contiguous().T)[0], routed.sum(0))


def test_what_schemas_say_of_arguments_is_true():
    load = worked_example().load
    quota, _ = native.solve_quota(load, 1, 2, 10_000, 1)
    batch = torch.stack([load, load])
    for op, args in (
        (native.count_load, (workloads.routing_map(9, 4, 2),)),
        (native.count_load, (workloads.routing_map(9, 4, 2), torch.tensor([7]))),
        (
            native.share_and_seal,
            (
                *planned(4, 8, 2),
                1,
                NOTHING_BEFORE,
                1,
                torch.zeros(6).long(),
                torch.zeros(1).long(),
            ),
        ),
        (
            native.set_aside,
            ([torch.ones(3), torch.ones(3)], torch.tensor([[-1], [2]]).int(), [2, 3]),
        ),
        (native.solve_quota, (load, 1, 2, 10_000, 1)),
        (native.solve_quota, (batch, 0, 1, 0, 3)),
        (native.solve_ladder, (load, 1, 2, [500_000, 0], 1)),
        (native.solve_ladder, (batch, 1, 2, [10_000], 1)),
        (native.solve_fastest, (load, 1, 2, [500_000, 0], 1, 3, 2, 1)),
        (native.solve_fastest, (batch, 0, 2, [500_000, 0], 1, 3, 2, 1)),
        (native.solve_paper, (batch, 1, 2, 10_000, 1)),
        (native.solve_shipped, (batch, 1, 2, 10_000, 1, 1024)),
        (native.lower_bound, (load, 1, 2)),
        (native.lower_bound, (batch, 1, 2)),
        (native.share_plan, (*planned(4, 8, 2), 3)),
        (native.assign, assign_arguments()),
        (native.reroute, reroute_arguments()),
        (native.place_back, place_back_arguments()),
        (native.split_quota, (load, quota, None)),
        (native.split_quota, (load, quota, 1)),
    ):
        torch.library.opcheck(op.default, args, test_utils="test_schema")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((torch.zeros(2, 4), 1, 2, 0, 1), "load must be int64, got Float"),
        ((torch.zeros(4, dtype=torch.int64), 1, 2, 0, 1), r"load must be \[R, E\] or \[B, R, E\]"),
        ((torch.zeros(2, 3, dtype=torch.int64), 1, 2, 0, 1), "got R = 2 and E = 3"),
        ((torch.zeros(0, 3, dtype=torch.int64), 1, 2, 0, 1), "got R = 0 and E = 3"),
        (
            (torch.zeros(2, 4, dtype=torch.int64), -1, 2, 0, 1),
            r"num_slots \(-1\) must be from 0 to",
        ),
        (
            (torch.zeros(2, 4, dtype=torch.int64), 1, 3, 0, 1),
            r"nvlink_domain \(3\) must divide R \(2\)",
        ),
        (
            (torch.zeros(2, 4, dtype=torch.int64), 1, 2, -1, 1),
            r"tolerance_ppm \(-1\) must be from 0",
        ),
        (
            (torch.zeros(2, 4, dtype=torch.int64), 1, 2, 2**63 - 1, 1),
            r"tolerance_ppm \(9223372036854775807\) must be from 0 to 1000000000000",
        ),
        (
            (torch.zeros(2, 4, dtype=torch.int64), 2**31 - 1, 2, 0, 1),
            r"num_slots \(2147483647\) must be from 0 to 32767",
        ),
        (
            (torch.tensor([[0]]).expand(8192, 8192), 1, 1, 0, 1),
            r"at most 4096 ranks and 1048576 experts, got R = 8192 and E = 8192",
        ),
        (
            (torch.tensor([[3, 1, -1, 2]]), 1, 1, 0, 1),
            "load must have assignments of 0 or more, got -1",
        ),
        (
            (torch.tensor([[[3, 1]], [[2**62, 2**62]]]), 1, 1, 0, 1),
            r"load must have assignments whose sum fits int64, got a sum of 9.22337e\+18",
        ),
        ((torch.zeros(2, 4, dtype=torch.int64), 1, 2, 0, 0), r"min_quota \(0\) must be >= 1"),
    ],
)
def test_solve_rejects(args, message):
    for solver in SOLVERS:
        with pytest.raises(ValueError, match=message):
            getattr(native, solver)(*args, **more_of(solver, args[-1]))
    with pytest.raises(ValueError, match=r"search_min_quota \(1\) must be >= min_quota \(2\)"):
        native.solve_shipped(worked_example().load, 1, 2, 0, 2, 1)


def test_loads_that_just_fit_are_planned():
    """Entries whose bits together are more than each may be, and sums near the end of int64."""
    load = torch.tensor([[2**59 - 1, 1], [2**61 - 1, 2**60]])
    quota, _ = native.solve_quota(load, 1, 2, 0, 1)
    assert torch.equal(quota.sum(1), load.sum(0))
    assert native.split_quota(load, quota, None).sum(2).tolist() == load.tolist()
    assert int(native.lower_bound(load, 1, 2)) <= int(quota.sum(0).max())
    costs = [2**63 - 1] * 3
    assert torch.equal(native.solve_fastest(load, 1, 2, [0], 1, *costs)[0].sum(1), load.sum(0))


def test_bounds_and_shares_reject():
    load, quota, slots = planned(4, 8, 2)
    wrong = load.clone()
    wrong[3, 7] = -5
    with pytest.raises(ValueError, match="load must have assignments of 0 or more, got -5"):
        native.lower_bound(wrong, 2, 4)
    with pytest.raises(ValueError, match=r"num_slots \(2147483647\) must be from 0 to 23170"):
        native.lower_bound(load, 2**31 - 1, 4)
    with pytest.raises(ValueError, match="load must have assignments of 0 or more, got -5"):
        native.share_plan(wrong, quota, slots, 1)
    with pytest.raises(
        ValueError,
        match=r"quota must have assignments whose sum fits int64, got a sum of 1.47574e\+20",
    ):
        native.split_quota(load, torch.full_like(quota, 2**62), None)
    with pytest.raises(ValueError, match=r"source_rank \(4\) must be from 0 to 3"):
        native.share_plan(load, quota, slots, 4)


@pytest.mark.parametrize(
    ("tolerances", "costs", "message"),
    [
        ([], (1, 1, 1), "tolerances_ppm must be 1 to 16 tolerances, got 0"),
        (list(range(17, 0, -1)), (1, 1, 1), "1 to 16 tolerances, got 17"),
        ([1, 1], (1, 1, 1), r"go from loose to tight, got \[1, 1\]"),
        ([1, -1], (1, 1, 1), r"tolerances_ppm must be from 0 .* got \[1, -1\]"),
        ([1], (-1, 1, 1), r"expert_ps \(-1\) must be >= 0"),
        ([1], (1, -2, 1), r"token_ps \(-2\) must be >= 0"),
        ([1], (1, 1, -3), r"assignment_ps \(-3\) must be >= 0"),
    ],
)
def test_solve_fastest_rejects(tolerances, costs, message):
    load = worked_example().load
    with pytest.raises(ValueError, match=message):
        native.solve_fastest(load, 1, 2, tolerances, 1, *costs)
    if costs == (1, 1, 1):
        with pytest.raises(ValueError, match=message):
            native.solve_ladder(load, 1, 2, tolerances, 1)


def assign_arguments():
    routed = workloads.routing_map(9, 4, 2)
    load = torch.stack([routed.sum(0), torch.zeros(4, dtype=torch.int64)])
    plan = solve(load, ep_size=2, slots=1)
    return routed, split_quota(load, plan, 0), plan.physical_index(), 2


def reroute_arguments():
    routed, *shares = assign_arguments()
    placed = torch.zeros(9, 6), torch.zeros(9, 6).bool()
    return (torch.rand(9, 4) * routed, routed, *shares, None, None, *placed)


def place_back_arguments():
    return (torch.rand(9, 6), *native.assign(*assign_arguments()), 4)


@pytest.mark.parametrize(
    ("place", "wrong", "message"),
    [
        (0, torch.zeros(9, 4), r"routing_map must be bool \[N, E\], got Float"),
        (0, torch.zeros(9, dtype=torch.bool), r"routing_map must be bool \[N, E\], got Bool"),
        (1, torch.zeros(4, 2), "source_quota must be int64, got Float"),
        (1, torch.zeros(3, 2, dtype=torch.int64), r"must be \[E, R\] with E = 4"),
        (2, torch.zeros(4, 1, dtype=torch.int64), r"must be \[E, R\] with E = 4"),
        (2, torch.zeros(4, 2), "physical_index must be int64, got Float"),
        (1, torch.full((4, 2), -1), r"source_quota must be >= 0, got -1 of expert 0"),
        (1, torch.tensor([[2**62, 0]] * 2 + [[0, 2**62]] * 2), "count different assignments"),
        (2, torch.full((4, 2), -1), r"physical_index must be from 0 .* got -1 of expert 0"),
        (2, torch.full((4, 2), 2**32), r"physical_index must be from 0 .* got 4294967296"),
        (3, 0, r"top_k \(0\) must be from 1 to 4"),
        (3, 5, r"top_k \(5\) must be from 1"),
    ],
)
def test_assign_rejects(place, wrong, message):
    arguments = list(assign_arguments())
    arguments[place] = wrong
    with pytest.raises((ValueError, RuntimeError), match=message):
        native.assign(*arguments)


@pytest.mark.parametrize(
    ("place", "wrong", "message"),
    [
        (0, torch.zeros(9, 4, dtype=torch.int64), "must be floating point .* got Long"),
        (0, torch.zeros(8, 4), r"of the routing_map's shape, \[9, 4\], got \[8, 4\]"),
        (2, torch.zeros(4, 2), "source_quota must be int64, got Float"),
        (7, torch.zeros(8, 6), r"placed must be contiguous \[N, P\] with N = 9"),
        (7, torch.zeros(9, 6).double(), "the probabilities' dtype, Float, got Double"),
        (7, torch.zeros(6, 9).T, "placed must be contiguous"),
        (7, torch.zeros(9, 1), "logical and physical must be below 4 and 1"),
        (8, torch.zeros(9, 6), r"placed_map must be contiguous bool \[9, 6\], got Float"),
        (8, torch.zeros(9, 5).bool(), r"placed_map must be contiguous bool \[9, 6\]"),
    ],
)
def test_reroute_rejects(place, wrong, message):
    arguments = list(reroute_arguments())
    arguments[place] = wrong
    if wrong.shape == (9, 1):
        arguments[8] = torch.zeros(9, 1).bool()
    with pytest.raises((ValueError, IndexError), match=message):
        native.reroute(*arguments)


@pytest.mark.parametrize(
    ("place", "wrong", "message"),
    [
        (0, torch.zeros(9, 6, dtype=torch.int64), "must be floating point .* got Long"),
        (0, torch.zeros(8, 6), r"must be int32 \[N, K\] with N = 8"),
        (1, torch.zeros(9, 2), r"must be int32 \[N, K\] with N = 9, got Float"),
        (2, torch.zeros(9, 1, dtype=torch.int32), "must have the same shape"),
        (3, -1, r"num_experts \(-1\) must be from 1 to 1048576"),
        (3, 2**40, r"num_experts \(1099511627776\) must be from 1 to 1048576"),
    ],
)
def test_place_back_rejects(place, wrong, message):
    arguments = list(place_back_arguments())
    arguments[place] = wrong
    with pytest.raises(ValueError, match=message):
        native.place_back(*arguments)


@pytest.mark.parametrize("place", [1, 2])
@pytest.mark.parametrize("value", [100, -1])
def test_indices_outside_are_rejected(place, value):
    arguments = list(place_back_arguments())
    arguments[place] = arguments[place].clone()
    arguments[place][3, 0] = value
    if (place, value) == (1, -1):  # the end of a row: nothing comes back
        assert not native.place_back(*arguments)[3].any()
        return
    with pytest.raises(IndexError, match="logical and physical must be below 6 and 4"):
        native.place_back(*arguments)


def test_count_rejects():
    with pytest.raises(ValueError, match=r"routing_map must be bool \[N, E\], got Int"):
        native.count_load(torch.zeros(2, 4, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"routing_map must be bool \[N, E\], got Bool"):
        native.count_load(torch.zeros(4, dtype=torch.bool))


def test_a_library_that_does_not_load_says_what_to_do(monkeypatch, tmp_path):
    broken = tmp_path / "libmegatron_ext.so"
    broken.write_bytes(b"no library")
    monkeypatch.setattr(ops, "library", lambda: broken)
    ops.load_library()  # loaded already: nothing is looked for
    with pytest.raises(RuntimeError, match=f"{broken} does not load .*remove"):
        ops.load_library.__wrapped__()


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "experts"), [(0, 16), (1, 1), (8192, 33), (300_000, 256)])
def test_count_on_the_device_equals_the_host(tokens, experts):
    routed = workloads.routing_map(tokens, experts, 1)
    assert torch.equal(native.count_load(routed.cuda())[0].cpu(), native.count_load(routed)[0])
