"""What a run would need, found without running it: parameters, memory, plans in flight.

One rank of each pipeline stage is built on the meta device (`meta_model.py`), so the count has all
that Megatron would allocate, and activations are what autograd keeps of a forward there. All ranks
of a stage are alike. Layers are Megatron's local ones; where Transformer Engine's are assumed,
attention keeps no scores, and gradients are fused.

Left out of memory: what a backward needs for a moment, workspaces of libraries, buffers of
communication, and what an allocator cannot use.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.utils import unwrap_model
from torch import nn

from megatron_ext.balance.planner import plan_layout
from megatron_ext.balance.strategies import get_strategy
from megatron_ext.config import BalanceConfig, ConfigError
from megatron_ext.mcore.balancer import layout_of
from megatron_ext.mcore.capacity import RankCapacity, promised_tolerance
from megatron_ext.mcore.experts import expert_weights
from megatron_ext.trainer.config import TrainConfig
from megatron_ext.trainer.model.build import build_model, moe_layers
from megatron_ext.trainer.model.meta_model import (
    Kept,
    deal_evenly,
    fake_rank,
    kernels_of_a_gpu,
    without_recompute,
)
from megatron_ext.trainer.model.settings import assumes_transformer_engine, recipe_of, unquantized
from megatron_ext.trainer.model.shape import REPLICA_BYTES
from megatron_ext.trainer.validate import expert_shards, validate

_MOMENT_BYTES = 8
"""Bytes of a parameter's two moments of Adam."""
_ROWS_OF_OP_FUSER = 256
"""Megatron rounds buffers up to so many rows where it has Transformer Engine's op fuser."""
_MAIN_BYTES = 4
"""Bytes of a parameter's float32 copy in the optimizer, where it is not float32 itself."""


@dataclass(frozen=True, kw_only=True)
class Params:
    """Numbers of parameters."""

    dense: int = 0
    """Of everything but routed experts."""
    experts: int = 0
    """Of routed experts."""
    mtp: int = 0
    """Of layers that predict further tokens; in none of the above."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One rank of a pipeline stage. Sizes in bytes."""

    pp_rank: int
    layers: list[int]
    """Numbers of its transformer layers, from 1; those of multi-token prediction are left out."""
    of_model: Counter[str]
    """Its part of the whole model, over all ranks of the stage: by the fields of `Params`."""
    params: int
    """Parameters of the rank."""
    weights: int
    gradients: int
    optimizer: int
    """State of Adam; with a distributed optimizer the mean of the ranks that share it."""
    num_slots: int
    """Replicas that the rank can hold, in all sets of slots."""
    expert_params: int
    """Weights of one expert on the rank, in numbers; 0 without layers with experts."""
    expert_bytes: int
    """The same in bytes: what a replica moves."""
    expert_grad_bytes: int
    """Gradient of a replica, as it is stored and moved."""
    activations: dict[float, int]
    """By imbalance: the most that is kept for backward on the busiest rank, if the imbalance is
    that of all layers in all microbatches."""

    @property
    def slots(self) -> int:
        """Weights of the replicas."""
        return self.num_slots * self.expert_bytes

    @property
    def slot_gradients(self) -> int:
        """Gradients of the replicas."""
        return self.num_slots * self.expert_grad_bytes

    @property
    def static(self) -> int:
        """What is there before any activation."""
        return self.weights + self.gradients + self.optimizer + self.slots + self.slot_gradients


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """What a run would need."""

    num_ranks: int
    num_microbatches: int
    """Microbatches of a step, for each rank."""
    tokens: int
    """Tokens of a microbatch that a rank routes."""
    params: Params
    """Of the whole model."""
    active: int
    """Parameters that a token meets, without layers that predict further tokens."""
    stages: list[Stage]


USUAL_FACTOR = 1.5
"""The `moe_expert_rank_capacity_factor` of most published recipes."""


@dataclass(frozen=True, kw_only=True)
class Buffers:
    """HybridEP's buffers of fixed size, with the factor that plans allow."""

    factor: float
    """The least `moe_expert_rank_capacity_factor` with which plans within the tolerance drop
    nothing."""
    rows: int
    """Rows of a layer's buffer with that factor."""
    usual_rows: int
    """The same with `USUAL_FACTOR`."""


