"""A whole step as one graph: forwards, backwards, and the reduction of gradients.

Layer 2 (gloo ranks): Megatron's own `FullCudaGraphWrapper` around its own schedule, with the
recorder of `graphs.py` in place of CUDA graphs. So that nothing of the stand-ins asks the host,
tokens go to all ranks, whose experts compute all of them, and replicas move by operations that are
the same for all plans. Planning, reroute, replicas and their reduction are the package's own.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from megatron_ext.balance import plan
from megatron_ext.config import BalanceConfig
from megatron_ext.transport.collective import CollectiveTransport
from tests import gpt as tiny
from tests.gpt import TinyGPT  # first: it enables the CPU platform
from tests.mcore import inside
from tests.mcore.graphs import CaptureError, whole_steps
from tests.mcore.parity import balanced_gpt, balanced_layers
from tests.ranks import run_ranks
from tests.telemetry.test_log_lines import Notes

from megatron.core.full_cuda_graph import FullCudaGraphWrapper  # isort: skip
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining  # isort: skip
from megatron_ext.mcore import process_hooks  # isort: skip
from megatron_ext.mcore.between_steps import reset_after_abort  # isort: skip
from megatron_ext.telemetry.recorder import LoadRecorder  # isort: skip

STEPS, MICROBATCHES = 5, 2


LATE = "waited 0.2 s for rank 0 to offer the gradient of slot 0"


class OperationsTransport:
    """Moves replicas by operations whose sizes no plan changes: all of everything to all ranks."""

    name = "operations"
    rows = None

    def __init__(self, group: Any) -> None:
        self._group = group
        self._rank = group.rank()
        self.failed = torch.zeros(1, dtype=torch.int32)
        self.is_late = torch.zeros(1, dtype=torch.int32)
        """Set between steps: the wait of a pull fails, as a kernel's does, and the step goes on."""

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    def push(
        self, transfers: Any, mains: list[list[Tensor]], slot_weights: list[Tensor], label: str = ""
    ) -> Any:
        experts = transfers.experts_in_slots[self._rank].long()
        for of_segment, slots in zip(mains, slot_weights, strict=True):
            there = _gathered(torch.stack(of_segment), self._group)
            arrived = there.index_select(0, experts.clamp(min=0))
            is_used = (experts >= 0).view(-1, *[1] * (arrived.dim() - 1))
            slots.copy_(torch.where(is_used, arrived, slots))
        return mock.Mock(wait=lambda: None)

    def pull_add(
        self, transfers: Any, slot_grads: list[Tensor], totals: Any, aside: Any, label: str = ""
    ) -> Any:
        experts = transfers.experts_in_slots.flatten()
        for grads, of_segment in zip(slot_grads, totals, strict=True):
            there = _gathered(grads, self._group)
            for main_idx, total in enumerate(of_segment):
                expert = self._rank * transfers.mains_per_rank + main_idx
                is_its = (experts == expert).view(-1, *[1] * (there.dim() - 1))
                total.add_((there * is_its).sum(0))
            grads.zero_()
        self.failed.add_(self.is_late)
        return mock.Mock(wait=lambda: None)

    def note_reads(self) -> None: ...

    def raise_failure(self) -> None:
        if int(self.failed):
            raise RuntimeError(LATE)

    def cancel(self) -> None: ...

    def reset(self) -> None:
        self.failed.zero_()


def _gathered(mine: Tensor, group: Any) -> Tensor:
    of_all = mine.new_empty(group.size() * len(mine), *mine.shape[1:])
    dist.all_gather_into_tensor(of_all, mine.contiguous(), group=group)
    return of_all


def _summed(of_all: Tensor, group: Any) -> Tensor:
    """The sum of this rank's part. Not by a reduce-scatter, which gloo makes of operations that a
    replay takes for its own."""
    total = of_all.clone()
    dist.all_reduce(total, group=group)
    return total.chunk(group.size())[group.rank()]


