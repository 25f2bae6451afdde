"""How a training run follows a file of semantics: by samples, or by tokens."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from megatron.core import parallel_state

from megatron_ext.config import BalanceConfig
from megatron_ext.methods.run_hook import Reader, RunHook
from megatron_ext.methods.sem_moe.attach import rebatch_tokens, validate_for_rebatching
from megatron_ext.methods.sem_moe.samples import scheduled_microbatches
from megatron_ext.methods.sem_moe.semantics import Semantics, read_semantics


def _problems_with_samples(
    path: Path, megatron: Any, balance: BalanceConfig, vocab_size: int | None
) -> list[str]:
    tp_size = megatron.tensor_model_parallel_size
    if tp_size > 1:
        return [f"must be empty with tensor_model_parallel_size ({tp_size}) > 1"]
    found = _read(path, megatron, vocab_size)
    return [] if isinstance(found, Semantics) else [found]


def _problems_with_tokens(
    path: Path, megatron: Any, balance: BalanceConfig, vocab_size: int | None
) -> list[str]:
    if problems := validate_for_rebatching(megatron, balance):
        return problems
    found = _read(path, megatron, vocab_size)
    if not isinstance(found, Semantics):
        return [found]
    experts, layers = found.expert.shape[1], found.layers
    # Not every layer has experts if Megatron was told so.
    uniform = getattr(megatron, "moe_layer_freq", 1) == 1
    wanted = tuple(range(1, megatron.num_layers + 1)) if uniform else layers
    if (experts, layers) != (megatron.num_moe_experts, wanted):
        return [
            f"is for {experts} experts in layers {layers}, the model has "
            f"{megatron.num_moe_experts} in layers {wanted}"
        ]
    return []


def _read(path: Path, megatron: Any, vocab_size: int | None) -> Semantics | str:
    """Read the file of semantics; return what is wrong with it for this model and dataset."""
    try:
        semantics = read_semantics(path)
    except (FileNotFoundError, ValueError) as error:
        return str(error)
    known, ranks = semantics.affinity.shape
    ep_size = megatron.expert_model_parallel_size
    if ranks != ep_size:
        return f"is for {ranks} ranks, expert_model_parallel_size is {ep_size}"
    if vocab_size is not None and known < vocab_size:
        return f"knows {known} tokens, the dataset has {vocab_size}"
    return semantics


def _read_by_affinity(path: Path, global_batch_size: int) -> Reader:
    affinity = read_semantics(path).affinity
    dp_rank = parallel_state.get_data_parallel_rank()
    ep_rank = parallel_state.get_expert_model_parallel_rank()
    assert ep_rank == dp_rank % affinity.shape[1], (ep_rank, dp_rank, affinity.shape)
    return partial(scheduled_microbatches, affinity=affinity, global_batch_size=global_batch_size)


SAMPLES = RunHook(problems=_problems_with_samples, reader=_read_by_affinity)
"""Samples go to the ranks that have the experts which the samples' tokens choose."""

TOKENS = RunHook(
    problems=_problems_with_tokens,
    attach=lambda path: partial(rebatch_tokens, semantics=read_semantics(path)),
)
"""In MoE layers, tokens go to the ranks that probably have the tokens' experts."""
