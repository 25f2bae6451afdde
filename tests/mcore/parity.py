"""Runs the same tiny GPT with and without balancing and measures how far apart they are.

What is compared: logits, losses and every parameter's gradient after one pipeline schedule
(float64), or losses and parameters after several optimizer steps (float32), both against Megatron's
own layers on the same ranks.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

import torch

from megatron_ext.balance.predictions import replica_use
from megatron_ext.config import BalanceConfig
from tests.gpt import TinyGPT, build_gpt
from tests.mcore import inside

GRADIENT_TOLERANCE = 1e-10
"""float64 sums in another order differ by about 1e-16 x their length; the rest is cancellation."""

STEP_TOLERANCE = 1e-5
"""float32 over a few steps, with an optimizer that does not amplify rounding (see `tests.gpt`)."""


P = ParamSpec("P")
R = TypeVar("R")


@dataclass
class Difference:
    """How far a balanced run is from the unbalanced one on this rank."""

    worst: float
    """Largest relative distance |a - b| / |b| of any compared tensor (2-norm)."""
    where: str
    """Name of that tensor."""
    replicas: int
    """Replicas made in the balanced run; 0 means that nothing was tested."""
    hits: int
    """Replicas that were sent ahead and used, in all forwards."""


def balanced(spec: Any, balance: BalanceConfig) -> Any:
    """`balance_spec`, imported late: Megatron must not be imported before the CPU platform."""
    from megatron_ext.mcore.spec import balance_spec

    return balance_spec(spec, balance)


@contextmanager
def balancing_models(balance: BalanceConfig, attend: Callable[[Any], None]) -> Iterator[None]:
    """`balance_models` for as long as the block."""
    from megatron_ext.mcore import models, process_hooks

    models.balance_models(balance, attend)
    try:
        yield
    finally:
        process_hooks.uninstall()


def balanced_gpt(case: dict[str, Any], balance: BalanceConfig, **settings: Any) -> TinyGPT:
    """Build the model of `case` with balanced layers, each of which counts its replicas."""
    gpt = build_gpt(**case, **settings, spec_transform=partial(balanced, balance=balance))
    for layer in balanced_layers(gpt):
        layer.num_replicas = 0
        layer.num_hits = 0
        layer.observers.append(partial(_count, layer))
        inside.watch_plans(layer, partial(_count_hits, layer))
    return gpt


def balanced_layers(gpt: TinyGPT) -> list[Any]:
    """The balanced layers of this rank, in order."""
    from megatron_ext.mcore.moe_layer import BalancedMoELayer

    return [m for chunk in gpt.chunks for m in chunk.modules() if isinstance(m, BalancedMoELayer)]


def _count(layer: Any, report: Any) -> None:
    layer.num_replicas += report.num_replicas


def _count_hits(layer: Any, plan: Any, sent: torch.Tensor | None) -> None:
    if sent is not None:
        layer.num_hits += int(replica_use(sent, plan)["hit_replicas"])


def gradient_difference(
    case: dict[str, Any], *, num_microbatches: int = 1, balance: BalanceConfig | None = None
) -> Difference:
    """Logits, losses and gradients of one schedule in float64."""
    balance = balance or BalanceConfig(tolerance=0.0)
    expected = _outcome_without(case, num_microbatches)
    gpt = balanced_gpt(case, balance, dtype=torch.float64)
    found = _outcome(gpt, num_microbatches)
    for layer in balanced_layers(gpt):
        assert inside.in_flight(layer) == 0
    return _difference(expected, found, gpt)


def step_difference(
    case: dict[str, Any],
    *,
    num_steps: int = 2,
    num_microbatches: int = 1,
    balance: BalanceConfig | None = None,
) -> Difference:
    """Losses and parameters after several optimizer steps in float32.

    Where two experts are equally good for a token, rounding decides, and what follows differs by
    far more than that: such a start is left for another. A mistake shows from every start.
    """
    balance = balance or BalanceConfig(tolerance=0.0)
    for seed in range(3):
        expected, expected_choices = _training_without(case, seed, num_steps, num_microbatches)
        gpt = balanced_gpt(case, balance, seed=seed)
        choices = _choices(gpt)
        found = _train(gpt, num_steps, num_microbatches)
        differ = torch.tensor(choices != expected_choices, dtype=torch.int32)
        torch.distributed.all_reduce(differ)
        if not differ:
            break
    return _difference(expected, found, gpt)


def _once(compute: Callable[P, R]) -> Callable[P, R]:
    """Have a rank compute once what stock Megatron makes of a case, which many tests compare with.

    All ranks of a call have begun together (`tests/ranks.py`), so all have it or none.
    """
    known: dict[bytes, R] = {}

    @wraps(compute)
    def once(*args: P.args, **kwargs: P.kwargs) -> R:
        key = pickle.dumps((args, kwargs))
        if key not in known:
            known[key] = compute(*args, **kwargs)
        return known[key]

    return once


@_once
def _outcome_without(case: dict[str, Any], num_microbatches: int) -> dict[str, torch.Tensor]:
    return _outcome(build_gpt(**case, dtype=torch.float64), num_microbatches)


@_once
def _training_without(
    case: dict[str, Any], seed: int, num_steps: int, num_microbatches: int
) -> tuple[dict[str, torch.Tensor], list[bytes]]:
    gpt = build_gpt(**case, seed=seed)
    choices = _choices(gpt)
    return _train(gpt, num_steps, num_microbatches), choices


def _choices(gpt: TinyGPT) -> list[bytes]:
    """List the routers' choices of experts, of every forward from now on."""
    from megatron.core.transformer.moe.router import TopKRouter

    choices: list[bytes] = []

    def keep(router: Any, inputs: Any, outputs: Any) -> None:
        choices.append(outputs[1].cpu().numpy().tobytes())

    for chunk in gpt.chunks:
        for module in chunk.modules():
            if isinstance(module, TopKRouter):
                module.register_forward_hook(keep)
    return choices


def _outcome(gpt: TinyGPT, num_microbatches: int) -> dict[str, torch.Tensor]:
    reports = gpt.forward_backward(num_microbatches=num_microbatches)
    return gpt.gradients() | {
        f"{name} of microbatch {index}": value
        for index, report in enumerate(reports)
        for name, value in report.items()
    }


def _train(gpt: TinyGPT, num_steps: int, num_microbatches: int) -> dict[str, torch.Tensor]:
    losses = [gpt.train_step(step, num_microbatches=num_microbatches) for step in range(num_steps)]
    known = [loss for loss in losses if loss == loss]
    return gpt.parameters() | {"losses": torch.tensor(known, dtype=torch.float64)}


def _difference(
    expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor], gpt: TinyGPT
) -> Difference:
    assert expected.keys() == found.keys()
    assert all(value.isfinite().all() for value in found.values())
    distances = {name: relative_distance(found[name], value) for name, value in expected.items()}
    where = max(distances, key=lambda name: distances[name])
    replicas = sum(layer.num_replicas for layer in balanced_layers(gpt))
    hits = sum(layer.num_hits for layer in balanced_layers(gpt))
    return Difference(distances[where], where, replicas, hits)


def relative_distance(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.double(), b.double()
    scale = float(b.norm())
    distance = float((a - b).norm())
    return distance / scale if scale > 0 else distance
