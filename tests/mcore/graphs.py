"""Stands in for CUDA graphs on the CPU: operations of one run, replayed on the same memory.

A CUDA graph keeps the kernels of one run with the addresses and the arguments that they had, and
runs them again without Python. `Recorder` keeps the operations of one run with their tensors and
arguments, and `replay` runs them again. So a replay is wrong where a graph would be wrong:

- counters, lists and decisions of Python are those of the recorded run;
- arguments that are numbers are those of the recorded run;
- results lie where they lay, and the next replay overwrites them.

What a capture forbids is an error while recording: values that the host reads, shapes that depend
on values, tensors made of the host's data. Memory that an operation leaves unset holds NaN in a
replay, or a large number.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tests.gpt import SEQUENCE, TinyGPT  # first: it enables the CPU platform

from megatron.core.distributed.finalize_model_grads import reset_model_temporary_tensors  # isort: skip
from megatron.core.transformer import cuda_graphs  # isort: skip

_aten = torch.ops.aten
_HOST_READS = (_aten._local_scalar_dense, _aten.equal, _aten.is_nonzero, _aten.item)
_UNSET = (_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty)
_INDEXED = (_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_)
_ALLOWED = "tensor_parallel/random.py"
"""Megatron compares states of the CPU's generator there, which is the GPU's on a GPU."""
_SCHEDULES = "pipeline_parallel/schedules.py"


class CaptureError(RuntimeError):
    """A capture forbids this."""


class Operation(NamedTuple):
    """An operation as it ran; its tensors keep their memory."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any

    def replay(self) -> None:
        """Run the operation again, into the memory of its result."""
        if self.function.overloadpacket in _UNSET:
            _poison(self.result)
            return
        again = self.function(*self.args, **self.kwargs)
        for old, new in zip(tree_leaves(self.result), tree_leaves(again), strict=True):
            if hasattr(new, "wait"):  # a collective
                new.wait()
            elif isinstance(new, Tensor) and not _is_same_memory(old, new):
                assert old.shape == new.shape, f"{self.function}: a shape depends on values"
                old.copy_(new)