def recommended_buffers(config: TrainConfig, *, tokens: int) -> Buffers | None:
    """Return the least buffers that drop nothing; None if the run's plans promise nothing.

    A rank routes `tokens` in a microbatch. The op fuser is taken for on, which Megatron demands
    with such buffers.
    """
    kind = get_strategy(config.balance.strategy)
    tolerance = promised_tolerance(config.balance)
    ep_size = config.parallel.ep_size
    if kind.kind is not kind.planner or tolerance is None or ep_size == 1:
        return None
    layout = plan_layout(
        config.balance.strategy,
        num_experts=config.model.num_experts,
        ep_size=ep_size,
        slots=config.balance.slots,
        nvlink_domain=None,
    )
    choices = tokens * config.model.topk
    pad = _ROWS_OF_OP_FUSER if recipe_of(config) else 1
    usual = RankCapacity(factor=USUAL_FACTOR, align=_ROWS_OF_OP_FUSER, pad=pad)
    shards = expert_shards(config)
    least = usual.least_factor(choices, layout, tolerance, num_shards=shards)
    rows = dataclasses.replace(usual, factor=least).rows(choices)
    return Buffers(factor=least, rows=rows, usual_rows=usual.rows(choices))


def dry_run(
    config: TrainConfig, *, num_ranks: int, vocab_size: int, imbalances: Sequence[float] = (1.0,)
) -> DryRun:
    """Build one rank of each pipeline stage on the meta device, and count.

    The settings of the run were checked, and the process is no rank. `vocab_size` is the
    tokenizer's, without padding; activations are counted at `imbalances`, busiest rank / mean.

    Raises:
        ConfigError: A tensor of the model would have more bytes than torch counts.
    """
    data, model, pp_size = config.data, config.model, config.parallel.pp_size
    batch = data.micro_batch_size * num_ranks // (config.parallel.tp_size * pp_size)
    with_engine = assumes_transformer_engine(config)
    # The same parameters in layers that need no GPU to be built, and no Transformer Engine.
    local = dataclasses.replace(config.model, transformer_impl="local")
    counted = dataclasses.replace(unquantized(config), model=local)
    element_bytes = REPLICA_BYTES[recipe_of(config) or config.model.precision]
    # Weight gradients are added to `main_grad` where they are computed, but not with PyTorch's
    # grouped product.
    fuses: bool = config.megatron.get("gradient_accumulation_fusion", with_engine)
    fuses = fuses and (with_engine or model.experts == "sequential")
    stages = []
    with ExitStack() as stack:
        if with_engine or config.hardware.summary:
            stack.enter_context(kernels_of_a_gpu(fused_attention=with_engine))
        for pp_rank in range(pp_size):
            rank = pp_rank * num_ranks // pp_size
            with fake_rank(counted, rank=rank, num_ranks=num_ranks):
                try:
                    stages.append(
                        _count(counted, pp_rank, vocab_size, imbalances, fuses, element_bytes)
                    )
                except RuntimeError as error:
                    if "overflow" not in str(error):
                        raise
                    said = f"the model is too large for any machine: {error}"
                    raise ConfigError([said]) from error
    params = Params(**sum((stage.of_model for stage in stages), Counter()))
    return DryRun(
        num_ranks=num_ranks,
        num_microbatches=data.global_batch_size // batch,
        tokens=data.micro_batch_size * data.sequence_length // config.parallel.tp_size,
        params=params,
        active=params.dense + params.experts * model.topk // model.num_experts,
        stages=stages,
    )


def what_fits(
    config: TrainConfig, *, num_ranks: int, vocab_size: int, imbalance: float, memory_bytes: float
) -> tuple[list[str], int] | None:
    """Look for settings with which a run that does not fit would fit into a rank's memory.

    Tried are full recompute, more EP ranks, and both. Arguments are those of `dry_run`.

    Returns:
        The overrides, and the bytes of the busiest rank with them; None if none of these fits.
    """
    now = config.parallel
    wider = [now.ep_size << power for power in (1, 2, 3)]
    tries = [("full", now.ep_size)]
    tries += [(each, size) for each in dict.fromkeys([now.recompute, "full"]) for size in wider]
    for recompute, ep_size in tries:
        parallel = dataclasses.replace(config.parallel, recompute=recompute, ep_size=ep_size)
        other = dataclasses.replace(config, parallel=parallel)
        try:
            validate(other, num_ranks=num_ranks, needs_data=False)
        except ConfigError:
            continue
        counted = dry_run(
            other, num_ranks=num_ranks, vocab_size=vocab_size, imbalances=(min(imbalance, ep_size),)
        )
        most = max(stage.static + max(stage.activations.values()) for stage in counted.stages)
        if most <= memory_bytes:
            changed = {"recompute": recompute, "ep_size": ep_size}
            return [
                f"parallel.{name}={value}"
                for name, value in changed.items()
                if value != getattr(config.parallel, name)
            ], most
    return None


