"""A tiny Megatron GPT with MoE layers on CPU ranks, with equal weights and data whatever the
parallel layout.

Parameters are named globally (`decoder.layers.3.mlp.experts.5.linear_fc1.weight`: global layer,
counted from 0, and logical expert) and start from a random stream of that name, so runs that differ
in expert or pipeline parallelism, or in the spec of their MoE layers, start from the same model.

Import it before anything of Megatron: it enables the CPU platform, and Transformer Engine where it
is on the path.
"""

from __future__ import annotations

import gc
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_ext.cpu_platform import enable_cpu_platform
from tests.ranks import after_call
from tests.te_on_cpu import enable_te_on_cpu

enable_te_on_cpu()
enable_cpu_platform()

from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.distributed import DistributedDataParallel  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import (  # noqa: E402
    get_gpt_decoder_block_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.optimizer import get_megatron_optimizer  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from megatron.core.transformer.moe import moe_utils  # noqa: E402
from megatron.core.transformer.multi_token_prediction import (  # noqa: E402
    MTPLossLoggingHelper,
)

from megatron_ext.mcore import process_hooks  # noqa: E402
from megatron_ext.mcore.grouped_experts import grouped_mm_spec  # noqa: E402
from megatron_ext.trainer.config import ModelConfig, OptimizerConfig, ParallelConfig, TrainConfig  # noqa: E402
from megatron_ext.trainer.model.local_layers import sequence_parallel_spec  # noqa: E402
from megatron_ext.trainer.model.settings import (  # noqa: E402
    ddp_config,
    optimizer_config,
    overridable_settings,
    transformer_settings,
    wrap_in_ddp,
)

VOCAB = 32
SEQUENCE = 16


@dataclass
class TinyGPT:
    """A model on its ranks: DDP chunks, their optimizer (float64, float16: None), how to step."""

    chunks: list[DistributedDataParallel]
    optimizer: Any
    config: TransformerConfig
    dtype: torch.dtype
    micro_batch_size: int
    seed: int

    def tokens(self, step: int, microbatch: int) -> torch.Tensor:
        """Tokens [B, SEQUENCE + 1] of this data-parallel rank: a function of seed, step, microbatch
        and rank only."""
        dp_rank = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        generator = _stream(f"tokens {step} {microbatch} {dp_rank}", self.seed)
        return torch.randint(VOCAB, (self.micro_batch_size, SEQUENCE + 1), generator=generator)

    def forward_backward(
        self, step: int = 0, *, num_microbatches: int = 1, forward_only: bool = False
    ) -> list[dict[str, torch.Tensor]]:
        """Run Megatron's pipeline schedule once and reduce the gradients.

        Returns:
            On the last stage, for every microbatch, its `loss` (mean over tokens) and `logits` [B,
            SEQUENCE, VOCAB].
        """
        for chunk in self.chunks:
            chunk.train(not forward_only)
            if not forward_only:
                chunk.zero_grad_buffer()
        if self.optimizer is not None and not forward_only:
            self.optimizer.zero_grad()
        return get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=[self._batches(step, num_microbatches) for _ in self.chunks],
            model=self.chunks,
            num_microbatches=num_microbatches,
            seq_length=SEQUENCE,
            micro_batch_size=self.micro_batch_size,
            forward_only=forward_only,
        )

    def train_step(self, step: int, *, num_microbatches: int = 1) -> float:
        """One optimizer step. Returns the mean loss of this rank's microbatches (nan but on the
        last stage)."""
        loss = self.mean_loss(step, num_microbatches=num_microbatches)
        self.update()
        return loss

    def mean_loss(self, step: int, *, num_microbatches: int) -> float:
        """The same without the optimizer."""
        reports = self.forward_backward(step, num_microbatches=num_microbatches)
        losses = [float(report["loss"]) for report in reports]
        return sum(losses) / len(losses) if losses else float("nan")

    def update(self) -> None:
        """Let the optimizer step, by the gradients that are there."""
        succeeded, _, _ = self.optimizer.step()
        assert succeeded

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """This rank's parameters under their global names."""
        for chunk in self.chunks:
            yield from _global_names(chunk.module)

    def gradients(self) -> dict[str, torch.Tensor]:
        """Reduced gradients by global name, of parameters that DDP has not found frozen. Of whole
        ones only without the distributed optimizer, which leaves on each data-parallel rank the
        reduced shard of its own."""
        named = self.named_parameters()
        return {n: p.main_grad.detach().clone() for n, p in named if hasattr(p, "main_grad")}

    def parameters(self) -> dict[str, torch.Tensor]:
        """Values by global name."""
        return {name: p.detach().clone() for name, p in self.named_parameters()}

    def _batches(self, step: int, num_microbatches: int) -> Iterator[torch.Tensor]:
        return (self.tokens(step, microbatch) for microbatch in range(num_microbatches))


