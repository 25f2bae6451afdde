"""Lets stock Megatron-Core train on CPU ranks, by replacing the parts of CUDA that it calls.

1. Memory of a device (`device="cuda"`, `.cuda()`) and pinned memory are memory of the CPU.
2. Streams and events order nothing: on the CPU work is done when it was issued.
3. Random number states of the GPU are the CPU generator's.
4. A CPU tensor answers with the name of a GPU's tensor type (`torch.cuda.FloatTensor`).
5. `FusedWeightGradient` adds weight gradients to `main_grad`, instead of Apex's kernels.
6. An all-to-all gathers, or adds up and scatters, tensors of unequal lengths, as NCCL does and gloo
   cannot.
7. Functions that Megatron compiles run as they are written: the import of the compiler alone takes
   each process 3 s. `undo` leaves these functions as they are.
8. Groups share the thread that moves gloo's bytes: one for each group, of which Megatron makes 30,
   would wake a rank 3,000 times a second.

The functions themselves are replaced, not intercepted by a `TorchFunctionMode`: such a mode is not
active inside autograd's backward, where recompute creates attention masks with `device="cuda"`.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._device

from megatron_ext import gloo_peers
from megatron_ext.cpu_memory import keep_freed_memory

_CPU = torch.device("cpu")

FACTORIES = (
    *("arange", "as_tensor", "empty", "empty_like", "empty_strided", "eye", "full", "full_like"),
    *("linspace", "ones", "ones_like", "rand", "rand_like", "randint", "randint_like", "randn"),
    *("randn_like", "randperm", "tensor", "zeros", "zeros_like"),
)

_TENSOR_FACTORIES = (
    *("new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros", "to"),
)

_GLOO: Any = dist.ProcessGroupGloo  # Its stubs name other options than it has.

_enabled: CpuPlatform | None = None


def enable_cpu_platform() -> CpuPlatform:
    """Make Megatron-Core's CUDA assumptions hold on the CPU of this process, a rank over gloo.

    Call it before Megatron is imported. A second call changes nothing and returns the same handle.
    The process keeps memory that it frees from now on (`cpu_memory.py`), which nothing undoes.

    Returns:
        The handle that undoes everything, by `undo()` or as a context manager.

    Raises:
        RuntimeError: If this machine has CUDA: Megatron must then use it.
    """
    global _enabled
    if _enabled is None:
        if torch.cuda.is_available():
            raise RuntimeError(
                "enable_cpu_platform() is for machines without CUDA, but "
                "torch.cuda.is_available() is True here: leave the call out, or hide the GPUs with "
                "CUDA_VISIBLE_DEVICES="
            )
        _enabled = CpuPlatform()
    return _enabled


class CpuPlatform:
    """The replacements in force. Made by `enable_cpu_platform()`, lives until `undo()`."""

    def __init__(self) -> None:
        keep_freed_memory()
        gloo_peers.watch()  # First: it stays when this is undone.
        self._undo = ExitStack()
        self._patch_torch()
        self._patch_megatron()

    def __enter__(self) -> CpuPlatform:
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()

    def undo(self) -> None:
        """Put back every replaced attribute. Harmless when called twice."""
        global _enabled
        self._undo.close()
        if _enabled is self:
            _enabled = None

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        if name in vars(owner):
            self._undo.callback(setattr, owner, name, vars(owner)[name])
        else:  # The owner inherits it, as `torch.Tensor.to`.
            self._undo.callback(delattr, owner, name)
        setattr(owner, name, value)

    def _patch_torch(self) -> None:
        # `with torch.device(...)` looks for factories once. It must find torch's own, which those
        # here call.
        torch.utils._device._device_constructors()
        for name in FACTORIES:
            self._replace(torch, name, _on_cpu(getattr(torch, name)))
        # Module.to and Module.cuda go through `to` and `cuda` of tensors.
        for name in _TENSOR_FACTORIES:
            self._replace(torch.Tensor, name, _on_cpu(getattr(torch.Tensor, name)))
        self._replace(torch.Tensor, "cuda", lambda tensor, *args, **kwargs: tensor)
        self._replace(torch.Tensor, "type", _cuda_type_names(torch.Tensor.type))
        self._replace(torch.Tensor, "record_stream", lambda tensor, stream: None)

        current_stream = _Stream()
        for name, value in {
            "current_device": lambda: _CPU,
            "set_device": lambda device: None,
            "device_count": lambda: 1,
            "synchronize": lambda device=None: None,
            "empty_cache": lambda: None,
            "Stream": _Stream,
            "Event": _Event,
            "current_stream": lambda device=None: current_stream,
            "default_stream": lambda device=None: current_stream,
            "stream": nullcontext,
            "is_current_stream_capturing": lambda: False,
            "get_rng_state": lambda device=None: torch.get_rng_state(),
            "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
            "manual_seed": lambda seed: torch.manual_seed(seed),
        }.items():
            self._replace(torch.cuda, name, value)
        self._replace(torch.cuda.nvtx, "range_push", lambda message: None)
        self._replace(torch.cuda.nvtx, "range_pop", lambda: None)

        self._replace(_GLOO, "__init__", _on_shared_devices(_GLOO.__init__))

    def _patch_megatron(self) -> None:
        # Megatron takes `torch.compile` as its `jit_fuser` when it is imported, and calls it then.
        compile_, torch.compile = torch.compile, _as_written  # type: ignore[assignment]
        try:
            importlib.import_module("megatron.core.jit")
        finally:
            torch.compile = compile_

        random = importlib.import_module("megatron.core.tensor_parallel.random")
        self._replace(
            random,
            "_get_cuda_rng_state",
            lambda device=None, clone=False, graph_safe=False: torch.get_rng_state(),
        )
        self._replace(
            random,
            "_set_cuda_rng_state",
            lambda state, device=-1, graph_safe=False: torch.set_rng_state(state),
        )

        # Megatron warns when the CPU's generator moves while the GPU's is in use; here they are
        # one.
        logger = logging.getLogger(random.__name__)
        warning = "CPU RNG state changed"
        filters = [*logger.filters, lambda record: warning not in record.getMessage()]
        self._replace(logger, "filters", filters)

        # Transformer Engine's matrix product needs a GPU; None selects PyTorch's. megatron-core
        # 0.16.1 reads the name without defining it when Transformer Engine is not installed.
        moe_utils = importlib.import_module("megatron.core.transformer.moe.moe_utils")
        self._replace(moe_utils, "te_general_gemm", None)

        # Split sizes of an all-to-all must be host integers. Megatron converts them only on their
        # way from a GPU.
        token_dispatcher = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
        self._replace(token_dispatcher, "maybe_move_tensor_to_cpu", _to_host)

        layers = importlib.import_module("megatron.core.tensor_parallel.layers")
        self._replace(layers, "fused_weight_gradient_mlp_cuda", FusedWeightGradient)
        self._replace(layers, "_grad_accum_fusion_available", True)

        # With expert tensor parallelism, shards of an expert get the tokens of several ranks.
        mappings = importlib.import_module("megatron.core.tensor_parallel.mappings")
        for name, unequal in (
            ("_gather_along_first_dim", _gather_unequal),
            ("_reduce_scatter_along_first_dim", _reduce_scatter_unequal),
        ):
            self._replace(mappings, name, _if_sizes_are_given(unequal, getattr(mappings, name)))


class FusedWeightGradient:
    """Replaces Apex's module `fused_weight_gradient_mlp_cuda`, for `gradient_accumulation_fusion`.

    Products are computed and added in float32; a `main_grad` of another dtype is rounded once.
    """

    @staticmethod
    def wgrad_gemm_accum_fp32(
        inputs: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor
    ) -> None:
        """Add a linear layer's weight gradient to `main_grad` [out, in].

        Inputs are [..., in], gradients of the outputs [..., out]. `main_grad` is float32 here,
        float16 or bfloat16 under the other name.
        """
        grad_output = grad_output.flatten(0, -2).float()
        inputs = inputs.flatten(0, -2).float()
        main_grad.copy_(torch.addmm(main_grad.float(), grad_output.t(), inputs))

    wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32


def _on_shared_devices(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def on_shared_devices(
        group: Any, store: Any, rank: int, size: int, *args: Any, **kwargs: Any
    ) -> None:
        if args or "options" in kwargs:
            init(group, store, rank, size, *args, **kwargs)
            return
        options = _GLOO._Options()
        options._devices = _gloo_devices(os.getpid(), os.environ.get("GLOO_SOCKET_IFNAME"))
        options._threads = 2 * len(options._devices)
        options._timeout = kwargs.get("timeout", dist.default_pg_timeout)
        init(group, store, rank, size, options)

    return on_shared_devices


@functools.cache
def _gloo_devices(process: int, interfaces: str | None) -> list[Any]:
    """Return gloo's devices of a process. Each has a thread, which a fork does not inherit."""
    if not interfaces:
        return [_GLOO.create_default_device()]
    return [_GLOO.create_device(interface=name) for name in interfaces.split(",")]