def _count(
    config: TrainConfig,
    pp_rank: int,
    vocab_size: int,
    imbalances: Sequence[float],
    fuses_gradients: bool,
    element_bytes: float,
) -> Stage:
    """Build this fake rank's model, and count what it is and keeps."""
    # Replicas are no parameters, and without them nothing is planned.
    plain = dataclasses.replace(config.balance, strategy="none")
    chunks = build_model(dataclasses.replace(config, balance=plain), vocab_size)
    if config.parallel.overlap_param_gather:
        for chunk in chunks:  # There is nothing to gather.
            chunk.disable_forward_pre_hook(param_sync=False)
    layers = moe_layers(chunks)
    buffers = [
        buffer for chunk in chunks for buffer in chunk.buffers + chunk.expert_parallel_buffers
    ]
    held = {
        weight.untyped_storage()._cdata: weight.untyped_storage().nbytes()
        for weight in _parameters(chunks)
    }
    expert_params, expert_grad_bytes = _expert_sizes(layers, fuses_gradients)
    return Stage(
        pp_rank=pp_rank,
        layers=[each.layer_number for one in unwrap_model(chunks) for each in one.decoder.layers],
        of_model=_part_of_model(chunks, is_first=pp_rank == 0),
        params=sum(weight.numel() for weight in _parameters(chunks)),
        weights=sum(held.values()),
        gradients=sum(buffer.grad_data.nbytes for buffer in buffers),
        optimizer=_optimizer_bytes(config, chunks),
        num_slots=_num_slots(config.balance, [moe_layers([chunk]) for chunk in chunks]),
        expert_params=expert_params,
        expert_bytes=round(expert_params * element_bytes),
        expert_grad_bytes=expert_grad_bytes,
        activations={
            imbalance: _activation_bytes(config, chunks, pp_rank, imbalance)
            for imbalance in imbalances
        },
    )


def _parameters(chunks: list[Any]) -> Iterator[nn.Parameter]:
    return (weight for chunk in chunks for weight in chunk.parameters())


def _routed(layers: Sequence[MoELayer]) -> set[nn.Parameter]:
    return {weight for layer in layers for weight in layer.experts.parameters()}


def _part_of_model(chunks: list[Any], *, is_first: bool) -> Counter[str]:
    """Count the parameters of all ranks of a stage, each once."""
    layers = moe_layers(chunks)
    routed = _routed(layers)
    part: Counter[str] = Counter()
    for model in unwrap_model(chunks):
        for name, weight in model.named_parameters():
            if name.startswith("embedding.") and not is_first:
                continue  # A copy, for the layers that predict further tokens.
            if weight in routed:
                shards = parallel_state.get_expert_model_parallel_world_size()
                shards *= parallel_state.get_expert_tensor_parallel_world_size()
            else:
                is_shard = getattr(weight, "tensor_model_parallel", False)
                shards = parallel_state.get_tensor_model_parallel_world_size() if is_shard else 1
            kind = "experts" if weight in routed else "dense"
            part["mtp" if name.startswith("mtp.") else kind] += weight.numel() * shards
    return part


def _optimizer_bytes(config: TrainConfig, chunks: list[Any]) -> int:
    """Count the optimizer's state; the mean of the ranks that share it."""
    routed = _routed(moe_layers(chunks))
    is_spread = config.parallel.distributed_optimizer
    total = 0.0
    for weight in _parameters(chunks):
        main_bytes = 0 if weight.dtype == torch.float32 else _MAIN_BYTES
        group = (
            parallel_state.get_expert_data_parallel_group()
            if weight in routed
            else parallel_state.get_data_parallel_group(with_context_parallel=True)
        )
        ranks = group.size() if is_spread else 1
        total += weight.numel() * (main_bytes + _MOMENT_BYTES) / ranks
    return round(total)


