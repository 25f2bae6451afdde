"""Covering arrays: few trainings in which every two values of every two options come together.

A pair that Megatron refuses is left out. Each training runs with one version of Megatron-Core, each
value with all of them. Each training is compared with Megatron's own layers on the same ranks, in
float64; in float32 where what computes knows no float64.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from importlib.metadata import version
from typing import Any, TypeVar

import pytest

from megatron_ext.config import BalanceConfig
from tests.compatibility import VERSIONS
from tests.mcore.parity import (
    GRADIENT_TOLERANCE,
    STEP_TOLERANCE,
    Difference,
    gradient_difference,
    step_difference,
)
from tests.ranks import run_ranks

T = TypeVar("T")

Settings = dict[str, Any]

Options = Mapping[str, Mapping[str, Settings]]
"""By option and value: arguments of `build_gpt`, `balance` and `world_size` apart."""

Combination = dict[str, str]
"""The value of each option."""

OPTIONS: dict[str, dict[str, Settings]] = {
    "layout": {
        "ep2": dict(ep=2),
        "etp2": dict(ep=2, etp=2, tp=2, world_size=4),
        "tp2": dict(ep=2, tp=2, world_size=4),
        "edp2": dict(ep=2, world_size=4),
        "pp2": dict(ep=2, pp=2, world_size=4),
        "vpp2": dict(ep=2, pp=2, vpp=2, num_layers=4, world_size=4),
    },
    "router": {
        "aux": dict(moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=0.01),
        "top-1": dict(topk=1, moe_z_loss_coeff=0.01),
        "bias": dict(moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True),
        "groups": dict(moe_router_num_groups=2, moe_router_group_topk=1),
        "sequence": dict(moe_router_load_balancing_type="seq_aux_loss", moe_aux_loss_coeff=0.01),
        "capacity": dict(moe_expert_capacity_factor=1.0),
    },
    "recompute": {
        "kept": {},
        "moe": dict(recompute="selective"),
        "full": dict(recompute="full"),
        "block": dict(
            recompute="full", recompute_method="block", recompute_num_layers=1, num_layers=4
        ),
    },
    "shared experts": {
        "no shared": {},
        "before": dict(shared_ffn=24),
        "beside": dict(shared_ffn=24, moe_shared_expert_overlap=True),
    },
    "layers": {
        "all": {},
        "dense": dict(moe_layer_freq=[1, 0, 1, 1], num_layers=4),
        "mtp": dict(mtp_num_layers=1),
    },
    "strategy": {
        "quota": {},
        "exact": dict(balance=dict(strategy="exact", slots=0)),
        "libra": dict(balance=dict(strategy="libra")),
    },
    "gradients": {"autograd": {}, "fused": dict(gradient_accumulation_fusion=True)},
    "optimizer": {
        "plain": {},
        "distributed": dict(distributed_optimizer=True, overlap_grad_reduce=True),
    },
    "dispatcher": {"alltoall": {}, "allgather": dict(dispatcher="allgather")},
    "experts": {
        "gated": dict(gated_linear_unit=True, bias_activation_fusion=False),
        "biased": dict(add_bias_linear=True),
    },
    "transport": {
        "shared memory": {},
        "collective": dict(balance=dict(transport="collective")),
    },
    "schedule": {"in turn": {}, "overlapped": dict(overlap_moe_expert_parallel_comm=True)},
    "exchange": {"at once": {}, "own first": dict(balance=dict(local_first=True))},
}

IN_FLOAT32 = (
    *("gradient_accumulation_fusion", "moe_router_fusion", "use_transformer_engine_op_fuser"),
)
"""Settings of what knows no float64."""


def combinations(
    options: Options, impossible: Collection[set[str]], shown: Mapping[str, str]
) -> list[Any]:
    """The trainings of the installed version as parameters of a test; of another, all.

    Args:
        options: What to combine. A value is of one option.
        impossible: Pairs of values that Megatron refuses.
        shown: Rows of docs/compatibility.md by value.
    """
    trainings = covering(options, impossible)
    return [
        pytest.param(
            combination,
            marks=[pytest.mark.option(shown[v]) for v in combination.values() if v in shown],
            id=", ".join(combination.values()),
        )
        for combination in by_version(trainings).get(version("megatron-core"), trainings)
    ]


def covering(options: Options, impossible: Collection[set[str]]) -> list[Combination]:
    """Return few combinations that have every possible pair of values of two options.

    Each next combination is the one with the most pairs that are still missing, of those that begin
    with one of the first such pairs.
    """
    missing = dict.fromkeys(possible_pairs(options, impossible))
    found = []
    while missing:
        begun = [_complete(pair, options, impossible, missing) for pair in [*missing][:_BEGUN]]
        best = max(begun, key=lambda combination: len(missing.keys() & _pairs(combination)))
        for pair in _pairs(best):
            missing.pop(pair, None)
        found.append({option: best[option] for option in options})
    return found


def possible_pairs(options: Options, impossible: Collection[set[str]]) -> list[frozenset[str]]:
    """Return all pairs of values of two options, but for the impossible ones."""
    pairs = [
        frozenset(pair)
        for of_two in itertools.combinations(options.values(), 2)
        for pair in itertools.product(*of_two)
    ]
    return [pair for pair in pairs if pair not in map(frozenset, impossible)]


def by_version(trainings: Sequence[Combination]) -> dict[str, list[Combination]]:
    """Give each training to the version that had fewer of its values' trainings so far."""
    shares: dict[str, list[Combination]] = {each: [] for each in VERSIONS}
    all_values = Counter(value for training in trainings for value in training.values())
    had = {each: Counter[str]() for each in VERSIONS}
    for training in trainings:
        least = min(
            VERSIONS,
            key=lambda each: sum(
                had[each][value] / all_values[value] for value in training.values()
            ),
        )
        had[least].update(training.values())
        shares[least].append(training)
    return shares


