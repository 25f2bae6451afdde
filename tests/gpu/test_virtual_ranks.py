"""Virtual ranks are made before one moves, and no two of them share a hardware queue."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.gpu import virtual_ranks
from tests.gpu.virtual_ranks import (
    POOL,
    ByTorch,
    VirtualRanks,
    choose,
    classes_of,
    give_next,
)
from tests.transport.test_transports import LARGE, SHAPES, Side, Transfer


def pools(priorities: int) -> tuple[list[str], list[str], dict[Hashable, int]]:
    """Streams made as torch makes them, a priority after the other, on 32 queues in turn."""
    made = [f"{number}/{priority}" for number in range(POOL) for priority in range(priorities)]
    queues: dict[Hashable, int] = {stream: at % 32 for at, stream in enumerate(made)}
    return made[priorities - 1 :: priorities], made[::priorities], queues


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("priorities", [2, 3, 4])
def test_no_two_ranks_share_a_queue(num_ranks: int, priorities: int) -> None:
    urgent, plain, queues = pools(priorities)
    chosen = choose(num_ranks, urgent, plain, queues)
    streams = [stream for of_rank in chosen for stream in of_rank]
    assert len(set(streams)) == 3 * num_ranks
    assert all(each.push in urgent and {each.main, each.pull} <= {*plain} for each in chosen)
    used = [{queues[stream] for stream in of_rank} for of_rank in chosen]
    for one, other in itertools.combinations(used, 2):
        assert not one & other


def test_streams_in_torchs_turn_share_queues() -> None:
    """So it is no chance that those chosen do not."""
    urgent, plain, queues = pools(4)
    in_turn = [(plain[rank], urgent[rank], plain[6 + rank]) for rank in range(6)]
    used = [{queues[stream] for stream in of_rank} for of_rank in in_turn]
    assert used[0] & used[2]


def test_too_few_queues_are_an_error() -> None:
    urgent, plain, queues = pools(2)
    one = dict.fromkeys(queues, 0)
    assert len(choose(1, urgent, plain, one)) == 1
    with pytest.raises(RuntimeError, match=r"2 ranks in one process .* share 1"):
        choose(2, urgent, plain, one)


def test_queues_are_found_by_what_waits() -> None:
    _, plain, queues = pools(4)

    def held_up(stream: str, others: Sequence[str]) -> list[str]:
        return [other for other in others if queues[other] == queues[stream]]

    found = classes_of(plain, held_up)
    for one, other in itertools.combinations(plain, 2):
        assert (found[one] == found[other]) == (queues[one] == queues[other])


def test_the_pool_is_drawn_from_until_a_streams_turn() -> None:
    pool = list("abcdef")
    turn = itertools.cycle(pool)
    for wanted in "cafe":
        give_next(wanted, pool, lambda: next(turn))
        assert next(turn) == wanted
    with pytest.raises(RuntimeError, match="in turn"):
        give_next("a", pool, lambda: "b")


class Stream:
    """Stands for one of CUDA's."""

    def __init__(self, name: str) -> None:
        self.name = name


def ranks_without_a_gpu(monkeypatch: pytest.MonkeyPatch, notes: list[str]) -> VirtualRanks:
    ranks = object.__new__(VirtualRanks)
    ranks.num_ranks = 2
    ranks.device = torch.device("cpu")
    ranks.streams = [Stream("0"), Stream("1")]
    ranks._chosen = [virtual_ranks.Streams(Stream("m"), Stream("p"), Stream("q"))] * 2
    ranks.all_here = threading.Barrier(2, timeout=10)
    empty = torch.empty

    def allocate(size: int, **options: Any) -> torch.Tensor:
        notes.append("pinned" if options.pop("pin_memory", False) else "device")
        return empty(min(size, 8), **options)

    monkeypatch.setattr(torch, "empty", allocate)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: notes.append("idle"))
    return ranks


def test_allocators_are_warm_before_a_rank_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    ranks = ranks_without_a_gpu(monkeypatch, notes)
    ranks.run(["a", "b"], lambda thing: notes.append(f"{thing} begins"))
    begun = [at for at, note in enumerate(notes) if note.endswith("begins")]
    assert sorted(notes[at] for at in begun) == ["a begins", "b begins"]
    before = notes[: begun[0]]
    assert {"device", "pinned"} <= {*before}
    assert before[-1] == "idle"
    assert not {"device", "pinned"} & {*notes[begun[0] :]}


@pytest.mark.parametrize("drawn", [1, 2])
def test_a_transport_that_takes_other_streams_is_noticed(
    drawn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    urgent, plain = list("ABCD"), list("abcd")
    turns = {"urgent": itertools.cycle(urgent), "plain": itertools.cycle(plain)}
    ranks = object.__new__(VirtualRanks)
    ranks._chosen = [virtual_ranks.Streams("a", "C", "d")]
    taken = []

    def make(heap: Any, **options: Any) -> str:
        taken.append((next(turns["urgent"]), [next(turns["plain"]) for _ in range(drawn)]))
        return "made"

    draw: dict[str, Callable[..., str]] = {
        name: lambda turn=turn: next(turn) for name, turn in turns.items()
    }
    monkeypatch.setattr(virtual_ranks, "_pools", lambda: (urgent, plain))
    monkeypatch.setattr(virtual_ranks, "_draw_urgent", draw["urgent"])
    monkeypatch.setattr(torch.cuda, "Stream", draw["plain"])
    monkeypatch.setattr(virtual_ranks, "VirtualHeap", lambda ranks, rank: None)
    monkeypatch.setattr(virtual_ranks, "CudaTransport", make)
    if drawn == 1:
        assert ranks.transport(0) == "made"  # type: ignore[comparison-overlap]
        assert taken == [("C", ["d"])]
    else:
        with pytest.raises(AssertionError):
            ranks.transport(0)


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
def test_replicas_of_a_ranks_own_experts_are_looked_at(grad_dtype: torch.dtype) -> None:
    group = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
    for shapes in (SHAPES, LARGE):
        side = Side(ByTorch(), group, shapes, grad_dtype)
        for step in range(2):
            for second in range(2):
                side.step([Transfer(0, 0, 0, 0), Transfer(0, second, 0, 1)], step)
