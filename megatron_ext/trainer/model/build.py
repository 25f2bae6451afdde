"""From the sections of a run's config to Megatron's objects.

The functions that a training loop needs, in the order of use: `start_parallelism`, `build_model`,
`build_optimizer`, `build_scheduler`; and `dataset`, which opens the text. `settings.py` makes
Megatron's settings.
"""

from __future__ import annotations

import dataclasses
import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import optimizer as megatron_optimizer
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.moe_layer import MoELayer

from megatron_ext.data.manifest import Manifest
from megatron_ext.data.mixing import MixedDataset, microbatches
from megatron_ext.data.tokenizer import padded_vocab_size
from megatron_ext.mcore.grouped_experts import grouped_mm_spec
from megatron_ext.mcore.spec import balance_spec, name_stages
from megatron_ext.methods.run_hook import Reader, run_hooks
from megatron_ext.trainer.config import TrainConfig
from megatron_ext.trainer.data import data_weights
from megatron_ext.trainer.model.local_layers import latent_attention_spec, sequence_parallel_spec
from megatron_ext.trainer.model.settings import (
    assumes_transformer_engine,
    ddp_config,
    optimizer_config,
    transformer_config,
    uses_transformer_engine,
    wrap_in_ddp,
)

logger = logging.getLogger(__name__)


def dataset(config: TrainConfig, manifest: Manifest, split: str) -> MixedDataset:
    """Open the split `train` or `validation` of the run's text."""
    data = config.data
    return MixedDataset(
        manifest,
        split=split,
        sequence_length=data.sequence_length,
        micro_batch_size=data.micro_batch_size,
        seed=config.seed,
        weights=data_weights(data, manifest),
        mix_by=data.mix_by,
        validation_fraction=data.validation_fraction,
    )


def reader(config: TrainConfig) -> Reader:
    """Return the reader of the training data: a method's if the settings name one."""
    for _, path, hook in run_hooks(config.data):
        if hook.reader:
            return hook.reader(path, config.data.global_batch_size)
    return microbatches


def start_parallelism(config: TrainConfig, *, with_gloo: bool = True) -> None:
    """Make Megatron's process groups, unless they exist, and seed every random generator.

    Several models of equal parallel sizes may live in one process. Checkpoints need gloo groups.
    """
    parallel = config.parallel
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tp_size,
            pipeline_model_parallel_size=parallel.pp_size,
            virtual_pipeline_model_parallel_size=(
                parallel.vpp_size if parallel.vpp_size > 1 else None
            ),
            expert_model_parallel_size=parallel.ep_size,
            expert_tensor_parallel_size=transformer_config(config).expert_tensor_parallel_size,
            distributed_timeout_minutes=config.group_timeout.total_seconds() / 60,
            create_gloo_process_groups=with_gloo,
        )
    # As in Megatron: another seed for every pipeline stage, the same for data-parallel replicas.
    seed = config.seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(seed)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def build_model(config: TrainConfig, vocab_size: int) -> list[DistributedDataParallel]:
    """Build this rank's model chunks, balanced by the config, inside Megatron's DDP.

    `vocab_size` is the tokenizer's, without padding; `model.vocab_size` goes before it.
    """
    megatron = transformer_config(config)
    parallel = config.parallel
    padded = padded_vocab_size(
        config.model.vocab_size or vocab_size, tensor_parallel=parallel.tp_size
    )
    attach = [hook.attach(path) for _, path, hook in run_hooks(config.data) if hook.attach]
    balance = config.balance
    if balance.wait_limit_s is None:
        balance = dataclasses.replace(balance, timeout_s=config.timeout_s)
    if balance.log_every == "auto":
        balance = dataclasses.replace(balance, log_every=0)
    with_engine = uses_transformer_engine(config)
    auto = config.model.transformer_impl == "auto"
    if auto and torch.cuda.is_available() and dist.get_rank() == 0:
        _say_whose_layers(with_engine, assumed=assumes_transformer_engine(config))
    modules = []
    for chunk in range(parallel.vpp_size):
        vp_stage = chunk if parallel.vpp_size > 1 else None
        spec = get_gpt_decoder_block_spec(
            megatron,
            use_transformer_engine=with_engine,
            normalization=megatron.normalization,
            vp_stage=vp_stage,
        )
        if config.model.experts == "grouped_mm" and not with_engine:
            spec = grouped_mm_spec(spec)
        if megatron.multi_latent_attention and not with_engine:
            spec = latent_attention_spec(spec)
        spec = balance_spec(spec, balance)
        if config.profile.steps > 0:
            spec = name_stages(spec)
        mtp_spec = (
            get_gpt_mtp_block_spec(megatron, spec, with_engine, vp_stage=vp_stage)
            if megatron.mtp_num_layers
            else None
        )
        if parallel.tp_size > 1 and not with_engine:
            spec, mtp_spec = map(sequence_parallel_spec, (spec, mtp_spec))
        stage: dict[str, Any] = {"ignore_virtual": False, "vp_stage": vp_stage}
        module = GPTModel(
            megatron,
            spec,
            vocab_size=padded,
            max_sequence_length=config.data.sequence_length,
            pre_process=parallel_state.is_pipeline_first_stage(**stage),
            post_process=parallel_state.is_pipeline_last_stage(**stage),
            position_embedding_type="rope",
            rotary_base=config.model.rotary_base,
            rotary_percent=config.model.rotary_percent,
            share_embeddings_and_output_weights=False,
            mtp_block_spec=mtp_spec,
            vp_stage=vp_stage,
        ).cuda()
        for each in attach:
            each(module)
        modules.append(Float16Module(megatron, module) if megatron.bf16 else module)
    return wrap_in_ddp(megatron, modules, ddp_config(config))


