"""From a Hugging Face model's configuration to the settings of a training run."""

from __future__ import annotations

import dataclasses
from typing import Any

import yaml
from megatron.core.transformer import TransformerConfig
from torch.nn import functional

from megatron_ext.config import BalanceConfig
from megatron_ext.trainer.config import ModelConfig, TrainConfig
from megatron_ext.trainer.model.settings import (
    transformer_class,
    transformer_config,
    transformer_settings,
)

_OF_A_RUN = {
    *("attention_softmax_in_fp32", "autocast_dtype", "bf16", "fp16", "params_dtype"),
    *("bias_activation_fusion", "bias_dropout_fusion", "cross_entropy_fusion_impl"),
    *("cross_entropy_loss_fusion", "gradient_accumulation_fusion", "masked_softmax_fusion"),
    *("moe_permute_fusion", "moe_router_fusion", "persist_layer_norm", "apply_rope_fusion"),
    *("batch_p2p_comm", "deallocate_pipeline_outputs", "moe_shared_expert_overlap"),
    *("moe_token_dispatcher_type", "moe_grouped_gemm", "moe_router_dtype", "offload_modules"),
    *("transformer_impl", "pipeline_dtype", "use_cpu_initialization", "cuda_graph_modules"),
    *("init_method", "init_method_std", "embedding_init_method_std", "embedding_init_method"),
    *("output_layer_init_method", "use_te_rng_tracker", "moe_flex_dispatcher_backend"),
    "ffn_hidden_size",  # Of a model without dense layers; of others `model.dense_hidden_size`.
}
"""Fields of TransformerConfig that say how a model is computed or begun, not which model it is."""

_ROTARY = {
    "position_embedding_type": "rope",
    "rope_scaling": False,
    "seq_len_interpolation_factor": None,
    "share_embeddings_and_output_weights": False,
}
"""What the trainer's models have of the fields that only Bridge's providers have."""


def _unsaid_problems(described: Any, provider: Any) -> list[str]:
    """Return what Bridge's providers do not say, or say otherwise, and Megatron computes one way.

    That is how positions are scaled, windows, and how routers weigh experts.
    """
    positions = getattr(described, "rope_parameters", None) or {}
    kind = positions.get("rope_type") or positions.get("type") or "default"
    is_latent = bool(getattr(described, "kv_lora_rank", None))
    is_sigmoid, topk = provider.moe_router_score_function == "sigmoid", provider.moe_router_topk
    groups, chosen = provider.moe_router_num_groups or 1, provider.moe_router_group_topk or 1
    problems = []
    if kind not in ("default", *(["yarn"] if is_latent else [])):
        problems.append(f"it has no positions scaled by {kind}")
    window = getattr(described, "sliding_window", None)
    if window is not None and getattr(described, "use_sliding_window", True):
        problems.append(f"it has no windows ({window} tokens)")
    if is_latent and described.q_lora_rank is None:  # Megatron-Core 0.19 puts a norm before these.
        problems.append("its latent attention (MLA) has no queries without a latent (q_lora_rank)")
    if described.model_type.startswith("ernie4_5"):
        problems.append("Megatron-Bridge takes its router's softmax for a sigmoid")
    # In transformers a group's score is the sum of its best two.
    if is_sigmoid and groups > chosen and topk // chosen != 2:
        problems.append(f"topk_group ({chosen}) must be half of num_experts_per_tok ({topk})")
    wanted = {
        "attention_factor": None,
        "partial_rotary_factor": provider.rotary_percent,
        "rope_interleave": is_latent,
        **({"norm_topk_prob": topk > 1} if is_sigmoid else {}),
    }
    given = {**described.to_dict(), **positions}
    return problems + [
        f"{name} ({value}) must be {ours}"
        for name, ours in wanted.items()
        if (value := given.get(name, ours)) != ours
    ]


