"""How many microbatches of one layer a pipeline schedule holds between forward and backward."""

from __future__ import annotations


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
    if num_chunks == 1:
        return pp_size - pp_rank
    group = group_size or pp_size
    num_warmup = (pp_size - pp_rank - 1) * 2 + (num_chunks - 1) * group
    # Long enough to pass warm-up and to see every phase of the steady state twice.
    num_forwards = num_warmup + 2 * group * num_chunks
    in_flight = [0] * num_chunks
    most = 0
    for step in range(num_forwards):
        in_flight[step // group % num_chunks] += 1
        most = max(most, *in_flight)
        if step >= num_warmup:
            in_flight[num_chunks - 1 - (step - num_warmup) // group % num_chunks] -= 1
    return most
