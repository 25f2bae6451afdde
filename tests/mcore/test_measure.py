"""Costs that are not given are measured: once, by the slowest rank, equal on all, and used.

Layer 2 (1 to 4 gloo ranks). The clock is the test's own (`tests/mcore/clock.py`), so costs are
compared exactly with what its rounds come to; one test lets the real one run.

The model: 4 experts of 16 x 32 weights twice, in float32, 2 of them and 2 slots on a rank; 32
tokens of a rank choose 2 experts each, so an expert gets 32 in the mean.
"""

from __future__ import annotations

import logging
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_ext.config import BalanceConfig
from tests.gpt import build_gpt  # first: it enables the CPU platform
from tests.mcore import inside
from tests.mcore.clock import DEAR_EXPERTS_MS, ROUNDS, rounds_take
from tests.mcore.parity import balanced_gpt, balanced_layers, gradient_difference, step_difference
from tests.mcore.test_parity import GRADIENT_TOLERANCE, STEP_TOLERANCE
from tests.ranks import run_ranks

EXPERT_BYTES = 2 * 16 * 32 * 4
ASSIGNMENTS = 2 * 32
"""Of a rank's mains in a round."""

TIME = BalanceConfig(objective="time", check_plans=True)

# Each rank is the slower one now and then: the median of the slowest rank's times is 4, that of
# either rank 1. The first two rounds warm up.
ROUNDS_MS = ([50, 60, 4, 4, 4, 1, 1, 1, 1], [70, 50, 1, 1, 1, 4, 4, 4, 1])
MEDIAN_S = 4e-3


def _costs(layer: Any) -> Any:
    return inside.costs(layer)


def _measure(rank: int) -> Any:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("megatron_ext.mcore.measure")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        gpt = balanced_gpt(dict(ep=2), TIME)
        assert [inside.measured(layer) for layer in balanced_layers(gpt)] == [{}, {}]
        with rounds_take(ROUNDS_MS[rank]) as clock:
            for step in range(2):
                gpt.train_step(step)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert gpt.chunks[0].module.config.num_layers == len(balanced_layers(gpt)) == 2
    costs = [_costs(layer) for layer in balanced_layers(gpt)]
    return [inside.measured(layer) for layer in balanced_layers(gpt)], costs, clock.rounds, records


def test_measured_once_by_the_slowest_rank_and_used() -> None:
    expected = {
        "link_bandwidth": 2 * EXPERT_BYTES / MEDIAN_S,
        "assignment_time": MEDIAN_S / ASSIGNMENTS,
    }
    by_rank = run_ranks(_measure, 2)
    for measured, costs, rounds, _ in by_rank:
        assert measured == [expected] * 2
        assert rounds == 2 * ROUNDS, "once for both layers and all steps"
        for of_layer in costs:
            assert of_layer.link_bandwidth == expected["link_bandwidth"]
            assert of_layer.assignment_time == expected["assignment_time"]
            assert (of_layer.expert_bytes, of_layer.token_bytes) == (EXPERT_BYTES, 64)
    assert by_rank[0][3] == [
        "balance.link_bandwidth=auto: measured 2.048e+06 bytes per second "
        "(2 ranks, experts of 4096 bytes, with 32 assignments each)",
        "balance.assignment_time=auto: measured 6.25e-05 seconds "
        "(2 ranks, experts of 4096 bytes, with 32 assignments each)",
    ]
    assert by_rank[1][3] == []


def _long_rounds(rank: int) -> Any:
    gpt = balanced_gpt(dict(ep=2), TIME)
    with rounds_take([900.0, 500.0]) as clock:
        gpt.forward_backward()
    return clock.rounds, inside.measured(balanced_layers(gpt)[0])["assignment_time"]


def test_long_rounds_are_few_and_the_first_does_not_count() -> None:
    for rounds, assignment_time in run_ranks(_long_rounds, 2):
        assert rounds == 2 * 2
        assert assignment_time == float(f"{0.5 / ASSIGNMENTS:.4g}")


def _given(rank: int) -> None:
    models = []
    link, experts = dict(link_bandwidth=5e9), dict(assignment_time=3e-6)
    # The models have the same slots, one after the other: what was measured for them stands.
    for given, rounds in ((link, ROUNDS), (experts, ROUNDS), (link | experts, 0), ({}, 0)):
        gpt = balanced_gpt(dict(ep=2), BalanceConfig(objective="time", **given))
        with rounds_take([1.0]) as clock:
            gpt.forward_backward()
        for layer in balanced_layers(gpt):
            assert (
                inside.measured(layer).keys()
                == {"link_bandwidth", "assignment_time"} - given.keys()
            )
            for name, value in given.items():
                assert getattr(_costs(layer), name) == value
            for name, value in inside.measured(layer).items():
                assert getattr(_costs(layer), name) == value
        assert clock.rounds == rounds
        models.append(gpt)


