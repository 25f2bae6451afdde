"""Random programs around the MoE layers of a small model, run with and without balancing.

A program is drawn from a seed: it changes what is around the layers (stop-gradients, hooks,
checkpoints, frozen parts), and then runs forwards and backwards as no training loop should. Both
ranks run it with Megatron's own layers and with balanced ones, in the same process group. Right is

    equal      outputs and gradients are those of Megatron's own layers
    refused    the balanced layers raise an error that names the cause, at the same step on all
               ranks, where Megatron's own may go on
    failed     Megatron's own layers raise an error, and so do the balanced ones

All else is wrong: other values, an error on one rank, an error that says nothing, a hang.

    python -m tests.mcore.random_graphs --graphs 500 --seed 0
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from megatron_ext.config import BalanceConfig
from tests.gpt import SEQUENCE, TinyGPT, build_gpt  # first: it enables the CPU platform
from tests.mcore.parity import (
    GRADIENT_TOLERANCE,
    STEP_TOLERANCE,
    balanced_gpt,
    balanced_layers,
    relative_distance,
)
from tests.ranks import run_ranks

from megatron_ext.mcore.between_steps import reset_after_abort  # isort: skip

F64 = dict(dtype=torch.float64)
MODELS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (F64, {}),
    (dict(**F64, experts=8, topk=1), dict(transport="collective")),
    (dict(**F64, shared_ffn=16, recompute="selective"), {}),
    (dict(**F64, recompute="full"), dict(check_plans=True)),
    (dict(**F64, num_layers=3), dict(strategy="libra")),
    (dict(**F64, shared_ffn=16), dict(local_first=True)),
    (dict(**F64, dispatcher="allgather"), dict(max_in_flight=4)),
    (dict(grouped_mm=True), {}),
    (dict(gradient_accumulation_fusion=True), {}),
    (dict(gradient_accumulation_fusion=True, recompute="selective"), {}),
]
"""(model, balance)."""

REFUSALS = (
    r"one forward has one backward",
    r"use_reentrant=True",
    r"max_in_flight",
    r"ran in the middle of this layer's experts",
    r"no second derivatives",
    r"with gradient_accumulation_fusion, experts add",
    r"have frozen or thawed experts, and the other ranks have not",
)
"""What the errors of balanced layers say where Megatron's own go on."""

SETTLED = ("equal", "refused", "failed")
"""Right verdicts."""

Step = tuple[str, dict[str, Any]]
"""What a program does next: name of a method of `_Run`, and its arguments."""


@dataclass
class Outcome:
    """What a program did on a rank."""

    values: dict[str, torch.Tensor] = field(default_factory=dict)
    error: str = ""
    """`type: message`, or nothing."""
    step: int = -1
    """The step that raised it."""


class PlannedError(Exception):
    """Raised by a program in the middle of a forward or a backward."""


