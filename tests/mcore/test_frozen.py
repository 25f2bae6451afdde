"""Frozen parameters: what is trained gets the gradients that it gets without balancing.

Layer 2 (2 gloo ranks, two MoE layers). Parameters are frozen before DDP, which then gives them no
`main_grad`, or after it. Gradients of what is below an expert come through it, so the embedding's
say that tokens' gradients are right. And gradients that nobody needs do not move.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_ext.config import BalanceConfig
from tests.gpt import TinyGPT, build_gpt
from tests.mcore import inside
from tests.mcore.parity import (
    GRADIENT_TOLERANCE,
    STEP_TOLERANCE,
    Difference,
    balanced_gpt,
    balanced_layers,
    gradient_difference,
    step_difference,
)
from tests.ranks import run_ranks

EXACT = BalanceConfig(tolerance=0.0)

LOWER = r"layers\.0\..*\.experts\."
EXPERTS = r"\.experts\."
FC1 = r"\.experts\..*fc1"
BELOW = r"embedding|layers\.0\."
ALL_BUT_ROUTERS = "^(?!.*router)"
ALL_BUT_EXPERT_0 = r"\.experts\.[1-9]"  # all experts of rank 1

Case = tuple[dict[str, Any], dict[str, Any], str]

CASES: list[Case] = [
    (dict(frozen=LOWER), {}, "layer 2"),
    (dict(frozen=LOWER, recompute="full"), {}, "layer 2"),
    (dict(frozen=BELOW), {}, "layer 2"),
    (dict(frozen=FC1), dict(transport="collective"), "layer 1, layer 2"),
    (dict(frozen=EXPERTS), dict(local_first=True), ""),
    (dict(frozen=EXPERTS, recompute="selective"), dict(transport="collective"), ""),
    (dict(frozen=ALL_BUT_ROUTERS), {}, ""),
    (dict(frozen=ALL_BUT_ROUTERS), dict(strategy="libra"), ""),
    (dict(frozen=ALL_BUT_EXPERT_0), {}, "layer 1, layer 2"),
]
"""(model, balance, layers whose gradients move)."""

STEP_CASES: list[Case] = [
    *(
        (dict(gradient_accumulation_fusion=True, **case), balance, moving)
        for case, balance, moving in CASES
        if case["frozen"] in (LOWER, FC1, ALL_BUT_EXPERT_0)
    ),
    (dict(frozen=FC1, grouped_mm=True), {}, "layer 1, layer 2"),
    (dict(frozen=EXPERTS, grouped_mm=True), {}, ""),
]


@contextmanager
def _moving(layers: set[str]) -> Iterator[None]:
    """Note the layers whose gradients move, and that of frozen segments none do."""
    reduce = inside.original(inside.START_REDUCE)

    def noted(
        self: Any,
        replicas: Any,
        slot_grads: Any,
        replica_grads: Any,
        totals: Any,
        label: str,
        **rest: Any,
    ) -> Any:
        layers.add(label.split(",")[0])
        with mock.patch.object(self, "transport", wraps=self.transport) as transport:
            reducing = reduce(self, replicas, slot_grads, replica_grads, totals, label, **rest)
        (_, buffers, added_to, *_), _ = transport.pull_add.call_args
        num_trained = sum(grad is not None for grad in slot_grads)
        assert 0 < num_trained == len(buffers) == len(added_to)
        return reducing

    with mock.patch(inside.START_REDUCE, noted):
        yield


def _differences(rank: int, cases: list[Case], compare: Any) -> list[tuple[Difference, str]]:
    found = []
    for case, balance, _ in cases:
        layers: set[str] = set()
        with _moving(layers):
            difference = compare(
                dict(ep=2, **case),
                num_microbatches=3,
                balance=BalanceConfig(tolerance=0.0, **balance),
            )
        found.append((difference, ", ".join(sorted(layers))))
    return found


@pytest.mark.parametrize(
    ("cases", "compare", "tolerance"),
    [
        (CASES, gradient_difference, GRADIENT_TOLERANCE),
        (STEP_CASES, step_difference, STEP_TOLERANCE),
    ],
    ids=["gradients", "steps"],
)
def test_what_is_trained_gets_the_gradients_of_unbalanced_megatron(
    cases: list[Case], compare: Any, tolerance: float
) -> None:
    for case, *of_ranks in zip(cases, *run_ranks(_differences, 2, cases, compare), strict=True):
        for difference, moving in of_ranks:
            assert difference.worst <= tolerance, f"{case}: {difference}"
            assert difference.replicas > 0, f"{case}: nothing was tested"
            assert moving == case[2], case


def _freeze(gpt: TinyGPT, pattern: str) -> None:
    for name, parameter in gpt.named_parameters():
        parameter.requires_grad_(re.search(pattern, name) is None)


def _in_turn(rank: int, fused: bool, local_first: bool) -> None:
    """Freeze and thaw while DDP's gradients are there for all: nothing may get into them."""
    case = dict(ep=2, gradient_accumulation_fusion=fused)
    dtype = torch.float32 if fused else torch.float64
    balance = replace(EXACT, local_first=local_first)
    plain, balanced = build_gpt(**case, dtype=dtype), balanced_gpt(case, balance, dtype=dtype)
    for pattern in (EXPERTS, FC1, LOWER, "$^", BELOW, EXPERTS, ALL_BUT_ROUTERS):
        for gpt in (plain, balanced):
            _freeze(gpt, pattern)
            gpt.forward_backward(num_microbatches=2)
        expected = plain.gradients()
        for name, value in balanced.gradients().items():
            if re.search(pattern, name):
                assert not value.any(), (pattern, name)
            distance, scale = float((value - expected[name]).norm()), float(expected[name].norm())
            assert distance <= (STEP_TOLERANCE if fused else GRADIENT_TOLERANCE) * scale, name
    assert all(layer.num_replicas > 0 for layer in balanced_layers(balanced))


