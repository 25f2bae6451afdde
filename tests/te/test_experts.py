"""Balancing changes nothing with Transformer Engine's experts: mains and slots are one product.

Layer 2. Gradients are compared in float64, where only the order of sums differs, and bit by bit
where it does not.
"""

from __future__ import annotations

import os
import re
import sys
import weakref
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from packaging.version import Version

from megatron_ext.config import BalanceConfig
from tests.gpt import TinyGPT, build_gpt
from tests.mcore.parity import balanced_gpt, balanced_layers, gradient_difference, step_difference
from tests.ranks import run_ranks

GRADIENT_TOLERANCE = 1e-10
"""As in `tests/mcore/test_parity.py`; so is the next."""

STEP_TOLERANCE = 1e-5

EXACT = BalanceConfig(tolerance=0.0)

TE: dict[str, Any] = dict(ep=2, transformer_engine=True, moe_grouped_gemm=True)
GATED: dict[str, Any] = dict(gated_linear_unit=True, activation_func=torch.nn.functional.silu)

Case = tuple[dict[str, Any], int, BalanceConfig]

CASES: list[Case] = [
    (TE | dict(overlap_grad_reduce=True), 4, EXACT),
    (TE | dict(add_bias_linear=True, topk=1, moe_apply_probs_on_input=True), 1, EXACT),
    (TE | GATED | dict(add_bias_linear=True, bias_activation_fusion=False), 1, EXACT),
    (TE | GATED | dict(bias_activation_fusion=True, recompute="selective"), 2, EXACT),
    (TE | dict(recompute_granularity="selective", recompute_modules=["moe_act"]), 2, EXACT),
    (TE | dict(recompute="full", dispatcher="allgather", shared_ffn=24), 1, EXACT),
    (TE | dict(distributed_optimizer=True), 2, BalanceConfig(tolerance=0.0, local_first=True)),
    (TE | dict(moe_grouped_gemm=False), 2, EXACT),
    (TE | dict(moe_latent_size=8), 1, EXACT),
    (TE | dict(frozen=r"layers\.0\..*\.experts\.|fc1"), 2, EXACT),
    (TE | dict(frozen=r"\.experts\.", add_bias_linear=True), 2, EXACT),
]
OVERLAPPED = dict(distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True)

STEP_CASES = [
    TE | GATED | OVERLAPPED | dict(gradient_accumulation_fusion=fused) for fused in (False, True)
]
STEP_CASES.append(STEP_CASES[-1] | dict(frozen=r"layers\.0\..*\.experts\.|fc1"))

HAS_BLOCKS = Version(version("megatron-core")) >= Version("0.19")
if HAS_BLOCKS:
    IN_BLOCKS = TE | GATED | dict(moe_mlp_glu_interleave_size=4)
    CASES.append((IN_BLOCKS, 1, EXACT))
    # The op fuser takes no float64.
    FUSED = IN_BLOCKS | dict(use_transformer_engine_op_fuser=True)
    # Recompute begins with a forward without gradients.
    STEP_CASES += [FUSED, FUSED | dict(recompute="selective", frozen=r"\.experts\..*fc1")]


def _fused_biases(rank: int) -> None:
    case = TE | GATED | dict(use_transformer_engine_op_fuser=True, add_bias_linear=True)
    with (
        mock.patch.dict(os.environ, NVTE_CUTEDSL_FUSED_GROUPED_MLP="1"),
        pytest.raises(ValueError, match=r"add_bias_linear \(True\) must be False with use_trans"),
    ):
        _balanced(**case)


@pytest.mark.skipif(not HAS_BLOCKS, reason="Megatron has no fused experts")
def test_biases_of_fused_experts_are_refused() -> None:
    run_ranks(_fused_biases, 2)


def _gradients(rank: int) -> list[Any]:
    return [
        gradient_difference(case, num_microbatches=num_microbatches, balance=balance)
        for case, num_microbatches, balance in CASES
    ]


@pytest.mark.option("glu_interleave" if HAS_BLOCKS else "te_grouped")
@pytest.mark.option("te_grouped")
@pytest.mark.option("te_sequential")
@pytest.mark.option("recompute_act")
def test_gradients_equal_unbalanced_megatron() -> None:
    by_rank = run_ranks(_gradients, 2, timeout_s=400)
    for index, case in enumerate(CASES):
        worst = max((rank[index] for rank in by_rank), key=lambda difference: difference.worst)
        assert worst.worst <= GRADIENT_TOLERANCE, f"{case}: {worst}"
        assert all(rank[index].replicas > 0 for rank in by_rank), f"{case}: nothing was tested"