def draw(seed: int) -> tuple[int, list[Step]]:
    """Return the model of a seed and its program."""
    rng = random.Random(seed)
    model = rng.randrange(len(MODELS))
    steps: list[Step] = [
        ("surround", dict(layer=rng.randrange(2), how=_surrounding(rng)))
        for _ in range(rng.choice((0, 1, 1, 2, 3)))
    ]
    if rng.random() < 0.3:
        steps.append(("freeze", dict(pattern=rng.choice(FROZEN))))
    # A checkpoint with reentry goes on to leaves alone.
    is_recomputed = "recompute" in MODELS[model][0]
    num_kept = 0
    for _ in range(rng.randint(3, 9)):
        name = rng.choices(*zip(*_ODDS, strict=True))[0]
        if name == "backward" and num_kept == 0:
            name = "forward"
        if name == "forward":
            kept = rng.random() < 0.75
            grad = rng.choice(list(GRAD_MODES)) if rng.random() < 0.35 else "as it is"
            # Megatron's other dispatcher needs equal lengths.
            is_uneven = rng.random() < 0.3 and "dispatcher" not in MODELS[model][0]
            within = rng.choice(list(WRAPPERS)) if rng.random() < 0.25 else "nothing"
            steps.append(
                (
                    name,
                    dict(
                        microbatch=rng.randrange(8),
                        lengths=rng.choice(LENGTHS) if is_uneven else (16, 16),
                        training=rng.random() < 0.8,
                        grad=grad,
                        within=within,
                        kept=kept,
                    ),
                )
            )
            num_kept += kept and grad in ("as it is", "enable_grad in no_grad")
        elif name == "backward":
            how = rng.choice(list(BACKWARDS)) if rng.random() < 0.4 else "plain"
            if how in _PARTIAL and (is_recomputed or "checkpoint" in str(steps)):
                how = "sum"
            retained = rng.random() < 0.04
            steps.append((name, dict(which=rng.randrange(num_kept), how=how, retained=retained)))
            num_kept -= 0 if retained or how == "part, then all" else 1
        elif name == "drop":
            steps.append((name, dict(which=rng.randrange(max(1, num_kept)))))
            num_kept = max(0, num_kept - 1)
        elif name == "freeze":
            steps += [("drop_all", {}), (name, dict(pattern=rng.choice(FROZEN)))]
            num_kept = 0
        elif name in ("step", "move"):
            # Else the next backward fails, as it should.
            if name == "step" and rng.random() < 0.9:
                steps.append(("drop_all", {}))
                num_kept = 0
            steps.append((name, {}))
        elif name == "collect":
            steps.append((name, dict(rank=rng.randrange(2))))
        elif name == "abort":
            steps.append(
                (name, dict(where=rng.choice(("forward", "backward")), layer=rng.randrange(2)))
            )
            num_kept = 0
        elif name == "surround":
            steps.append((name, dict(layer=rng.randrange(2), how=_surrounding(rng))))
    if num_kept:
        steps.append(("backward_all", {}))
    steps.append(("end_step", {}))
    if rng.random() < 0.05:
        steps.append(("cast", {}))
    return model, steps


_ODDS = [
    ("forward", 10),
    ("backward", 7),
    ("drop", 2),
    ("freeze", 1),
    ("step", 1),
    ("move", 0.7),
    ("collect", 1),
    ("abort", 0.7),
    ("surround", 0.7),
]

FROZEN = (
    "$^",
    r"\.experts\.",
    r"layers\.0\..*\.experts\.",
    r"\.experts\..*fc1",
    r"\.experts\.[1-9]",
    r"\.experts\.0\.",
    r"router",
    r"embedding",
    r"embedding|layers\.0\.",
    r"^(?!.*router)",
    r"pre_mlp|shared",
    r".",
)

LENGTHS = (16, 16), (5, 5), (1, 1), (16, 3), (2, 16)
"""Tokens of each rank's samples."""

PARTS = (
    r"embedding",
    r"router",
    r"layers\.1\..*router",
    r"\.experts\.",
    r"\.experts\..*fc1",
    r"layers\.0\..*\.experts\.",
    r"output_layer",
    r"self_attention",
    r"layers\.1\.",
)
"""Parameters whose gradients alone a program asks for: some on every rank."""

GRAD_MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "enable_grad in no_grad": lambda: _both(torch.no_grad, torch.enable_grad),
}


_PARTIAL = ("grad of part", "inputs", "part, then all", "create_graph")


