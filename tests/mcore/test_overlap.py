"""Megatron's combined schedule: a microbatch's forward runs beside the backward of the one before.

Layer 2, on CPU ranks, where all work is done when it is issued: so these tests show what each piece
of a forward leaves to the next, and the order in which layers use the slots. `streams.py` stands in
for the streams of a GPU. Pairs with other options are in `test_combinations.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch.autograd import Variable

from megatron_ext.balance import held_back
from megatron_ext.config import BalanceConfig
from tests.gpt import TinyGPT  # first: it enables the CPU platform
from tests.mcore import inside
from tests.mcore.covering import WITH_ONE_VERSION, of_this_version
from tests.mcore.graphs import graph_layers
from tests.mcore.parity import balanced_gpt, balanced_layers
from tests.mcore.streams import Stream, Watch, clocked_streams
from tests.mcore.test_agreement import spoil
from tests.mcore.test_partial_graphs import ALL, with_graphs
from tests.ranks import run_ranks

OVERLAP = dict(overlap_moe_expert_parallel_comm=True)
EARLY = dict(ep_overlap_early_attn_memory_release=True)
FUSED = dict(gradient_accumulation_fusion=True)
BIASED = dict(add_bias_linear=True)
IN_BACKWARD = dict(distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True)
EXACT = BalanceConfig(tolerance=0.0)


@dataclass(frozen=True)
class Case:
    """A model, and what differs with the schedule."""

    settings: dict[str, Any] = field(default_factory=dict)
    schedule: dict[str, Any] = field(default_factory=lambda: OVERLAP)
    world_size: int = 2
    num_microbatches: int = 3
    dtype: torch.dtype = torch.float32
    before: dict[str, Any] = field(default_factory=dict)
    """What differs without it."""
    strategy: str = "quota"


CASES = {
    "three layers": Case(dict(num_layers=3, shared_ffn=16), dtype=torch.float64),
    "reduced in backward": Case(FUSED | IN_BACKWARD, world_size=4),
}
"""With each version of Megatron-Core."""
CASES |= of_this_version(
    {
        "one microbatch": Case(num_microbatches=1, dtype=torch.float64),
        "one expert a rank": Case(dict(experts=2, topk=1), dtype=torch.float64),
        "not fused, reduced in backward": Case(IN_BACKWARD, world_size=4),
        "early release": Case(FUSED | IN_BACKWARD, OVERLAP | EARLY, before=OVERLAP),
        "interleaved": Case(
            FUSED | dict(num_layers=4, pp=2, vpp=2), world_size=4, num_microbatches=4
        ),
        "DeepEP": Case(dict(dispatcher="flex", moe_flex_dispatcher_backend="deepep")),
        "HybridEP": Case(dict(dispatcher="flex", moe_flex_dispatcher_backend="hybridep")),
        "ideal": Case(strategy="ideal"),
        "frozen experts": Case(dict(frozen=r"\.experts\."), dtype=torch.float64),
    }
)


def _reducing_at_once() -> Any:
    """Let DDP end a reduction where it starts one: what comes into a gradient later is lost."""
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

    start = _ParamAndGradBucketGroup.start_grad_sync

    def start_and_wait(group: Any, *args: Any, **kwargs: Any) -> None:
        start(group, *args, **kwargs)
        if group.grad_reduce_handle is not None:
            group.grad_reduce_handle.wait()

    return mock.patch.object(_ParamAndGradBucketGroup, "start_grad_sync", start_and_wait)


def train_with_and_without(rank: int, case: Case) -> tuple[int, list[str]]:
    """Train alike with and without the schedule; return replicas, and tensors that differ.

    In the first step DDP learns what comes, and from the second on it reduces in backward.
    """
    from tests.flex_on_cpu import flex_on_cpu

    if case.settings.get("dispatcher") == "flex":
        with flex_on_cpu():
            return _train_with_and_without(case)
    return _train_with_and_without(case)


def _train_with_and_without(case: Case) -> tuple[int, list[str]]:
    outcomes: list[dict[str, torch.Tensor]] = []
    for schedule in (case.before, case.schedule):
        balance = replace(EXACT, strategy=case.strategy)
        gpt = balanced_gpt(dict(ep=2) | case.settings, balance, dtype=case.dtype, **schedule)
        run = partial(gpt.forward_backward, num_microbatches=case.num_microbatches)
        with _reducing_at_once():
            run(0)
            with torch.no_grad():
                run(7, forward_only=True)
            reports = run(1)
        assert all(inside.in_flight(layer) == 0 for layer in balanced_layers(gpt))
        losses = {f"loss {number}": each["loss"] for number, each in enumerate(reports)}
        outcomes.append(gpt.gradients() | losses)
    expected, found = outcomes
    replicas = sum(layer.num_replicas for layer in balanced_layers(gpt))
    return replicas, [name for name, each in expected.items() if not torch.equal(each, found[name])]


@pytest.mark.option("overlap")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_training_is_the_same(case: Case) -> None:
    for replicas, different in run_ranks(train_with_and_without, case.world_size, case):
        assert replicas > 0 or case.strategy == "ideal"
        assert different == []


@contextmanager
def _pushing_before_dispatch() -> Iterator[None]:
    """Let layers push behind the plan, while another microbatch's backward has the slots."""
    from megatron_ext.mcore.moe_layer import BalancedMoELayer

    plan, push = BalancedMoELayer.preprocess_behind_graph, inside.original(inside.START_MATERIALIZE)

    def plan_and_push(layer: Any, *args: Any) -> Any:
        result = plan(layer, *args)
        layer.push(layer.under_way)
        layer.under_way.pushing.wait()
        return result

    def push_once(forward: Any, there: Any = None) -> None:
        if forward.pushing is None:
            push(forward, there)

    with (
        mock.patch.object(BalancedMoELayer, "preprocess_behind_graph", plan_and_push),
        mock.patch(inside.START_MATERIALIZE, push_once),
    ):
        yield