def of_this_version(cases: Mapping[str, T]) -> dict[str, T]:
    """Return the cases of the installed version: each has one, in turn. Of another, all."""
    return dict(dealt(cases.items()))


def dealt(cases: Iterable[T]) -> list[T]:
    """Return the cases of the installed version, as `of_this_version`, without names."""
    here = version("megatron-core")
    return [
        case
        for number, case in enumerate(cases)
        if VERSIONS[number % len(VERSIONS)] == here or here not in VERSIONS
    ]


WITH_ONE_VERSION = pytest.mark.skipif(
    version("megatron-core") == VERSIONS[1], reason=f"Megatron-Core {VERSIONS[0]} shows the same"
)
"""For tests that break something on purpose: what they break is this package's, or their own."""


_BEGUN = 40
"""Missing pairs of which each is tried as the beginning of the next combination."""


def _pairs(combination: Combination) -> set[frozenset[str]]:
    return set(map(frozenset, itertools.combinations(combination.values(), 2)))


def _complete(
    begun: frozenset[str],
    options: Options,
    impossible: Collection[set[str]],
    missing: Container[frozenset[str]],
) -> Combination:
    """Give each option a value: the possible one with the most missing pairs."""
    chosen = {
        option: value for option, values in options.items() for value in values if value in begun
    }
    for option in sorted(options.keys() - chosen, key=lambda each: (-len(options[each]), each)):
        possible = [
            value
            for value in options[option]
            if not any({value, other} in impossible for other in chosen.values())
        ]
        assert possible, f"no {option} goes with {chosen}"
        chosen[option] = max(
            possible,
            key=lambda value: sum(
                frozenset((value, other)) in missing for other in chosen.values()
            ),
        )
    return chosen


def assert_each_version_has_each_value(options: Options, trainings: Sequence[Combination]) -> None:
    """Look at what each version of Megatron-Core trains, and that each training has one version."""
    shares = by_version(trainings)
    assert sum(map(len, shares.values())) == len(trainings)
    for share in shares.values():
        trained = {value for training in share for value in training.values()}
        assert trained == {value for values in options.values() for value in values}


def assert_equals_unbalanced_megatron(options: Options, combination: Combination) -> None:
    """Train by a combination, balanced and not, and compare."""
    case: Settings = {}
    balance: Settings = dict(tolerance=0.0)
    for option, value in combination.items():
        chosen = dict(options[option][value])
        balance |= chosen.pop("balance", {})
        case |= chosen
    num_ranks = case.pop("world_size", 2)
    is_float32 = any(name in case for name in IN_FLOAT32)
    differences = run_ranks(_difference, num_ranks, case, balance, is_float32)
    worst = max(differences, key=lambda difference: difference.worst)
    assert worst.worst <= (STEP_TOLERANCE if is_float32 else GRADIENT_TOLERANCE), worst
    assert all(difference.replicas > 0 for difference in differences), "nothing was tested"


def _difference(rank: int, case: Settings, balance: Settings, is_float32: bool) -> Difference:
    settings = BalanceConfig(**balance)
    if is_float32:
        # One step: in a later one, a rounded score may drop another token at the capacity.
        return step_difference(case, num_steps=1, num_microbatches=4, balance=settings)
    return gradient_difference(case, num_microbatches=4, balance=settings)
