"""HybridEP's buffers of fixed size: balanced models need little room, and drop what Megatron drops.

Layer 2: CPU ranks, with the twin of HybridEP (`tests/flex_on_cpu.py`), which drops like the real
one, and Transformer Engine's op fuser, which Megatron demands. Balanced training with the limit is
compared bit by bit with balanced training without it, and where no plan helps, with Megatron's own
layers under the same limit. Where Megatron's runner (`PagedStashRunner`) runs a step again, the
result is compared with a step that needed no second run.
"""

from __future__ import annotations

import logging
import os
from functools import wraps
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_ext.config import BalanceConfig, HistorySettings
from tests.flex_on_cpu import flex_on_cpu
from tests.gpt import TinyGPT, build_gpt
from tests.mcore import inside
from tests.mcore.parity import balanced_gpt, balanced_layers
from tests.ranks import run_ranks
from tests.stash_on_cpu import stash_on_cpu
from tests.te.quantized import Case
from tests.te.test_experts import GATED, HAS_BLOCKS, TE
from tests.te_quantized_on_cpu import answer_like
from tests.telemetry.test_log_lines import Notes

pytestmark = pytest.mark.skipif(not HAS_BLOCKS, reason="Megatron has no such limit")

HYBRIDEP: dict[str, Any] = dict(
    dispatcher="flex",
    moe_flex_dispatcher_backend="hybridep",
    use_transformer_engine_op_fuser=True,
    moe_mlp_glu_interleave_size=4,
    # Buffers are multiples of 256 rows.
    micro_batch_size=64,
    # In float32, the op fuser splits the buffer itself, which no rows may follow then.
    dtype=torch.bfloat16,
)
MODEL = TE | GATED | HYBRIDEP
LIMIT = dict(moe_expert_rank_capacity_factor=1.05)
EXACT = BalanceConfig(tolerance=0.0)
STUCK = BalanceConfig(min_quota=10**6, log_every=2)
"""No replica has so many assignments, so that no plan helps."""


def on_hybridep(function: Any) -> Any:
    """Run a rank's function with the twin, and the op fuser for gated experts."""

    @wraps(function)
    def run(*args: Any) -> Any:
        with mock.patch.dict(os.environ, NVTE_CUTEDSL_FUSED_GROUPED_MLP="1"), flex_on_cpu():
            return function(*args)

    return run


def overflowed(gpt: TinyGPT) -> list[bool]:
    """Whether each layer has dropped tokens on this rank so far, by Megatron's own flag."""
    modules = (module for chunk in gpt.chunks for module in chunk.modules())
    dispatchers = [m.token_dispatcher for m in modules if hasattr(m, "token_dispatcher")]
    return [bool(each.check_over_budget()) for each in dispatchers]


def train(gpt: TinyGPT) -> dict[str, torch.Tensor]:
    losses = [gpt.train_step(step, num_microbatches=2) for step in range(2)]
    return gpt.parameters() | {"losses": torch.tensor(losses)}


def unequal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    assert found.keys() == expected.keys()
    return [name for name, value in expected.items() if not torch.equal(found[name], value)]


@on_hybridep
def _within(rank: int) -> tuple[list[str], list[bool], list[bool], int]:
    expected = train(balanced_gpt(MODEL, EXACT))
    stock, gpt = build_gpt(**MODEL, **LIMIT), balanced_gpt(MODEL | LIMIT, EXACT)
    train(stock)
    found = train(gpt)
    assert all(value.isfinite().all() for value in found.values())
    replicas = sum(layer.num_replicas for layer in balanced_layers(gpt))
    return unequal(found, expected), overflowed(gpt), overflowed(stock), replicas


@pytest.mark.option("rank_capacity")
def test_balanced_training_needs_hardly_more_room_than_the_mean() -> None:
    by_rank = run_ranks(_within, 2, timeout_s=300)
    for differ, balanced, _, replicas in by_rank:
        assert differ == []
        assert balanced == [False, False]
        assert replicas > 0
    assert any(any(stock) for _, _, stock, _ in by_rank), "Megatron drops nothing here either"


@on_hybridep
def _stuck(rank: int) -> tuple[list[str], list[bool], list[bool], list[list[int]], list[str]]:
    """Train Megatron's own layers and stuck ones."""
    from megatron_ext.telemetry.recorder import LoadRecorder

    notes = Notes()
    logging.getLogger().addHandler(notes)
    stock, gpt = build_gpt(**MODEL, **LIMIT), balanced_gpt(MODEL | LIMIT, STUCK)
    reports: list[Any] = []
    for layer in balanced_layers(gpt):
        layer.observers.append(reports.append)
    expected = train(stock)
    recorder = LoadRecorder(balanced_layers(gpt), None)
    found = train(gpt)
    logging.getLogger().removeHandler(notes)
    over = [report.rows_over.tolist() for report in reports]
    needed = [(one.rank_loads_after - 2303).clamp(min=0).tolist() for one in reports]
    assert over == needed, "the buffer has 2304 rows, and the last stays empty"
    counted = sum(one.rows_over or 0 for one in recorder.take_step().computed)
    assert counted == sum(map(sum, over))
    recorder.close()
    lines = [line for line in notes.lines if "dropped" in line]
    return unequal(found, expected), overflowed(gpt), overflowed(stock), over, lines


