"""Transports on the same transfers in one run, beside plain copies and sums of the same bytes.

    python tests/perf/transport.py [--rounds N] [--json FILE] [--gathers | --gpu]

A time is from the first rank's call to the last rank's return, one of several calls in a row, the
median of rounds in which all that is compared takes turns, after a warm-up. `x` is how many times
faster a line is than what it is compared with; plain copies and sums run on one thread of rank 0
while the others sleep.

`--gathers` measures the gather of counts instead, whose worst case all ranks wait for: each call of
rank 0, percentiles in microseconds, blocks of calls taking turns with those of gloo.

With `--gpu`, ranks are streams of one GPU (tests/gpu/virtual_ranks.py), and times are the device's:
from the first rank's first kernel to the last rank's last one. All bytes then move within one GPU's
memory, so what is compared with is a copy within it, not a link. A push between two ranks has a row
for each of `PUSH_BLOCKS`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from megatron_ext.transport import Transfer, Transfers, Transport  # noqa: E402
from megatron_ext.transport.collective import CollectiveTransport  # noqa: E402
from megatron_ext.transport.relay import compile_copies  # noqa: E402
from megatron_ext.transport.shared_memory import SharedMemoryTransport  # noqa: E402
from tests.perf.planner import describe_machine  # noqa: E402
from tests.ranks import run_ranks  # noqa: E402
from tests.transport.test_transports import in_slots  # noqa: E402

CPU = torch.device("cpu")
PUSH_BLOCKS = (8, 16, 32, 64, 132)
"""Blocks of a push that `--gpu` compares with a plain copy of the same bytes."""

MIB = 2**20
WORDS = 257
"""Of a row of the gather: counts of 256 experts, and a seal."""

COLUMNS = ("what", "ranks", "MiB", "ms", "GB/s", "compared with", "ms there", "x", "most sends")
GATHER_COLUMNS = ("what", "ranks", "p50 us", "p99 us", "max us")


class Setup:
    """A transport's buffers on one rank: experts of two segments, as fc1 and fc2 are."""

    def __init__(
        self, transport: Transport, num_bytes: int, slots: int, device: torch.device = CPU
    ) -> None:
        self.transport = transport
        self.shapes = [(num_bytes // 6,), (num_bytes // 12,)]  # float32, two to one
        shapes = [(slots, *shape) for shape in self.shapes]
        self.slot_weights = [transport.allocate(shape, torch.float32, device) for shape in shapes]
        self.slot_grads = [transport.allocate(shape, torch.float32, device) for shape in shapes]
        self.mains = [
            [torch.ones(shape, device=device) for _ in range(slots)] for shape in self.shapes
        ]
        self.totals = [
            [torch.ones(shape, device=device) for _ in range(slots)] for shape in self.shapes
        ]

    def push(self, transfers: Transfers) -> None:
        self.transport.push(transfers, self.mains, self.slot_weights).wait()

    def pull_add(self, transfers: Transfers) -> None:
        self.transport.pull_add(transfers, self.slot_grads, self.totals, [None, None]).wait()


Times = dict[str, list[tuple[float, float]]]
"""Start and end of each round of one rank, by what ran."""


def _time(calls: dict[str, Callable[[], None]], rounds: int, num_bytes: int) -> Times:
    """Time `calls` of this rank by the machine's clock; so many in a row that a barrier's is lost.

    Times are those of one call.
    """
    repeats = max(2, min(200, 8 * MIB // num_bytes))
    times: Times = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            call()
            dist.barrier()
            start = time.monotonic()
            for _ in range(repeats):
                call()
            times[name].append((start / repeats, time.monotonic() / repeats))
    return {name: each[1:] for name, each in times.items()}


def _copy(rank: int, num_bytes: int, slots: int, rounds: int) -> Any:
    """Rank 0 fills all slots of rank 1; plain copy of as much on rank 0."""
    shared = Setup(SharedMemoryTransport(dist.group.WORLD), num_bytes, slots)
    gloo = Setup(CollectiveTransport(dist.group.WORLD), num_bytes, slots)
    transfers = [Transfer(0, m, 1, m) for m in range(slots)]
    plan = in_slots(transfers, dist.get_world_size(), mains=slots, slots=slots)

    def memcpy() -> None:
        for mains, copies in zip(shared.mains, gloo.slot_weights, strict=True):
            for main, copy in zip(mains, copies, strict=True):
                copy.copy_(main)

    return _time(
        {
            "shared_memory": lambda: shared.push(plan),
            "memcpy": memcpy if rank == 0 else _nothing,
            "gloo": lambda: gloo.push(plan),
        },
        rounds,
        slots * num_bytes,
    )


def _add(rank: int, num_bytes: int, slots: int, rounds: int) -> Any:
    """Rank 0 adds the slot gradients of two others; a fused add of as much on rank 0."""
    shared = Setup(SharedMemoryTransport(dist.group.WORLD), num_bytes, slots)
    gloo = Setup(CollectiveTransport(dist.group.WORLD), num_bytes, slots)
    transfers = [Transfer(0, m, other, m) for other in (1, 2) for m in range(slots)]
    plan = in_slots(transfers, dist.get_world_size(), mains=slots, slots=slots)

    def add() -> None:
        for g, totals in enumerate(shared.totals):
            for m, total in enumerate(totals):
                torch.add(gloo.slot_weights[g][m], gloo.slot_grads[g][m], out=total)

    return _time(
        {
            "shared_memory": lambda: shared.pull_add(plan),
            "fused add": add if rank == 0 else _nothing,
            "gloo": lambda: gloo.pull_add(plan),
        },
        rounds,
        2 * slots * num_bytes,
    )


def _fan_out(rank: int, num_bytes: int, rounds: int) -> Any:
    """One expert of rank 0 to all others, with and without relays; also what this rank fills."""
    num_ranks = dist.get_world_size()
    transfers = [Transfer(0, 0, other, 0) for other in range(1, num_ranks)]
    plan = in_slots(transfers, num_ranks, mains=1, slots=1)
    calls: dict[str, Callable[[], None]] = {}
    sends = {}
    for name, threshold in (("direct", num_ranks), ("relays", 1)):
        transport = SharedMemoryTransport(dist.group.WORLD, relay_threshold=threshold)
        setup = Setup(transport, num_bytes, slots=1)
        setup.push(plan)
        copies = compile_copies(plan, num_ranks, threshold)[rank]
        sends[name] = sum(len(copy.destinations) for copy in copies)
        calls[name] = partial(setup.push, plan)
    return _time(calls, rounds, num_bytes), sends


def _nothing() -> None:
    pass


def _gather(rank: int, rounds: int) -> dict[str, list[float]]:
    """Microseconds of each gather of one row, one-sided and by gloo, in blocks of 100."""
    rows = SharedMemoryTransport(dist.group.WORLD).rows
    assert rows is not None
    row = torch.full((WORDS,), rank)
    gathered = row.new_empty(dist.get_world_size() * WORDS)
    calls: dict[str, Callable[[], Any]] = {
        "shared_memory": lambda: rows.gather(row),
        "gloo": lambda: dist.all_gather_into_tensor(gathered, row),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for warm in (False, *[True] * rounds):
        for name, call in calls.items():
            dist.barrier()
            for _ in range(100):
                start = time.perf_counter()
                call()
                if warm:
                    times[name].append(1e6 * (time.perf_counter() - start))
    return times


def measure_gathers(rounds: int) -> list[dict[str, Any]]:
    """All lines of the gathers' table: as many ranks as cores, and more than cores."""
    table = []
    for num_ranks in (2, 4, 8):
        by_rank = run_ranks(_gather, num_ranks, rounds)
        for name, times in by_rank[0].items():
            p50, p99 = np.percentile(times, (50, 99))
            table.append(
                dict(
                    zip(
                        GATHER_COLUMNS,
                        (name, num_ranks, float(p50), float(p99), max(times)),
                        strict=True,
                    )
                )
            )
    return table


def _median_ms(by_rank: list[Times], name: str) -> float:
    rounds = zip(*(times[name] for times in by_rank), strict=True)
    return 1e3 * statistics.median(
        max(end for _, end in each) - min(start for start, _ in each) for each in rounds
    )


def _compare(what: str, by_rank: list[Any], baseline: str, num_bytes: int) -> list[dict[str, Any]]:
    ms = _median_ms(by_rank, "shared_memory")
    rows = []
    for other in (baseline, "gloo"):
        # Only rank 0 works there, and another's early return from the barrier is not its time.
        there = _median_ms(by_rank[:1] if other == baseline else by_rank, other)
        rows.append(
            {
                "what": what,
                "ranks": len(by_rank),
                "MiB": num_bytes / MIB,
                "ms": ms,
                "GB/s": num_bytes / ms / 1e6,
                "compared with": other,
                "ms there": there,
                "x": there / ms,
                "most sends": None,
            }
        )
    return rows


def measure(rounds: int) -> list[dict[str, Any]]:
    """All lines of the table."""
    rows = []
    for num_bytes, slots in ((48 * MIB, 2), (48 * 1024, 2)):
        found = run_ranks(_copy, 2, num_bytes, slots, rounds)
        rows += _compare("push", found, "memcpy", slots * num_bytes)
        found = run_ranks(_add, 3, num_bytes, slots, rounds)
        rows += _compare("pull_add", found, "fused add", 2 * slots * num_bytes)
    num_bytes = 12 * MIB
    found = run_ranks(_fan_out, 8, num_bytes, rounds)
    ms = {name: _median_ms([times for times, _ in found], name) for name in ("direct", "relays")}
    for name, other in (("direct", "relays"), ("relays", "direct")):
        rows.append(
            {
                "what": f"1 to 7, {name}",
                "ranks": 8,
                "MiB": 7 * num_bytes / MIB,
                "ms": ms[name],
                "GB/s": 7 * num_bytes / ms[name] / 1e6,
                "compared with": other,
                "ms there": ms[other],
                "x": ms[other] / ms[name],
                "most sends": max(sends[name] for _, sends in found),
            }
        )
    return rows


HELD_CYCLES = 40_000_000
"""The device is held up so long, 20 ms, while the host calls: what it takes must not be timed."""


def _time_gpu(calls: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Median milliseconds of each call, by the device's clock, taking turns."""
    repeats = 5
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            torch.cuda._sleep(HELD_CYCLES)
            start.record()
            for _ in range(repeats):
                call()
            end.record()
            torch.cuda.synchronize()
            times[name].append(start.elapsed_time(end) / repeats)
    return {name: statistics.median(each[1:]) for name, each in times.items()}


def on_all(streams: Sequence[Any], setups: Sequence[Any], call: Callable[[Any], None]) -> None:
    """Call for each rank on its stream, all beside each other, between two points of this one."""
    now = torch.cuda.current_stream()
    for stream in streams:
        stream.wait_stream(now)
    for stream, setup in zip(streams, setups, strict=True):
        with torch.cuda.stream(stream):
            call(setup)
    # Not before all have begun: a rank waits for the others, and these must not wait for its end.
    for stream in streams:
        now.wait_stream(stream)


def _copy_mains(setups: Sequence[Setup]) -> None:
    """Copy rank 0's mains into rank 1's slots, plainly."""
    for mains, copies in zip(setups[0].mains, setups[1].slot_weights, strict=True):
        for main, to in zip(mains, copies, strict=True):
            to.copy_(main)


def measure_gpu(rounds: int) -> list[dict[str, Any]]:
    """The same lines with virtual ranks on one GPU."""
    from tests.gpu.virtual_ranks import VirtualRanks

    def set_up(
        num_ranks: int,
        num_bytes: int,
        slots: int,
        relay_threshold: int,
        push_blocks: int | None = None,
    ) -> Any:
        ranks = VirtualRanks(num_ranks)
        # All blocks of all ranks must fit at a time.
        blocks = torch.cuda.get_device_properties(ranks.device).multi_processor_count
        setups = [
            Setup(
                ranks.transport(
                    rank,
                    timeout_s=60.0,
                    relay_threshold=relay_threshold,
                    # 3 of a push on a multiprocessor.
                    push_blocks=push_blocks or min(blocks, 3 * blocks // num_ranks),
                    grad_reduce_share=0.5 if num_ranks <= 3 else 0.25,
                ),
                num_bytes,
                slots,
                ranks.device,
            )
            for rank in range(num_ranks)
        ]
        ranks.warm()
        return setups, partial(on_all, ranks.streams, setups)

    def row(what: str, ranks: int, moved: int, ms: float, other: str, there: float) -> Any:
        return {
            "what": what,
            "ranks": ranks,
            "MiB": moved / MIB,
            "ms": ms,
            "GB/s": moved / ms / 1e6,
            "compared with": other,
            "ms there": there,
            "x": there / ms,
            "most sends": None,
        }

    # One rank alone calls each kernel first: a first launch may wait for all that runs.
    (alone,), _ = set_up(1, MIB, 1, relay_threshold=1000)
    device = alone.slot_weights[0].device
    nothing = in_slots([], 1, mains=1, slots=1, device=device)
    alone.push(nothing)
    alone.pull_add(nothing)
    rows = []
    for num_bytes, slots in ((48 * MIB, 4), (48 * 1024, 4)):
        moved = slots * num_bytes
        setups, together = set_up(3, num_bytes, slots, relay_threshold=1000)
        to_one = [Transfer(0, m, 1, m) for m in range(slots)]
        plan = in_slots(to_one, 3, mains=slots, slots=slots, device=device)
        both = in_slots(
            [Transfer(0, m, other, m) for other in (1, 2) for m in range(slots)],
            3,
            mains=slots,
            slots=slots,
            device=device,
        )

        def add(setups: Any = setups) -> None:
            for g, totals in enumerate(setups[0].totals):
                for m, total in enumerate(totals):
                    torch.add(setups[1].slot_grads[g][m], setups[2].slot_grads[g][m], out=total)

        ms = _time_gpu(
            {
                "push": partial(together, lambda setup, plan=plan: setup.push(plan)),
                "copy": partial(_copy_mains, setups),
                "pull_add": partial(together, lambda setup, both=both: setup.pull_add(both)),
                "add": add,
            },
            rounds,
        )
        rows.append(row("push", 3, moved, ms["push"], "device copy", ms["copy"]))
        rows.append(row("pull_add", 3, 2 * moved, ms["pull_add"], "fused add", ms["add"]))
    for blocks in PUSH_BLOCKS:
        # Two ranks, so that the GPU has room for what waits beside what copies.
        num_bytes, slots = 48 * MIB, 4
        setups, together = set_up(2, num_bytes, slots, 1000, push_blocks=blocks)
        to_one = [Transfer(0, m, 1, m) for m in range(slots)]
        plan = in_slots(to_one, 2, mains=slots, slots=slots, device=device)
        ms = _time_gpu(
            {
                "push": partial(together, lambda setup, plan=plan: setup.push(plan)),
                "copy": partial(_copy_mains, setups),
            },
            rounds,
        )
        what, moved = f"push, {blocks} blocks", slots * num_bytes
        rows.append(row(what, 2, moved, ms["push"], "device copy", ms["copy"]))
    num_bytes = 12 * MIB
    to_all = [Transfer(0, 0, other, 0) for other in range(1, 8)]
    plan = in_slots(to_all, 8, mains=1, slots=1, device=device)
    calls = {}
    for name, threshold in (("direct", 1000), ("relays", 1)):
        _, together = set_up(8, num_bytes, 1, threshold)
        calls[name] = partial(together, lambda setup: setup.push(plan))
    ms = _time_gpu(calls, rounds)
    for name, other in (("direct", "relays"), ("relays", "direct")):
        rows.append(row(f"1 to 7, {name}", 8, 7 * num_bytes, ms[name], other, ms[other]))
    return rows


def main() -> None:
    """Measure, print the table, and write it as JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=11, help="rounds (default: 11)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the table")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--gathers", action="store_true", help="the gather of counts")
    what.add_argument("--gpu", action="store_true", help="ranks on one GPU, not on CPUs")
    options = parser.parse_args()
    if options.gpu:
        print(torch.cuda.get_device_name())
    print(describe_machine())
    columns = GATHER_COLUMNS if options.gathers else COLUMNS
    print(" ".join(f"{name:>14}" for name in columns))
    if options.gathers:
        rows = measure_gathers(options.rounds)
    else:
        rows = (measure_gpu if options.gpu else measure)(options.rounds)
    for row in rows:
        print(" ".join(f"{_text(row[name]):>14}" for name in columns))
    if options.json:
        options.json.write_text(json.dumps({"machine": describe_machine(), "rows": rows}, indent=1))


def _text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
