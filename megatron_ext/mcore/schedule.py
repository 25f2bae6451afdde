"""How many microbatches of one layer a pipeline schedule holds between forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_ext.config import BalanceConfig


def most_in_flight(
    *, pp_size: int, pp_rank: int, num_chunks: int = 1, group_size: int | None = None
) -> int:
    """Return the most plans of one layer in flight on a pipeline stage.

    Holds for any number of microbatches. Walks Megatron's schedules: warm-up forwards, then one
    forward and one backward in turn, the chunks taken in groups of microbatches (interleaved
    schedule). The number is the largest over the stage's chunks.

    Args:
        pp_size: Pipeline stages.
        pp_rank: This stage.
        num_chunks: Model chunks on this stage (VPP size).
        group_size: Microbatches that a chunk takes in a row; the interleaved schedule's default is
            `pp_size`.

    >>> [most_in_flight(pp_size=4, pp_rank=rank) for rank in range(4)]
    [4, 3, 2, 1]
    >>> [most_in_flight(pp_size=2, pp_rank=rank, num_chunks=2) for rank in range(2)]
    [4, 3]
    """
    steps = held_by_chunks(
        pp_size=pp_size, pp_rank=pp_rank, num_chunks=num_chunks, group_size=group_size
    )
    return max(max(held) for held in steps)


def held_by_chunks(
    *, pp_size: int, pp_rank: int, num_chunks: int = 1, group_size: int | None = None
) -> Iterator[tuple[int, ...]]:
    """Walk the schedule of a pipeline stage; arguments as for `most_in_flight`.

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


def ring_size(balance: BalanceConfig, config: Any, *, pp_rank: int, is_for_mtp: bool) -> int:
    """Return how many plans a layer keeps from forward to backward.

    Args:
        balance: May say it.
        config: Megatron's TransformerConfig.
        pp_rank: The layer's pipeline stage.
        is_for_mtp: Whether it is a layer of multi-token prediction.
    """
    if balance.max_in_flight != "auto":
        return int(balance.max_in_flight)
    num_microbatches = most_in_flight(
        pp_size=config.pipeline_model_parallel_size,
        pp_rank=pp_rank,
        num_chunks=config.virtual_pipeline_model_parallel_size or 1,
        group_size=config.microbatch_group_size_per_vp_stage,
    )
    # Such a layer takes a microbatch once for every token to predict. In hybrid models Megatron
    # does not tell a layer that it is one.
    is_repeated = getattr(config, "mtp_use_repeated_layer", False) and (
        is_for_mtp or config.is_hybrid_model
    )
    num_tokens = (config.mtp_num_layers or 1) if is_repeated else 1
    # Every part of the sequence is a forward of its own, and all come before the first backward.
    num_parts = getattr(config, "mlp_chunks_for_training", 1)
    return num_microbatches * num_tokens * num_parts
