"""A whole iteration as one graph: forwards, backwards, and the reduction of gradients.

Layer 2 (2 gloo ranks), with the recorder of `graphs.py` in place of CUDA graphs. So that nothing of
the stand-ins asks the host, tokens go to all ranks, whose experts compute all of them, and replicas
move by operations that are the same for all plans. Planning, reroute, replicas and their reduction
are the package's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from tests.gpt import SEQUENCE, TinyGPT  # first: it enables the CPU platform
from tests.mcore import inside
from tests.mcore.graphs import CaptureError, Recorder
from tests.mcore.parity import balanced_gpt, balanced_layers
from tests.ranks import run_ranks

from megatron_ext.mcore.between_steps import check_agreement  # isort: skip

STEPS, MICROBATCHES = 3, 2
LEARNING_RATE = 0.5


class OperationsTransport:
    """Moves replicas by operations whose sizes no plan changes: all of everything to all ranks."""

    name = "operations"
    failed = None
    rows = None

    def __init__(self, group: Any) -> None:
        self._group = group
        self._rank = group.rank()

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
        return mock.Mock(wait=lambda: None)

    def note_reads(self) -> None: ...

    def raise_failure(self) -> None: ...

    def reset(self) -> None: ...


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

    def dispatch_preprocess(
        self, hidden: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
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


def _run_all(
    experts: Any, _: Any, slot_weights: Any, tokens: Tensor, __: Tensor, probs: Tensor
) -> Tensor:
    """Each expert computes all tokens; the probabilities of those of others are zero."""
    firsts, seconds = (
        [getattr(each, name).weight for each in experts.local_experts] + list(of_slots)
        for name, of_slots in zip(("linear_fc1", "linear_fc2"), slot_weights, strict=True)
    )
    output = torch.zeros_like(tokens)
    for first, second, prob in zip(firsts, seconds, probs.unbind(1), strict=True):
        output = output + prob[:, None] * (functional.gelu(tokens @ first.T) @ second.T)
    return output


def _model() -> TinyGPT:
    case = dict(ep=2, experts=8, topk=2, num_layers=2, dtype=torch.float64)
    gpt = balanced_gpt(case, BalanceConfig(tolerance=0.0))
    for layer in balanced_layers(gpt):
        layer.token_dispatcher = EveryTokenEverywhere(layer)
    return gpt


class Iteration:
    """An iteration as Megatron's schedule runs it: all microbatches, then data parallelism."""

    def __init__(self, gpt: TinyGPT) -> None:
        self.gpt = gpt
        self.batches = [gpt.tokens(STEPS, each).clone() for each in range(MICROBATCHES)]
        self.losses = torch.zeros(MICROBATCHES, dtype=torch.float64)
        self.reports: list[Any] = []
        """Of the layers' forwards; a replay writes into the tensors of a captured one."""
        for layer in balanced_layers(gpt):
            layer.observers[:] = [self.reports.append]

    def __call__(self) -> None:
        self.reports.clear()
        for microbatch, tokens in enumerate(self.batches):
            positions = torch.arange(SEQUENCE).expand(len(tokens), -1)
            logits = self.gpt.chunks[0](tokens[:, :-1], positions, None)
            loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            self.losses[microbatch] = loss.detach()
            (loss / MICROBATCHES).backward()
        self.gpt.chunks[0].finish_grad_sync()

    def step(self, step: int, run: Callable[[], None]) -> tuple[Tensor, Tensor]:
        """Train one step by `run`; return the losses, and all plans' experts in slots."""
        for microbatch, batch in enumerate(self.batches):
            batch.copy_(self.gpt.tokens(step, microbatch))
        self.gpt.chunks[0].zero_grad_buffer()
        run()
        with torch.no_grad():
            for parameter in self.gpt.chunks[0].parameters():
                parameter.sub_(LEARNING_RATE * parameter.main_grad)
        return self.losses.clone(), torch.stack([one.experts_in_slots for one in self.reports])


@contextmanager
def _static(transport: type) -> Iterator[None]:
    with (
        mock.patch.object(plan, "check_counts", return_value=None),  # Not of a load on a GPU.
        mock.patch(inside.MAKE_TRANSPORT, lambda name, group, *_: transport(group)),
        mock.patch(inside.RUN_EXPERTS, _run_all),
    ):
        yield


def _capture(iteration: Iteration) -> Recorder:
    iteration()  # The warm-up makes what is made once.
    iteration.gpt.chunks[0].zero_grad_buffer()
    with Recorder() as recorder:
        iteration()
    return recorder


def _train_both_ways(rank: int) -> int:
    with _static(OperationsTransport):
        eager, graphed = Iteration(_model()), Iteration(_model())
        eager()
        replay = _capture(graphed).replay
        plans = []
        for step in range(STEPS):
            losses, in_slots = eager.step(step, eager)
            of_replay, in_slots_of_replay = graphed.step(step, replay)
            assert torch.equal(losses, of_replay)
            assert torch.equal(in_slots, in_slots_of_replay)
            plans.append(in_slots)
        weights, of_replays = eager.gpt.parameters(), graphed.gpt.parameters()
        assert all(torch.equal(value, of_replays[name]) for name, value in weights.items())
        assert not torch.equal(plans[0], plans[-1]), "each replay makes its own plans"
        return int((torch.stack(plans) >= 0).sum())


def test_replays_of_a_whole_iteration_train_as_without_graphs() -> None:
    assert min(run_ranks(_train_both_ways, 2)) > STEPS * MICROBATCHES, "replicas are used"


def _disagree(rank: int) -> None:
    """Rank 1 plans something else, which the next layer of the graph finds: of another replay."""
    with _static(OperationsTransport):
        iteration = Iteration(_model())
        replay = _capture(iteration).replay
        agreement = balanced_layers(iteration.gpt)[0].balancer.agreement
        replay()
        check_agreement(iteration.gpt.chunks)
        agreement._seal += rank
        replay()
        with pytest.raises(RuntimeError, match=r"layer 2: EP ranks \[1\] had another load or plan"):
            check_agreement(iteration.gpt.chunks)


def test_replays_compare_plans() -> None:
    run_ranks(_disagree, 2)


def _capture_with_messages(rank: int) -> None:
    with _static(CollectiveTransport), pytest.raises(CaptureError, match="the host reads a value"):
        _capture(Iteration(_model()))


def test_a_transport_that_lists_transfers_cannot_be_captured() -> None:
    run_ranks(_capture_with_messages, 2)