def _telling_at_once() -> Any:
    """Let DDP hear of a main's gradient before the replicas' part is in it."""
    return mock.patch.object(held_back, "call_when_complete", lambda main, call: call())


def _train_broken(rank: int, case: Case, break_it: Callable[[], Any]) -> list[str]:
    with break_it():
        return train_with_and_without(rank, case)[1]


@WITH_ONE_VERSION
def test_gradients_that_ddp_hears_of_early_change_weights() -> None:
    case = CASES["reduced in backward"]
    assert any(run_ranks(_train_broken, case.world_size, case, _telling_at_once))


@WITH_ONE_VERSION
def test_replicas_pushed_while_another_microbatch_has_the_slots_are_noticed() -> None:
    case = CASES["three layers"]
    with pytest.raises(RuntimeError, match="ran in the middle of this layer's experts"):
        run_ranks(_train_broken, case.world_size, case, _pushing_before_dispatch)


def without_a_join() -> Any:
    """Let transformer layers be of a class that knows nothing of balancing."""
    from megatron_ext.mcore.transformer_layers import JoiningTransformerLayer

    def run(layer: Any, run: Any, args: Any, kwargs: Any) -> Any:
        return run(*args, **kwargs)

    return mock.patch.object(JoiningTransformerLayer, "_joined", run)


class Watched(NamedTuple):
    """What `Watch` has seen."""

    num_checks: int
    num_freed: int
    errors: list[str]


@contextmanager
def _ddp_on_a_stream_of_its_own(gpt: TinyGPT) -> Iterator[None]:
    """Let the leaves of DDP have the stream on which DDP was made, as in Megatron's programs.

    Autograd lets that stream wait for what computes gradients, and for nothing else. Who called
    backward waits for it when all of that backward is done, and nobody earlier. A reduction reads
    all gradients of its bucket.
    """
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

    of_ddp, callers, engine = Stream(name="DDP"), [], Variable._execution_engine
    start = _ParamAndGradBucketGroup.start_grad_sync

    def begin(grads: Sequence[torch.Tensor | None]) -> None:
        for grad in grads:
            if grad is not None:
                grad.record_stream(of_ddp)  # as autograd does
        callers.append(caller := Stream.current)
        of_ddp.learn({caller.name: caller.clock[caller.name]})
        Stream.current = of_ddp

    def end(*_: Any) -> None:
        Stream.current = callers.pop()

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        result = engine.run_backward(*args, **kwargs)
        Stream.current.learn(of_ddp.clock)
        return result

    def read_and_start(group: Any, *args: Any, **kwargs: Any) -> None:
        for parameter in group.params:
            parameter.main_grad.sum()
        start(group, *args, **kwargs)

    for leaf in (leaf for chunk in gpt.chunks for leaf in chunk.grad_accs):
        leaf.register_prehook(begin)
        leaf.register_hook(end)
    learning = mock.Mock(wraps=engine, run_backward=run_backward)
    with (
        mock.patch.object(_ParamAndGradBucketGroup, "start_grad_sync", read_and_start),
        mock.patch.object(Variable, "_execution_engine", learning),
    ):
        yield


