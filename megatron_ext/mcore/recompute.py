"""A recomputed forward goes on with the `Forward` of its first pass, and so with its plan.

A checkpoint runs a forward twice: without gradients inside the forward of an autograd function, and
with gradients inside that function's backward. The function's context is one object for both, and
lives as long as the backward can come. So the first pass leaves its `Forward` there:

    first pass    gather load, solve plan, keep it; leave it in the checkpoint's context
    second pass   take it from there; materialize its replicas unless the slots still hold them

So the layer needs neither the order of microbatches nor the plan on the host. If no backward
follows a pass (evaluation, log-probabilities, also in training mode), the context ends with the
pass, and the `Forward` ends with the context.
"""

from __future__ import annotations

import sys
import weakref
from collections import defaultdict, deque
from types import FrameType
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from megatron_ext.balance.forward import Forward

_LEFT = "_megatron_ext_left"
"""Attribute of a checkpoint's context: what each layer's forwards left there, in order."""

_WITHOUT_REENTRY = ("torch.utils.checkpoint", "transformer_engine.pytorch.distributed")
"""Modules whose checkpoints can hook saved tensors."""


def leave(checkpoint: Any, layer: object, forward: Forward) -> None:
    """Leave a layer's forward in a checkpoint's context for the second pass."""
    if not hasattr(checkpoint, _LEFT):
        setattr(checkpoint, _LEFT, defaultdict(deque))
        forward.checkpoint = weakref.ref(checkpoint)
    getattr(checkpoint, _LEFT)[layer].append(forward)


def take(layer: object) -> Forward | None:
    """Begin the second pass of the `Forward` that the first pass left, and return it, if any."""
    if not in_backward():
        return None
    left = getattr(torch._C._current_autograd_node(), _LEFT, {}).get(layer)
    if not left:
        return None
    forward: Forward = left.popleft()
    forward.checkpoint = None
    forward.begin_again()
    return forward


def checkpoint_under_way() -> Any | None:
    """Return the context of the checkpoint whose first pass runs now; None if none does.

    PyTorch cannot be asked which function's forward runs, so this function reads Python's stack.
    """
    if torch.is_grad_enabled():
        return None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        # Reading `f_locals` keeps all local variables alive, so only such a frame is read.
        code = frame.f_code
        if code.co_name == "forward" and code.co_varnames[:1] == ("ctx",):
            context = frame.f_locals.get("ctx")
            if isinstance(context, BackwardCFunction):
                return context
        frame = frame.f_back
    return None


def refuse_other_checkpoints(layer_number: int | None) -> None:
    """Refuse checkpoints that do not re-enter autograd: a first pass would leave nothing there.

    A checkpoint without reentry hooks saved tensors. Its second pass runs in the middle of the
    backward of the first pass, which uses the slots at that time, and may stop halfway.

    Raises:
        RuntimeError: Such a checkpoint is under way.
    """
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is not None and (home := hooks[0].__module__) in _WITHOUT_REENTRY:
        raise RuntimeError(
            f"layer {layer_number}: {home}.checkpoint(use_reentrant=False) cannot recompute "
            "balanced layers, because its second forward cannot find the plan of the first: give "
            "use_reentrant=True, or use Megatron's recompute (--recompute-granularity)"
        )


def in_backward() -> bool:
    """Whether autograd runs a backward in this thread: a forward is then a recomputed one."""
    return torch._C._current_graph_task_id() != -1
