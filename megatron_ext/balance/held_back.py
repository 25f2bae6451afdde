"""Holds a main's gradient back from data-parallel training until the replicas' part is in it.

In a backward of one piece, autograd waits for both parts. Megatron's combined schedule of two
microbatches runs the backward in pieces, a recomputed MoE layer has one of its own, and delayed
weight gradients come after it: there a hook would reduce a main's gradient when its own part is
there. So the hook's call waits here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

_waiting: dict[Tensor, list[Callable[[], object]]] = {}
"""Calls to make, by main, from the experts' backward until the replicas' part is added."""


def hold_back(mains: Iterable[Tensor]) -> None:
    """Let calls for these parameters wait from now on."""
    for main in mains:
        _waiting.setdefault(main, [])


def let_go(mains: Iterable[Tensor]) -> None:
    """Make the calls for these parameters: their gradients are complete."""
    for main in mains:
        for call in _waiting.pop(main, ()):
            call()


def call_when_complete(main: Tensor, call: Callable[[], object]) -> None:
    """Make the call, at once unless the gradient of the parameter is held back."""
    if main in _waiting:
        _waiting[main].append(call)
    else:
        call()


def forget() -> None:
    """Forget an aborted step."""
    _waiting.clear()


def require_complete() -> None:
    """Check that no gradient is held back, when gradients are about to be used.

    Raises:
        RuntimeError: Backward has not come to the input of a transformer layer whose experts it
            has run.
    """
    if _waiting:
        num_mains = len(_waiting)
        forget()
        raise RuntimeError(
            f"the gradients of {num_mains} expert weights lack the part of the replicas: backward "
            "has run the experts of a layer, and not the layer's input; give each forward its "
            "whole backward"
        )
