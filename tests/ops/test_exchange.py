"""`torch.classes.megatron_ext.Exchange` refuses what it cannot use before anything has changed.

One process; what ranks do with each other is tested in `tests/transport`.
"""

import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_ext.ops import load_library

load_library()
Exchange = torch.classes.megatron_ext.Exchange

FLAGS_OF_A_SLOT = 256
"""Bytes."""

RANKS, SLOTS, WIDTH = 3, 2, 16
NO_SLOTS_USED = torch.full((RANKS, SLOTS), -1, dtype=torch.int32)


def flags(slots=SLOTS):
    return torch.zeros(slots * FLAGS_OF_A_SLOT, dtype=torch.uint8)


def nowhere():
    """Memory of a rank that is out of reach."""
    return torch.zeros(0, dtype=torch.uint8)


class Ranks:
    """The ends of ranks 0 and 1, which reach each other; rank 2 is out of reach."""

    def __init__(self):
        shared = [flags(), flags(), nowhere()]
        self.slots = [torch.zeros(SLOTS, WIDTH) for _ in range(2)]
        self.ends = [Exchange(rank, 5.0, 0) for rank in range(2)]
        for end in self.ends:
            end.set_flags(shared)
            assert end.add_segment([*self.slots, torch.zeros(0, WIDTH)]) == 0

    def push(self, value):
        """Push a main of that value from rank 0 to slot 1 of rank 1, and see that it arrives."""
        main = torch.full((WIDTH,), float(value))
        offer = self.ends[1].start_push([0], [], [], [0, 1], NO_SLOTS_USED, "")
        send = self.ends[0].start_push([0], [main], [-1, -1, 1, 1, 1], [], NO_SLOTS_USED, "")
        self.ends[0].finish_push(send)
        self.ends[1].finish_push(offer)
        assert torch.equal(self.slots[1][1], main)


@pytest.fixture(scope="module")
def ranks():
    return Ranks()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, 1.0, 0), r"rank \(-1\) must be from 0 to 4095"),
        ((0, float("nan"), 0), r"timeout_s \(nan\) must be above 0 and at most 9e\+09 seconds"),
        ((0, float("inf"), 0), r"timeout_s \(inf\) must be above 0"),
        ((0, 0.0, 0), r"timeout_s \(0\) must be above 0"),
        ((0, -1.0, 0), r"timeout_s \(-1\) must be above 0"),
        ((0, 1.0, -1), r"max_delay_us \(-1\) must be from 0 to 1000000"),
        ((0, 1.0, 2**62), r"max_delay_us \(4611686018427387904\) must be from 0 to 1000000"),
    ],
)
def test_numbers_of_a_rank(arguments, message):
    with pytest.raises(ValueError, match=message):
        Exchange(*arguments)


@pytest.mark.parametrize(
    ("by_rank", "message"),
    [
        ([], r"flags must be of more ranks than rank \(1\) and at most 4096, got 0"),
        ([flags()], r"flags must be of more ranks than rank \(1\) .* got 1"),
        ([flags(), nowhere()], r"flags must be 256 bytes for each slot, got Byte \[0\]"),
        ([flags(), flags()[:-1]], r"flags must be 256 bytes for each slot, got Byte \[511\]"),
        (
            [flags(1), flags()],
            r"flags of rank 0 must be contiguous Byte \[512\] .*got Byte \[256\]",
        ),
        ([flags(), flags().float()], r"flags of rank 0 .* got Float|flags of rank 1 .* got Float"),
        ([flags(), flags().to("meta")], r"flags of rank 1 must be .* got Byte \[512\] on meta"),
        ([flags().to("meta"), flags()], r"flags of rank 0 must be .* got Byte \[512\] on meta"),
        ([flags(), flags(4)[::2]], r"flags of rank 1 must be .* got non-contiguous Byte \[512\]"),
        ([flags(), flags(3)[8:520]], r"flags of rank 1 must be .* aligned to 64 bytes"),
    ],
)
def test_flags(by_rank, message):
    with pytest.raises(ValueError, match=message):
        Exchange(1, 1.0, 0).set_flags(by_rank)


def test_flags_come_first_and_once(ranks):
    with pytest.raises(RuntimeError, match="the flags are set already"):
        ranks.ends[0].set_flags([flags(), flags(), nowhere()])
    new = Exchange(0, 1.0, 0)
    with pytest.raises(ValueError, match="slot buffers must be 0 here, got 1"):
        new.add_segment([torch.zeros(1, 1)])
    with pytest.raises(ValueError, match="tables must be 0 here, got 1"):
        new.set_table([torch.zeros(8, dtype=torch.uint8)], 1)
    with pytest.raises(RuntimeError, match=r"call set_table\(\) first"):
        new.gather(torch.zeros(0, dtype=torch.int64), "", None)
    with pytest.raises(ValueError, match=r"segments must be ids of the 0 that were added, got 0"):
        new.start_push([0], [], [], [], NO_SLOTS_USED, "")