@pytest.mark.parametrize(("fused", "local_first"), [(False, False), (True, False), (False, True)])
def test_experts_are_frozen_and_thawed_in_turn(fused: bool, local_first: bool) -> None:
    run_ranks(_in_turn, 2, fused, local_first)


def _bytes_and_dtypes(rank: int, main_grads_in_fp32: bool) -> None:
    case = dict(
        ep=2,
        frozen=f"{LOWER}|{FC1}",
        gradient_accumulation_fusion=True,
        ddp=dict(grad_reduce_in_fp32=main_grads_in_fp32),
    )
    gpt = balanced_gpt(case, EXACT, dtype=torch.bfloat16)
    plain, exact = build_gpt(**case, dtype=torch.bfloat16), build_gpt(**case)
    lower, upper = balanced_layers(gpt)
    reports: list[Any] = []
    for layer in (lower, upper):
        layer.observers.append(reports.append)
    for model in (gpt, plain, exact):
        model.forward_backward(num_microbatches=2)
    fc1, fc2 = inside.slot_grads(upper)
    dtype = torch.float32 if main_grads_in_fp32 else torch.bfloat16
    assert fc1 is None
    assert fc2.dtype == dtype
    assert {report.grad_bytes for report in reports if report.layer_number == 1} == {0}
    assert {report.grad_bytes for report in reports if report.layer_number == 2} == {fc2[0].nbytes}

    def error(model: TinyGPT) -> float:
        expected = exact.gradients()
        pairs = [(value.float(), expected[name]) for name, value in model.gradients().items()]
        return float(sum((a - b).square().sum() for a, b in pairs))

    # Low precision by the usual rule: at most twice the error of the plain path.
    assert error(gpt) <= 2**2 * error(plain)
    assert lower.num_replicas > 0 < upper.num_replicas


@pytest.mark.parametrize("main_grads_in_fp32", [False, True])
def test_frozen_experts_share_slots_with_trained_ones_of_any_gradients(
    main_grads_in_fp32: bool,
) -> None:
    run_ranks(_bytes_and_dtypes, 2, main_grads_in_fp32)


def _reference_beside_a_policy(rank: int) -> None:
    """Without DDP, in evaluation, but nobody said `no_grad`."""
    case = dict(ep=2, gradient_accumulation_fusion=True)
    policy, reference = (balanced_gpt(case, EXACT, dtype=torch.bfloat16) for _ in range(2))
    for weight in reference.chunks[0].parameters():
        del weight.main_grad
    tokens, model = reference.tokens(0, 0)[:, :-1], reference.chunks[0].module.eval()
    positions = torch.arange(tokens.shape[1]).expand(len(tokens), -1)
    outputs = []
    for step in range(2):
        policy.train_step(step)
        outputs.append(model(tokens, positions, None).detach())
    assert torch.equal(*outputs)


def test_a_reference_model_without_main_grads_is_evaluated_beside_a_policy() -> None:
    run_ranks(_reference_beside_a_policy, 2)


def _thawed_on_one_rank(rank: int, balance: dict[str, Any]) -> None:
    gpt = balanced_gpt(dict(ep=2), BalanceConfig(tolerance=0.0, **balance))
    _freeze(gpt, EXPERTS)
    gpt.forward_backward()
    _freeze(gpt, ALL_BUT_EXPERT_0)
    with torch.no_grad():
        gpt.forward_backward(forward_only=True)
    message = (
        r"layer 1: EP ranks \[0\] have frozen or thawed experts.*on all ranks in the same step"
    )
    with pytest.raises(RuntimeError, match=message):
        gpt.forward_backward()


@pytest.mark.parametrize("balance", [{}, dict(transport="collective")])
def test_experts_thawed_on_some_ranks_only_are_an_error_on_all(balance: dict[str, Any]) -> None:
    run_ranks(_thawed_on_one_rank, 2, balance, timeout_s=30)
