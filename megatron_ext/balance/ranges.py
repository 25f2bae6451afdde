"""Shows the stages of a balanced layer as ranges in torch's profiler and in Nsight Systems.

While a torch profiler runs, `emit_nvtx` included, a stage is a range of that profiler. Otherwise a
stage is an NVTX range if Megatron switches NVTX on (`configure_nvtx_profiling`; `mcore/` hands in
the switch). Without either, a stage costs two checks.

The stages correspond to those of Megatron's own work on virtual experts:

    expert_balance_load               1  the exact load gathered, within the plan
    expert_balance_plan               2  virtual_expert_plan
    expert_balance_weight_push_start  4  virtual_expert_weight_push_start
    expert_balance_weight_push_wait      virtual_expert_weight_push_wait
    expert_balance_reroute            3
    expert_balance_dispatch           5
    expert_balance_experts            6
    expert_balance_combine            7
    expert_balance_grad_reduce_start  8  virtual_expert_grad_reduce_start
    expert_balance_grad_reduce_wait      virtual_expert_grad_reduce_wait

A layer's forward is a range around its stages. Autograd runs the backward, so each stage of a
backward has its own range around it, which names the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache

import torch
from torch._C._autograd import _profiler_enabled
from torch.profiler import record_function

PREFIX = "expert_balance_"

LOAD, PLAN, REROUTE, DISPATCH, EXPERTS, COMBINE = (
    PREFIX + stage for stage in ("load", "plan", "reroute", "dispatch", "experts", "combine")
)
PUSH_START, PUSH_WAIT = PREFIX + "weight_push_start", PREFIX + "weight_push_wait"
REDUCE_START, REDUCE_WAIT = PREFIX + "grad_reduce_start", PREFIX + "grad_reduce_wait"

_NOTHING = nullcontext()

_wants_nvtx: Callable[[], bool] = bool


def show_in_nvtx(wanted: Callable[[], bool]) -> None:
    """Set the function that says at each range whether NVTX ranges are on."""
    global _wants_nvtx
    _wants_nvtx = wanted


def stage(name: str) -> AbstractContextManager[object]:
    """Return a range of this name for the running profiler; an empty one without a profiler."""
    if _profiler_enabled():
        return record_function(name)
    return _nvtx(name) if _wants_nvtx() else _NOTHING


def layer_forward(layer_number: int) -> AbstractContextManager[object]:
    """Return the range around the stages of a layer's forward."""
    return stage(_layer(layer_number, "forward"))


def stage_of_backward(name: str, layer_number: int) -> AbstractContextManager[object]:
    """Return a range of this name within a range that names the layer."""
    if _profiler_enabled() or _wants_nvtx():
        return _both(_layer(layer_number, "backward"), name)
    return _NOTHING


@contextmanager
def _both(layer: str, name: str) -> Iterator[None]:
    with stage(layer), stage(name):
        yield


@contextmanager
def _nvtx(name: str) -> Iterator[None]:
    torch.cuda.nvtx.range_push(name)
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()


# The names are kept: a range in a captured CUDA graph holds only the address of its name.
@cache
def _layer(number: int, direction: str) -> str:
    return f"{PREFIX}layer_{number}_{direction}"