@contextmanager
def _both(*makers: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    first, *others = makers
    with first(), _both(*others) if others else nullcontext():
        yield


WRAPPERS = (*("save_on_cpu", "checkpoint") * 4, "anomaly", "checkpoint without reentry")
BACKWARDS = (
    *("sum", "grad of part", "inputs", "in a thread") * 3,
    *("part, then all", "create_graph"),
)


class _AtTimes:
    """Acts in every n-th call only, so that a hook changes from microbatch to microbatch."""

    def __init__(self, calls: int, action: Callable[[Any], Any]) -> None:
        self.calls, self.action, self.count = calls, action, 0

    def __call__(self, value: Any) -> Any:
        self.count += 1
        return value if self.count % self.calls else self.action(value)


def _change_input(change: Callable[[Any], Any]) -> Callable[[Any, Any], None]:
    def surround(layer: Any, undo: list[Any]) -> None:
        act = copy.copy(change)  # It counts from the start.
        hook = layer.mlp.register_forward_pre_hook(lambda _, given: (act(given[0]), *given[1:]))
        undo.append(hook.remove)

    return surround


def _change_output(change: Callable[[Any], Any]) -> Callable[[Any, Any], None]:
    def surround(layer: Any, undo: list[Any]) -> None:
        act = copy.copy(change)  # It counts from the start.
        hook = layer.mlp.register_forward_hook(lambda _, __, out: (act(out[0]), *out[1:]))
        undo.append(hook.remove)

    return surround


def _change_layer_input(change: Callable[[Any], Any]) -> Callable[[Any, Any], None]:
    def surround(layer: Any, undo: list[Any]) -> None:
        act = copy.copy(change)  # It counts from the start.

        def before(_: Any, args: Any, kwargs: Any) -> Any:
            return args, kwargs | dict(hidden_states=act(kwargs["hidden_states"]))

        undo.append(layer.register_forward_pre_hook(before, with_kwargs=True).remove)

    return surround


def _on_grad(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def hooked(tensor: Any) -> Any:
        if tensor.requires_grad:
            tensor.register_hook(change)
        return tensor

    return hooked


def _within(reentrant: bool, of_layer: bool) -> Callable[[Any, Any], None]:
    def surround(layer: Any, undo: list[Any]) -> None:
        module = layer if of_layer else layer.mlp
        run = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not of_layer:
                return checkpoint(partial(run, **kwargs), *args, use_reentrant=reentrant)
            hidden = kwargs.pop("hidden_states")
            return checkpoint(
                lambda x: run(hidden_states=x, **kwargs), hidden, use_reentrant=reentrant
            )

        module.forward = forward
        undo.append(lambda: module.__dict__.pop("forward", None))

    return surround


def _beside(mode: Callable[[], Any], added: bool) -> Callable[[Any, Any], None]:
    """Run the MoE layer once more before its own forward; add that to its output or drop it."""

    def surround(layer: Any, undo: list[Any]) -> None:
        inside = False
        more: list[Any] = []

        def before(module: Any, given: Any) -> None:
            nonlocal inside
            if not inside:
                inside = True
                try:
                    with mode():
                        more.append(module(given[0] * 0.5)[0])
                finally:
                    inside = False

        def after(_: Any, __: Any, out: Any) -> Any:
            if inside or not more:
                return out
            extra = more.pop()
            return (out[0] + extra, *out[1:]) if added else out

        undo.append(layer.mlp.register_forward_pre_hook(before).remove)
        undo.append(layer.mlp.register_forward_hook(after).remove)

    return surround


def _probe_in_backward(layer: Any, undo: list[Any]) -> None:
    """Evaluate the layer in the middle of its backward."""
    mlp, seen = layer.mlp, []

    def probe(grad: Any) -> None:
        with torch.no_grad():
            mlp(seen[-1])

    def after(_: Any, given: Any, out: Any) -> None:
        if torch.is_grad_enabled() and out[0].requires_grad:
            seen.append(given[0].detach())
            out[0].register_hook(probe)

    undo.append(mlp.register_forward_hook(after).remove)


def _probe_experts(when: str) -> Callable[[Any, Any], None]:
    """Evaluate another MoE layer where this layer's experts run, or their backward."""

    def surround(layer: Any, undo: list[Any]) -> None:
        other = layer.other_mlp

        def probe(tensor: Any) -> None:
            with torch.no_grad():
                other(torch.ones(4, 1, other.config.hidden_size, dtype=tensor.dtype))

        def before(_: Any, given: Any) -> None:
            if when == "forward":
                probe(given[0])
            elif given[0].requires_grad:
                given[0].register_hook(probe)

        undo.append(layer.mlp.experts.register_forward_pre_hook(before).remove)

    return surround


def _full_backward_hook(layer: Any, undo: list[Any]) -> None:
    """Double the gradient of the MoE layer's input."""

    def hook(_: Any, grads: Any, __: Any) -> Any:
        return tuple(None if grad is None else 2 * grad for grad in grads)

    undo.append(layer.mlp.register_full_backward_hook(hook).remove)


SURROUNDINGS: dict[str, Callable[[Any, list[Any]], None]] = {
    "input detached": _change_input(lambda x: x.detach()),
    "input detached at times": _change_input(_AtTimes(2, lambda x: x.detach())),
    "input scaled": _change_input(lambda x: 2 * x),
    "input's gradient scaled": _change_input(_on_grad(lambda grad: 2 * grad)),
    "input's gradient zeroed": _change_input(_on_grad(torch.zeros_like)),
    "output detached": _change_output(lambda y: y.detach()),
    "output detached at times": _change_output(_AtTimes(2, lambda y: y.detach())),
    "output scaled at times": _change_output(_AtTimes(3, lambda y: 3 * y)),
    "output zeroed": _change_output(lambda y: y * 0),
    "output replaced": _change_output(torch.zeros_like),
    "output's gradient scaled": _change_output(_on_grad(lambda grad: 2 * grad)),
    "layer's input detached": _change_layer_input(lambda x: x.detach()),
    "layer's input detached at times": _change_layer_input(_AtTimes(2, lambda x: x.detach())),
    "layer in a checkpoint": _within(reentrant=True, of_layer=True),
    "MoE layer in a checkpoint": _within(reentrant=True, of_layer=False),
    "MoE layer in a checkpoint without reentry": _within(reentrant=False, of_layer=False),
    "run twice": _beside(nullcontext, added=True),
    "run twice, dropped": _beside(nullcontext, added=False),
    "probed without gradients": _beside(torch.no_grad, added=False),
    "probed in inference mode": _beside(torch.inference_mode, added=False),
    "probed in backward": _probe_in_backward,
    "others run inside its experts": _probe_experts("forward"),
    "others run inside its experts' backward": _probe_experts("backward"),
    "full backward hook": _full_backward_hook,
}


def _surrounding(rng: random.Random) -> str:
    how = rng.choice(list(SURROUNDINGS))
    # Those that are refused end a program.
    return rng.choice(list(SURROUNDINGS)) if "without reentry" in how or "inside" in how else how


class _Run:
    """A program under way, with one of the two models."""

    def __init__(self, gpt: TinyGPT, rank: int, initial: dict[str, torch.Tensor]) -> None:
        self.gpt = gpt
        self.rank = rank
        self.initial = initial
        self.kept: list[torch.Tensor] = []
        self.values: dict[str, torch.Tensor] = {}
        self.undo: list[Callable[[], object]] = []
        self.is_cast = False
        self.layers = gpt.chunks[0].module.decoder.layers
        for index, layer in enumerate(self.layers):
            object.__setattr__(layer, "other_mlp", self.layers[index - 1].mlp)

    def note(self, name: str, value: torch.Tensor) -> None:
        self.values[f"{len(self.values)}: {name}"] = value.detach().clone()

    def loss(self, microbatch: int, lengths: tuple[int, int] = (16, 16)) -> torch.Tensor:
        tokens = self.gpt.tokens(0, microbatch)[:, : lengths[self.rank]]
        positions = torch.arange(tokens.shape[1]).expand(len(tokens), -1)
        logits: torch.Tensor = self.gpt.chunks[0](tokens, positions, None)
        return logits.square().mean()

    def surround(self, layer: int, how: str) -> None:
        SURROUNDINGS[how](self.layers[layer], self.undo)

    def freeze(self, pattern: str) -> None:
        for name, parameter in self.gpt.named_parameters():
            parameter.requires_grad_(re.search(pattern, name) is None)

    def forward(
        self,
        microbatch: int,
        lengths: tuple[int, int],
        training: bool,
        grad: str,
        within: str,
        kept: bool,
    ) -> None:
        self.gpt.chunks[0].train(training)
        mode = GRAD_MODES.get(grad, nullcontext)
        with mode():
            loss = self._forward_within(partial(self.loss, microbatch, lengths), within)
        self.note("loss", loss)
        # Where all is frozen, a balanced layer's output asks for a gradient, as those of ranks may
        # that have trained experts, and Megatron's own does not.
        is_trained = any(each.requires_grad for each in self.gpt.chunks[0].parameters())
        if kept and is_trained and loss.requires_grad and not loss.is_inference():
            self.kept.append(loss)

    def _forward_within(self, run: Callable[[], torch.Tensor], within: str) -> torch.Tensor:
        if within == "save_on_cpu":
            with torch.autograd.graph.save_on_cpu():
                return run()
        if within == "anomaly":
            with torch.autograd.detect_anomaly(check_nan=False):
                return run()
        if within.startswith("checkpoint"):
            start = torch.zeros((), dtype=self.gpt.dtype, requires_grad=True)
            return checkpoint(
                lambda x: run() + x,
                start,
                use_reentrant=within == "checkpoint",
            )
        return run()

    def backward(self, which: int, how: str, retained: bool) -> None:
        if not self.kept:
            return
        loss = self.kept.pop(which % len(self.kept))
        if how == "sum":
            loss = loss + sum(self.kept)
            self.kept.clear()
            loss.backward()
        elif how in ("grad of part", "part, then all"):
            grads = torch.autograd.grad(
                loss, self._part(which), retain_graph=how != "grad of part", allow_unused=True
            )
            for grad in grads:
                if grad is not None:
                    self.note("gradient of a part", grad)
            if how == "part, then all":
                loss.backward()
        elif how == "inputs":
            loss.backward(inputs=self._part(which))
        elif how == "in a thread":
            _in_a_thread(loss.backward)
        elif how == "create_graph":
            grads = torch.autograd.grad(
                loss, self._part(which), create_graph=True, allow_unused=True
            )
            sum(grad.square().sum() for grad in grads if grad is not None).backward()
        else:
            loss.backward(retain_graph=retained)
            if retained:
                self.kept.append(loss)

    def _part(self, which: int) -> list[torch.Tensor]:
        pattern = PARTS[which % len(PARTS)]
        return [
            parameter
            for name, parameter in self.gpt.chunks[0].named_parameters()
            if re.search(pattern, name) and parameter.requires_grad
        ] or [next(p for p in self.gpt.chunks[0].parameters() if p.requires_grad)]

    def backward_all(self) -> None:
        while self.kept:
            self.kept.pop().backward()

    def drop(self, which: int) -> None:
        if self.kept:
            self.kept.pop(which % len(self.kept))

    def drop_all(self) -> None:
        self.kept.clear()

    def step(self) -> None:
        """As plain SGD; backward of what is kept fails then, as it should."""
        self.end_step()
        with torch.no_grad():
            for _, parameter in self.gpt.named_parameters():
                parameter.add_(parameter.main_grad.to(parameter.dtype), alpha=-0.01)
        self.gpt.chunks[0].zero_grad_buffer()

    def end_step(self) -> None:
        self.gpt.chunks[0].finish_grad_sync()
        for name, value in self.gpt.gradients().items():
            self.note(name, value)

    def move(self) -> None:
        """Let the weights lie elsewhere."""
        for parameter in self.gpt.chunks[0].parameters():
            parameter.data = parameter.data.clone()

    def cast(self) -> None:
        """Evaluate in another precision, and come back.

        Megatron's DDP gets no gradients any more, so the program ends here.
        """
        module = self.gpt.chunks[0].module
        for dtype in (torch.bfloat16, self.gpt.dtype):
            module.to(dtype)
            # Rounding may choose other experts, so only that it ends is compared.
            for mode in (torch.no_grad, torch.inference_mode, nullcontext):
                with mode():
                    loss = self.loss(7)
                if dtype == self.gpt.dtype:
                    self.note("loss", loss)
        self.is_cast = True

    def collect(self, rank: int) -> None:
        if rank == self.rank:
            gc.collect()

    def abort(self, where: str, layer: int) -> None:
        """Raise an error in the middle, and go on with the next step."""
        mlp = self.layers[layer].mlp

        def fail(*_: Any) -> None:
            raise PlannedError

        def fail_in_backward(_: Any, __: Any, out: Any) -> None:
            if out[0].requires_grad:
                out[0].register_hook(fail)

        hook = (
            mlp.experts.register_forward_pre_hook(fail)
            if where == "forward"
            else mlp.register_forward_hook(fail_in_backward)
        )
        self.kept.clear()
        try:
            loss = self.loss(6)
            if loss.requires_grad:
                loss.backward()
        except PlannedError:
            pass
        finally:
            hook.remove()
        reset_after_abort(self.gpt.chunks)
        self.gpt.chunks[0].zero_grad_buffer()

    def reset(self) -> None:
        """Make the model as it was before the program."""
        self.kept.clear()
        for undo in self.undo:
            undo()
        chunk = self.gpt.chunks[0]
        chunk.train()
        for parameter in chunk.parameters():
            parameter.requires_grad_(True)
            parameter.grad = None
        with torch.no_grad():
            for name, parameter in self.gpt.named_parameters():
                parameter.copy_(self.initial[name])
        reset_after_abort(self.gpt.chunks)
        chunk.zero_grad_buffer()
        _forget_first_forward(self.gpt)


def _forget_first_forward(gpt: TinyGPT) -> None:
    """Let the next program begin with the first forward of the balanced layers."""
    for layer in balanced_layers(gpt):
        vars(layer).pop("balancer", None)


def _in_a_thread(call: Callable[[], None]) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        pool.submit(call).result()


def _outcome(run: _Run, steps: Sequence[Step]) -> Outcome:
    outcome = Outcome(run.values)
    run.gpt.chunks[0].zero_grad_buffer()
    for index, (name, arguments) in enumerate(steps):
        try:
            getattr(run, name)(**arguments)
        except Exception as error:
            outcome.error, outcome.step = f"{type(error).__name__}: {error}", index
            break
    run.reset()
    return outcome


def _verdict(expected: Outcome, found: Outcome, tolerance: float) -> str:
    """Return one of `SETTLED`, or what is wrong."""
    if found.error:
        if not expected.error and not any(re.search(each, found.error) for each in REFUSALS):
            return f"step {found.step}: says nothing of the cause: {found.error[:400]}"
    elif expected.error:
        return f"step {expected.step}: only Megatron's own fail: {expected.error[:200]}"
    pairs = zip(expected.values.items(), found.values.items(), strict=False)
    for (name, value), (other_name, other) in pairs:
        if name != other_name:
            return f"{other_name} in place of {name}"
        distance = relative_distance(other, value)
        if not distance <= tolerance:
            return f"{name} differs by {distance:.1e}"
    if not found.error and len(expected.values) != len(found.values):
        return "other values"
    return "failed" if expected.error else "refused" if found.error else "equal"


_models: dict[int, tuple[TinyGPT, TinyGPT, dict[str, torch.Tensor]]] = {}
"""Of the call under way: Megatron's own, the balanced one, weights."""


def _pair(model: int) -> tuple[TinyGPT, TinyGPT, dict[str, torch.Tensor]]:
    if model not in _models:
        case, balance = MODELS[model]
        plain = build_gpt(ep=2, **case)
        balanced = balanced_gpt(
            dict(ep=2, **case), BalanceConfig(tolerance=0.0, timeout_s=20.0, **balance)
        )
        for gpt in (plain, balanced):
            # Megatron caches them, and those of inference mode would fail in training.
            for length in {SEQUENCE, *chain(*LENGTHS)}:
                gpt.chunks[0].module.rotary_pos_emb(length)
                with torch.no_grad():
                    _Run(gpt, dist.get_rank(), {}).loss(0, (length, length))
            _forget_first_forward(gpt)
        _models[model] = plain, balanced, plain.parameters()
    return _models[model]


def _programs(rank: int, seeds: Sequence[int]) -> list[tuple[int, str, str]]:
    """Run the programs; return seed, verdict and words of an error for each.

    A rank that does not hear from its peer in time, or heard that its peer did something else,
    raises, because what follows cannot be trusted.
    """
    store = dist.distributed_c10d._get_default_store()
    store.set_timeout(timedelta(seconds=60))
    found = []
    _models.clear()
    num_replicas = 0
    _pair(0)
    # A rank whose peer hangs shall hear of it.
    for group in dist.distributed_c10d._world.pg_map:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=45), group)
    try:
        for seed in seeds:
            model, steps = draw(seed)
            plain, balanced, initial = _pair(model)
            doing = f"seed {seed}"
            expected = _outcome(_Run(plain, rank, initial), steps)
            _agree(store, rank, f"seed {seed} without balancing", expected)
            outcome = _outcome(_Run(balanced, rank, initial), steps)
            _agree(store, rank, f"seed {seed} with balancing", outcome)
            is_double = plain.dtype == torch.float64
            if steps[-1][0] == "cast":
                del _models[model]
            tolerance = GRADIENT_TOLERANCE if is_double else STEP_TOLERANCE
            num_replicas += sum(layer.num_replicas for layer in balanced_layers(balanced))
            verdict = _verdict(expected, outcome, tolerance)
            found.append((seed, verdict, outcome.error))
    except Exception as error:
        raise RuntimeError(f"{doing}: {error}") from error
    finally:
        _models.clear()
    assert num_replicas > 0 or len(seeds) == 1, "nothing was tested"
    return found