def build_gpt(
    *,
    ep: int = 1,
    tp: int = 1,
    etp: int = 1,
    pp: int = 1,
    vpp: int = 1,
    num_layers: int = 2,
    hidden: int = 16,
    ffn: int = 32,
    experts: int = 4,
    topk: int = 2,
    shared_ffn: int | None = None,
    dispatcher: str = "alltoall",
    recompute: str = "none",
    distributed_optimizer: bool = False,
    overlap_grad_reduce: bool = False,
    overlap_param_gather: bool = False,
    ddp: dict[str, Any] | None = None,
    optimizer: str = "adam",
    optimizer_settings: dict[str, Any] | None = None,
    lr: float = 0.02,
    dtype: torch.dtype = torch.float32,
    micro_batch_size: int = 2,
    seed: int = 0,
    transformer_engine: bool = False,
    grouped_mm: bool = False,
    frozen: str = "$^",
    spec_transform: Callable[[Any], Any] | None = None,
    **megatron: Any,
) -> TinyGPT:
    """Build the model on the ranks of the running process group; data parallelism takes what pp
    leaves.

    Args:
        tp: Tensor parallelism of the dense layers, with sequence parallelism. Each shard starts
            from a stream of its own: compare only with models of equal `tp` and `etp`.
        etp: Tensor parallelism of the experts.
        shared_ffn: Width of shared experts; None has none.
        recompute: `none`, `selective` (the MoE layer) or `full`.
        ddp: Fields of Megatron's DistributedDataParallelConfig that differ from the run's.
        optimizer: `sgd` or `adam`; Megatron's distributed optimizer takes only `adam`.
        optimizer_settings: Fields of Megatron's OptimizerConfig that differ from the run's.
        dtype: float64 gives a model without optimizer: Megatron's take none. So does float16.
        transformer_engine: Whether the layers are Transformer Engine's (`tests/te`).
        grouped_mm: Whether the experts are `GroupedExperts`.
        frozen: Regular expression; parameters in whose global name it is found are frozen.
        spec_transform: Applied to the block spec of every chunk, e.g. `partial(balance_spec,
            config=...)`.
        megatron: Further fields of Megatron's TransformerConfig.
    """
    _start_parallelism(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        context_parallel_size=megatron.get("context_parallel_size", 1),
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    run = TrainConfig(
        model=ModelConfig(
            num_layers=num_layers,
            hidden_size=hidden,
            num_attention_heads=2,
            num_experts=experts,
            topk=topk,
            expert_hidden_size=ffn,
            shared_expert_hidden_size=shared_ffn or 0,
            precision="bf16" if dtype == torch.bfloat16 else "fp32",
        ),
        parallel=ParallelConfig(
            ep_size=ep,
            tp_size=tp,
            pp_size=pp,
            vpp_size=vpp,
            dispatcher=dispatcher,
            recompute=recompute,
            distributed_optimizer=distributed_optimizer,
            overlap_grad_reduce=overlap_grad_reduce,
            overlap_param_gather=overlap_param_gather,
        ),
        # A large eps, so that Adam does not turn the rounding of a tiny gradient into a step of
        # size lr.
        optimizer=OptimizerConfig(lr=lr, weight_decay=0.0, beta2=0.999, eps=1e-2),
    )
    differences: dict[str, Any] = dict(
        moe_router_pre_softmax=topk
        == 1,  # Megatron demands it: a softmax over one choice is constant.
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        expert_tensor_parallel_size=etp,
    )
    if dtype == torch.float64:  # which no run of the package has
        differences |= dict(params_dtype=dtype, pipeline_dtype=dtype, moe_router_dtype="fp64")
    if dtype == torch.float16:  # nor this
        differences |= dict(params_dtype=dtype, pipeline_dtype=dtype, fp16=True)
    settings = overridable_settings(run) | transformer_settings(run)
    settings |= differences | megatron
    # Megatron allows these in 16 bits only, where it was tried; wider dtypes compare better.
    in_16_bits = (
        {} if dtype.itemsize == 2 else {n: settings.pop(n) for n in _IN_16_BITS & {*settings}}
    )
    config = TransformerConfig(**settings)
    for name, value in in_16_bits.items():
        setattr(config, name, value)
    transforms = [grouped_mm_spec] * grouped_mm + [spec_transform] * (spec_transform is not None)
    modules = [
        _build_chunk(config, chunk, vpp, transformer_engine, transforms) for chunk in range(vpp)
    ]
    for module in modules:
        module.to(dtype)  # Norms ignore params_dtype.
        _initialize(module, seed)
        for name, parameter in _global_names(module):
            if re.search(frozen, name):
                parameter.requires_grad_(False)
    # Buckets far smaller than Megatron's, so that even this model has several.
    ddp = {
        "bucket_size": 4 * hidden * ffn,
        "delay_wgrad_compute": config.delay_wgrad_compute
        or getattr(config, "overlap_dispatch_backward_with_experts_wgrad", False),
    } | (ddp or {})
    chunks = wrap_in_ddp(config, modules, replace(ddp_config(run), **ddp))
    built = None
    if dtype not in (torch.float64, torch.float16):
        settings = dict(optimizer=optimizer) | (optimizer_settings or {})
        built = get_megatron_optimizer(replace(optimizer_config(run), **settings), chunks)
    return TinyGPT(chunks, built, config, dtype, micro_batch_size, seed)


_IN_16_BITS = {
    *("overlap_moe_expert_parallel_comm", "delay_wgrad_compute"),
    "ep_overlap_early_attn_memory_release",
}
"""Fields of Megatron's combined schedule."""


def _drop_models() -> None:
    """Free the models that a call has built, here or by the training program, and their groups."""
    built = [each for each in gc.get_objects() if type(each) is DistributedDataParallel]
    for chunk in built:
        # Its hooks refer to it from inside autograd, where the garbage collector does not see.
        chunk.grad_accs.clear()
        # So do the optimizer's shards of parameters, and the config refers to the optimizer.
        chunk.config.grad_scale_func = None
        for module in chunk.modules():
            # Megatron's dispatchers keep the last microbatch's graph.
            if hasattr(module, "token_dispatcher"):
                module.token_dispatcher = None
    _forget_aux_losses()
    parallel_state.destroy_model_parallel()


def _forget_aux_losses() -> None:
    """Empty Megatron's table of auxiliary losses, which is as long as the first model."""
    try:
        from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
    except ModuleNotFoundError:  # megatron-core 0.16
        moe_utils.get_moe_layer_wise_logging_tracker().clear()
    else:
        destroy_moe_metrics_tracker()


after_call.append(_drop_models)
after_call.append(process_hooks.uninstall)

_parallelism: tuple[Any, dict[str, Any]] | None = None
"""The world group and the sizes for which Megatron's process groups stand."""


def _start_parallelism(**sizes: Any) -> None:
    """Make Megatron's process groups, unless they stand already: each costs several threads."""
    global _parallelism
    if _parallelism == (dist.group.WORLD, sizes):
        return
    parallel_state.destroy_model_parallel()
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    parallel_state.initialize_model_parallel(**sizes)
    _parallelism = (dist.group.WORLD, sizes)


def _build_chunk(
    config: TransformerConfig,
    chunk: int,
    vpp: int,
    transformer_engine: bool,
    spec_transforms: Sequence[Callable[[Any], Any]],
) -> GPTModel:
    vp_stage = chunk if vpp > 1 else None
    spec = get_gpt_decoder_block_spec(config, transformer_engine, vp_stage=vp_stage)
    if config.sequence_parallel and not transformer_engine:
        spec = sequence_parallel_spec(spec)
    for transform in spec_transforms:
        spec = transform(spec)
    model = GPTModel(
        config,
        spec,
        vocab_size=VOCAB,
        max_sequence_length=SEQUENCE,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        parallel_output=False,
        mtp_block_spec=config.mtp_num_layers
        and get_gpt_mtp_block_spec(config, spec, transformer_engine, vp_stage=vp_stage),
        vp_stage=vp_stage,
    )
    MTPLossLoggingHelper.tracker.clear()  # It has the size of the model before.
    model.compute_language_model_loss = _token_losses
    return model


def _stream(name: str, seed: int) -> torch.Generator:
    # A generator takes 32 bits of its seed.
    return torch.Generator().manual_seed(zlib.crc32(name.encode(), seed))


def _global_names(module: GPTModel) -> Iterator[tuple[str, torch.nn.Parameter]]:
    local_experts = (
        module.config.num_moe_experts // parallel_state.get_expert_model_parallel_world_size()
    )
    first_expert = local_experts * parallel_state.get_expert_model_parallel_rank()

    def layer_name(match: re.Match[str]) -> str:
        return f"layers.{module.decoder.layers[int(match[1])].layer_number - 1}."

    def expert_name(match: re.Match[str]) -> str:
        return f"experts.{first_expert + int(match[1])}."

    def grouped_name(match: re.Match[str]) -> str:
        return f"experts.{first_expert + int(match[2])}.{match[1]}"

    for name, parameter in chain(*(_experts_of(*named) for named in module.named_parameters())):
        name = re.sub(r"(?<=decoder\.)layers\.(\d+)\.", layer_name, name)
        name = re.sub(r"experts\.local_experts\.(\d+)\.", expert_name, name)
        yield re.sub(r"experts\.(linear_fc[12]\.\w+?)(\d+)$", grouped_name, name), parameter


def _experts_of(name: str, parameter: Any) -> Iterator[tuple[str, Any]]:
    """The parameter, or the experts of Transformer Engine's single weight as parameters of each."""
    values = getattr(parameter, "rowwise_data", None)
    if values is None:
        yield name, parameter
        return
    for m, row in enumerate(values.view(parameter.shape)):
        if hasattr(parameter, "main_grad"):
            row.main_grad = parameter.main_grad[m]
        yield f"{name}{m}", row


def _initialize(module: GPTModel, seed: int) -> None:
    with torch.no_grad():
        for name, parameter in _global_names(module):
            if parameter.dim() >= 2:
                stream = _stream(name + _shard_name(name, parameter), seed)
                values = torch.randn(parameter.shape, generator=stream, dtype=torch.float64)
                parameter.copy_(values / parameter.shape[-1] ** 0.5)


def _shard_name(name: str, parameter: torch.nn.Parameter) -> str:
    """Tells the shards of a parameter apart; empty for the first, so also for what is whole."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return ""
    is_expert = ".experts." in name
    rank = (
        parallel_state.get_expert_tensor_parallel_rank()
        if is_expert
        else parallel_state.get_tensor_model_parallel_rank()
    )
    return f" shard {rank}" if rank else ""


def _forward_step(
    batches: Iterator[torch.Tensor], model: Any, return_schedule_plan: bool = False
) -> tuple[Any, Any]:
    tokens = next(batches)
    positions = torch.arange(SEQUENCE).expand(len(tokens), -1)
    run = model.build_schedule_plan if return_schedule_plan else model
    if model.config.mtp_num_layers:
        # Only with labels does Megatron add the loss of the tokens after the next.
        return run(tokens[:, :-1], positions, None, labels=tokens[:, 1:]), _mean_loss
    return run(tokens[:, :-1], positions, None), partial(_loss, tokens[:, 1:])


def _loss(
    targets: torch.Tensor, logits: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    # Megatron's own cross entropy rounds to float32, which would hide a float64 comparison.
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    # A copy: Megatron's schedule divides the loss by the number of microbatches in place.
    return loss, {"loss": loss.detach().clone(), "logits": logits.detach()}


def _token_losses(labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Losses [B, SEQUENCE], in the dtype of the logits [SEQUENCE, B, VOCAB]."""
    return F.cross_entropy(logits.permute(1, 2, 0), labels, reduction="none")


def _mean_loss(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = losses.mean()
    return loss, {"loss": loss.detach().clone()}
