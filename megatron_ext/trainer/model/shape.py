"""Sizes of a model, and its work and bytes per token: for `simulate`, and a run's FLOP/s.

Letters: H hidden, F width inside an expert, E logical experts, K choices of a token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megatron_ext.config import check_fields, limits, setting
from megatron_ext.data.tokenizer import padded_vocab_size
from megatron_ext.trainer.config import TrainConfig
from megatron_ext.trainer.data import find_data

REPLICA_BYTES: dict[str, float] = {
    "fp32": 4,
    "bf16": 2,
    "tensorwise": 1,
    "blockwise": 1 + 4 / 128**2,
    "mxfp8": 1 + 1 / 32,
    "nvfp4": 1 / 2 + 1 / 16,
}
"""Bytes that a push moves for an element of a weight, scales among them, by precision. A recipe of
FP8 or FP4 stands for a model in bf16 with experts that compute by it. An amax, or the one scale of
a tensor, is left out."""


_POSITIVE = limits(least=1)


@dataclass(kw_only=True)
class ModelShape:
    """A model and how its training is spread. What has no default has to be given.

    FLOPs below are those of one forward; a backward has twice as many (UltraEP, Eq. 3).
    """

    name: str = ""
    num_dense_layers: int = setting(0, least=0)
    """Layers with one FFN of `dense_hidden_size` instead of experts."""
    dense_hidden_size: int = setting(0, least=0)
    latent_size: int = setting(0, least=0)
    """Width in which tokens go to experts and back, where it is not `hidden_size`; else 0."""
    attention_span: float = setting(0.0, least=0)
    """Tokens that a token attends to, on average over tokens and layers; 0 for half a sequence."""
    num_layers: int = field(metadata=_POSITIVE)
    hidden_size: int = field(metadata=_POSITIVE)
    attention_params: int = field(metadata=_POSITIVE)
    """Weights of the projections of one layer's attention."""
    attention_width: int = field(metadata=_POSITIVE)
    """Heads x the mean of the widths of a query and of a value."""
    num_experts: int = field(metadata=_POSITIVE)
    topk: int = field(metadata=_POSITIVE)
    expert_hidden_size: int = field(metadata=_POSITIVE)
    shared_expert_hidden_size: int = field(metadata=limits(least=0))
    is_gated: bool
    """Whether FFNs have two matrices into their width (SwiGLU) instead of one."""
    vocab_size: int = field(metadata=limits(least=0))
    """0 leaves embedding and logits out."""
    sequence_length: int = field(metadata=_POSITIVE)
    precision: str = field(metadata=limits(choices=tuple(REPLICA_BYTES)))
    pp_size: int = field(metadata=_POSITIVE)
    vpp_size: int = field(metadata=_POSITIVE)
    recompute: str = field(metadata=limits(choices=("none", "selective", "full")))
    distributed_optimizer: bool
    num_microbatches: int = field(metadata=_POSITIVE)
    """Microbatches of a step, for each data-parallel rank."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.num_dense_layers >= self.num_layers:
            raise ValueError(
                f"num_dense_layers ({self.num_dense_layers}) must be < num_layers "
                f"({self.num_layers})"
            )
        if self.pp_size * self.vpp_size > self.num_layers:
            raise ValueError(
                f"pp_size x vpp_size ({self.pp_size} x {self.vpp_size}) must be <= num_layers "
                f"({self.num_layers})"
            )
        if self.topk > self.num_experts:
            raise ValueError(f"topk ({self.topk}) must be <= num_experts ({self.num_experts})")

    @property
    def num_moe_layers(self) -> int:
        """Layers with experts."""
        return self.num_layers - self.num_dense_layers

    @property
    def element_bytes(self) -> int:
        """Bytes of a weight or an activation."""
        return 4 if self.precision == "fp32" else 2

    @property
    def replica_bytes(self) -> int:
        """Bytes of one expert's weights as a push moves them."""
        return round(REPLICA_BYTES[self.precision] * self.expert_params)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token on its way to an expert."""
        return self.element_bytes * (self.latent_size or self.hidden_size)

    @property
    def expert_params(self) -> int:
        """Weights of one expert."""
        return self._ffn_params(self.expert_hidden_size, self.latent_size)

    @property
    def moe_dense_params(self) -> int:
        """Weights of an MoE layer that every rank has: attention, router, shared expert."""
        # The router, and the way into the latent width and back.
        beside = self.hidden_size * (self.num_experts + 2 * self.latent_size)
        return self.attention_params + beside + self.shared_expert_params

    @property
    def shared_expert_params(self) -> int:
        """Weights of an MoE layer's shared expert."""
        return self._ffn_params(self.shared_expert_hidden_size)

    @property
    def dense_layer_params(self) -> int:
        """Weights of a layer without experts."""
        return self.attention_params + self._ffn_params(self.dense_hidden_size)

    def _ffn_params(self, width: int, latent_size: int = 0) -> int:
        return (3 if self.is_gated else 2) * (latent_size or self.hidden_size) * width

    @property
    def expert_flops(self) -> float:
        """FLOPs of one assignment: the matrix products of its expert."""
        return 2.0 * self.expert_params

    def dense_flops(self, params: int) -> float:
        """FLOPs of one token, in the parts of a layer with `params` weights that all ranks have."""
        span = self.attention_span or self.sequence_length / 2
        return 2.0 * params + 4.0 * span * self.attention_width

    @property
    def logits_flops(self) -> float:
        """FLOPs of one token."""
        return 2.0 * self.hidden_size * self.vocab_size

    @property
    def token_flops(self) -> float:
        """FLOPs of one token in the forward of the whole model."""
        moe = self.dense_flops(self.moe_dense_params) + self.topk * self.expert_flops
        dense = self.dense_flops(self.dense_layer_params)
        return self.num_moe_layers * moe + self.num_dense_layers * dense + self.logits_flops

    @property
    def optimizer_bytes(self) -> int:
        """Least bytes that a step of Adam reads and writes for a weight.

        These are, in float32, the gradient once, and the weight and two moments twice; and the
        weight once in its own type.
        """
        return 7 * 4 + self.element_bytes