class _Everywhere(torch.autograd.Function):
    """All ranks' rows; its backward is `_Home`."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _gathered(mine, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _summed(grad, ctx.group), None


class _Home(torch.autograd.Function):
    """The sum over ranks of this rank's rows."""

    @staticmethod
    def forward(ctx: Any, of_all: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _summed(of_all, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _gathered(grad, ctx.group), None


class EveryTokenEverywhere:
    """A dispatcher that sends all tokens to all ranks, and knows no numbers of tokens."""

    shared_experts = None

    def __init__(self, layer: Any) -> None:
        self._group, self._layout = layer.ep_group, layer.layout
        self.config = SimpleNamespace(moe_expert_rank_capacity_factor=1.0)
        self.is_small = torch.zeros(1, dtype=torch.bool)
        """Set between steps: the buffer of this rank has not enough rows, and a flag says so."""
        self._is_over = torch.zeros(1, dtype=torch.bool)
        self._comm_manager = SimpleNamespace(moe_expert_rank_capacity_factor=1.0)

    def check_over_budget(self) -> Tensor:
        return self._is_over

    def reset_over_budget(self) -> None:
        self._is_over.zero_()

    # Megatron-Core 0.20 asks for these, too.

    def check_required_capacity(self) -> None:
        """It is not known."""

    def invalidate_ep_bootstrap(self) -> None:
        """Nothing is set up."""

    def dispatch_preprocess(
        self, hidden: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        if self._comm_manager.moe_expert_rank_capacity_factor is not None:
            self._is_over.logical_or_(self.is_small)
        self._shape = hidden.shape
        return hidden.reshape(-1, hidden.shape[-1]), probs

    def token_dispatch(self, hidden: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        return _Everywhere.apply(hidden, self._group), _Everywhere.apply(probs, self._group)

    def dispatch_postprocess(self, tokens: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        here = self._layout.physical_per_rank
        first = self._group.rank() * here
        return tokens, probs.new_empty(here), probs[:, first : first + here]

    def combine_preprocess(self, output: Tensor) -> Tensor:
        return output

    def token_combine(self, output: Tensor, *_: Any, **__: Any) -> Tensor:
        return _Home.apply(output, self._group)

    def combine_postprocess(self, output: Tensor) -> Tensor:
        return output.view(self._shape)


def _run_all(weights: Any, slot_weights: Any, tokens: Tensor, _: Tensor, probs: Tensor) -> Tensor:
    """Each expert computes all tokens; the probabilities of those of others are zero."""
    experts = weights.experts
    firsts, seconds = (
        [getattr(each, name).weight for each in experts.local_experts] + list(of_slots)
        for name, of_slots in zip(("linear_fc1", "linear_fc2"), slot_weights, strict=True)
    )
    output = torch.zeros_like(tokens)
    for first, second, prob in zip(firsts, seconds, probs.unbind(1), strict=True):
        output = output + prob[:, None] * (functional.gelu(tokens @ first.T) @ second.T)
    return output


def _model(ep: int = 2, **balance: Any) -> TinyGPT:
    case = dict(ep=ep, experts=8, topk=2, num_layers=2)
    gpt = balanced_gpt(case, BalanceConfig(tolerance=0.0, **balance))
    for layer in balanced_layers(gpt):
        layer.token_dispatcher = EveryTokenEverywhere(layer)
        del layer.observers[-1]  # It asks the host, and only the recorder hears of replays.
    return gpt


def _forward_step(batches: Iterator[dict[str, Tensor]], *args: Any) -> Any:
    return original_forward_step(iter([next(batches)["tokens"]]), *args)


original_forward_step = tiny._forward_step


@contextmanager
def _static(transport: type = OperationsTransport) -> Iterator[None]:
    """Let nothing but the schedule and what it calls ask the host; batches are as Megatron's."""
    with (
        mock.patch.object(plan, "check_counts", return_value=None),  # Not of a load on a GPU.
        mock.patch(inside.MAKE_TRANSPORT, lambda name, group, *_: transport(group)),
        mock.patch(inside.RUN_EXPERTS, _run_all),
        mock.patch.object(tiny, "_forward_step", _forward_step),
        mock.patch.object(TinyGPT, "_batches", _batches),
        whole_steps(),
    ):
        yield


def _batches(gpt: TinyGPT, step: int, num_microbatches: int) -> Iterator[dict[str, Tensor]]:
    return ({"tokens": gpt.tokens(step, each)} for each in range(num_microbatches))


@contextmanager
def _captured_behind(warm_up: int, runner: Any = lambda run: run) -> Iterator[None]:
    """Let steps run as in Megatron's program: that after the warm-up is captured."""
    run = FullCudaGraphWrapper(forward_backward_no_pipelining, cuda_graph_warmup_steps=warm_up)
    with mock.patch.object(tiny, "get_forward_backward_func", return_value=runner(run)):
        yield


def _trained(gpt: TinyGPT, steps: range = range(STEPS)) -> tuple[dict[str, Tensor], list[Any]]:
    """Parameters and losses; what the layers have counted, taken every other step."""
    recorder, losses, counted = LoadRecorder(balanced_layers(gpt), None), [], []
    for step in steps:
        losses.append(gpt.train_step(step, num_microbatches=MICROBATCHES))
        if step % 2:
            held = [*recorder._held.events]
            loads = recorder.take_step()
            own = {n: v for n, v in loads.own.items() if n.startswith("max_cum")}
            counted.append([(own, held), *((c.load, c.experts_in_slots) for c in loads.computed)])
    recorder.close()
    return gpt.parameters() | {"losses": torch.tensor(losses)}, counted


def _equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    assert found.keys() == expected.keys()
    return all(torch.equal(found[name], value) for name, value in expected.items())


def _train_both_ways(rank: int) -> tuple[int, list[str]]:
    notes = Notes()
    with _static():
        expected, counted = _trained(_model())
        logging.getLogger().addHandler(notes)
        expected_lines = _lines_of(notes, lambda: _trained(_model(log_every=4)))
        with _captured_behind(warm_up=1):
            gpt = _model(log_every=4)
            found: list[Any] = []
            lines = _lines_of(notes, lambda: found.append(_trained(gpt)))
            for _ in range(3):  # One before the capture, and two of its graph.
                gpt.forward_backward(forward_only=True)
        logging.getLogger().removeHandler(notes)
    ((parameters, counted_in_replays),) = found
    assert FullCudaGraphWrapper.cuda_graph["training"] is None, "the stand-ins are gone"
    assert _equal(parameters, expected)
    assert str(counted_in_replays) == str(counted)
    assert lines == expected_lines
    plans = torch.stack([in_slots for _, *forwards in counted for _, in_slots in forwards])
    assert not torch.equal(plans[0], plans[-1]), "each replay makes its own plans"
    return int((plans >= 0).sum()), lines


def _lines_of(notes: Notes, run: Any) -> list[str]:
    notes.lines.clear()
    run()
    return [line for line in notes.lines if line.startswith("MoE")]


def test_replays_of_a_whole_step_train_count_and_speak_as_without_graphs() -> None:
    (replicas, lines), _ = run_ranks(_train_both_ways, 2)
    assert replicas > STEPS * MICROBATCHES, "replicas are used"
    assert len(lines) == 1 + STEPS * MICROBATCHES // 4


def _fail(rank: int, where: str) -> None:
    """Rank 3 fails in a replay. All ranks end the step; then the same graph trains on."""
    with _static():
        expected, _ = _trained(_model())
        with _captured_behind(warm_up=1):
            gpt = _model()
            _trained(gpt, range(2))
            before = gpt.parameters()
            buffers, agreement = (
                getattr(balanced_layers(gpt)[0].balancer, n) for n in ("buffers", "agreement")
            )
            if where == "wait":
                buffers.transport.is_late += rank == 3
                match = f"changes a weight: global rank 3: {LATE}$"
            else:
                agreement._seal += rank == 3
                differ = r"layer 2: EP ranks \[1\] had another load or plan"
                match = f"global rank 2: {differ}.*; global rank 3: {differ}"
            with pytest.raises(RuntimeError, match=match):
                gpt.forward_backward(2, num_microbatches=MICROBATCHES)
            assert _equal(gpt.parameters(), before)
            buffers.transport.is_late.zero_()
            reset_after_abort(gpt.chunks)
            found, _ = _trained(gpt, range(2, STEPS))
    assert _equal(found, expected | {"losses": expected["losses"][2:]})


@pytest.mark.parametrize("where", ["wait", "plan"])
def test_what_fails_in_a_replay_ends_the_step_on_all_ranks(where: str) -> None:
    run_ranks(_fail, 4, where)


def _lose(rank: int) -> None:
    """Rank 1 dies in the middle of a replay; rank 0 says what it then finds."""
    with _static(), _captured_behind(1):
        gpt = _model()
        _trained(gpt, range(2))
        before = gpt.parameters()
        if rank == 1:
            operations = FullCudaGraphWrapper.cuda_graph["training"].recorder.operations
            operations.insert(len(operations) // 2, SimpleNamespace(replay=partial(os._exit, 9)))
        started = time.monotonic()
        with pytest.raises(RuntimeError, match=r"(?i)connection|gloo"):
            gpt.train_step(2, num_microbatches=MICROBATCHES)
        assert time.monotonic() - started < 30
        assert _equal(gpt.parameters(), before)
        raise RuntimeError("rank 0 ended in time, and no weight has changed")


def test_a_peer_that_dies_in_a_replay_ends_the_step() -> None:
    with pytest.raises(RuntimeError, match="rank 0 ended in time, and no weight has changed"):
        run_ranks(_lose, 2, timeout_s=60)


def _overflow(rank: int) -> tuple[bool, bool]:
    """In two replays, a rank has not enough room in one layer: Megatron runs those steps again."""
    from megatron.core.transformer.moe.paged_stash import PagedStashRunner

    with _static():
        expected, counted = _trained(_model())
        gpt = _model()
        seen: list[bool] = []

        def runner(run: Any) -> Any:
            again = PagedStashRunner(gpt.config, False, gpt.chunks, gpt.optimizer, run)

            def step(**kwargs: Any) -> Any:
                layer = balanced_layers(gpt)[1]
                layer.token_dispatcher.is_small.fill_(len(seen) in (2, 4) and rank == 1)
                result = again(**kwargs)
                seen.append(FullCudaGraphWrapper.cuda_graph["training"] is not None)
                return result

            return step

        with _captured_behind(1, runner):
            found, counted_again = _trained(gpt)
    # Captured in the second step; run again without graph, which is the warm-up; captured.
    assert seen == [False, True, False, True, False]
    return _equal(found, expected), str(counted_again) == str(counted)


@pytest.mark.option("full_iteration")
@pytest.mark.skipif(
    not hasattr(FullCudaGraphWrapper, "reset_cuda_graph"),
    reason="Megatron has no dispatcher of fixed sizes, and runs no step again",
)
def test_a_replay_that_overflows_is_run_again_without_graph() -> None:
    assert run_ranks(_overflow, 2) == [(True, True)] * 2


def _capture_at_once(rank: int) -> None:
    with _static(), _captured_behind(0):
        gpt = _model()
        with pytest.raises(RuntimeError, match=r"layer 1 .*train one step before"):
            gpt.forward_backward(0, num_microbatches=MICROBATCHES)
    with _static():
        evaluated = _model()
        with torch.no_grad():
            evaluated.forward_backward(forward_only=True)
        with _captured_behind(0), pytest.raises(RuntimeError, match=r"layer 1 .*slots' gradients"):
            evaluated.forward_backward(0, num_microbatches=MICROBATCHES)


def test_nothing_that_outlives_a_capture_is_made_in_it() -> None:
    run_ranks(_capture_at_once, 2)


def _late(rank: int) -> None:
    """A step that was captured before anything of this package was there goes on."""
    with _static(), _captured_behind(1):
        gpt = _model()
        process_hooks.uninstall()
        for step in range(2):
            gpt.forward_backward(step)
        process_hooks.install()
        gpt.forward_backward(2)


def test_a_step_that_was_captured_before_is_replayed() -> None:
    run_ranks(_late, 2)


def _capture_messages(rank: int) -> None:
    with _static(CollectiveTransport), _captured_behind(1):
        gpt = _model()
        gpt.train_step(0)
        with pytest.raises(CaptureError, match="the host reads a value"):
            gpt.forward_backward(1)


def test_a_transport_that_lists_transfers_cannot_be_captured() -> None:
    run_ranks(_capture_messages, 2)
