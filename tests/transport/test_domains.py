"""Domains follow from who reaches whom, and transports need no memory of other domains.

Layer 2 (4 gloo ranks). Who reaches whom is given by fakes, and machines are made up.
"""

from __future__ import annotations

import dataclasses
import logging
import random
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from megatron_ext.transport import TRANSPORTS, Transfer, agree_on_transport, shared_heap
from megatron_ext.transport.reach import domain_of, gather_obstacles, largest_domain
from megatron_ext.transport.shared_memory import SharedMemoryTransport
from tests.ranks import run_ranks
from tests.transport.test_transports import CPU, LARGE, Side, random_transfers

FULL = ["1111"] * 4
CLIQUES = ["1100", "1100", "0011", "0011"]
ONE_WAY = ["1111", "1111", "0111", "1111"]
"""Rank 2 does not reach rank 0, which reaches it."""
NONE = ["1000", "0100", "0010", "0001"]
NOTHING = ["0000"] * 4
"""No rank has memory to share: none reaches itself either, as without a library's CUDA part."""
APART = ["1010", "0101", "1010", "0101"]
"""Those that reach each other are no neighbours."""


def obstacles_of(reach: list[str]) -> list[list[str]]:
    return [["" if each == "1" else "no link" for each in row] for row in reach]


@pytest.mark.parametrize(
    ("reach", "size"),
    [(FULL, 4), (CLIQUES, 2), (ONE_WAY, 2), (NONE, 1), (NOTHING, 1), (APART, 1), (["111"] * 3, 3)],
)
def test_a_domain_is_as_many_neighbours_as_all_reach_each_other(reach: Any, size: int) -> None:
    assert largest_domain(obstacles_of(reach)) == size


def on_machines(rank: int, ranks_each: int) -> AbstractContextManager[Any]:
    """Make machines of so many ranks."""
    here = shared_heap.machine_of_this_process()
    machine = dataclasses.replace(here, host=f"node{rank // ranks_each}")
    return mock.patch.object(shared_heap, "machine_of_this_process", return_value=machine)


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.levelname, record.getMessage()))


def _agree(rank: int, asked: list[tuple[Any, ...]]) -> list[Any]:
    """What becomes of settings, with what is logged."""
    logger = logging.getLogger("megatron_ext.transport")
    logger.setLevel(logging.INFO)
    found: list[Any] = []
    for reach, name, domain_ranks in asked:
        fake = dataclasses.replace(
            TRANSPORTS["shared_memory"],
            obstacles=lambda group, device, reach=reach: obstacles_of(reach)[group.rank()],
        )
        handler = _Lines()
        logger.addHandler(handler)
        with mock.patch.dict(TRANSPORTS, {"shared_memory": fake}):
            try:
                answer: Any = agree_on_transport(name, domain_ranks, dist.new_group(), CPU)
            except RuntimeError as error:
                answer = str(error)
        logger.removeHandler(handler)
        found.append((answer, handler.lines))
    # The shards of an expert are two groups: what one pair does not reach, none uses.
    mine = ["no link" if rank == 3 and peer == 0 else "" for peer in range(2)]
    assert gather_obstacles(mine, dist.group.WORLD) == [["", ""], ["no link", ""]]
    return found


def test_auto_takes_what_ranks_found_and_says_what_it_costs() -> None:
    asked = [
        (FULL, "auto", None),
        (CLIQUES, "auto", None),
        (ONE_WAY, "auto", None),
        (NONE, "auto", None),
        (NONE, "auto", 1),
        (CLIQUES, "auto", 4),
        (CLIQUES, "collective", None),
        (CLIQUES, "shared_memory", None),
        (CLIQUES, "shared_memory", 4),
        (NONE, "shared_memory", None),
        (CLIQUES, "auto", 2),
        (NOTHING, "auto", None),
        (NOTHING, "shared_memory", None),
    ]
    first, *others = run_ranks(_agree, 4, asked)
    for other in others:
        assert [answer for answer, _ in other] == [answer for answer, _ in first]
        assert not any(lines for _, lines in other), "one rank of a group says it"
    answers = [answer for answer, _ in first]
    assert answers[:8] == [
        ("shared_memory", 4),
        ("shared_memory", 2),
        ("shared_memory", 2),
        ("collective", 4),
        ("shared_memory", 1),
        ("collective", 4),
        ("collective", 4),
        ("shared_memory", 2),
    ]
    assert "nvlink_domain=4 (4 EP ranks on cpu): rank 0 does not reach rank 2: no l" in answers[8]
    assert "use balance.transport=collective" in answers[9]
    assert answers[11] == ("collective", 4)
    assert "rank 0 does not reach rank 0: no link; use balance" in answers[12]

    lines = [lines for _, lines in first]
    assert [[level for level, _ in each] for each in lines] == [
        *(["INFO"], ["WARNING"], ["WARNING"], ["WARNING"], ["INFO"]),
        *(["WARNING"], ["INFO"], ["WARNING"], [], [], ["INFO"], ["WARNING"], []),
    ]
    # Domains that nobody has asked for are a surprise; those of the last case are none.
    assert lines[1][0][1].endswith("If that is meant: balance.nvlink_domain=2")
    assert "If that is meant" not in lines[10][0][1]
    assert "transport shared_memory, one domain: all ranks reach each other" in lines[0][0][1]
    assert (
        "shared_memory, domains of 2 ranks: rank 0 does not reach rank 2: no link" in lines[1][0][1]
    )
    assert "stay in their domain, and so does what is uneven between" in lines[1][0][1]
    assert "Some ranks reach others beyond that, which is not used" in lines[2][0][1]
    assert "rank 0 does not reach rank 1: no link. So replicas go through" in lines[3][0][1]
    assert "transport collective, a message each over torch.distributed" in lines[3][0][1]
    assert "on cpu): replicas go through transport collective" in lines[6][0][1]


def within_domains(transfers: list[Transfer], domain_ranks: int) -> list[Transfer]:
    return [t for t in transfers if t.home_rank in domain_of(t.replica_rank, domain_ranks)]


def _move_in_two_machines(rank: int) -> None:
    with on_machines(rank, ranks_each=2):
        assert agree_on_transport("auto", None, dist.group.WORLD, CPU) == ("shared_memory", 2)
        transport = SharedMemoryTransport(dist.group.WORLD, domain_ranks=2, relay_threshold=0)
        side = Side(transport, dist.group.WORLD, LARGE)
    generator = random.Random(5)
    moved = 0
    for step in range(10):
        transfers = within_domains(random_transfers(generator, 4), 2)
        moved += len(transfers)
        side.step(transfers, step)
    assert moved > 10
    out = [Transfer(0, 0, 2, 0)]
    mine = f"of ranks {transport._peers[0]} to {transport._peers[1]}"
    for call in (lambda: side.push(out, 0), lambda: side.pull_add_and_check(out, 0)):
        with pytest.raises(ValueError, match=f"rank 0 on rank 2 leaves the NVLink domain {mine}"):
            call()
    transport.reset()
    side.step([Transfer(0, 0, 1, 0), Transfer(3, 1, 2, 1)], 10)


def test_two_machines_move_replicas_in_a_memory_each() -> None:
    run_ranks(_move_in_two_machines, 4)
