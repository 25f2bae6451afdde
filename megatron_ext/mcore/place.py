"""Where a rank is among those that hold the same experts, by Megatron's process groups."""

from __future__ import annotations

from megatron.core import parallel_state

from megatron_ext.telemetry.gather import Place


def place_of_rank(num_layers: int) -> Place:
    """Return this rank's place; for after Megatron's groups are made.

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
