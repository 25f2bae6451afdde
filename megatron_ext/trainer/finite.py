"""Keeps numbers that are not finite out of a run's weights and checkpoints.

The decision uses two numbers that the host reads anyway: the global gradient norm, which Megatron's
optimizer reads before it steps, and the step's loss, for the metrics. Weights and gradients are
searched only if one of the two is not finite, or before a checkpoint.
"""

from __future__ import annotations

import itertools
import logging
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from megatron_ext.mcore.grouped_experts import GroupedExperts
from megatron_ext.trainer.config import TrainConfig
from megatron_ext.trainer.ranks.launch import end_all
from megatron_ext.transport.reach import gather

logger = logging.getLogger(__name__)


class StepGuard:
    """Stops at, skips or ignores steps that are not finite, by `on_nan`. All ranks decide alike.

    Unless they are ignored, the optimizer's norm of the gradients raises instead of being used for
    clipping and for the step. Where the run ends, all ranks raise `SystemExit` with status
    `NO_RESTART`, after rank 0 has said why. `losses` are those of this rank's microbatches: none
    but on the last pipeline stage.
    """

    def __init__(
        self, config: TrainConfig, chunks: list[DistributedDataParallel], optimizer: Any
    ) -> None:
        self._policy = config.on_nan
        self._chunks = chunks
        self._optimizer = optimizer
        # What was not finite of the last step, as far as it changed the weights.
        self._unsound = ""
        if self._policy != "ignore":
            # The optimizer of a chain asks for the norm even where nothing is clipped.
            optimizer.get_grad_norm = partial(_finite_norm, optimizer.get_grad_norm)

    def optimizer_step(self, step: int, losses: Sequence[float]) -> tuple[bool, float]:
        """Make an optimizer step, unless the gradients are not finite.

        Returns:
            Whether the step was made, and the norm of the gradients, NaN if Megatron's loss scaling
            skipped the step before it took the norm. Equal on all ranks.
        """
        try:
            made, norm, _ = self._optimizer.step()
        except _NormNotFiniteError as error:
            self._refuse(step, f"the gradient norm is {error}", losses, made=False)
            return False, error.args[0]
        norm = math.nan if norm is None else float(norm)
        is_sound = not made or math.isfinite(norm)
        self._unsound = "" if is_sound else f"the gradient norm is {norm}"
        return made, norm

    def check_loss(self, step: int, loss: float, losses: Sequence[float], *, made: bool) -> None:
        """Look at a step's `loss`, the mean over all ranks, after its optimizer step.

        Its gradients may have been finite, so that the step was `made`.
        """
        if not made or math.isfinite(loss):
            return
        if not self._unsound and self._policy != "ignore":
            self._refuse(step, f"the loss is {loss}", losses, made=True)
        self._unsound = self._unsound or f"the loss is {loss}"

    def may_save(self, step: int) -> bool:
        """Whether the state after a step is finite. All ranks call it before they save."""
        state = itertools.chain(_weights(self._chunks), _optimizer_state(self._optimizer))
        is_finite = not self._unsound and all(_is_finite(one.tensor) for one in state)
        spoiled = torch.tensor(float(not is_finite), device="cuda")
        dist.all_reduce(spoiled, op=dist.ReduceOp.MAX)
        if not spoiled.item():
            return True
        found = self._look()
        said = f"step {step}: the state is not saved: {_told(found) if found else self._unsound}"
        if self._policy != "ignore" and _stays(found):
            end_all(said)
        _warn(said)
        return False

    def _refuse(self, step: int, what: str, losses: Sequence[float], *, made: bool) -> None:
        """Say what is not finite, and end the run unless its later steps can be good."""
        found = self._look(losses)
        was = "was" if made else "was not"
        said = f"step {step}: {what}: {_told(found)}; the optimizer step {was} made"
        if self._policy == "stop":
            end_all(f"{said} (on_nan=stop)")
        if _stays(found):
            end_all(f"{said}, and no later step can mend this (on_nan={self._policy})")
        _warn(said)

    def _look(self, losses: Sequence[float] = ()) -> list[_Place]:
        """Return what is not finite, of all ranks, in the order of `_KINDS`."""
        mine = [
            *_not_finite("weight", _weights(self._chunks)),
            *_not_finite("state", _optimizer_state(self._optimizer)),
            *(
                _Place("loss", 0, f"loss of microbatch {number}, rank {dist.get_rank()} ({loss})")
                for number, loss in enumerate(losses)
                if not math.isfinite(loss)
            ),
            *_not_finite("gradient", _gradients(self._chunks)),
        ]
        places = itertools.chain.from_iterable(gather(mine))
        # Of gradients the highest layer first: backward comes from there.
        return sorted(places, key=lambda place: (_KINDS.index(place.kind), -place.layer))


