"""What a forward asks of PyTorch's autograd: calls in backward, and where the backward will come.

Some answers are of functions of `torch._C`, which PyTorch does not document.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_ext.balance.beside import has_streams


class OnBackward(torch.autograd.Function):
    """Passes tensors on, and calls `call` in backward: (call, passed, *inputs) -> passed.

    `call` gets the gradients of the passed tensors, None for a tensor without a gradient, and
    returns the gradients of the inputs.
    """

    @staticmethod
    def forward(
        ctx: Any,
        call: Callable[..., Sequence[Tensor | None]],
        passed: Sequence[Tensor],
        *_inputs: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return the passed tensors, with the inputs before them in the graph."""
        ctx.call = call
        # PyTorch's "materialize", not ours: a missing gradient arrives as None, not as zeros.
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in passed)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return what `call` makes of the gradients.

        Raises:
            RuntimeError: The backward shall have a gradient itself.
        """
        if torch.is_grad_enabled():
            raise RuntimeError(
                "balanced MoE layers have no second derivatives: call backward or "
                "torch.autograd.grad with create_graph=False"
            )
        return (None, None, *ctx.call(*grads))


def accumulated() -> set[Tensor]:
    """Return the mains to whose `.grad` the running backward adds, in the join or behind this node.

    All of them in `backward()`; some or none in `backward(inputs=...)`; none in
    `torch.autograd.grad`, which returns gradients. A main with hooks of a program on its gradient
    is left out, because the hooks shall get all of the gradient.
    """
    after = _nodes_after(torch._C._current_autograd_node())
    joins = [node for node in after if node.name() == OnBackward.__name__ + "Backward"]
    after += [node for join in joins for node in _nodes_after(join)]
    return {leaf.variable for leaf in _executed_leaves(after) if not _has_hooks(leaf.variable)}


def let_leaves_wait(device: torch.device) -> None:
    """Let the mains' leaves behind the running node wait for the current stream.

    A leaf, and DDP's hook on it, has the stream on which DDP was made; Megatron's programs make it
    on one of its own. Autograd lets that stream wait for gradients only, and sums in a `main_grad`
    are none.
    """
    if not has_streams(device):
        return
    done = torch.cuda.current_stream(device).record_event()

    def wait_once(_: Any, handles: list[Any]) -> None:
        torch.cuda.current_stream(device).wait_event(done)
        handles.pop().remove()

    for leaf in _executed_leaves(_nodes_after(torch._C._current_autograd_node())):
        handles: list[Any] = []
        handles.append(leaf.register_prehook(partial(wait_once, handles=handles)))


def _nodes_after(node: Any) -> list[Any]:
    """The nodes of the graph to which a node's backward passes gradients."""
    return [after for after, _ in node.next_functions if after is not None]


def _executed_leaves(nodes: Iterable[Any]) -> list[Any]:
    """The nodes that add to a tensor's `.grad` in the running backward."""
    return [node for node in nodes if node.name().endswith("AccumulateGrad") and is_executed(node)]


def _has_hooks(main: Any) -> bool:
    """Whether a program reads or changes a main's gradient (`register_hook` and its like)."""
    return bool(main._backward_hooks or main._post_accumulate_grad_hooks)


def is_executed(node: Any) -> bool:
    """Whether the running backward comes to a node of the graph."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # `torch.autograd.grad` of this leaf.
        return False


def edge_like(like: Tensor) -> Tensor:
    """Return a tensor without elements that needs a gradient, so that its users get a backward."""
    return like.new_empty(0).requires_grad_(torch.is_grad_enabled())


@contextmanager
def kept_in_place(buffers: Sequence[Tensor]) -> Iterator[None]:
    """Hide buffers from hooks on saved tensors, such as hooks that offload activations.

    Backward needs no copies, because `before_experts_backward` restores the buffers. A quantized
    tensor has no storage of its own, and is known by its first part.
    """
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is None:
        yield
        return
    pack, unpack = hooks
    hidden = {_address(buffer) for buffer in buffers}

    def pack_others(saved: Tensor) -> tuple[bool, Any]:
        is_hidden = _address(saved) in hidden
        return is_hidden, saved if is_hidden else pack(saved)

    def unpack_others(packed: tuple[bool, Any]) -> Tensor:
        is_hidden, kept = packed
        return kept if is_hidden else unpack(kept)

    with torch.autograd.graph.saved_tensors_hooks(pack_others, unpack_others):
        yield


def _address(tensor: Any) -> int:
    """Where a tensor's storage begins."""
    if hasattr(tensor, "get_data_tensors"):  # Transformer Engine's quantized tensors.
        tensor = next(each for each in tensor.get_data_tensors() if each is not None)
    return int(tensor.untyped_storage().data_ptr())
