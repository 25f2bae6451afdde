"""The transformer layer around a balanced MoE layer, whose backward waits for the reduction.

backward of the layer
    MoE layer    8 start reducing replica gradients, once the experts' backward is done
    router, attention (Megatron), beside the reduction
    input        8 join the reduction: the mains' gradients are complete

Start and join are autograd functions of `balance/replicas.py`.
"""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_ext.mcore.moe_layer import BalancedMoELayer


class JoiningTransformerLayer(TransformerLayer):
    """Megatron's transformer layer, at whose input backward waits for the replicas' gradients."""

    def __init__(
        self, config: Any, submodules: Any, layer_number: int = 1, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(config, submodules, layer_number, *args, **kwargs)
        # What multi-token prediction begins with is not what the layer before it ends with.
        if isinstance(self.mlp, BalancedMoELayer) and not self.mlp.is_for_mtp:
            # The argument counts from the chunk's first layer, the attribute from the model's.
            self.mlp.chunk = self.layer_number - layer_number

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run Megatron's forward behind the point where backward will wait for the reduction."""
        if isinstance(self.mlp, BalancedMoELayer):
            if "hidden_states" in kwargs:
                kwargs["hidden_states"] = self.mlp.join_reduction(kwargs["hidden_states"])
            else:
                args = (self.mlp.join_reduction(args[0]), *args[1:])
        return super().forward(*args, **kwargs)
