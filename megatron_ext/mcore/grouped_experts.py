"""Experts with stacked parameters, which PyTorch's grouped matrix product computes.

Legend: M mains per rank, S slots per rank, H hidden, F expert FFN width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.random import (
    get_cuda_rng_tracker,
    get_expert_parallel_rng_tracker_name,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor, nn

from megatron_ext.balance.main_weights import MainWeights, Segment, StackedMains
from megatron_ext.mcore.grouped_product import grouped_product
from megatron_ext.mcore.sequential_experts import SlotsBehindMains
from megatron_ext.mcore.spec import grouped_by_megatron, module_names, replace_module, required

_EXTRA_STATE = "_extra_state"
"""Name that PyTorch gives to a module's state besides tensors."""


def grouped_mm_spec(spec: Any) -> Any:
    """Return `spec` with `GroupedExperts` for its `SequentialMLP` (same checkpoint keys).

    Raises:
        ValueError: There are no `SequentialMLP` experts in `spec`.
    """
    if by_megatron := grouped_by_megatron(module_names(spec)):
        raise ValueError(
            f"the spec has experts of {by_megatron}: make it with moe_grouped_gemm=False, which "
            "has the SequentialMLP that GroupedExperts replace"
        )
    what = required(spec, "SequentialMLP")
    return replace_module(spec, SequentialMLP, GroupedExperts, what)