def test_given_costs_win() -> None:
    run_ranks(_given, 2)


def _replicas(rank: int, rounds_ms: list[float]) -> int:
    gpt = balanced_gpt(dict(ep=2), BalanceConfig(objective="time"))
    with rounds_take(rounds_ms):
        gpt.forward_backward(num_microbatches=4)
    return sum(layer.num_replicas for layer in balanced_layers(gpt))


def test_plans_follow_what_was_measured() -> None:
    cheap, dear = (
        run_ranks(_replicas, 2, rounds_ms) for rounds_ms in (DEAR_EXPERTS_MS, DEAR_EXPERTS_MS[::-1])
    )
    assert cheap[0] == cheap[1] > 0
    assert dear == [0, 0]


UNDISTURBED = (
    dict(ep=2),
    dict(ep=2, recompute="full"),
    dict(ep=2, recompute="selective"),
    dict(ep=2, hidden_dropout=0.1),
)


def _state(gpt: Any) -> list[Any]:
    """Losses and gradients, the generators, and the places of plans, after a schedule."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    torch.manual_seed(3)
    reports = gpt.forward_backward(num_microbatches=2)
    return [
        *(report["loss"] for report in reports),
        *gpt.gradients().values(),
        torch.get_rng_state(),
        *get_cuda_rng_tracker().get_states().values(),
        *(torch.tensor(inside.plans_kept(layer)) for layer in balanced_layers(gpt)),
        *(torch.tensor(layer.num_replicas) for layer in balanced_layers(gpt)),
    ]


def _measure_undisturbed(rank: int, case: dict[str, Any]) -> int:
    with rounds_take(DEAR_EXPERTS_MS) as clock:
        measuring = balanced_gpt(case, TIME)
        found = _state(measuring)
        assert clock.rounds == 2 * ROUNDS
    costs = inside.measured(balanced_layers(measuring)[0])
    given = _state(balanced_gpt(case, BalanceConfig(objective="time", **costs)))
    assert len(found) == len(given)
    assert all(torch.equal(one, other) for one, other in zip(found, given, strict=True))
    return sum(layer.num_replicas for layer in balanced_layers(measuring))


@pytest.mark.parametrize("case", UNDISTURBED, ids=str)
def test_measuring_changes_nothing_but_the_costs(case: dict[str, Any]) -> None:
    """Bit-equal to a run that was given the same costs."""
    assert run_ranks(_measure_undisturbed, 2, case)[0] > 0


def _measure_between(rank: int) -> None:
    case = dict(ep=2)
    exact = BalanceConfig(tolerance=0.0)
    generator = torch.Generator().manual_seed(rank)
    hidden, upstream = torch.randn(2, 32, 1, 16, generator=generator)

    def gradients(between: Any) -> dict[str, torch.Tensor]:
        gpt = balanced_gpt(case, exact)
        gpt.chunks[0].zero_grad_buffer()
        layer = balanced_layers(gpt)[0]
        output, _ = layer(hidden)
        assert layer.num_replicas > 0
        between()
        output.backward(upstream)
        return gpt.gradients()

    def measure() -> None:
        # Another layer, as this one would leave the very weights in the slots that were there.
        other = balanced_layers(balanced_gpt(case, TIME))[1]
        with rounds_take(DEAR_EXPERTS_MS):
            inside.measure(other, torch.full((2, 4), 16), torch.float32)
        assert inside.measured(other)

    expected = gradients(lambda: None)
    found = gradients(measure)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_slots_of_a_forward_that_waits_for_its_backward_are_filled_again() -> None:
    run_ranks(_measure_between, 2)


def _fail_and_go_on(rank: int) -> str:
    from megatron_ext import reset_after_abort

    gpt = balanced_gpt(dict(ep=2), TIME)
    broken = mock.patch(inside.RUN_EXPERTS, side_effect=MemoryError("no room"))
    with broken, pytest.raises(RuntimeError) as error, rounds_take(DEAR_EXPERTS_MS):
        gpt.forward_backward()
    reset_after_abort(gpt.chunks)
    with rounds_take(DEAR_EXPERTS_MS[ROUNDS:]):
        gpt.train_step(0)
    assert all(inside.measured(layer) for layer in balanced_layers(gpt))
    return str(error.value)


def test_a_measurement_that_fails_names_the_settings() -> None:
    for message in run_ranks(_fail_and_go_on, 2):
        assert message == (
            "layer 1: balance.assignment_time could not be measured: no room. Give numbers instead "
            "of 'auto' for balance.link_bandwidth (bytes per second) and balance.assignment_time "
            "(seconds)"
        )


def _nothing_to_choose(rank: int, case: dict[str, Any], settings: dict[str, Any]) -> None:
    plain = build_gpt(**case)
    gpt = balanced_gpt(case, BalanceConfig(**settings, objective="time"))
    with rounds_take([1.0]) as clock:
        gpt.train_step(0)
    plain.train_step(0)
    assert clock.rounds == 0
    assert all(inside.measured(layer) == {} for layer in balanced_layers(gpt))
    found = gpt.parameters()
    assert all(torch.equal(found[name], value) for name, value in plain.parameters().items())


@pytest.mark.parametrize(
    ("world_size", "ep", "settings"),
    [(2, 2, dict(slots=0)), (1, 1, {}), (2, 2, dict(nvlink_domain=1))],
)
def test_nothing_is_measured_where_no_replica_can_be(
    world_size: int, ep: int, settings: dict[str, Any]
) -> None:
    run_ranks(_nothing_to_choose, world_size, dict(ep=ep), settings)


GROUPS = (
    (dict(ep=4, experts=8), dict(nvlink_domain=2), [[0, 1, 2, 3]]),
    (dict(ep=2, pp=2), dict(transport="collective"), [[0, 1], [2, 3]]),
    (dict(ep=2), dict(local_first=True), [[0, 1], [2, 3]]),
)


def _real_clock(rank: int) -> list[Any]:
    measured = []
    for case, settings, _ in GROUPS:
        gpt = balanced_gpt(case, BalanceConfig(objective="time", check_plans=True, **settings))
        gpt.forward_backward(num_microbatches=2)
        layers = balanced_layers(gpt)
        assert all(inside.measured(layer) == inside.measured(layers[0]) for layer in layers)
        measured.append(inside.measured(layers[0]))
    return measured


def test_every_expert_parallel_group_agrees_by_the_real_clock() -> None:
    by_rank = run_ranks(_real_clock, 4)
    for index, (_, _, groups) in enumerate(GROUPS):
        for group in groups:
            costs = by_rank[group[0]][index]
            assert 1e3 < costs["link_bandwidth"] < 1e13
            assert 1e-12 < costs["assignment_time"] < 1
            assert all(by_rank[rank][index] == costs for rank in group)


PARITY_CASES = (
    (dict(ep=2, recompute="full"), {}),
    (dict(ep=2, recompute="selective", dispatcher="allgather"), {}),
    (dict(ep=2, topk=1, overlap_grad_reduce=True), dict(transport="collective")),
    (dict(ep=2, shared_ffn=24), dict(local_first=True)),
)


def _parity(rank: int) -> list[Any]:
    with rounds_take(DEAR_EXPERTS_MS):
        return [
            gradient_difference(
                case, num_microbatches=4, balance=BalanceConfig(objective="time", **settings)
            )
            for case, settings in PARITY_CASES
        ]


def test_gradients_with_measured_costs_equal_unbalanced_megatron() -> None:
    for differences in run_ranks(_parity, 2):
        for difference in differences:
            assert difference.worst <= GRADIENT_TOLERANCE
            assert difference.replicas > 0


def _steps(rank: int) -> Any:
    case = dict(
        ep=2, distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True
    )
    with rounds_take(DEAR_EXPERTS_MS):
        return step_difference(case, num_microbatches=2, balance=BalanceConfig(objective="time"))


def test_weights_still_being_gathered_are_waited_for() -> None:
    for difference in run_ranks(_steps, 2):
        assert difference.worst <= STEP_TOLERANCE
        assert difference.replicas > 0


def _given_to_one_rank(rank: int) -> None:
    given = {"link_bandwidth": 1e9} if rank == 1 else {}
    balanced_gpt(dict(ep=2), BalanceConfig(objective="time", **given))


def test_costs_that_only_some_ranks_measure_fail_before_any_does() -> None:
    rule = r"balance.link_bandwidth must be equal.*rank 0 has 'auto', rank 1 has 1000000000.0"
    with pytest.raises(RuntimeError, match=rule):
        run_ranks(_given_to_one_rank, 2)