def watched_step(rank: int, settings: dict[str, Any], dtype: torch.dtype) -> Watched:
    """Look at the streams of a step, and at the memory that they free."""
    where = mock.patch("megatron_ext.balance.autograd.has_streams", return_value=True)
    with clocked_streams(), where:
        gpt = balanced_gpt(dict(ep=2, num_layers=3) | settings, EXACT, dtype=dtype)
        gpt.forward_backward(0, num_microbatches=2)  # Its first forward makes the slots.
        (buffers,) = {inside.slot_buffers(layer) for layer in balanced_layers(gpt)}
        with _ddp_on_a_stream_of_its_own(gpt), Watch(buffers) as watch:
            gpt.forward_backward(1, num_microbatches=4)
    return Watched(watch.num_checks, watch.freed.num_freed, watch.errors + watch.freed.errors)


ORDERED = {
    "in turn": (FUSED | IN_BACKWARD, torch.float32),
    "not fused": ({}, torch.float32),
    "overlapped": (OVERLAP, torch.float64),
    "overlapped and fused": (OVERLAP | FUSED, torch.float32),
    "early release": (OVERLAP | EARLY | FUSED, torch.float32),
    "frozen": (OVERLAP | dict(frozen=r"\.experts\."), torch.float64),
    "MoE layers recomputed": (FUSED | dict(recompute="selective"), torch.float32),
    "biases, overlapped": (OVERLAP | FUSED | BIASED, torch.float32),
    "biases, recomputed": (FUSED | BIASED | dict(recompute="selective"), torch.float32),
    "biases, in turn": (FUSED | BIASED | IN_BACKWARD, torch.float32),
    "layers recomputed": (dict(recompute="full"), torch.float64),
}


@pytest.mark.option("overlap")
@pytest.mark.parametrize("name", of_this_version(dict.fromkeys(ORDERED)))
def test_streams_use_the_slots_in_order(name: str) -> None:
    for watched in run_ranks(watched_step, 2, *ORDERED[name]):
        assert watched.num_checks >= 12
        assert watched.errors == []


def _watched_step_without_a_join(
    rank: int, settings: dict[str, Any], dtype: torch.dtype
) -> Watched:
    with without_a_join():
        return watched_step(rank, settings, dtype)


# Gradients in 16 bits are set aside, and the reduction reads them on a stream of its own.
SET_ASIDE = OVERLAP | FUSED | dict(ddp=dict(grad_reduce_in_fp32=False))
STAGES = dict(num_layers=4, pp=2, vpp=2)


@pytest.mark.parametrize(
    ("step", "settings"),
    [
        (watched_step, SET_ASIDE),
        (watched_step, SET_ASIDE | STAGES),
        (_watched_step_without_a_join, SET_ASIDE),
    ],
    ids=["joined", "interleaved", "without a join"],
)
def test_memory_is_free_when_all_streams_have_used_it(
    step: Callable[..., Watched], settings: dict[str, Any]
) -> None:
    for watched in run_ranks(step, 2 * settings.get("pp", 1), settings, torch.bfloat16):
        assert watched.num_freed > 0
        assert watched.errors == []


def _wait_for_no_reads() -> Any:
    return mock.patch.object(Watch, "note_reads", return_value=None)


def _wait_for_no_push() -> Any:
    def wait(materializing: Any) -> None:
        with mock.patch.object(Stream, "learn"):
            done(materializing)

    done = inside.original(inside.MATERIALIZED)
    return mock.patch(inside.MATERIALIZED, wait)


def _wait_for_no_pull() -> Any:
    def wait(reducing: Any) -> Any:
        with mock.patch.object(Stream, "learn"):
            return done(reducing)

    done = inside.original(inside.REDUCED)
    return mock.patch(inside.REDUCED, wait)


def _let_no_leaf_wait() -> Any:
    return mock.patch("megatron_ext.balance.forward.let_leaves_wait")


def _watch_broken(
    rank: int, break_it: Callable[[], Any], settings: dict[str, Any], dtype: torch.dtype
) -> list[str]:
    with break_it():
        return watched_step(rank, settings, dtype).errors


@WITH_ONE_VERSION
@pytest.mark.parametrize(
    ("break_it", "what", "schedule"),
    [
        (_wait_for_no_reads, "slots: push of layer", "overlapped and fused"),
        (_wait_for_no_push, "slots: aten.mm", "overlapped and fused"),
        (_wait_for_no_pull, "slot gradients: aten.copy_", "overlapped and fused"),
        (_wait_for_no_pull, "totals: aten.", "overlapped and fused"),
        (_wait_for_no_push, "slots: aten.mm", "in turn"),
        (_wait_for_no_push, "slots: aten.mm", "MoE layers recomputed"),
        (_wait_for_no_pull, "totals: aten.", "MoE layers recomputed"),
        (_let_no_leaf_wait, "totals: aten.mul_", "in turn"),
        (_let_no_leaf_wait, "totals: aten.add_", "not fused"),
    ],
)
def test_missing_waits_are_found(break_it: Callable[[], Any], what: str, schedule: str) -> None:
    errors = run_ranks(_watch_broken, 2, break_it, *ORDERED[schedule])
    assert any(what in error for of_rank in errors for error in of_rank), errors