def _agree(store: Any, rank: int, name: str, outcome: Outcome) -> None:
    mine = [outcome.step, bool(outcome.error)]
    store.set(f"{name} {rank}", json.dumps([*mine, outcome.error[:600]]))
    *theirs, error = json.loads(store.get(f"{name} {1 - rank}"))
    if theirs != mine or "gloo" in outcome.error + error:
        raise RuntimeError(
            f"{name}: step and whether it failed: {mine} {outcome.error[:600]!r} on rank {rank}, "
            f"{theirs} {error!r} on rank {1 - rank}"
        )


def run_programs(seeds: Sequence[int]) -> dict[int, tuple[str, str]]:
    """Run the programs of the seeds on 2 ranks; return verdict and error by seed."""
    by_rank = run_ranks(_programs, 2, list(seeds), timeout_s=60 + 4 * len(seeds))
    found = {}
    for (seed, verdict, error), (_, other, _) in zip(*by_rank, strict=True):
        worse = verdict if verdict not in SETTLED else other
        found[seed] = worse, error
    return found


def try_programs(seeds: Sequence[int]) -> Iterator[tuple[int, str, str]]:
    """Yield seed, verdict and error of each program; ranks that a program ended are made anew."""
    left = list(seeds)
    while left:
        chunk, left = left[:40], left[40:]
        try:
            found = run_programs(chunk)
        except RuntimeError as failure:
            # The ranks have ended. Those before the named program are right, or come again.
            if (named := re.search(r"seed (\d+)", str(failure))) is None:
                raise
            seed = int(named[1])
            said = re.findall(r"^RuntimeError: seed.*", str(failure), re.MULTILINE)
            # Megatron alone may fail on one rank only; that says nothing of balancing.
            is_stock = f"seed {seed} without balancing" in str(failure)
            verdict = "failed" if is_stock else "the ranks differ"
            found = {seed: (verdict, "\n  ".join(said))}
            left = [each for each in chunk if each != seed] + left
        for seed, (verdict, error) in found.items():
            yield seed, verdict, error


def described(seed: int) -> str:
    """Say what the program of a seed does."""
    model, steps = draw(seed)
    lines = [f"{index} {name} {arguments}" for index, (name, arguments) in enumerate(steps)]
    return "\n  ".join([f"seed {seed}: {MODELS[model]}", *lines])


def main() -> int:
    """Run many programs, and count the verdicts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--graphs", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    arguments = parser.parse_args()
    counts: Counter[str] = Counter()
    for seed, verdict, error in try_programs(
        range(arguments.seed, arguments.seed + arguments.graphs)
    ):
        counts[verdict if verdict in SETTLED else "wrong"] += 1
        if verdict not in SETTLED:
            print(f"{described(seed)}\n  -> {verdict} {error}", flush=True)
        if counts.total() % 50 == 0:
            print(dict(counts), flush=True)
    print(dict(counts))
    return int(counts["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
