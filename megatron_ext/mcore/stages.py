"""Names the stages of MoE layers in profiles, those of Megatron's own layer as well.

A profile of a run without balancing can then be laid beside one with it. `balance/ranges.py` says
when a range costs anything.
"""

from __future__ import annotations

from typing import Any

from megatron.core import utils
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor

from megatron_ext.balance.ranges import (
    COMBINE,
    DISPATCH,
    EXPERTS,
    layer_forward,
    show_in_nvtx,
    stage,
)

# Megatron has no function that says whether `configure_nvtx_profiling` was called.
show_in_nvtx(lambda: utils._nvtx_enabled)


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


class NamedMoELayer(NamedStages, MoELayer):
    """Megatron's own layer with its stages named, and nothing else. Made by `spec.name_stages`."""