def train_with_graphs(
    rank: int, scopes: tuple[str, ...], settings: dict[str, Any], schedule: dict[str, Any]
) -> tuple[int, list[str]]:
    """Train in turn without graphs, and with the schedule and graphs; return as above."""
    outcomes = []
    for changes in ({}, schedule | with_graphs(*scopes)):
        gpt = balanced_gpt(dict(ep=2, num_layers=4) | settings, EXACT, **changes)
        run = partial(gpt.train_step, num_microbatches=4)
        with _reducing_at_once():
            run(0)
            if changes:
                graph_layers(gpt, 4)
            run(1)
            loss = torch.tensor(run(2))
        outcomes.append(gpt.parameters() | {"loss": loss})
    expected, found = outcomes
    replicas = sum(layer.num_replicas for layer in balanced_layers(gpt))
    return replicas, [
        name
        for name, each in expected.items()
        if not torch.equal(each, found[name]) and not each.isnan().all()
    ]


SCOPES = {"all scopes": ALL} | of_this_version(
    {"router": ("moe_router", "moe_preprocess"), "attention": ("attn",)}
)


@pytest.mark.option("overlap")
@pytest.mark.parametrize("scopes", SCOPES.values(), ids=SCOPES.keys())
def test_training_with_partial_graphs_is_the_same(scopes: tuple[str, ...]) -> None:
    for replicas, different in run_ranks(train_with_graphs, 2, scopes, {}, OVERLAP):
        assert replicas > 0
        assert different == []


def _disagree(rank: int) -> None:
    gpt = balanced_gpt(dict(ep=2, num_layers=4), EXACT, **OVERLAP)
    gpt.train_step(0, num_microbatches=2)
    with spoil(gpt, "plan") if rank == 1 else nullcontext():
        gpt.train_step(1, num_microbatches=2)
    gpt.train_step(2, num_microbatches=2)


def test_ranks_that_differ_stop() -> None:
    with pytest.raises(RuntimeError, match=r"layer 2.*(another load or plan|different replicas)"):
        run_ranks(_disagree, 2)


def repeat_a_failed_step(rank: int, settings: dict[str, Any]) -> list[str]:
    """Fail in the middle of a step on all ranks, and train it again; return what differs."""
    from megatron_ext.mcore.between_steps import reset_after_abort

    def gradients(gpt: TinyGPT) -> dict[str, torch.Tensor]:
        gpt.forward_backward(1, num_microbatches=3)
        return gpt.gradients()

    expected = gradients(balanced_gpt(dict(ep=2) | settings, EXACT))
    gpt = balanced_gpt(dict(ep=2) | settings, EXACT)
    reductions = iter(range(9))
    reduce = inside.original(inside.START_REDUCTION)

    def fail_at_the_third(*args: Any, **kwargs: Any) -> Any:
        if next(reductions) == 2:
            raise ArithmeticError
        return reduce(*args, **kwargs)

    with mock.patch(inside.START_REDUCTION, fail_at_the_third), pytest.raises(ArithmeticError):
        gpt.forward_backward(0, num_microbatches=3)
    reset_after_abort(gpt.chunks)
    found = gradients(gpt)
    return [name for name, each in expected.items() if not torch.equal(each, found[name])]


def test_a_failed_step_can_be_repeated() -> None:
    assert run_ranks(repeat_a_failed_step, 2, OVERLAP | FUSED) == [[], []]


def _lose_a_join(rank: int) -> None:
    """Run the experts' backward, and nothing behind it."""
    from megatron.core.models.common.model_chunk_schedule_plan import TransformerLayerSchedulePlan

    run = TransformerLayerSchedulePlan.run
    gpt = balanced_gpt(dict(ep=2) | FUSED, EXACT, **OVERLAP)

    def run_without_attention(f_layer: Any, b_layer: Any, *args: Any, **kwargs: Any) -> Any:
        if b_layer is not None:
            names = ("pre_dispatch_computation", "attn")  # 0.16.1 has the other name.
            (node,) = (getattr(b_layer, name) for name in names if hasattr(b_layer, name))
            node.backward = lambda grads: torch.zeros_like(node.inputs[0])
        return run(f_layer, b_layer, *args, **kwargs)

    broken = staticmethod(run_without_attention)
    with mock.patch.object(TransformerLayerSchedulePlan, "run", broken):
        gpt.forward_backward(0, num_microbatches=2)


def test_a_backward_without_the_layers_input_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"gradients of \d+ expert weights lack .* replicas"):
        run_ranks(_lose_a_join, 2)
