"""Latent attention (MLA) without Transformer Engine: Megatron's attention has one width for all."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.dot_product_attention import DotProductAttention

from megatron_ext.mcore.spec import replace_parts


class LatentDotProductAttention(DotProductAttention):
    """Megatron's attention, for values of another width than queries and keys.

    Args:
        k_channels: Width of a query or key of one head. Not needed: Megatron gives the scale of the
            scores, which it is for.
        v_channels: Width of a value of one head. Megatron makes an attention without it first,
            which it replaces.
        arguments: Those of Megatron's attention.
    """

    def __init__(
        self, *, k_channels: int | None = None, v_channels: int | None = None, **arguments: Any
    ) -> None:
        super().__init__(**arguments)
        if v_channels is not None:
            # The width of the output.
            self.hidden_size_per_partition = self.num_attention_heads_per_partition * v_channels


def latent_attention_spec(spec: Any) -> Any:
    """Return `spec` with attention that fits Megatron's latent attention around it."""
    # megatron-core 0.16.1 believes that Transformer Engine is there, and asks what is no class.
    if not isinstance(getattr(multi_latent_attention, "TELinear", None), type):
        multi_latent_attention.HAVE_TE = False
    return replace_parts(
        spec, lambda part: part is DotProductAttention, lambda _: LatentDotProductAttention
    )
