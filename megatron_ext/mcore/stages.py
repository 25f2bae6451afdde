"""Names the stages of MoE layers in profiles, those of Megatron's own layer as well.

A profile of a run without balancing can then be laid beside one with it. `balance/ranges.py` says
when a range costs anything.
"""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor

from megatron_ext.balance.layer_report import Observer
from megatron_ext.balance.ranges import (
    COMBINE,
    DISPATCH,
    EXPERTS,
    layer_forward,
    stage,
)
from megatron_ext.config import BalanceConfig


class NamedStages:
    """Puts ranges around the stages that every MoE layer of Megatron's has: a base before it."""

    layer_number: Any

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run Megatron's forward, which calls the stages one by one."""
        with layer_forward(self.layer_number):
            return super().forward(*args, **kwargs)  # type: ignore[misc]

    def dispatch(self, *args: Any, **kwargs: Any) -> Any:
        """Stage 5 (Megatron)."""
        with stage(DISPATCH):
            return super().dispatch(*args, **kwargs)  # type: ignore[misc]

    def routed_experts_compute(self, *args: Any, **kwargs: Any) -> Any:
        """Stage 6 (Megatron)."""
        with stage(EXPERTS):
            return super().routed_experts_compute(*args, **kwargs)  # type: ignore[misc]

    def combine(self, *args: Any, **kwargs: Any) -> Tensor:
        """Stage 7 (Megatron)."""
        with stage(COMBINE):
            output: Tensor = super().combine(*args, **kwargs)  # type: ignore[misc]
        return output


class ObservedMoELayer(NamedStages, MoELayer):
    """A layer that tells its observers what it did: base of balanced layers and of even ones."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.observers: list[Observer] = []
        """Told of every microbatch that is trained with, once."""

    @classmethod
    def shared_by_layers(cls, balance: BalanceConfig) -> dict[str, Any]:
        """Return arguments that all layers of a spec share, besides `balance`."""
        return {}


class NamedMoELayer(NamedStages, MoELayer):
    """Megatron's own layer with its stages named, and nothing else. Made by `spec.name_stages`."""