def _freeze(gpt: TinyGPT, pattern: str) -> None:
    for name, parameter in gpt.named_parameters():
        parameter.requires_grad_(re.search(pattern, name) is None)


def _frozen_in_turn(rank: int, case: dict[str, Any]) -> None:
    plain, gpt = build_gpt(**TE, **case), balanced_gpt(TE | case, EXACT)
    for pattern in ("$^", "fc1", r"\.experts\.", r"layers\.0\..*\.experts\.", "$^", "."):
        for each in (plain, gpt):
            _freeze(each, pattern)
            each.forward_backward(num_microbatches=2, forward_only=pattern == ".")
        expected = plain.gradients()
        for name, value in gpt.gradients().items():
            assert (value - expected[name]).norm() <= STEP_TOLERANCE * expected[name].norm(), name
    assert all(layer.num_replicas > 0 for layer in balanced_layers(gpt)), "nothing was tested"


@pytest.mark.parametrize("case", [{}, dict(gradient_accumulation_fusion=True)])
def test_experts_are_frozen_and_thawed_in_turn(case: dict[str, Any]) -> None:
    run_ranks(_frozen_in_turn, 2, case)


def _frozen_on_one_rank(rank: int, frozen: str, trains_before: bool) -> None:
    gpt = balanced_gpt(TE, EXACT)
    if trains_before:
        gpt.forward_backward()
    _freeze(gpt, frozen)
    errors = {
        False: (ValueError, "linear_fc1.weight must have one dtype.*None.*freeze a linear of all"),
        True: (RuntimeError, "have frozen or thawed experts, and the other ranks have not"),
    }
    error, message = errors[trains_before]
    with pytest.raises(error, match=f"layer 1: .*{message}"):
        gpt.forward_backward()


@pytest.mark.parametrize("frozen", [r"\.experts\.0\.", r"\.experts\.[2-9]\."])
@pytest.mark.parametrize("trains_before", [False, True])
def test_experts_frozen_on_some_ranks_only_are_an_error_on_all(
    frozen: str, trains_before: bool
) -> None:
    """Transformer Engine asks the first expert of a rank whether to compute gradients of any."""
    run_ranks(_frozen_on_one_rank, 2, frozen, trains_before, timeout_s=60)


def _with_adapters(rank: int) -> None:
    gpt = balanced_gpt(TE, EXACT)
    for layer in gpt.chunks[0].module.decoder.layers:
        layer.mlp.experts.linear_fc1.adapter = torch.nn.Linear(16, 32)
    with pytest.raises(ValueError, match=r"further parameters.*\(linear_fc1.adapter.weight"):
        gpt.forward_backward()


def test_adapters_of_experts_are_refused() -> None:
    """A replica would compute with the adapter of another rank."""
    run_ranks(_with_adapters, 2)


def _steps(rank: int) -> list[Any]:
    # Without it, Megatron refuses the op fuser for gated experts.
    with mock.patch.dict(os.environ, NVTE_CUTEDSL_FUSED_GROUPED_MLP="1"):
        return [step_difference(case, num_microbatches=2, balance=EXACT) for case in STEP_CASES]


@pytest.mark.option("op_fuser" if HAS_BLOCKS else "te_grouped")
@pytest.mark.option("te_grouped")
def test_training_equals_unbalanced_megatron() -> None:
    for case, *differences in zip(STEP_CASES, *run_ranks(_steps, 2), strict=True):
        worst = max(differences, key=lambda difference: difference.worst)
        assert worst.worst <= STEP_TOLERANCE, f"{case}: {worst}"
        assert all(each.replicas > 0 for each in differences), f"{case}: nothing was tested"


def _grouped_and_sequential(rank: int) -> list[int]:
    """Train both in float32 by equal plans, and compare all bits."""
    settings = TE | GATED | dict(bias_activation_fusion=False)
    replicas = []
    for make in (build_gpt, _balanced):
        grouped = make(**settings)
        sequential = make(**(settings | dict(moe_grouped_gemm=False)))
        for step in range(2):
            losses = [gpt.train_step(step, num_microbatches=2) for gpt in (grouped, sequential)]
            assert losses[0] == losses[1]
        expected, found = sequential.parameters(), grouped.parameters()
        assert expected.keys() == found.keys()
        assert [n for n, value in expected.items() if not torch.equal(found[n], value)] == []
        replicas.append(sum(layer.num_replicas for layer in balanced_layers(grouped)))
    return replicas


def _balanced(**settings: Any) -> TinyGPT:
    return balanced_gpt(settings, EXACT)


def test_grouped_experts_train_as_single_ones_to_the_last_bit() -> None:
    for plain, balanced in run_ranks(_grouped_and_sequential, 2):
        assert plain == 0
        assert balanced > 0