BUFFER = torch.zeros(SLOTS, WIDTH)
OUT_OF_REACH = torch.zeros(0, WIDTH)


@pytest.mark.parametrize(
    ("by_rank", "message"),
    [
        ([BUFFER], "slot buffers must be 3 here, got 1"),
        ([torch.zeros(3, WIDTH)] * 3, r"must have 1 to 2 slots with elements, got \[3, 16\]"),
        ([torch.zeros(2, 0)] * 3, r"must have 1 to 2 slots with elements, got \[2, 0\]"),
        ([torch.tensor(1.0)] * 3, r"must have 1 to 2 slots with elements, got \[\]"),
        ([BUFFER, OUT_OF_REACH, OUT_OF_REACH], r"slot buffer of rank 1 must be .* got Float \[0"),
        ([BUFFER, BUFFER, BUFFER], r"rank 2 must be empty, as the rank is out of reach, got"),
        ([BUFFER, BUFFER.double(), OUT_OF_REACH], r"of rank 1 must be .* Float .* got Double"),
        (
            [BUFFER, BUFFER[:1], OUT_OF_REACH],
            r"of rank 1 must be .*\[2, 16\].* got Float \[1, 16\]",
        ),
        ([BUFFER.to("meta"), BUFFER, OUT_OF_REACH], r"of rank 0 must be .* on meta"),
        ([torch.zeros(16, 2).T, BUFFER, OUT_OF_REACH], r"of rank 0 must be .* got non-contiguous"),
        ([BUFFER.to_sparse(), BUFFER, OUT_OF_REACH], r"of rank 0 must be .* got non-contiguous"),
    ],
)
def test_slot_buffers(ranks, by_rank, message):
    with pytest.raises(ValueError, match=message):
        ranks.ends[0].add_segment(by_rank)


MAIN = torch.zeros(WIDTH)
FROM_MAIN = (-1, -1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"segments": [1]}, r"segments must be ids of the 1 that were added, got 1"),
        ({"segments": [-1]}, r"segments must be ids of the 1 that were added, got -1"),
        ({"slots": NO_SLOTS_USED[:2]}, r"slots must be contiguous int32 \[3, 2\] .* Int \[2, 2\]"),
        ({"slots": NO_SLOTS_USED.long()}, r"slots must be contiguous int32 .* got Long"),
        ({"slots": NO_SLOTS_USED.to("meta")}, r"slots must be contiguous int32 .* on meta"),
        ({"expected": [1]}, "expected must be ranks and slots, got 1 numbers"),
        ({"expected": [1, 2]}, "expected must name slots from 0 to 1, got slot 2"),
        ({"expected": [1, -1]}, "expected must name slots from 0 to 1, got slot -1"),
        ({"expected": [2, 0]}, "expected must name other ranks in reach of rank 0, .* got rank 2"),
        ({"expected": [0, 0]}, "expected must name other ranks in reach of rank 0, .* got rank 0"),
        ({"copies": [-1]}, "copies must each be a source, a number and .* got 1 numbers"),
        ({"copies": [*FROM_MAIN, 0]}, "copies must have 1 or more .* got the number 0 and 0"),
        ({"copies": [*FROM_MAIN, 2, 1, 0]}, "copies must have 1 .* the number 2 and 2 behind it"),
        ({"copies": [*FROM_MAIN, -1, 1, 0]}, "copies must have 1 .* the number -1 and 2 behind it"),
        ({"copies": [*FROM_MAIN, 2**62, 1, 0]}, "copies must have 1 .* the number 46116860184273"),
        ({"copies": [*FROM_MAIN, 1, 3, 0]}, "copies must name other ranks .* below 3, got rank 3"),
        ({"copies": [*FROM_MAIN, 1, 1, 2**40]}, "copies must name slots .* got slot 1099511627776"),
        ({"copies": [1, 2, 1, 1, 0]}, "copies must name slots from 0 to 1, got slot 2"),
        ({"copies": [-1, 0, 1, 1, 0]}, "copies must name other ranks .* got rank -1"),
        ({"mains": []}, "mains must be 1 here, got 0"),
        ({"mains": [MAIN, MAIN]}, "mains must be 1 here, got 2"),
        ({"mains": [MAIN.double()]}, "main must be contiguous Float .* got Double"),
        ({"mains": [MAIN.to("meta")]}, r"main must be contiguous Float .* on meta"),
        ({"mains": [MAIN[1:]]}, r"main must be contiguous Float \[16\] .* got Float \[15\]"),
        ({"mains": [MAIN.to_sparse()]}, "main must be contiguous Float .* got non-contiguous"),
    ],
)
def test_pushes(ranks, changes, message):
    arguments = {
        "segments": [0],
        "mains": [MAIN],
        "copies": [*FROM_MAIN, 1, 1, 0],
        "expected": [],
        "slots": NO_SLOTS_USED,
        "label": "",
    } | changes
    with pytest.raises(ValueError, match=message):
        ranks.ends[0].start_push(*arguments.values())
    ranks.push(len(message))  # Nothing had begun.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"segments": [2**63 - 1]}, r"segments must be ids .*, got 9223372036854775807"),
        ({"replicas": [0]}, "replicas must have 1 or more .* got the number 0 and 0 behind it"),
        ({"replicas": [1, 1]}, "replicas must have 1 or more .* the number 1 and 1 behind it"),
        ({"replicas": [-(2**63), 1, 0]}, "replicas must have 1 .* -9223372036854775808 and 2"),
        ({"replicas": [1, 0, 0]}, "replicas must name other ranks .* got rank 0"),
        ({"replicas": [1, 1, 5]}, "replicas must name slots from 0 to 1, got slot 5"),
        ({"computed": [1, 0, 1]}, "computed must be ranks and slots, got 3 numbers"),
        ({"computed": [1, 9]}, "computed must name slots from 0 to 1, got slot 9"),
        ({"totals": []}, "totals must be 1 here, got 0"),
        ({"asides": []}, "asides must be 1 here, got 0"),
        ({"totals": [MAIN.long()]}, "total must be contiguous Float .* got Long"),
        ({"asides": [MAIN.double()]}, "aside must be contiguous Float .* got Double"),
    ],
)
def test_pulls(ranks, changes, message):
    arguments = {
        "segments": [0],
        "totals": [MAIN],
        "asides": [None],
        "replicas": [1, 1, 0],
        "computed": [],
        "label": "",
    } | changes
    with pytest.raises(ValueError, match=message):
        ranks.ends[0].start_pull(*arguments.values())
    ranks.push(len(message))