class GroupedExperts(MegatronModule):
    """Experts with stacked weights, computed by PyTorch's `grouped_mm` (float32 and bfloat16).

    They replace `SequentialMLP` in a layer spec (`grouped_mm_spec`). Both have the same checkpoint
    keys, so each can load the other's checkpoints. No biases.

    Attributes:
        fc1: [M, F1, H], F1 = 2F with a gated linear unit, else F.
        fc2: [M, H, F].
    """

    def __init__(
        self,
        num_local_experts: int,
        config: Any,
        submodules: Any = None,
        pg_collection: Any = None,
        name: str | None = None,
    ) -> None:
        super().__init__(config=config)
        if config.add_bias_linear:
            raise ValueError("add_bias_linear (True) must be False: GroupedExperts have no biases")
        if (shards := config.expert_tensor_parallel_size) != 1:
            raise ValueError(
                f"expert_tensor_parallel_size ({shards}) must be 1: GroupedExperts are not sharded"
            )
        self.num_local_experts = num_local_experts
        self.ep_group = pg_collection.ep
        self.dp_group = pg_collection.expt_dp
        width = config.moe_ffn_hidden_size
        hidden = config.moe_latent_size or config.hidden_size
        fc1_width = 2 * width if config.gated_linear_unit else width
        self.fc1 = self._parameter((fc1_width, hidden), config.init_method, partition_dim=1)
        self.fc2 = self._parameter(
            (hidden, width), config.output_layer_init_method, partition_dim=2
        )
        self.register_load_state_dict_post_hook(self._ignore_extra_states)

    def _parameter(
        self, shape: tuple[int, int], init_method: Any, partition_dim: int
    ) -> nn.Parameter:
        config = self.config
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        weight = nn.Parameter(
            torch.empty((self.num_local_experts, *shape), device=device, dtype=config.params_dtype)
        )
        if config.perform_initialization:
            with get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()):
                for row in weight.data:
                    init_method(row)
        # Marks as on Megatron's own expert weights: the gradient norm counts the weights once, and
        # the expert DP group reduces their gradients.
        set_tensor_model_parallel_attributes(weight, True, partition_dim, 1)
        setattr(weight, "allreduce", config.expert_model_parallel_size == 1)  # noqa: B010
        return weight

    def forward(
        self, tokens: Tensor, tokens_per_expert: Tensor, probs: Tensor
    ) -> tuple[Tensor, None]:
        """Run the mains: tokens [N', H] sorted by expert, counts [M], probabilities [N']."""
        return self.compute(self.fc1, self.fc2, tokens, tokens_per_expert, probs), None

    def compute(
        self, fc1: Tensor, fc2: Tensor, tokens: Tensor, tokens_per_expert: Tensor, probs: Tensor
    ) -> Tensor:
        """Run experts with the given stacked weights on tokens sorted by expert.

        The counts may be on the host or the device; the host does not wait.
        """
        config = self.config
        scale = probs.unsqueeze(-1)
        if config.moe_apply_probs_on_input:
            tokens = (tokens * scale).to(tokens.dtype)
            scale = torch.ones_like(scale)
        ends = tokens_per_expert.cumsum(0, dtype=torch.int32)
        if tokens.is_cuda and not ends.is_cuda:
            # A copy from memory that is not pinned would wait for all earlier work on the device.
            ends = ends.pin_memory()
        ends = ends.to(tokens.device, non_blocking=True)
        inner = grouped_product(tokens, fc1.transpose(1, 2), ends)
        if config.gated_linear_unit:
            gate, linear = inner.chunk(2, dim=-1)
            if (limit := config.activation_func_clamp_value) is not None:
                gate, linear = gate.clamp(max=limit), linear.clamp(-limit, limit)
            inner = config.activation_func(gate) * (linear + config.glu_linear_offset)
        else:
            inner = config.activation_func(inner)
        inner = (inner * scale).to(tokens.dtype)
        return grouped_product(inner, fc2.transpose(1, 2), ends)

    def backward_dw(self) -> None:
        """Do nothing: weight gradients are never delayed here."""

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Name the weights as `SequentialMLP` does: a global tensor [..., E, *shape] a segment."""
        expert_axis = len(sharded_offsets)
        ep_rank, ep_size = self.ep_group.rank(), self.ep_group.size()
        replica_id = (0, 0, self.dp_group.rank())
        state: dict[str, Any] = {}
        for name, parameter in (("fc1", self.fc1), ("fc2", self.fc2)):
            key = f"{prefix}experts.linear_{name}"
            state[f"{prefix}{name}"] = ShardedTensor.from_rank_offsets(
                f"{key}.weight",
                parameter,
                *sharded_offsets,
                (expert_axis, ep_rank, ep_size),
                replica_id=replica_id,
                prepend_axis_num=expert_axis,
            )
            # Each of Megatron's linear layers saves an empty extra state, and refuses a checkpoint
            # without one.
            for m in range(self.num_local_experts):
                state[f"{prefix}{name}.{m}{_EXTRA_STATE}"] = ShardedObject(
                    f"{key}.{_EXTRA_STATE}",
                    None,
                    (*(size for _, _, size in sharded_offsets), ep_size * self.num_local_experts),
                    (*(idx for _, idx, _ in sharded_offsets), ep_rank * self.num_local_experts + m),
                    replica_id,
                )
        return state

    def _ignore_extra_states(self, module: nn.Module, incompatible_keys: Any) -> None:
        """After loading, drop the empty extra states of `sharded_state_dict`: nothing uses them."""
        unexpected = incompatible_keys.unexpected_keys
        unexpected[:] = [key for key in unexpected if not key.endswith(_EXTRA_STATE)]


class GroupedWeights(SlotsBehindMains):
    """Mains and slots of `GroupedExperts`: one stacked parameter a segment."""

    def __init__(self, experts: GroupedExperts) -> None:
        super().__init__(experts)
        self.segments = tuple(
            Segment(name, tuple(parameter.shape[1:]))
            for name, parameter in experts.named_parameters()
        )

    def mains(self) -> MainWeights:
        """See `ExpertWeights.mains`."""
        # PyTorch's grouped product gives its gradients to autograd, with fusion on or off.
        fc1, fc2 = self.experts.fc1, self.experts.fc2
        return MainWeights((StackedMains(fc1, fc1), StackedMains(fc2, fc2)), fused=False)

    def run_slots(
        self, weights: Sequence[Any], tokens: Tensor, num_tokens: list[int], probs: Tensor
    ) -> Tensor:
        """Run the slots in one grouped product."""
        return self.experts.compute(*weights, tokens, torch.tensor(num_tokens), probs)