class Counts(torch.Tensor):
    """Counts that note who asks for their values: on a device, a host waits for them."""

    readers: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function.__name__ in ("tolist", "item", "cpu", "__int__", "__bool__", "__index__"):
            cls.readers.append(Path(sys._getframe(1).f_code.co_filename).name)
        return super().__torch_function__(function, types, args, kwargs)


@mock.patch.dict(os.environ, NVTE_CUTEDSL_FUSED_GROUPED_MLP="1")
def _slots_for_mains(rank: int, case: dict[str, Any]) -> list[list[str]]:
    """Two mains and two slots with fused gradients, against four mains, over two microbatches.

    Returns:
        Who asked for the counts' values, of each.
    """
    from megatron_ext.mcore.experts import expert_weights

    settings = TE | GATED | dict(ep=1, num_layers=1) | case
    dtype, readers = settings.get("dtype", torch.float32), [[], []]
    whole, half = build_gpt(**settings), build_gpt(**(settings | dict(experts=2)))
    of_whole, of_half = (
        gpt.chunks[0].module.decoder.layers[0].mlp.experts for gpt in (whole, half)
    )
    weights = expert_weights(of_half)
    mains = expert_weights(of_whole).mains().rows()
    slots = [torch.stack(rows[2:]).requires_grad_() for rows in mains]
    slot_grads = [torch.zeros(values.shape) for values in slots]
    for experts in (of_whole, of_half):
        for linear in (experts.linear_fc1, experts.linear_fc2):
            linear.fuse_wgrad_accumulation = True
    for microbatch in range(2):
        torch.manual_seed(microbatch)
        counts = torch.tensor([5, 0, 7, 3]).as_subclass(Counts)
        tokens, upstream = torch.randn(2, 15, 16, dtype=dtype)
        probs = torch.rand(15)
        views = [list(values.unbind()) for values in slots]
        for of_segment, gradients in zip(views, slot_grads, strict=True):
            for view, gradient in zip(of_segment, gradients.unbind(), strict=True):
                view.main_grad = gradient
        outcomes = []
        for run, asked in zip((of_whole, partial(weights.run, views)), readers, strict=True):
            Counts.readers = asked
            inputs = tokens.clone().requires_grad_()
            output = run(inputs, counts, probs)
            output = output[0] if isinstance(output, tuple) else output
            output.backward(upstream)
            outcomes.append((output, inputs.grad))
        assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))
        # Autograd has got nothing: all is in the slots' `main_grad`.
        assert all(values.grad is None for values in slots)
    expected = dict(whole.named_parameters())
    found = {name: p.main_grad for name, p in half.named_parameters() if "experts" in name}
    for segment, gradients in zip(weights.segments, slot_grads, strict=True):
        for index, gradient in enumerate(gradients, start=2):
            found[f"decoder.layers.0.mlp.experts.{index}.{segment.name}"] = gradient
    assert len(found) == 8
    for name, gradient in found.items():
        assert torch.equal(expected[name].main_grad, gradient), name
        assert expected[name].main_grad.any() == ("experts.1" not in name)
    return readers


@pytest.mark.parametrize(
    "case",
    [
        {},
        pytest.param(
            dict(use_transformer_engine_op_fuser=True, dtype=torch.bfloat16),
            marks=pytest.mark.skipif(not HAS_BLOCKS, reason="Megatron has no fused experts"),
        ),
    ],
)
def test_slots_are_further_experts_of_the_same_product(case: dict[str, Any]) -> None:
    ((stock, balanced),) = run_ranks(_slots_for_mains, 1, case)
    assert balanced == stock, "the host reads counts where it does without slots, and nowhere else"
    # In bfloat16 the op fuser's products read counts on the device, where the twin reads them.
    assert set(stock) == {"te_on_cpu.py" if case else "experts.py"}


def _state(experts: Any) -> list[Any]:
    """What a forward with slots changes for its time."""
    linears = (experts.linear_fc1, experts.linear_fc2)
    of_linears = [(linear.num_gemms, sorted(vars(linear))) for linear in linears]
    return [*of_linears, getattr(experts, "_fused_ops", None)]