def shape_of(config: TrainConfig, name: str) -> ModelShape:
    """Return the shape of a run's model.

    The vocabulary is the model's, else that of the run's data, if they are there. A step's
    microbatches are counted for the ranks of the recipe, or else for as many data-parallel ranks as
    the EP group has. Layers that predict further tokens (MTP) are left out.
    """
    # They import Megatron.
    from megatron_ext.trainer.model.settings import recipe_of, transformer_config, unquantized

    model, parallel, data = config.model, config.parallel, config.data
    megatron: Any = transformer_config(unquantized(config))
    if isinstance(has_experts := megatron.moe_layer_freq, int):
        has_experts = [int(layer % has_experts == 0) for layer in range(model.num_layers)]
    vocab_size = model.vocab_size
    if not vocab_size and (manifest := find_data(config)):
        vocab_size = padded_vocab_size(manifest.vocab_size, tensor_parallel=1)
    attention_params, attention_width = _attention(megatron)
    data_parallel = max(
        parallel.num_ranks // (parallel.tp_size * parallel.pp_size), parallel.ep_size
    )
    return ModelShape(
        name=name,
        num_layers=model.num_layers,
        num_dense_layers=model.num_layers - sum(has_experts),
        dense_hidden_size=model.dense_hidden_size or model.expert_hidden_size,
        hidden_size=model.hidden_size,
        latent_size=megatron.moe_latent_size or 0,
        attention_params=attention_params,
        attention_width=attention_width,
        attention_span=_attention_span(megatron, data.sequence_length),
        num_experts=model.num_experts,
        topk=model.topk,
        expert_hidden_size=model.expert_hidden_size,
        shared_expert_hidden_size=model.shared_expert_hidden_size,
        is_gated=model.activation == "swiglu" or bool(config.megatron.get("gated_linear_unit")),
        vocab_size=vocab_size,
        sequence_length=data.sequence_length,
        precision=recipe_of(config) or model.precision,
        pp_size=parallel.pp_size,
        vpp_size=parallel.vpp_size,
        recompute=parallel.recompute,
        distributed_optimizer=parallel.distributed_optimizer,
        num_microbatches=max(1, data.global_batch_size // (data.micro_batch_size * data_parallel)),
    )


def _attention(megatron: Any) -> tuple[int, int]:
    """Return weights and width of a layer's attention, by Megatron's config."""
    hidden, heads = megatron.hidden_size, megatron.num_attention_heads
    if megatron.multi_latent_attention:
        position, value = megatron.qk_pos_emb_head_dim, megatron.v_head_dim
        query = megatron.qk_head_dim + position
        of_queries = (hidden + heads * query) * megatron.q_lora_rank
        into_latent = hidden * (megatron.kv_lora_rank + position)
        out_of_latent = megatron.kv_lora_rank * heads * (megatron.qk_head_dim + value)
        params = of_queries + into_latent + out_of_latent + heads * value * hidden
        return params, heads * (query + value) // 2
    width = heads * megatron.kv_channels
    key_values = 2 * megatron.num_query_groups * megatron.kv_channels
    return hidden * (2 * width + key_values), width


def _attention_span(megatron: Any, sequence_length: int) -> float:
    """Return `ModelShape.attention_span`, by Megatron's config: some layers may have a window."""
    from megatron.core.transformer.utils import is_layer_window_attention

    window, skipped = megatron.window_size, megatron.window_attn_skip_freq
    layers = range(1, megatron.num_layers + 1)
    num_windowed = sum(is_layer_window_attention(window, skipped, layer) for layer in layers)
    if not num_windowed or window[0] < 0:
        return 0.0
    seen = min(window[0] + 1, sequence_length)  # With itself.
    # The first tokens of a sequence see less.
    windowed = seen * (1 - seen / (2 * sequence_length))
    full = sequence_length / 2
    return full + (windowed - full) * num_windowed / megatron.num_layers
