"""What Megatron's own layers lack: norms for sequence parallelism, and latent attention (MLA).

Megatron leaves the first to Apex, and both to Transformer Engine.
"""

from __future__ import annotations

import copy
from typing import Any

from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch import nn

from megatron_ext.mcore.spec import replace_parts


def sequence_parallel_spec(spec: Any) -> Any:
    """Return `spec` with norms of PyTorch that sequence parallelism can use; Apex's stay."""
    return replace_parts(
        spec, lambda part: part is WrappedTorchNorm, lambda _: _SequenceParallelNorm
    )


def latent_attention_spec(spec: Any) -> Any:
    """Return `spec` with attention that fits Megatron's latent attention around it."""
    # megatron-core 0.16.1 believes that Transformer Engine is there, and asks what is no class.
    if not isinstance(getattr(multi_latent_attention, "TELinear", None), type):
        multi_latent_attention.HAVE_TE = False
    return replace_parts(
        spec, lambda part: part is DotProductAttention, lambda _: _LatentDotProductAttention
    )


class _SequenceParallelNorm:
    """Makes Megatron's `WrappedTorchNorm`, and marks its parameters for a sum of their gradients.

    A norm looks at each token by itself, so a rank's slice of the sequence needs nothing but this
    sum over the tensor-parallel ranks. Megatron sums the gradients of all marked parameters.
    """

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5) -> nn.Module:  # type: ignore[misc]
        plain = copy.copy(config)
        plain.sequence_parallel = False  # WrappedTorchNorm refuses it.
        norm: nn.Module = WrappedTorchNorm(plain, hidden_size, eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


class _LatentDotProductAttention(DotProductAttention):
    """Megatron's attention, which has one width for all, with values of the width `v_channels`.

    `k_channels` is not needed: it is for the scale of the scores, which Megatron gives. Megatron
    first makes an attention without widths, which it replaces.
    """

    def __init__(
        self, *, k_channels: int | None = None, v_channels: int | None = None, **arguments: Any
    ) -> None:
        super().__init__(**arguments)
        if v_channels is not None:
            # The width of the output.
            self.hidden_size_per_partition = self.num_attention_heads_per_partition * v_channels