def _expert_sizes(layers: Sequence[MoELayer], fuses_gradients: bool) -> tuple[int, int]:
    """Numbers of one expert's weights, and bytes of its gradient in a slot."""
    if not layers:
        return 0, 0
    mains = expert_weights(layers[0].experts).mains()
    numel = sum(of_segment[0].numel() for of_segment in mains.rows())
    weight: Any = next(layers[0].experts.parameters())
    grad_dtype = weight.main_grad.dtype if fuses_gradients else weight.dtype
    return numel, numel * grad_dtype.itemsize


def _num_slots(balance: BalanceConfig, layers: Sequence[Sequence[MoELayer]]) -> int:
    """Slots of the rank, in all sets, by the layers with experts of its chunks."""
    strategy = get_strategy(balance.strategy)
    some = next((layer for of_chunk in layers for layer in of_chunk), None)
    if some is None or strategy.kind is not strategy.planner:
        return 0
    slots = layout_of(some.config, balance, some.ep_group.size()).slots
    # What a layer sends ahead goes into the set that the layer before does not use.
    sends_ahead = strategy.predicts and max(map(len, layers)) > 1
    return slots * (2 if sends_ahead else 1)


def _activation_bytes(
    config: TrainConfig, chunks: list[Any], pp_rank: int, imbalance: float
) -> int:
    """Count what is kept at the peak of the pipeline's schedule."""
    tokens = config.data.micro_batch_size * config.data.sequence_length
    tokens = tokens * parallel_state.get_expert_tensor_parallel_world_size()
    mean = tokens // config.parallel.tp_size * config.model.topk
    for layer in moe_layers(chunks):
        deal_evenly(layer, round(mean * imbalance))
    of_chunks, again = [], 0
    for chunk in chunks:
        kept = _forward(config, unwrap_model(chunk))
        of_chunks.append(kept.num_bytes)
        if config.parallel.recompute != "none":
            with without_recompute():
                whole = _forward(config, unwrap_model(chunk))
            again = max(
                again,
                *(more - less for more, less in zip(whole.by_layer, kept.by_layer, strict=True)),
            )
    parallel = config.parallel
    steps = held_by_chunks(
        pp_size=parallel.pp_size,
        pp_rank=pp_rank,
        num_chunks=parallel.vpp_size,
        group_size=chunks[0].config.microbatch_group_size_per_vp_stage,
    )
    batch = config.data.micro_batch_size * parallel_state.get_data_parallel_world_size()
    most = config.data.global_batch_size // batch
    return again + max(
        sum(min(count, most) * size for count, size in zip(held, of_chunks, strict=True))
        for held in steps
    )


def _forward(config: TrainConfig, model: Any) -> Kept:
    data, parallel = config.data, config.parallel
    tokens = torch.zeros(data.micro_batch_size, data.sequence_length, dtype=torch.int64)
    model.set_input_tensor(
        torch.empty(
            data.sequence_length // parallel.tp_size,
            data.micro_batch_size,
            config.model.hidden_size,
            dtype=model.config.params_dtype,
            requires_grad=True,
        )
    )
    with Kept(model) as kept:
        model(tokens, tokens, None, labels=tokens)
    return kept


def held_by_chunks(
    *, pp_size: int, pp_rank: int, num_chunks: int = 1, group_size: int | None = None
) -> Iterator[tuple[int, ...]]:
    """Walk the schedule of a pipeline stage, as Megatron does, and count microbatches in flight.

    Warm-up forwards come first, then one forward and one backward in turn. Of several chunks (VPP),
    each takes a group of microbatches in a row; `pp_size` of them by default. Holds for any number
    of microbatches.

    Yields:
        After each forward, the microbatches that each chunk holds for backward.

    >>> list(held_by_chunks(pp_size=2, pp_rank=0))
    [(1,), (2,), (2,), (2,), (2,)]
    """
    group = group_size or pp_size
    num_warmup = pp_size - pp_rank - 1
    if num_chunks > 1:
        num_warmup = num_warmup * 2 + (num_chunks - 1) * group
    # Long enough to pass warm-up and to see every phase of the steady state twice.
    num_forwards = num_warmup + 2 * group * num_chunks
    held = [0] * num_chunks
    for step in range(num_forwards):
        held[step // group % num_chunks] += 1
        yield tuple(held)
        if step >= num_warmup:
            held[num_chunks - 1 - (step - num_warmup) // group % num_chunks] -= 1