def test_segments_that_do_not_go_together(ranks):
    words = [torch.zeros(SLOTS, 4, dtype=torch.int32)] * 2
    segment = ranks.ends[0].add_segment([*words, words[0][:0]])
    with pytest.raises(ValueError, match=r"slot_grads must be float32, .* got Int"):
        ranks.ends[0].start_pull([segment], [], [], [], [], "")
    few = [torch.zeros(1, 4), torch.zeros(1, 4), torch.zeros(0, 4)]
    segments = [0, ranks.ends[0].add_segment(few)]
    with pytest.raises(ValueError, match="segments must have equally many slots, got 2 and 1"):
        ranks.ends[0].start_push(segments, [], [], [], NO_SLOTS_USED, "")


def test_tables():
    end = Exchange(0, 1.0, 0)
    end.set_flags([flags()])
    for numbers, message in (
        ((0, 1), r"num_ranks \(0\) must be from 1 to 4096"),
        ((2**40, 1), r"num_ranks \(1099511627776\) must be from 1 to 4096"),
        ((1, 0), r"num_words \(0\) must be from 1 to"),
        ((1, 2**62), r"num_words \(4611686018427387904\) must be from 1 to"),
    ):
        with pytest.raises(ValueError, match=message):
            Exchange.table_bytes(*numbers)
    table = torch.zeros(Exchange.table_bytes(1, 4), dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"a table must be 336 bytes, got Byte \[320\]"):
        end.set_table([table], 5)
    with pytest.raises(ValueError, match="tables must be 1 here, got 2"):
        end.set_table([table, table], 4)
    end.set_table([table], 4)
    row = torch.tensor([3, 4])
    assert end.gather(row, "", None).tolist() == [[3, 4]]
    for wrong, message in (
        (torch.zeros(5, dtype=torch.int64), r"at most 4 words on cpu, got Long \[5\]"),
        (row.to("meta"), r"row must be contiguous int64 .* on meta"),
        (row.float(), r"row must be contiguous int64 .* got Float"),
        (torch.zeros(4, dtype=torch.int64)[::2], "row must be contiguous int64 .* got non-"),
    ):
        with pytest.raises(ValueError, match=message):
            end.gather(wrong, "", None)
    with pytest.raises(ValueError, match=r"into must be contiguous int64 \[2\] .* on meta"):
        end.gather(row, "", row.to("meta"))


def test_restarts():
    ranks = Ranks()
    ranks.push(1.0)
    with pytest.raises(RuntimeError, match="restart must follow abort"):
        ranks.ends[0].restart(1)
    highest = max(end.abort() for end in ranks.ends)
    for generation in (highest - 1, -1, 2**62):
        with pytest.raises(ValueError, match=rf"generation \({generation}\) must be from 1 to"):
            ranks.ends[0].restart(generation)
    for end in ranks.ends:
        end.restart(highest)
    ranks.push(2.0)


def _pull_without_a_thread():
    end = Ranks().ends[0]
    pull = [0], [MAIN], [None], [1, 1, 0], [], ""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (1 << 20), before[1]))
    with pytest.raises(RuntimeError, match="Resource temporarily unavailable"):
        end.start_pull(*pull)
    resource.setrlimit(resource.RLIMIT_AS, before)
    end.restart(end.abort())
    end.start_pull(*pull)


def test_where_no_thread_could_be_started_nothing_is_waited_for():
    code = f"from {__name__} import _pull_without_a_thread as pull; pull()"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
