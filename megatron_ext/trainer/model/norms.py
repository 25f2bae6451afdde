"""PyTorch's norms for sequence parallelism, which Megatron otherwise leaves to Apex."""

from __future__ import annotations

import copy
from typing import Any

from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch import nn

from megatron_ext.mcore.spec import replace_parts


class SequenceParallelNorm:
    """Makes Megatron's `WrappedTorchNorm`, and marks its parameters for a sum of their gradients.

    A norm looks at each token by itself, so a rank's slice of the sequence needs nothing but this
    sum over the tensor-parallel ranks. Megatron sums the gradients of all marked parameters.
    """

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5) -> nn.Module:  # type: ignore[misc]
        """Make the norm that `config` asks for; arguments are Megatron's."""
        plain = copy.copy(config)
        plain.sequence_parallel = False  # WrappedTorchNorm refuses it.
        norm: nn.Module = WrappedTorchNorm(plain, hidden_size, eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


def sequence_parallel_spec(spec: Any) -> Any:
    """Return `spec` with norms of PyTorch that sequence parallelism can use; Apex's stay."""
    return replace_parts(
        spec, lambda part: part is WrappedTorchNorm, lambda _: SequenceParallelNorm
    )
