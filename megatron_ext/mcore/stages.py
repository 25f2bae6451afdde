"""Names the stages of balanced layers, and of Megatron's own MoE layer, in profiles.

So the profiles of a run with and of a run without balancing can be compared.
`balance/ranges.py` has the cost of a range.
"""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from torch import Tensor, nn

from megatron_ext.balance.layer_report import Observer, number_of
from megatron_ext.balance.ranges import COMBINE, DISPATCH, EXPERTS, layer_forward, stage
from megatron_ext.config import BalanceConfig
from megatron_ext.mcore.partial_graphs import GraphsEndBeforePlan


class NamedMoELayer(MoELayer):
    """Megatron's own layer with its stages named, and nothing else. Made by `spec.name_stages`."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run Megatron's forward, which calls the stages one by one."""
        with layer_forward(self.layer_number):
            return super().forward(*args, **kwargs)

    def dispatch(self, *args: Any, **kwargs: Any) -> Any:
        """Stage 5 (Megatron)."""
        with stage(DISPATCH):
            return super().dispatch(*args, **kwargs)

    def routed_experts_compute(self, *args: Any, **kwargs: Any) -> Any:
        """Stage 6 (Megatron)."""
        with stage(EXPERTS):
            return super().routed_experts_compute(*args, **kwargs)

    def combine(self, *args: Any, **kwargs: Any) -> Tensor:
        """Stage 7 (Megatron)."""
        with stage(COMBINE):
            output: Tensor = super().combine(*args, **kwargs)
        return output


class ObservedMoELayer(NamedMoELayer, GraphsEndBeforePlan):
    """An MoE layer that reports to observers: the base of balanced layers and of even layers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.observers: list[Observer] = []
        """Functions that the layer calls once for every training microbatch, with a report."""

    def set_layer_number(self, layer_number: int) -> None:
        """Take the number in the model; the router keeps Megatron's."""
        super().set_layer_number(layer_number)
        self.layer_number = number_of(self)

    @classmethod
    def shared_by_layers(cls, balance: BalanceConfig) -> dict[str, Any]:
        """Return arguments that all layers of a spec share, besides `balance`."""
        return {}


def number_predicting(model: nn.Module) -> None:
    """Number the MoE layers of multi-token prediction behind the decoder's in hybrid models, too.

    Megatron-Core 0.19 numbers those of each predicted token's hybrid stack from 1 on, and does not
    tell them what they are for.
    """
    for part in model.modules():
        if isinstance(part, MultiTokenPredictionLayer):
            stack: Any = getattr(part, "mtp_model_layer", None)
            for layer in part.modules():
                if isinstance(layer, MoELayer) and hasattr(stack, "layers"):
                    layer.is_mtp_layer = True
                    layer.num_predicting_before = (part.layer_number - 1) * len(stack.layers)
                    if isinstance(layer, ObservedMoELayer):
                        layer.layer_number = number_of(layer)
