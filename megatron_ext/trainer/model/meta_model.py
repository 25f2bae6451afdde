"""A rank's model without its memory: built on the meta device, among ranks that do not exist.

Torch's fake process groups know their sizes and send nothing, so Megatron builds what one rank of
thousands would have. Sizes and dtypes are as in a run; there are no values. Nothing of this is for
a process that trains: it makes, and ends, process groups of its own.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves, tree_map_only

from megatron_ext.config import ConfigError
from megatron_ext.cpu_platform import FACTORIES
from megatron_ext.trainer.config import TrainConfig
from megatron_ext.trainer.model.build import start_parallelism


@contextmanager
def fake_rank(config: TrainConfig, *, rank: int, num_ranks: int) -> Iterator[None]:
    """Make this process one rank of a run, with Megatron's groups, as far as sizes go.

    What is created meanwhile is created on the meta device.

    Raises:
        ConfigError: This torch has no collectives of tensors without values.
    """
    if torch.__version__ < "2.11":
        raise ConfigError(
            [f"torch ({torch.__version__}): a dry run needs torch >= 2.11; training does not"]
        )
    said = sys.excepthook  # A process group puts a rank before every line of an error.
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    try:
        start_parallelism(config, with_gloo=False)
        with OnMeta():
            yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        sys.excepthook = said


class OnMeta(TorchFunctionMode):
    """Creates tensors on the meta device in place of every other device."""

    # The CPU platform wraps them. A tensor of given values is one that somebody reads: it stays on
    # the host where no device is asked for.
    _factories = frozenset(
        inspect.unwrap(getattr(torch, name)) for name in FACTORIES if not name.endswith("tensor")
    )

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if function is torch.Tensor.cuda:
            return args[0]
        if function in self._factories or kwargs.get("device") is not None:
            kwargs["device"] = "meta"
        return function(*args, **kwargs)


class Kept:
    """The bytes that autograd keeps of a module's forward for its backward, while it is entered.

    The module's weights do not count. On the meta device only the first of layers that are alike
    runs, as nothing depends on what it returns; the others add what it added.
    """

    by_layer: list[int]
    """Bytes that each transformer layer added, in the order of the forward."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._weights = {_storage(weight) for weight in module.parameters()}
        self._kept: dict[int, torch.UntypedStorage] = {}
        self._not_run = 0
        self._ran: dict[Any, tuple[int, Any]] = {}
        self.by_layer = []
        self._exits = ExitStack()

    @property
    def num_bytes(self) -> int:
        """Bytes kept so far."""
        return self._not_run + sum(storage.nbytes() for storage in self._kept.values())

    def __enter__(self) -> Kept:
        self._exits.enter_context(saved_tensors_hooks(self._keep, lambda tensor: tensor))
        for layer in self._module.modules():
            if isinstance(layer, TransformerLayer):
                self._exits.enter_context(self._counted(layer))
        return self

    def __exit__(self, *_: object) -> None:
        self._exits.close()

    def _keep(self, tensor: Tensor) -> Tensor:
        number = _storage(tensor)
        if number not in self._weights:
            # Held, so that no other storage gets its number.
            self._kept[number] = tensor.untyped_storage()
        return tensor

    @contextmanager
    def _counted(self, layer: TransformerLayer) -> Iterator[None]:
        run = layer.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            has_values = not any(
                each.is_meta for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)
            )
            # What is recomputed runs without gradients, and keeps nothing.
            shapes = str(tree_map_only(Tensor, lambda tensor: tensor.shape, (args, kwargs)))
            kind = _kind(layer), torch.is_grad_enabled(), shapes
            if has_values or kind not in self._ran:
                before = self.num_bytes
                outputs = run(*args, **kwargs)
                self._ran[kind] = self.num_bytes - before, outputs
            else:
                outputs = tree_map_only(
                    Tensor,
                    lambda one: torch.empty_like(one, requires_grad=one.requires_grad),
                    self._ran[kind][1],
                )
                self._not_run += self._ran[kind][0]
            self.by_layer.append(self._ran[kind][0])
            return outputs

        with patch.object(layer, "forward", forward):
            yield


def _kind(layer: TransformerLayer) -> Any:
    """What layers have in common that keep the same."""
    shapes = tuple((name, weight.shape) for name, weight in layer.named_parameters())
    return type(layer), id(layer.config), shapes


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class _FusedAttention(torch.autograd.Function):
    """Keeps what kernels of attention keep: inputs, output, and a number for each row of scores."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, width: int) -> Tensor:
        output = query.new_empty(*query.shape[:2], width)
        rows = query.new_empty(query.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, rows)
        return output


class _FusedNorm(torch.autograd.Function):
    """Keeps what kernels of norms keep: inputs, and a number for each row."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(
            tokens, weight, tokens.new_empty(tokens.shape[:-1], dtype=torch.float32)
        )
        return torch.empty_like(tokens)


@contextmanager
def kernels_of_a_gpu(*, fused_attention: bool) -> Iterator[None]:
    """Let modules keep for backward what they keep on a GPU.

    With `fused_attention`, attention is a kernel, as Transformer Engine's, and keeps no scores.
    """

    def attend(self: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        return _FusedAttention.apply(query, key, value, self.hidden_size_per_partition)

    def normalize(self: Any, tokens: Tensor) -> Tensor:
        return _FusedNorm.apply(tokens, self.weight)

    attention = patch.object(DotProductAttention, "forward", attend)
    norms = patch.object(nn.RMSNorm, "forward", normalize)
    with norms, attention if fused_attention else nullcontext():
        yield


@contextmanager
def without_recompute() -> Iterator[None]:
    """Let everything be kept, as it is for one layer while that is computed again in backward."""

    def keep_all(function: Callable[..., Any], _: bool, *args: Any) -> Any:
        return function(*args)

    with patch.object(tensor_parallel, "checkpoint", keep_all):
        yield


def deal_evenly(layer: MoELayer, num_assignments: int) -> None:
    """Let the rank's experts of a layer compute so many assignments in every forward, dealt evenly.

    Nothing is exchanged. Shared experts that would run beside an exchange run before it.
    """
    layer.token_dispatcher = _NoExchange(layer.num_local_experts, num_assignments)
    layer.shared_expert_overlap = False


class _NoExchange:
    """Stands where a token dispatcher is, and gives the experts tokens of its own."""

    def __init__(self, num_experts: int, num_assignments: int) -> None:
        counts = np.full(num_experts, num_assignments // num_experts)
        counts[: num_assignments % num_experts] += 1
        # On the host: experts may read them.
        self._tokens_per_expert = torch.from_numpy(counts)
        self._num_assignments = num_assignments
        self._home: Tensor

    def dispatch_preprocess(
        self, hidden: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        self._home = hidden
        return hidden, probs

    def token_dispatch(self, hidden: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        return hidden, probs

    def dispatch_postprocess(self, hidden: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        count = self._num_assignments
        tokens = hidden.new_empty(count, hidden.shape[-1], requires_grad=True)
        return tokens, self._tokens_per_expert, probs.new_empty(count, requires_grad=True)

    def get_expert_zero_copy_buffers(self) -> tuple[None, None]:
        return None, None

    def combine_preprocess(self, output: Tensor) -> Tensor:
        return output

    def token_combine(self, output: Tensor) -> Tensor:
        return output

    def combine_postprocess(self, output: Tensor) -> Tensor:
        return torch.empty_like(self._home, requires_grad=True)
