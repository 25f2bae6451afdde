"""Training balanced equals training unbalanced where three options meet, or numbers or steps count.

Layer 2 (gloo ranks on the CPU). Every two options are trained by `test_combinations.py`. Here are
what it does not vary, three options that interact, other numbers of ranks, experts and layers, more
steps, and all planners. Cases run in one set of processes per world size: starting Megatron costs
more than a case.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.balance.placement import Placement
from megatron_ext.balance.strategies import STRATEGIES
from megatron_ext.config import BalanceConfig, HistorySettings, LibraSettings, LlepSettings
from megatron_ext.files.placement import write_placement
from tests.mcore.clock import DEAR_EXPERTS_MS, rounds_take
from tests.mcore.covering import dealt
from tests.mcore.parity import (
    GRADIENT_TOLERANCE,
    STEP_TOLERANCE,
    gradient_difference,
    step_difference,
)
from tests.ranks import run_ranks

Case = tuple[dict[str, Any], int]


def by_world_size(cases: dict[int, Any]) -> list[Any]:
    """The numbers of ranks to parametrize with; many ranks take long on few cores."""
    slow = pytest.mark.slow
    return [pytest.param(size, marks=slow) if size >= 4 else size for size in sorted(cases)]


TRANSPORTS = {1: "shared_memory", 2: "collective", 4: "shared_memory", 8: "collective"}
"""Of each number of ranks; `test_combinations.py` trains every option with both."""

OVERLAPPED = dict(moe_shared_expert_overlap=True, moe_shared_expert_gate=True)
"""The dispatcher computes the shared experts beside its exchanges, and their gate."""

GRADIENT_CASES: dict[int, list[Case]] = {
    1: [(dict(ep=1), 1), (dict(ep=1, recompute="full", topk=1), 4)],
    2: [
        (dict(ep=2, topk=1, overlap_grad_reduce=True), 4),
        (dict(ep=2, shared_ffn=24, dispatcher="alltoall", **OVERLAPPED), 2),
        (dict(ep=2, experts=2, topk=1, num_layers=3), 4),
        (dict(ep=2, tp=2, shared_ffn=24, dispatcher="allgather"), 2),
        (dict(ep=1), 4),
    ],
    4: [
        (dict(ep=4, topk=1, experts=8, recompute="full", shared_ffn=24), 4),
        (dict(ep=2, pp=2, recompute="full", topk=1, distributed_optimizer=True), 4),
        (dict(ep=2, pp=2, vpp=2, num_layers=4, recompute="selective"), 4),
        (dict(ep=1, pp=2), 4),
    ],
    8: [
        (dict(ep=4, pp=2, vpp=2, num_layers=4, experts=8, distributed_optimizer=True), 4),
        (dict(ep=2, pp=2, distributed_optimizer=True, overlap_grad_reduce=True, shared_ffn=24), 4),
    ],
}

STEP_CASES: dict[int, list[Case]] = {
    2: [
        (dict(ep=2, optimizer="sgd"), 1),
        (dict(ep=2, distributed_optimizer=True), 4),
        (dict(ep=2, optimizer="sgd", recompute="full", topk=1), 4),
    ],
    4: [
        (dict(ep=4, optimizer="sgd", dispatcher="allgather"), 1),
        (
            dict(
                ep=2,
                distributed_optimizer=True,
                overlap_grad_reduce=True,
                overlap_param_gather=True,
            ),
            4,
        ),
        (
            dict(
                ep=2,
                pp=2,
                vpp=2,
                num_layers=4,
                distributed_optimizer=True,
                overlap_grad_reduce=True,
                shared_ffn=24,
            ),
            4,
        ),
    ],
}


def _gradients(rank: int, cases: list[Case], balance: BalanceConfig) -> list[Any]:
    return [
        gradient_difference(case, num_microbatches=num_microbatches, balance=balance)
        for case, num_microbatches in cases
    ]


def _steps(rank: int, cases: list[Case]) -> list[Any]:
    return [
        step_difference(case, num_microbatches=num_microbatches) for case, num_microbatches in cases
    ]


@pytest.mark.parametrize("world_size", by_world_size(GRADIENT_CASES))
def test_gradients_equal_unbalanced_megatron(world_size: int) -> None:
    cases = dealt(GRADIENT_CASES[world_size])
    balance = BalanceConfig(tolerance=0.0, transport=TRANSPORTS[world_size])
    differences = run_ranks(_gradients, world_size, cases, balance, timeout_s=400)
    _check(differences, cases, GRADIENT_TOLERANCE)


FLEX_CASES: list[Case] = [
    (dict(ep=2, dispatcher="flex", moe_flex_dispatcher_backend=backend), 2)
    for backend in ("deepep", "hybridep")
]


def _flex(rank: int) -> list[Any]:
    from tests.flex_on_cpu import flex_on_cpu

    with flex_on_cpu():
        return _gradients(rank, FLEX_CASES, BalanceConfig(tolerance=0.0))


def test_gradients_equal_unbalanced_megatron_over_deepep_and_hybridep() -> None:
    """What travels over them, by stand-ins between CPU ranks."""
    _check(run_ranks(_flex, 2), FLEX_CASES, GRADIENT_TOLERANCE)


@pytest.mark.parametrize("world_size", by_world_size(STEP_CASES))
def test_training_equals_unbalanced_megatron(world_size: int) -> None:
    cases = dealt(STEP_CASES[world_size])
    _check(run_ranks(_steps, world_size, cases, timeout_s=400), cases, STEP_TOLERANCE)


PLANNERS = (
    dict(tolerance=0.0),
    dict(strategy="exact", slots=0),  # takes as many slots as there are mains
    dict(strategy="quota_paper", tolerance=0.0),
    dict(strategy="quota_shipped", tolerance=0.0),
    dict(objective="time", link_bandwidth=1e12, assignment_time=1e-6),
    dict(objective="time"),  # with measured costs
    dict(strategy="eplb", history=HistorySettings(interval=1)),
    dict(strategy="eplb_exact"),
    dict(strategy="lplb", history=HistorySettings(interval=1)),
    dict(strategy="llep", llep=LlepSettings(alpha=1.0, min_tokens_per_gemm=1)),
    dict(strategy="moonep", slots=0),
    dict(strategy="taot"),
    dict(strategy="craft", tolerance=0.0, placement="placement.npz"),
    dict(strategy="quota", tolerance=0.0, placement="placement.npz"),  # as a limit of its slots
    dict(strategy="libra", tolerance=0.0),
    dict(strategy="libra_paper", tolerance=0.0, libra=LibraSettings(locality_share=1.0)),
)


def _planners(rank: int, folder: Path) -> list[Any]:
    with contextlib.chdir(folder), rounds_take(DEAR_EXPERTS_MS):
        # The second microbatch is the first that can be planned from history.
        return [
            gradient_difference(dict(ep=2), num_microbatches=2, balance=BalanceConfig(**planner))
            for planner in PLANNERS
        ]


def test_every_live_planner_is_tested() -> None:
    tested = {planner.get("strategy", BalanceConfig().strategy) for planner in PLANNERS}
    assert tested == {
        name for name, each in STRATEGIES.items() if each.planner and each.kind is each.planner
    }


HISTORY_CASES: list[Case] = [
    # Planned in forward, and in backward again when the next placement is in force.
    (dict(ep=2, recompute="full"), 4),
    (dict(ep=2, recompute="selective", distributed_optimizer=True), 4),
]


def _history(rank: int) -> list[Any]:
    balance = BalanceConfig(strategy="eplb", history=HistorySettings(interval=1), check_plans=True)
    return [
        gradient_difference(case, num_microbatches=num_microbatches, balance=balance)
        for case, num_microbatches in HISTORY_CASES
    ]


AHEAD_CASES: dict[int, list[Case]] = {
    2: [
        (dict(ep=2, num_layers=4), 4),
        (dict(ep=2, num_layers=4, topk=1, overlap_grad_reduce=True), 4),
        (dict(ep=2, num_layers=4, recompute="full"), 4),
        (dict(ep=2, num_layers=4, recompute="selective", distributed_optimizer=True), 4),
        (dict(ep=2, num_layers=3, shared_ffn=24, dispatcher="allgather"), 4),
        (dict(ep=2, num_layers=5, moe_layer_freq=[1, 0, 1, 0, 1]), 4),
    ],
    4: [
        (dict(ep=4, num_layers=3, experts=8), 4),
        (dict(ep=2, pp=2, num_layers=4, recompute="full", topk=1), 4),
        (dict(ep=2, pp=2, vpp=2, num_layers=8, overlap_grad_reduce=True), 4),
        (dict(ep=2, pp=2, vpp=2, num_layers=8, recompute="selective"), 4),
    ],
}
"""Every chunk has layers that replicas are sent ahead to."""

AHEAD_STEP_CASES: list[Case] = [
    (dict(ep=2, num_layers=3, optimizer="sgd"), 2),
    (
        dict(
            ep=2,
            num_layers=3,
            distributed_optimizer=True,
            overlap_grad_reduce=True,
            overlap_param_gather=True,
        ),
        2,
    ),
]


def _steps_ahead(rank: int, cases: list[Case], local_first: bool) -> list[Any]:
    balance = BalanceConfig(strategy="libra", tolerance=0.0, local_first=local_first)
    return [
        step_difference(case, num_microbatches=num_microbatches, balance=balance)
        for case, num_microbatches in cases
    ]


@pytest.mark.parametrize("world_size", by_world_size(AHEAD_CASES))
def test_replicas_sent_ahead_change_no_gradient(world_size: int) -> None:
    cases = dealt(AHEAD_CASES[world_size])
    transport = TRANSPORTS[world_size]
    balance = BalanceConfig(strategy="libra", tolerance=0.0, transport=transport, check_plans=True)
    differences = run_ranks(_gradients, world_size, cases, balance, timeout_s=400)
    _check(differences, cases, GRADIENT_TOLERANCE)
    _check_hits(differences)


@pytest.mark.parametrize("local_first", [False, True])
def test_replicas_sent_ahead_change_no_step(local_first: bool) -> None:
    cases = dealt(AHEAD_STEP_CASES)
    differences = run_ranks(_steps_ahead, 2, cases, local_first, timeout_s=400)
    _check(differences, cases, STEP_TOLERANCE)
    _check_hits(differences)


OWN_FIRST_CASES = {
    strategy: [(case, num_microbatches) for case, num_microbatches in cases[4] if case["ep"] > 1]
    for strategy, cases in (("quota", GRADIENT_CASES), ("libra", AHEAD_CASES))
}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["quota", "libra"])
def test_own_tokens_first_change_no_gradient(strategy: str) -> None:
    # With `collective`, replicas and tokens travel in the same group.
    transport = "shared_memory" if strategy == "quota" else "collective"
    balance = BalanceConfig(strategy=strategy, tolerance=0.0, transport=transport, local_first=True)
    cases = OWN_FIRST_CASES[strategy]
    differences = run_ranks(_gradients, 4, cases, balance, timeout_s=400)
    _check(differences, cases, GRADIENT_TOLERANCE)


def _check_hits(by_rank: list[list[Any]]) -> None:
    for of_rank in by_rank:
        assert all(difference.hits > 0 for difference in of_rank), f"nothing was used: {of_rank}"


def test_history_that_moves_on_before_recompute_changes_nothing() -> None:
    _check(run_ranks(_history, 2), HISTORY_CASES, GRADIENT_TOLERANCE)


def test_every_planner_equals_unbalanced_megatron(tmp_path: Path) -> None:
    # Every expert twice in layer 1, nothing in layer 2.
    slots = torch.tensor([[[2, 3], [0, 1]], [[-1, -1], [-1, -1]]], dtype=torch.int32)
    placement = Placement((1, 2), slots, torch.ones(2, 4, dtype=torch.int64))
    write_placement(tmp_path / "placement.npz", placement)
    cases = [(dict(ep=2, **p), 2) for p in PLANNERS]
    _check(run_ranks(_planners, 2, tmp_path), cases, GRADIENT_TOLERANCE)


def _check(by_rank: list[list[Any]], cases: list[Case], tolerance: float) -> None:
    for index, (case, num_microbatches) in enumerate(cases):
        differences = [rank[index] for rank in by_rank]
        worst = max(differences, key=lambda difference: difference.worst)
        assert worst.worst <= tolerance, f"{case} x {num_microbatches}: {worst}"
        if case["ep"] > 1:
            assert all(d.replicas > 0 for d in differences), f"{case}: no replica, nothing tested"
