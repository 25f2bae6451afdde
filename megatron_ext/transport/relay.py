"""Turns transfers into each rank's copies, with relays for ranks that send to many ranks.

A rank that sends to many ranks would finish long after all others. If a rank has more sends than a
threshold, the rank sends each of its experts to a few relays only. A relay passes the expert on
from its own slot, chunk by chunk as the chunks arrive. The threshold counts all sends of a rank
together, not those of one expert.

If a rank has n sends, and f of them send one expert, that expert gets ceil(f / sqrt(n)) relays: the
rank then sends about sqrt(n) times instead of n times, and so does each relay.

On GPUs a kernel makes the same choices (`csrc/cuda/compile_copies.cuh`); this is its specification.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from megatron_ext.transport.transport import Transfer


@dataclass(frozen=True)
class Copy:
    """A copy from one source, read once, to all its destinations.

    The source is a main of the rank that makes the copy or, for a relay, its own slot
    `relay_slot_idx`, which the home rank writes. `destinations` are (rank, slot).
    """

    home_rank: int
    main_idx: int
    relay_slot_idx: int | None
    destinations: tuple[tuple[int, int], ...]


def compile_copies(
    transfers: Iterable[Transfer], num_ranks: int, relay_threshold: int
) -> list[list[Copy]]:
    """Return every rank's copies, those from mains first; the same on all ranks.

    The transfers are every replica of the group, in an order that is the same on all ranks. The
    threshold is the most sends of a rank, all its experts together, without relays.

    >>> everywhere = [Transfer(0, 0, rank, slot_idx=0) for rank in range(1, 8)]
    >>> for rank, copies in enumerate(compile_copies(everywhere, 8, relay_threshold=4)):
    ...     print(rank, [copy.destinations for copy in copies])
    0 [((1, 0), (2, 0), (3, 0))]
    1 [((4, 0), (7, 0))]
    2 [((5, 0),)]
    3 [((6, 0),)]
    4 []
    5 []
    6 []
    7 []
    """
    by_main: dict[tuple[int, int], list[Transfer]] = defaultdict(list)
    num_sends = [0] * num_ranks
    for transfer in transfers:
        by_main[transfer.home_rank, transfer.main_idx].append(transfer)
        num_sends[transfer.home_rank] += 1
    # Sends of each rank by the copies made so far. All experts have one size, so counts suffice.
    planned = [sends if sends <= relay_threshold else 0 for sends in num_sends]
    copies: list[list[Copy]] = [[] for _ in range(num_ranks)]
    relayed: list[list[Copy]] = [[] for _ in range(num_ranks)]
    # The busiest rank chooses its relays first.
    for (home, main_idx), replicas in sorted(
        by_main.items(), key=lambda item: (-num_sends[item[0][0]], item[0])
    ):
        if num_sends[home] <= relay_threshold:
            direct = tuple((t.replica_rank, t.slot_idx) for t in replicas)
            copies[home].append(Copy(home, main_idx, None, direct))
            continue
        num_relays = math.ceil(len(replicas) / math.sqrt(num_sends[home]))
        order = sorted(replicas, key=lambda t: (planned[t.replica_rank], t.replica_rank))
        relays, others = order[:num_relays], order[num_relays:]
        planned[home] += num_relays
        passed_on: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for other in others:
            relay = min(relays, key=lambda t: (planned[t.replica_rank], t.replica_rank))
            planned[relay.replica_rank] += 1
            passed_on[relay.replica_rank].append((other.replica_rank, other.slot_idx))
        first = tuple((t.replica_rank, t.slot_idx) for t in relays)
        copies[home].append(Copy(home, main_idx, None, first))
        for relay in relays:
            if onward := passed_on[relay.replica_rank]:
                relayed[relay.replica_rank].append(
                    Copy(home, main_idx, relay.slot_idx, tuple(onward))
                )
    # A copy from a main waits for no other copy. These copies come first, so no ranks wait for each
    # other in a circle.
    return [own + onward for own, onward in zip(copies, relayed, strict=True)]