def model_settings(described: Any, provider: Any, precision: str) -> dict[str, Any]:
    """Return the sections `model` and `megatron` of a run that trains a model, in this precision.

    `described` is transformers' configuration of the model, `provider` Bridge's provider for it.

    Raises:
        ValueError: The trainer has no setting for something that the model computes.
    """
    missing = _unsaid_problems(described, provider)
    missing += [
        f"{name} ({value}) must be {ours}"
        for name, ours in _ROTARY.items()
        if (value := getattr(provider, name, ours)) != ours
    ]
    model = _model(provider, missing) | {"precision": precision, "experts": "grouped_mm"}
    config = TrainConfig(model=ModelConfig(**model))
    if problems := config.model.problems():
        raise ValueError(problems[0])
    if provider.multi_latent_attention:
        config.megatron["multi_latent_attention"] = True
    ours = transformer_config(config)
    further: dict[str, Any] = {}
    decided = transformer_settings(config)
    for each in dataclasses.fields(transformer_class(config)):
        theirs = getattr(provider, each.name)
        default = getattr(ours, each.name)
        # Megatron fills in what is None; no number and no list is as good as none.
        if theirs is None or theirs == default or not (theirs or default):
            continue
        if each.name in _OF_A_RUN:
            continue
        if each.name in decided or not isinstance(theirs, bool | int | float | str | list):
            missing.append(f"{each.name} ({getattr(theirs, '__name__', theirs)}) is no setting")
        further[each.name] = theirs
    further |= config.megatron
    if missing:
        raise ValueError(f"the trainer cannot make this model: {'; '.join(missing)}")
    return {"model": model, "megatron": further}


def run_config(settings: dict[str, Any]) -> TrainConfig:
    """Return a run of these sections on one rank, unbalanced and of Megatron's own layers."""
    model = {**settings["model"], "transformer_impl": "local", "experts": "sequential"}
    return TrainConfig(
        model=ModelConfig(**model),
        megatron=dict(settings["megatron"]),
        balance=BalanceConfig(strategy="none"),
    )


def recipe_text(settings: dict[str, Any], *, checkpoint: str, run_dir: str, source: str) -> str:
    """Return a recipe that trains a model from a checkpoint that was imported for it."""
    groups = {"balance": "quota"}, {"logging": "files"}, "_self_", {"size": "full"}
    recipe = {
        "defaults": ["train", *groups],
        "run_dir": run_dir,
        "checkpoint": {"load": checkpoint},
        **settings,
    }
    head = (
        f"# The model of {source}, from its configuration. It says nothing of ranks and batches.\n"
    )
    return head + yaml.safe_dump(recipe, sort_keys=False)


def _model(provider: TransformerConfig, missing: list[str]) -> dict[str, Any]:
    """Return the fields of `ModelConfig`; add to `missing` what has none."""
    layers = provider.num_layers
    pattern = provider.moe_layer_freq
    of_layers = [1] * layers if pattern == 1 else list(pattern)
    num_dense = of_layers.index(1) if 1 in of_layers else layers
    if of_layers != [0] * num_dense + [1] * (layers - num_dense):
        missing.append(f"layers without experts must be the first ones, not {of_layers}")
    kinds = {(True, functional.silu): "swiglu", (False, functional.gelu): "gelu"}
    activation = kinds.get((provider.gated_linear_unit, provider.activation_func))
    base = float(provider.rotary_base)
    return {
        "num_layers": layers,
        "hidden_size": provider.hidden_size,
        "num_attention_heads": provider.num_attention_heads,
        "rotary_base": int(base) if base == int(base) else base,
        "rotary_percent": float(provider.rotary_percent),
        "num_dense_layers": num_dense,
        "dense_hidden_size": provider.ffn_hidden_size if num_dense else 0,
        "activation": activation or "gelu",
        "vocab_size": provider.vocab_size,
        "num_experts": provider.num_moe_experts,
        "topk": provider.moe_router_topk,
        "expert_hidden_size": provider.moe_ffn_hidden_size,
        "shared_expert_hidden_size": provider.moe_shared_expert_intermediate_size or 0,
        "aux_loss": provider.moe_aux_loss_coeff,
    }