def _as_written(function: Any = None, **_: Any) -> Any:
    """Stands for `torch.compile`, as a decorator with arguments and without."""
    return function if function is not None else _as_written


def _to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def _if_sizes_are_given(
    unequal: Callable[..., torch.Tensor], equal: Callable[..., torch.Tensor]
) -> Callable[..., torch.Tensor]:
    @functools.wraps(equal)
    def either(
        tensor: torch.Tensor, group: Any, sizes: list[int] | None = None, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        if sizes is None or group.size() == 1:
            return equal(tensor, group, sizes, *args, **kwargs)
        return unequal(tensor, group, sizes)

    return either


def _gather_unequal(tensor: torch.Tensor, group: Any, sizes: list[int]) -> torch.Tensor:
    """Gather the ranks' tensors, whose first dimensions are `sizes`."""
    gathered = tensor.new_empty(sum(sizes), *tensor.shape[1:])
    copies = torch.cat([tensor] * group.size())
    dist.all_to_all_single(gathered, copies, sizes, [len(tensor)] * group.size(), group=group)
    return gathered


def _reduce_scatter_unequal(tensor: torch.Tensor, group: Any, sizes: list[int]) -> torch.Tensor:
    """Add up the ranks' tensors, in their order, and return this rank's piece, one of `sizes`."""
    mine = sizes[group.rank()]
    pieces = tensor.new_empty(group.size(), mine, *tensor.shape[1:])
    dist.all_to_all_single(
        pieces.flatten(0, 1), tensor.contiguous(), [mine] * group.size(), sizes, group=group
    )
    return pieces.sum(0)


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.partition(":")[0] == "cuda"


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return function(*(_CPU if _is_cuda(arg) else arg for arg in args), **kwargs)

    return on_cpu


def _cuda_type_names(type_of: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(type_of)
    def named(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return type_of(tensor, *args, **kwargs)
        name = type_of(tensor)
        # A tensor of a subclass may have been asked by way of this function already.
        return name if name.startswith("torch.cuda.") else name.replace("torch.", "torch.cuda.", 1)

    return named


class _Done:
    """Work on the CPU: it is done when it was issued."""

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class _Event(_Done):
    """Replaces a CUDA event."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._time_s = 0.0

    def record(self, stream: Any = None) -> None:
        self._time_s = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        pass

    def elapsed_time(self, end: _Event) -> float:
        return 1e3 * (end._time_s - self._time_s)


class _Stream(_Done):
    """Replaces a CUDA stream."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = _CPU

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: _Event | None = None) -> _Event:
        event = event or _Event()
        event.record(self)
        return event
