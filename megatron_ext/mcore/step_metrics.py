"""Computes the metrics of each step, for the logs of any program that trains with Megatron.

The program writes the metrics to its own W&B, TensorBoard or files.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import nn

from megatron_ext.mcore import process_hooks
from megatron_ext.mcore.graph_limits import hold_whole_steps
from megatron_ext.telemetry.gather import Place, gather_step
from megatron_ext.telemetry.names import MAX_KEYS, TIERS, shown
from megatron_ext.telemetry.recorder import LoadRecorder


class StepMetrics:
    """Counts the loads and replicas of a model's MoE layers, until `close()`.

    Every rank makes a `StepMetrics` after the model, also on pipeline stages without MoE layers,
    and before the first step: what a CUDA graph of a whole step captures is counted in its replays.
    Layers that are not balanced are counted, too, so that an unbalanced run can be compared.

    Args:
        model: The model's chunks on this rank, wrapped or not.

    Raises:
        TypeError: `model` is one module.
    """

    def __init__(self, model: Iterable[nn.Module]) -> None:
        if isinstance(model, nn.Module):
            raise TypeError(
                f"model must be a list of the model's chunks on this rank, not a "
                f"{type(model).__name__}: give [model]"
            )
        parts = [part for chunk in model for part in chunk.modules()]
        if any(hold_whole_steps(part.config) for part in parts if hasattr(part, "config")):
            process_hooks.install()
        layers = [part for part in parts if isinstance(part, MoELayer)]
        group = parallel_state.get_expert_model_parallel_group() if layers else None
        self._recorder = LoadRecorder((), group)
        self._last_layer = 0
        self._place: Place | None = None
        for layer in layers:
            self.watch(layer)

    def watch(self, layer: Any) -> None:
        """Count this layer, too; called before the first `take`."""
        self._last_layer = max(self._last_layer, layer.layer_number or 0)
        self._recorder.watch(layer)

    def take(self, *, tier: str = "brief") -> dict[str, float]:
        """Return the metrics of the steps since the last call, by name; all ranks call together.

        The metrics cover all ranks, layers and pipeline stages, and are equal on every rank. Call
        `take` after each step: the counts stay in memory until the call. Evaluation is not counted.

        Args:
            tier: `brief`, or `detailed` with metrics of each layer as well. If the layers need more
                than `MAX_KEYS` names, those with the largest imbalance before are returned.

        Returns:
            Numbers as `balance/imbalance_after` or `balance/imbalance_after_layer_3`, and under
            Megatron's names where it has any (`moe/avg_overload_factor`); `telemetry/names.py`
            gives units and meanings. Empty if nothing was trained.

        Raises:
            ValueError: There is no such tier.
        """
        if tier not in TIERS:
            raise ValueError(f"tier ({tier!r}) must be one of {', '.join(TIERS)}")
        loads = self._recorder.take_step()
        if self._place is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
            last_layer = torch.tensor(self._last_layer, device=device)
            dist.all_reduce(last_layer, dist.ReduceOp.MAX)
            self._place = place_of_rank(int(last_layer))
        if not self._place.num_layers:
            return {}
        gathered = gather_step(loads.computed, self._place, loads.own)
        layers = gathered.layers(with_experts=False)
        return shown(gathered.metrics(), layers, tier=tier, max_keys=MAX_KEYS)

    def close(self) -> None:
        """Stop counting."""
        self._recorder.close()


def place_of_rank(num_layers: int) -> Place:
    """Return this rank's place by Megatron's groups, once they are made.

    Args:
        num_layers: Layers of the model, with those of multi-token prediction.
    """
    is_first_shard = parallel_state.get_expert_tensor_parallel_rank() == 0
    return Place(
        group=parallel_state.get_expert_data_parallel_rank(),
        groups=parallel_state.get_expert_data_parallel_world_size(),
        ep_size=parallel_state.get_expert_model_parallel_world_size(),
        speaks=is_first_shard and parallel_state.get_expert_model_parallel_rank() == 0,
        num_layers=num_layers,
    )