@cache
def _say_whose_layers(with_engine: bool, *, assumed: bool) -> None:
    """Log, once in a process, what `model.transformer_impl=auto` stands for on this GPU."""
    if with_engine:
        logger.info("model.transformer_impl=auto: layers of Transformer Engine")
        return
    local = "Megatron's local layers; Transformer Engine is not installed"
    if assumed:
        local += ", without which the recipe's batches may not fit"
    level = logging.WARNING if assumed else logging.INFO
    logger.log(level, "model.transformer_impl=auto: %s", local)


def build_optimizer(config: TrainConfig, chunks: list[DistributedDataParallel]) -> Any:
    """Build Megatron's optimizer of these chunks, and let their schedule scale the loss for it."""
    optimizer = megatron_optimizer.get_megatron_optimizer(optimizer_config(config), chunks)
    chunks[0].config.grad_scale_func = optimizer.scale_loss
    return optimizer


def build_scheduler(
    config: TrainConfig, optimizer: Any, start_step: int
) -> OptimizerParamScheduler:
    """Return Megatron's schedule of learning rate and weight decay, after `start_step` steps."""
    settings = config.optimizer
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=min(settings.warmup_steps, config.steps - 1),
        lr_decay_steps=config.steps,
        lr_decay_style=settings.decay,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=config.steps,
        wd_incr_style="constant",
    )
    scheduler.step(increment=start_step)
    return scheduler


def moe_layers(chunks: list[DistributedDataParallel]) -> list[MoELayer]:
    """Return this rank's MoE layers: balanced, even and Megatron's own."""
    return [layer for chunk in chunks for layer in chunk.modules() if isinstance(layer, MoELayer)]


@contextmanager
def whole_parameters(config: TrainConfig, chunks: list[DistributedDataParallel]) -> Iterator[None]:
    """Finish gathering the updated weights, which otherwise the next forward would finish."""
    if not config.parallel.overlap_param_gather:
        yield
        return
    for chunk in chunks:
        chunk.disable_forward_pre_hook()
    yield
    for chunk in chunks:
        chunk.enable_forward_pre_hook()
