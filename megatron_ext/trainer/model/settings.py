"""From the sections of a run's config to Megatron's settings: only this module translates them.

Settings that Megatron knows keep Megatron's defaults, except those of `OVERRIDABLE`. Nothing here
needs data, a balancer or a process group.
"""

from __future__ import annotations

import dataclasses
from operator import attrgetter
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.optimizer import OptimizerConfig
from megatron.core.tensor_parallel import layers
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from torch.nn import functional

from megatron_ext.mcore.limits import DELAYS
from megatron_ext.trainer.config import MEGATRON_NAMES, TrainConfig

OVERRIDABLE: dict[str, Any] = {
    "expert_tensor_parallel_size": 1,
    "moe_router_dtype": "fp32",
    "add_bias_linear": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
"""Where this project's defaults differ from Megatron's; the section `megatron` may set them."""

UNEVEN_STAGES = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
"""Fields of TransformerConfig with which pipeline stages may differ in their layers."""

_RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective"},
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def transformer_settings(config: TrainConfig) -> dict[str, Any]:
    """Return the fields of TransformerConfig that the sections `model` and `parallel` decide."""
    model, parallel = config.model, config.parallel
    dtype = _DTYPES[model.precision]
    with_engine = uses_transformer_engine(config)
    named = {name: ours for name, ours in MEGATRON_NAMES.items() if "=" not in ours}
    settings = {name: attrgetter(ours)(config) for name, ours in named.items()} | {
        "transformer_impl": "transformer_engine" if with_engine else "local",
        "ffn_hidden_size": model.dense_hidden_size or model.expert_hidden_size,
        # `model.experts` says how experts are computed; Megatron knows no product of PyTorch's.
        "moe_grouped_gemm": with_engine and model.experts == "grouped_mm",
        "moe_shared_expert_intermediate_size": model.shared_expert_hidden_size or None,
        "sequence_parallel": parallel.tp_size > 1,  # MoE layers need it.
        "context_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": parallel.vpp_size
        if parallel.vpp_size > 1
        else None,
        "pipeline_dtype": dtype,
        "params_dtype": dtype,
        "bf16": model.precision == "bf16",
        **_RECOMPUTE[parallel.recompute],
    }
    if dense := model.num_dense_layers:
        settings["moe_layer_freq"] = [0] * dense + [1] * (model.num_layers - dense)
    if model.activation == "swiglu":
        settings |= {"gated_linear_unit": True, "activation_func": functional.silu}
    if _is_latent(config):
        # Other attention gets them as arguments of the model.
        settings |= {"rotary_base": model.rotary_base, "rotary_percent": model.rotary_percent}
    return settings


def overridable_settings(config: TrainConfig) -> dict[str, Any]:
    """Return the fields of TransformerConfig that the section `megatron` may replace."""
    is_interleaved = config.parallel.vpp_size > 1
    settings = OVERRIDABLE | {
        # As Megatron's programs choose. With batched messages, its combined schedule of two
        # microbatches computes other losses.
        "overlap_p2p_comm": is_interleaved,
        "batch_p2p_comm": not is_interleaved,
        "moe_router_load_balancing_type": "aux_loss" if config.model.aux_loss else "none",
        # The output layer is Megatron's own, and needs a kernel of NVIDIA Apex for it.
        "gradient_accumulation_fusion": (
            uses_transformer_engine(config) and layers._grad_accum_fusion_available
        ),
    }
    if config.parallel.recompute == "selective":
        settings["recompute_modules"] = ["moe"]
    return settings


def uses_transformer_engine(config: TrainConfig) -> bool:
    """Whether this machine would make the model of Transformer Engine's layers."""
    asked = config.model.transformer_impl
    return asked == "transformer_engine" or (
        asked == "auto" and HAVE_TE and torch.cuda.is_available()
    )


def assumes_transformer_engine(config: TrainConfig) -> bool:
    """Return whether a dry run counts with Transformer Engine's layers, installed here or not.

    With `auto` it is where the recipe names a machine: those have GPUs.
    """
    asked = config.model.transformer_impl
    return asked == "transformer_engine" or (asked == "auto" and bool(config.hardware.summary))


def recipe_of(config: TrainConfig) -> str | None:
    """Return the recipe of quantization; None without one."""
    for name in ("fp8", "fp4"):
        if config.megatron.get(name):
            field = f"{name}_recipe"
            return str(config.megatron.get(field, getattr(TransformerConfig, field)))
    return None


def unquantized(config: TrainConfig) -> TrainConfig:
    """Return a run without quantization, which needs Transformer Engine; its sizes are the same."""
    of_quantization = (
        "fp8",
        "fp4",
        "first_last_layers_bf16",
        "num_layers_at_",
        "moe_router_padding",
    )
    rest = {k: v for k, v in config.megatron.items() if not k.startswith(of_quantization)}
    return dataclasses.replace(config, megatron=rest)


def transformer_class(config: TrainConfig) -> type[TransformerConfig]:
    """Return the class of Megatron's description of the model."""
    return MLATransformerConfig if _is_latent(config) else TransformerConfig


def _is_latent(config: TrainConfig) -> bool:
    return bool(config.megatron.get("multi_latent_attention"))


def transformer_config(config: TrainConfig) -> TransformerConfig:
    """Return Megatron's description of the model."""
    settings = overridable_settings(config) | transformer_settings(config) | config.megatron
    return transformer_class(config)(**settings)


def ddp_config(config: TrainConfig) -> DistributedDataParallelConfig:
    """Return the settings of Megatron's DDP."""
    parallel = config.parallel
    return DistributedDataParallelConfig(
        use_distributed_optimizer=parallel.distributed_optimizer,
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        overlap_param_gather=parallel.overlap_param_gather,
        grad_reduce_in_fp32=config.model.precision == "bf16",
        delay_wgrad_compute=any(config.megatron.get(name) for name in DELAYS),
    )


def optimizer_config(config: TrainConfig) -> OptimizerConfig:
    """Return the settings of Megatron's optimizer."""
    settings, parallel = config.optimizer, config.parallel
    return OptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        min_lr=settings.min_lr,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.beta1,
        adam_beta2=settings.beta2,
        adam_eps=settings.eps,
        clip_grad=settings.clip_grad,
        bf16=config.model.precision == "bf16",
        params_dtype=_DTYPES[config.model.precision],
        use_distributed_optimizer=parallel.distributed_optimizer,
        overlap_param_gather=parallel.overlap_param_gather,
    )


def wrap_in_ddp(
    megatron: TransformerConfig, modules: list[torch.nn.Module], ddp: DistributedDataParallelConfig
) -> list[DistributedDataParallel]:
    """Wrap a rank's model chunks in Megatron's DDP, and tell its schedules how to finish a step."""
    chunks = [
        # Only the first chunk's gradients become ready late enough to be worth reducing in parts.
        DistributedDataParallel(megatron, ddp, module, disable_bucketing=index > 0)
        for index, module in enumerate(modules)
    ]
    megatron.finalize_model_grads_func = finalize_model_grads
    if ddp.overlap_grad_reduce:
        no_sync = [chunk.no_sync for chunk in chunks]
        megatron.no_sync_func = no_sync if len(chunks) > 1 else no_sync[0]
    return chunks