class _NormNotFiniteError(Exception):
    """The norm of the gradients, its argument, is not finite."""


def _finite_norm(get_grad_norm: Callable[[], float]) -> float:
    norm = get_grad_norm()
    if not math.isfinite(norm):
        raise _NormNotFiniteError(norm)
    return norm


_KINDS = ("weight", "state", "loss", "gradient")
"""What can be not finite: causes before what they cause."""


class _Place(NamedTuple):
    """Where something is not finite."""

    kind: str
    layer: int
    text: str


class _Part(NamedTuple):
    """A tensor of the model or the optimizer on this rank."""

    layer: int
    name: str
    tensor: Tensor


def _told(places: Sequence[_Place]) -> str:
    """Return the first place as words, and how many are like it."""
    if not places:
        return "every gradient by itself is finite, the sum of their squares is not"
    others = sum(place.kind == places[0].kind for place in places[1:])
    more = f", and {others} more" if others else ""
    return f"{places[0].text}{more}"


def _stays(places: Sequence[_Place]) -> bool:
    """Whether the next step begins with numbers that are not finite."""
    return any(place.kind in ("weight", "state") for place in places)


def _not_finite(kind: str, parts: Iterable[_Part]) -> Iterator[_Place]:
    rank = dist.get_rank()
    for part in parts:
        if not _is_finite(part.tensor):
            yield _Place(kind, part.layer, f"{kind} {part.name} of rank {rank}")


def _is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


def _weights(chunks: list[DistributedDataParallel]) -> Iterator[_Part]:
    for model in unwrap_model(chunks):
        yield from _parts(model, lambda parameter: parameter.detach())


def _gradients(chunks: list[DistributedDataParallel]) -> Iterator[_Part]:
    for model in unwrap_model(chunks):
        yield from _parts(model, lambda parameter: getattr(parameter, "main_grad", None))


def _optimizer_state(optimizer: Any) -> Iterator[_Part]:
    """Yield the optimizer's tensors, its copies of weights included. They have no layer's name."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if part.optimizer is None:  # There are no parameters for it on this rank.
            continue
        for state in part.optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, Tensor):
                    yield _Part(0, f"{name} of the optimizer", value)
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                yield _Part(0, "main_param of the optimizer", parameter.detach())


def _parts(
    module: nn.Module,
    take: Callable[[Any], Tensor | None],
    layer: int | None = None,
    path: str = "",
    experts: Sequence[int] = (),
) -> Iterator[_Part]:
    """Yield what `take` takes of every parameter, if anything, by layer and logical expert."""
    if isinstance(module, TransformerLayer):
        layer, path = module.layer_number, ""
    if isinstance(module, MoELayer):
        experts = module.local_expert_indices
    for name, parameter in module.named_parameters(path.rstrip("."), recurse=False):
        tensor = take(parameter)
        if tensor is None:
            continue
        # Outside of layers there are the embedding, below them, and the end of the model.
        order = layer or (0 if "embedding" in name else sys.maxsize)
        place = name if layer is None else f"{name} of layer {layer},"
        if isinstance(module, GroupedExperts):
            for expert, row in zip(experts, tensor, strict=True):
                yield _Part(order, f"{place} expert {expert},", row)
        else:
            if number := re.search(r"local_experts\.(\d+)\.", name):
                place += f" expert {experts[int(number[1])]},"
            yield _Part(order, place, tensor)
    for name, child in module.named_children():
        yield from _parts(child, take, layer, f"{path}{name}.", experts)


def _warn(said: str) -> None:
    if dist.get_rank() == 0:
        logger.warning("warning: %s", said)