@mock.patch.dict(os.environ, NVTE_CUTEDSL_FUSED_GROUPED_MLP="1")
def _lend_and_take_back(rank: int, case: dict[str, Any]) -> None:
    from megatron_ext.mcore.experts import expert_weights

    gpt = build_gpt(**(TE | GATED | dict(ep=1, num_layers=1, experts=2) | case))
    experts = gpt.chunks[0].module.decoder.layers[0].mlp.experts
    weights = expert_weights(experts)
    slots = [[rows[0].clone()] for rows in weights.mains().rows()]
    tokens, probs = torch.randn(8, 16), torch.rand(8)
    weights.run([()], tokens, torch.tensor([8, 0]), probs)
    before = _state(experts)
    counts = torch.tensor([4, 0, 4])
    output = weights.run(slots, tokens, counts, probs)
    assert output.shape == tokens.shape
    assert _state(experts) == before
    with (
        mock.patch.object(experts, "forward", side_effect=RuntimeError("out of memory")),
        pytest.raises(RuntimeError, match="out of memory"),
    ):
        weights.run(slots, tokens, counts, probs)
    assert _state(experts) == before


@pytest.mark.parametrize("op_fuser", [False, *[True] * HAS_BLOCKS])
def test_experts_are_as_they_were_after_a_forward_and_after_one_that_fails(op_fuser: bool) -> None:
    of_fuser = dict(moe_mlp_glu_interleave_size=4, use_transformer_engine_op_fuser=True)
    run_ranks(_lend_and_take_back, 1, of_fuser if op_fuser else {})


@mock.patch.dict(os.environ, NVTE_CUTEDSL_FUSED_GROUPED_MLP="1")
def _two_in_flight(rank: int) -> int:
    """Two microbatches, each computed in two parts, whose backwards follow both forwards.

    Returns:
        How often operations were made.
    """
    from megatron_ext.mcore.experts import expert_weights

    of_fuser = dict(moe_mlp_glu_interleave_size=4, use_transformer_engine_op_fuser=True)
    gpt = build_gpt(**(TE | GATED | of_fuser | dict(ep=1, num_layers=1, experts=2)))
    experts = gpt.chunks[0].module.decoder.layers[0].mlp.experts
    weights = expert_weights(experts)
    memory = [torch.stack(rows) for rows in weights.mains().rows()]
    counts = torch.tensor([3, 2, 0, 4])
    parts = [(torch.randn(9, 16), torch.rand(9)) for _ in range(4)]

    def forward(of_microbatch: list[Any]) -> tuple[Any, list[torch.Tensor]]:
        slots = [[row.clone().requires_grad_() for row in values] for values in memory]
        for of_segment, values in zip(slots, memory, strict=True):
            for slot, row in zip(of_segment, values, strict=True):
                slot.data = row  # All microbatches have the same memory.
        outputs = [weights.run(slots, t, counts, p) for t, p in of_microbatch]
        return sum(outputs).square().sum(), [slot for of_segment in slots for slot in of_segment]

    def gradients(microbatches: list[list[Any]]) -> list[Any]:
        under_way = [forward(of_microbatch) for of_microbatch in microbatches]
        for loss, _ in under_way:
            loss.backward()
        return [slot.grad for _, slots in under_way for slot in slots]

    microbatches = [parts[:2], parts[2:]]
    make = mock.patch.object(experts, "_make_fused_ops", wraps=experts._make_fused_ops)
    with make as made:
        together = gradients(microbatches)
        alone = [each for of_microbatch in microbatches for each in gradients([of_microbatch])]
    assert len(alone) == 8
    assert all(torch.equal(*pair) for pair in zip(together, alone, strict=True))
    assert [bool(grad.any()) for grad in alone] == [False, True] * 4
    loss, slots = forward(parts)
    kept = [weakref.ref(slot) for slot in slots]
    del loss, slots
    assert not any(slot() is not None for slot in kept), "a graph outlives its microbatch"
    return made.call_count


@pytest.mark.skipif(not HAS_BLOCKS, reason="Megatron has no fused experts")
def test_operations_of_the_op_fuser_are_made_once_for_all_microbatches() -> None:
    assert run_ranks(_two_in_flight, 1) == [1]


def _checkpoint_entries(rank: int) -> int:
    """Compare what checkpoints hold, after a step; returns how many entries are of experts."""
    settings = TE | GATED | dict(add_bias_linear=True, bias_activation_fusion=False)
    fields = ("key", "replica_id", "global_shape", "global_offset")
    entries = []
    for gpt in (build_gpt(**settings), _balanced(**settings)):
        gpt.train_step(0)
        model = gpt.chunks[0].module
        sharded = model.sharded_state_dict()
        places = {
            name: [type(entry), *(getattr(entry, field, None) for field in fields)]
            for name, entry in sharded.items()
        }
        entries.append((list(model.state_dict()), places))
    assert entries[0] == entries[1]
    return sum("experts" in name for name in entries[0][1])


def test_checkpoints_hold_what_they_held() -> None:
    assert min(run_ranks(_checkpoint_entries, 2)) >= 16