def test_what_no_plan_can_help_is_said_counted_and_dropped_as_by_megatron() -> None:
    by_rank = run_ranks(_stuck, 2, timeout_s=300)
    for rank, (differ, balanced, stock, over, _) in enumerate(by_rank):
        assert differ == []
        assert balanced == stock == [any(each[rank] for each in over[k::2]) for k in range(2)]
    assert any(any(balanced) for _, balanced, *_ in by_rank)
    (_, _, _, over, lines), (*_, silent) = by_rank
    rows = sum(map(sum, over[:4:2])), sum(map(sum, over[1:4:2]))
    said = ", ".join(f"{n} of layer {k}" for k, n in enumerate(rows, 1) if n)
    assert lines[0].endswith(f"; rows dropped beyond moe_expert_rank_capacity_factor: {said}")
    assert silent == []


@on_hybridep
def _refused(rank: int) -> None:
    answer_like("blackwell")
    # With few tokens, the padding of experts and slots weighs more.
    case = Case("mxfp8", MODEL | LIMIT | dict(hidden=64, ffn=128)).model
    with pytest.raises(ValueError, match=r"factor \(1\.05\) must be >= 1\.376 with 2048 choices"):
        balanced_gpt(case, EXACT).forward_backward()
    gradients = []
    for factor in (1.376, None):
        gpt = balanced_gpt(case | dict(moe_expert_rank_capacity_factor=factor), EXACT)
        gpt.forward_backward(num_microbatches=2)
        assert overflowed(gpt) == [False, False]
        gradients.append(gpt.gradients())
    assert unequal(*gradients) == []


def test_a_factor_without_room_for_even_plans_names_the_least() -> None:
    run_ranks(_refused, 2)


def run_by_megatrons_program(gpt: TinyGPT) -> Any:
    """Let the model's steps be run by Megatron's runner, as its program does under a limit."""
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.moe.paged_stash import PagedStashRunner

    run = get_forward_backward_func()
    runner = PagedStashRunner(gpt.config, False, gpt.chunks, gpt.optimizer, run)
    return mock.patch("tests.gpt.get_forward_backward_func", return_value=runner)


FACTOR = "moe_paged_stash_buffer_size_factor_cuda"
STASH = LIMIT | {"moe_paged_stash": True, FACTOR: 1.1}
RERUNS: dict[str, tuple[BalanceConfig, dict[str, Any], int]] = {
    "not needed": (EXACT, STASH, 0),
    # The stash takes its sizes in the first step, and what is full stays empty from the second on.
    "stash full": (EXACT, STASH | {FACTOR: 0.1}, 2),
    "dropped": (STUCK, STASH, 3),
    "dropped, without stash": (STUCK, LIMIT, 3),
    "history": (BalanceConfig(strategy="eplb", history=HistorySettings(interval=3)), STASH, 2),
}


def _trained(gpt: TinyGPT) -> tuple[dict[str, torch.Tensor], list[list[Any]]]:
    """Parameters and losses after three steps; what each step's forwards have counted."""
    from megatron_ext.telemetry.recorder import LoadRecorder

    recorder, losses, counted = LoadRecorder(balanced_layers(gpt), None), [], []
    for step in range(3):
        losses.append(gpt.train_step(step, num_microbatches=2))
        loads = recorder.take_step()
        plans = [(c.load.tolist(), c.experts_in_slots.tolist()) for c in loads.computed]
        counted.append([*plans, loads.own["max_cum_overload"]])
        assert all(inside.in_flight(layer) == 0 for layer in balanced_layers(gpt))
    recorder.close()
    return gpt.parameters() | {"losses": torch.tensor(losses)}, counted


@on_hybridep
def _run_again(rank: int, name: str) -> tuple[list[str], bool, int, int, bool]:
    from megatron.core.transformer.moe.paged_stash import PagedStashRunner

    balance, settings, _ = RERUNS[name]
    expected, counted = _trained(balanced_gpt(MODEL, balance))
    gpt = balanced_gpt(MODEL | settings, balance)
    with stash_on_cpu() as seen, run_by_megatrons_program(gpt):
        again = mock.patch.object(
            PagedStashRunner,
            "prepare_for_rerun",
            autospec=True,
            side_effect=PagedStashRunner.prepare_for_rerun,
        )
        with again as reruns:
            found, counted_again = _trained(gpt)
    slots = {w.untyped_storage().data_ptr() for w in inside.slot_weights(balanced_layers(gpt)[0])}
    differ = unequal(found, expected)
    return differ, counted == counted_again, reruns.call_count, len(seen), not slots & {*seen}


@pytest.mark.option("paged_stash")
@pytest.mark.parametrize("name", RERUNS)
def test_a_step_that_runs_again_leaves_nothing_of_its_first_run(name: str) -> None:
    for differ, counts_equal, reruns, saved, leaves_slots in run_ranks(_run_again, 2, name):
        assert differ == []
        assert counts_equal
        assert reruns == RERUNS[name][2]
        assert (saved > 0) == ("moe_paged_stash" in RERUNS[name][1])
        assert leaves_slots