class Recorder(TorchDispatchMode):
    """Records the operations of its block, and finds what a capture forbids.

    Raises:
        CaptureError: In the block.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self._before: dict[int, tuple[Any, Any]] = {}
        self._made: set[int] = set()

    def __enter__(self) -> Any:
        # Methods of tensors on the CPU that read values without an operation.
        self._patches = [
            mock.patch.object(Tensor, name, _forbidden(getattr(Tensor, name)))
            for name in ("tolist", "numpy", "__array__")
        ]
        self._patches += [
            mock.patch.object(torch, name, _forbidden_of_host_data(getattr(torch, name)))
            for name in ("tensor", "as_tensor")
        ]
        for patch in self._patches:
            patch.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for patch in self._patches:
            patch.stop()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        packet, tags = function.overloadpacket, function.tags
        if packet in _HOST_READS or torch.Tag.data_dependent_output in tags:
            _forbid(f"{function}: the host reads a value")
        if torch.Tag.dynamic_output_shape in tags and (packet not in _INDEXED or _has_mask(args)):
            _forbid(f"{function}: a shape depends on values")
        for storage in _storages((args, kwargs)):
            if storage.data_ptr() not in self._made | self._before.keys():
                self._before[storage.data_ptr()] = storage, storage.clone()
        result = function(*args, **(kwargs or {}))
        self._made |= {each.data_ptr() for each in _storages(result)} - self._before.keys()
        self.operations.append(Operation(function, *map(_detached, (args, kwargs or {}, result))))
        return result

    def undo(self) -> None:
        """Leave what was there before the block as it was: a capture runs nothing."""
        for storage, values in self._before.values():
            storage.copy_(values)

    def replay(self) -> None:
        """Run what was recorded, without Python."""
        with torch.no_grad():
            for operation in self.operations:
                operation.replay()


def _storages(tree: Any) -> list[Any]:
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _forbid(what: str) -> None:
    if not any(_ALLOWED in frame.filename for frame in traceback.extract_stack()):
        raise CaptureError(what)


def _forbidden(method: Any) -> Any:
    @wraps(method)
    def forbidden(*args: Any, **kwargs: Any) -> Any:
        _forbid(f"{method.__name__}: the host reads a value")
        return method(*args, **kwargs)

    return forbidden


def _forbidden_of_host_data(make: Any) -> Any:
    @wraps(make)
    def forbidden(data: Any, *args: Any, **kwargs: Any) -> Any:
        # The schedule makes numbers in the host's memory, where there are GPUs, too.
        is_of_schedule = sys._getframe(1).f_code.co_filename.endswith(_SCHEDULES)
        if not isinstance(data, Tensor) and not is_of_schedule:
            _forbid(f"torch.{make.__name__}: data of the host")
        return make(data, *args, **kwargs)

    return forbidden


def _has_mask(args: tuple[Any, ...]) -> bool:
    return any(isinstance(each, Tensor) and each.dtype == torch.bool for each in args[1])


def _detached(tree: Any) -> Any:
    return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, tree)


def _is_same_memory(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.stride() == other.stride()


def _poison(tensor: Tensor) -> None:
    if tensor.is_floating_point():
        tensor.fill_(torch.nan)
    elif tensor.dtype != torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).max // 3)


class Graphed:
    """A forward and its backward as graphs: what `make_graphed_callables` makes of a function.

    Args:
        function: Takes tensors; returns tensors, and None.
        sample: Inputs of the recorded run.
        parameters: What else gets gradients.
        modules: Where linears of Transformer Engine may keep weight gradients for later.
    """

    def __init__(
        self,
        function: Callable[..., Sequence[Tensor | None]],
        sample: Sequence[Tensor],
        parameters: Sequence[Tensor],
        modules: Iterable[Any] = (),
    ) -> None:
        self.linears = [m for m in modules if hasattr(m, "wgrad_store") and m.need_backward_dw()]
        self.inputs = [each.detach().clone().requires_grad_(each.requires_grad) for each in sample]
        self.parameters = [each for each in parameters if each.requires_grad]
        wanted = [*(each for each in self.inputs if each.requires_grad), *self.parameters]
        for _ in range(2):  # The first run warms up.
            with Recorder() as self.forward:
                self.outputs = list(function(*self.inputs))
            self.differentiable = [
                each for each in self.outputs if each is not None and each.requires_grad
            ]
            self.output_grads = [torch.zeros_like(each) for each in self.differentiable]
            with Recorder() as self.backward:
                self.grads = torch.autograd.grad(
                    self.differentiable, wanted, self.output_grads, allow_unused=True
                )
            with _hooks_off(self.linears), Recorder() as self.weight_gradients:
                for linear in self.linears:
                    linear.backward_dw()

    def __call__(self, *inputs: Tensor, **kwargs: Any) -> tuple[Tensor | None, ...]:
        results = iter(_Replay.apply(self, *inputs, *self.parameters))
        return tuple(None if each is None else next(results) for each in self.outputs)

    def backward_dw(self) -> None:
        """Compute the weight gradients that the backward has left for later."""
        self.weight_gradients.replay()
        for linear in self.linears:
            linear._trigger_wgrad_accumulation_and_reduce_hooks()


@contextmanager
def _hooks_off(linears: Iterable[Any]) -> Iterator[None]:
    """Call no hooks of DDP while weight gradients are captured."""
    hooks = [(linear, linear.wgrad_accumulation_and_reduce_hooks) for linear in linears]
    for linear, _ in hooks:
        linear.wgrad_accumulation_and_reduce_hooks = []
    try:
        yield
    finally:
        for linear, each in hooks:
            linear.wgrad_accumulation_and_reduce_hooks = each


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graphed: Graphed, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.graphed = graphed
        for mine, given in zip(graphed.inputs, inputs, strict=False):
            mine.data.copy_(given)
        graphed.forward.replay()
        outputs = [(each, each.detach()) for each in graphed.outputs if each is not None]
        ctx.mark_non_differentiable(*(o for each, o in outputs if not each.requires_grad))
        ctx.is_differentiable = [each.requires_grad for each, _ in outputs]
        return tuple(output for _, output in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        graphed: Graphed = ctx.graphed
        given = [grad for grad, wanted in zip(grads, ctx.is_differentiable, strict=True) if wanted]
        for mine, grad in zip(graphed.output_grads, given, strict=True):
            mine.zero_() if grad is None else mine.copy_(grad)
        graphed.backward.replay()
        found = iter(None if each is None else each.clone() for each in graphed.grads)
        inputs = [next(found) if each.requires_grad else None for each in graphed.inputs]
        return (None, *inputs, *found)


@contextmanager
def capturing() -> Iterator[None]:
    """Tell Megatron that a graph is captured."""
    cuda_graphs._set_capture_start()
    try:
        yield
    finally:
        cuda_graphs._set_capture_end()


def graph_layers(gpt: TinyGPT, num_graphs: int = 1) -> list[Graphed]:
    """Capture all transformer layers as Megatron's TECudaGraphHelper does.

    Args:
        gpt: A model whose `cuda_graph_impl` is `transformer_engine`.
        num_graphs: Graphs of a layer, as many as there are microbatches in flight.
    """
    from megatron.core.transformer.transformer_layer import TransformerLayer

    made = []
    for chunk in gpt.chunks:
        model: Any = chunk.module
        for layer in model.modules():
            if not isinstance(layer, TransformerLayer):
                continue
            run = partial(layer, attention_mask=None, rotary_pos_emb=model.rotary_pos_emb(SEQUENCE))
            shape = (SEQUENCE, gpt.micro_batch_size, gpt.config.hidden_size)
            sample = torch.randn(shape, dtype=gpt.dtype).requires_grad_()
            covered = layer._get_submodules_under_cudagraphs()
            parameters = [p for module in covered for p in module.parameters()]
            modules = [part for module in covered for part in module.modules()]
            with capturing():
                graphs = [Graphed(run, [sample], parameters, modules) for _ in range(num_graphs)]
            layer.cuda_graphs = graphs
            # Megatron's own adds a mask, and asks for the version of Transformer Engine.
            layer._get_te_cuda_graph_replay_args = _hidden_states_alone
            if chunk.ddp_config.overlap_param_gather:
                layer.setup_manual_hooks(chunk._make_forward_pre_hook)
            made += graphs
    # The captures have routed tokens, which the expert bias must not see.
    reset_model_temporary_tensors(gpt.config, gpt.chunks)
    return made


def _hidden_states_alone(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (args or (kwargs["hidden_states"],))[:1], {}


class StepGraph:
    """Stands in for `torch.cuda.CUDAGraph` where Megatron captures a whole step."""

    recorder: Recorder

    def register_generator_state(self, state: Any) -> None: ...

    def replay(self) -> None:
        self.recorder.replay()


@contextmanager
def _captured(graph: StepGraph, **_: Any) -> Iterator[None]:
    with Recorder() as graph.recorder:
        yield
    graph.recorder.undo()


@contextmanager
def whole_steps() -> Iterator[None]:
    """Let Megatron's FullCudaGraphWrapper capture steps; none is captured before the block."""
    from megatron.core import full_cuda_graph

    stages = "training", "validation"
    with (
        mock.patch.multiple(
            torch.cuda, CUDAGraph=StepGraph, graph=_captured, graph_pool_handle=lambda: None
        ),
        mock.patch.multiple(
            full_cuda_graph.FullCudaGraphWrapper,
            curr_iteration=dict.fromkeys(stages, 0),
            cuda_graph=dict.fromkeys(stages),
            result=dict.fromkeys(stages),
        ),
        mock.patch.object(
            full_cuda_graph.StaticBufferLoader, "static_buffers", {each: [] for each in stages}
        ),
    ):
        yield
