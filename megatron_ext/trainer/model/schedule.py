"""How many microbatches a pipeline schedule holds between forward and backward."""

from __future__ import annotations

from collections.abc import Iterator


def held_by_chunks(
    *, pp_size: int, pp_rank: int, num_chunks: int = 1, group_size: int | None = None
) -> Iterator[tuple[int, ...]]:
    """Walk the schedule of a pipeline stage, as Megatron does.

    Warm-up forwards come first, then one forward and one backward in turn, the chunks taken in
    groups of microbatches (interleaved schedule). Holds for any number of microbatches.

    Args:
        pp_size: Pipeline stages.
        pp_rank: This stage.
        num_chunks: Model chunks on this stage (VPP size).
        group_size: Microbatches that a chunk takes in a row; the interleaved schedule's default is
            `pp_size`.

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
