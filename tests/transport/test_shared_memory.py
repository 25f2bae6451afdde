"""What only the shared-memory transport promises: its own ordering, its errors, no leftovers.

Layer 2 (2 to 8 gloo ranks). Values are checked as in `test_transports.py`, bit for bit.
"""

from __future__ import annotations

import os
import random
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_ext.balance.layout import ExpertLayout
from megatron_ext.balance.main_weights import MainWeights, Segment, StackedMains
from megatron_ext.balance.slots import SlotBuffers
from megatron_ext.transport import (
    Transfer,
    TransportOptions,
    agree_on_transport,
    make_transport,
    shared_memory,
)
from megatron_ext.transport.one_sided import group_timeout_s
from megatron_ext.transport.relay import compile_copies
from megatron_ext.transport.shared_memory import SharedMemoryTransport
from tests.ranks import run_ranks
from tests.transport.test_transports import (
    CPU,
    LARGE,
    MAINS,
    SHAPES,
    Side,
    in_slots,
    random_transfers,
)

OPTIONS = TransportOptions()


def side_of(shapes: Any = SHAPES, **options: Any) -> Side:
    return Side(SharedMemoryTransport(dist.group.WORLD, **options), dist.group.WORLD, shapes)


def check_rows(side: Side, step: int, num_words: int, label: str = "") -> None:
    """Gather a row of every rank; all call alike."""
    rows = 1000 * step + torch.arange(side.group.size() * num_words).view(-1, num_words)
    assert side.transport.rows is not None
    into = torch.empty(rows.numel(), dtype=torch.int64) if step % 2 else None
    gathered = side.transport.rows.gather(rows[side.rank].clone(), label, into)
    assert torch.equal(gathered.view_as(rows), rows)
    assert into is None or gathered.data_ptr() == into.data_ptr()


def _race(rank: int, num_steps: int, max_delay_us: int) -> int:
    """Calls as they may follow each other, with nothing that orders the ranks in between."""
    world_size = dist.get_world_size()
    side = side_of(relay_threshold=2, max_delay_us=max_delay_us)
    generator = random.Random(7)
    moved = 0
    is_dropped = False
    for step in range(num_steps):
        transfers = random_transfers(generator, world_size)
        moved += len(transfers)
        order = generator.randrange(5)
        num_words = generator.randrange(3) * generator.randrange(1, 30)
        if num_words:
            check_rows(side, step, num_words)
        # Slots of a push that nobody waited for are not ours to fill with NaN.
        pending = side.push(transfers, step, fill=not is_dropped)
        if order == 0:  # the push goes on during another layer's reduction
            side.pull_add_and_check(random_transfers(generator, world_size), step)
        was_dropped, is_dropped = is_dropped, order == 1
        if is_dropped:  # the next push ends it
            continue
        pending.wait()
        side.check_slots(transfers, step, filled=not was_dropped)
        if order == 2:
            side.pull_add_and_check(transfers, step)
    return moved


@pytest.mark.parametrize(
    ("world_size", "num_steps", "max_delay_us"),
    [(2, 2000, 0), (2, 300, 300), (4, 300, 300), (8, 300, 100)],
)
def test_no_call_needs_a_barrier(world_size: int, num_steps: int, max_delay_us: int) -> None:
    moved = run_ranks(_race, world_size, num_steps, max_delay_us)
    assert moved[0] > num_steps


def _fan_out(rank: int, relay_threshold: int) -> int:
    """Make two pushes; return the slots that this rank fills in each."""
    side = side_of(LARGE, relay_threshold=relay_threshold, max_delay_us=100)
    transfers = [Transfer(0, 1, other, 0) for other in range(1, dist.get_world_size())]
    with mock.patch.object(shared_memory, "compile_copies", wraps=compile_copies) as compiled:
        for step in range(2):
            side.push(transfers, step).wait()
            side.check_slots(transfers, step)
    first, second = (compile_copies(*call.args)[rank] for call in compiled.call_args_list)
    assert first == second
    return sum(len(copy.destinations) for copy in first)


def test_relays_spread_the_sending_of_one_rank_over_eight() -> None:
    assert run_ranks(_fan_out, 8, 7) == [7, 0, 0, 0, 0, 0, 0, 0]
    assert run_ranks(_fan_out, 8, 4) == [3, 2, 1, 1, 0, 0, 0, 0]


class _NoTensors(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} in a step")


@contextmanager
def _nothing_new() -> Iterator[None]:
    before = _mappings()
    with mock.patch.object(dist, "all_gather_object", side_effect=AssertionError), _NoTensors():
        yield
    assert _mappings() == before


def _mappings() -> set[str]:
    """Names and inodes of what is mapped of ours; the kernel may list one in several parts."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    ours = [line for line in maps if "megatron_ext" in line and ".so" not in line]
    return {" ".join(line.split()[4:]) for line in ours}


def _step_in_steady_state(rank: int) -> None:
    others = _mappings()
    large = side_of(LARGE)  # starts the thread
    large.step([Transfer(0, 0, 1, 0)], 0)
    large.transport.close()
    large.slot_weights.clear()
    large.slot_grads.clear()
    side = side_of()
    transfers = [Transfer(0, 1, 1, 0), Transfer(1, 0, 0, 1)]
    side.step(transfers, 0)
    mains = [
        [segment.clone() for segment in main] for main in zip(*side.weights[rank], strict=True)
    ]
    totals = [[torch.zeros(shape) for _ in range(MAINS)] for shape in SHAPES]
    plan, nothing = in_slots(transfers, 2), [None for _ in SHAPES]
    with _nothing_new():
        for _ in range(3):
            side.transport.push(plan, mains, side.slot_weights).wait()
            side.transport.pull_add(plan, side.slot_grads, totals, nothing).wait()
    mine = _mappings() - others
    assert len(mine) == 2 * (1 + 2 * len(SHAPES)), "one region a rank and buffer, and flags"
    assert all("memfd:megatron_ext (deleted)" in name for name in mine)
    child = os.fork()
    if child == 0:  # has the transport, but not its thread
        signal.alarm(10)
        side.transport.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, "closing in a forked process hangs"
    side.transport.close()
    with pytest.raises(RuntimeError, match="this transport is closed"):
        side.push(transfers, 0)
    side.slot_weights.clear()
    side.slot_grads.clear()
    assert _mappings() <= others, "memory stays mapped"


def test_a_step_allocates_nothing_and_closing_lets_all_go() -> None:
    run_ranks(_step_in_steady_state, 2)


def _copy_while_python_runs(rank: int, gate: str) -> None:
    side = side_of()
    transfers = [Transfer(1, 0, 0, 0)]
    if rank == 0:
        opener = threading.Thread(target=lambda: (time.sleep(0.05), Path(gate).touch()))
        opener.start()
        side.push(transfers, 0).wait()  # blocks until the other thread of this process has run
        opener.join()
    else:
        while not Path(gate).exists():
            time.sleep(0.01)
        side.push(transfers, 0).wait()
    side.check_slots(transfers, 0)


def test_waiting_lets_other_threads_of_python_run(tmp_path: Path) -> None:
    run_ranks(_copy_while_python_runs, 2, str(tmp_path / "gate"))


def _lose_a_peer(rank: int, call: str) -> None:
    side = side_of(timeout_s=60.0)
    side.step([Transfer(0, 0, 1, 0), Transfer(2, 0, 0, 0)], 0)
    check_rows(side, 0, 3)
    with pytest.raises(ValueError, match=r"into must be contiguous int64 \[9\] on cpu.* \[8\]"):
        side.transport.rows.gather(torch.zeros(3).long(), into=torch.zeros(8).long())
    # Both others need rank 2: one to give, one to take.
    transfers = [Transfer(0, 1, 2, 0), Transfer(2, 0, 1, 1)]
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if call == "push":
        side.push(transfers, 1, "layer 3, virtual layer 12").wait()
    elif call == "gather":
        check_rows(side, 1, 3, "layer 3, virtual layer 12")
    else:
        side.pull_add_and_check(transfers, 1, "layer 3, virtual layer 12")


@pytest.mark.parametrize(
    ("call", "seen", "deeds"),
    [
        ("push", (1, 0), ("free slot 0", "fill slot 1")),
        ("pull_add", (0, 0), ("offer the gradient of slot 0", "take the gradient of slot 1")),
        ("gather", (0, 0), ("send its row", "send its row")),
    ],
)
def test_a_killed_peer_is_named_by_all_others_and_leaves_nothing(
    call: str, seen: tuple[int, int], deeds: tuple[str, str]
) -> None:
    with pytest.raises(RuntimeError, match="died with exit code -9") as caught:
        run_ranks(_lose_a_peer, 3, call)
    for rank in (0, 1):
        said = re.escape(
            f" s for rank 2 to {deeds[rank]} (generation 2, seen {seen[rank]}), "
            "layer 3, virtual layer 12: the process of rank 2 has ended"
        )
        assert re.search(rf"rank {rank} waited [01]\.\d{said}", str(caught.value))
    assert not [name for name in os.listdir("/dev/shm") if "megatron_ext" in name]


def _interrupt(rank: int, call: str) -> None:
    """A signal comes to rank 0 while it waits for rank 1; afterwards both go on."""
    side = side_of(timeout_s=60.0)
    side.step([Transfer(0, 0, 1, 0), Transfer(1, 0, 0, 1)], 0)
    check_rows(side, 0, 3)
    calls = {
        "send": lambda: side.push([Transfer(0, 1, 1, 0)], 1).wait(),
        "receive": lambda: side.push([Transfer(1, 0, 0, 0)], 1).wait(),
        "pull_add": lambda: side.pull_add_and_check([Transfer(0, 1, 1, 0)], 1),
        "gather": lambda: check_rows(side, 1, 3),
    }
    if rank == 0:
        before = signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            calls[call]()
        signal.signal(signal.SIGALRM, before)
    side.transport.reset()
    side.step([Transfer(0, 0, 1, 0), Transfer(1, 0, 0, 1)], 2)


@pytest.mark.parametrize("call", ["send", "receive", "pull_add", "gather"])
def test_a_signal_ends_a_wait(call: str) -> None:
    started = time.monotonic()
    run_ranks(_interrupt, 2, call)
    assert time.monotonic() - started < 50.0


LIMIT_S = 3.0


def _pause(rank: int, folder: str) -> None:
    """Rank 2 stops the others, one of which waits for the other, for longer than the limit."""
    side = side_of(timeout_s=LIMIT_S)
    transfers = [Transfer(1, 0, 0, 0)]
    place = Path(folder)
    pids: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    if rank == 0:
        pending = side.push(transfers, 0)
        (place / "waits").touch()
        pending.wait()
    elif rank == 1:
        _await(place / "go on")
        side.push(transfers, 0).wait()
    else:
        _await(place / "waits")
        for pid in pids[:2]:
            os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(1.2 * LIMIT_S)  # The pause itself.
        finally:
            for pid in pids[:2]:
                os.kill(pid, signal.SIGCONT)
        (place / "go on").touch()
        side.push(transfers, 0).wait()
    side.check_slots(transfers, 0)


def _await(file: Path) -> None:
    while not file.exists():
        time.sleep(0.01)


def test_a_pause_of_the_machine_is_no_wait(tmp_path: Path) -> None:
    run_ranks(_pause, 3, str(tmp_path))


def _push_other_replicas(rank: int) -> None:
    side = side_of(timeout_s=100.0)
    side.step([Transfer(0, 0, 1, 0)], 0)
    mine = [Transfer(0, 1, 1, 0), Transfer(0, 2, 2, 1)] if rank == 1 else [Transfer(0, 2, 2, 1)]
    started = time.monotonic()
    try:
        side.push(mine, 1, "layer 3").wait()
    finally:
        assert time.monotonic() - started < 50
    dist.barrier()  # Whoever has all its replicas goes on, and waits for the others elsewhere.


def test_ranks_that_push_different_replicas_say_so_at_once() -> None:
    with pytest.raises(
        RuntimeError,
        match=r"rank 1 and rank 0 .*different replicas .*\(generation 2\).*layer 3",
    ):
        run_ranks(_push_other_replicas, 3)


def _limits(rank: int) -> tuple[float, float]:
    from datetime import timedelta

    short = dist.new_group(timeout=timedelta(seconds=7))
    return group_timeout_s(short, CPU), group_timeout_s(dist.group.WORLD, CPU)


def _wait_as_long_as_the_group(rank: int) -> None:
    from datetime import timedelta

    group = dist.new_group(timeout=timedelta(seconds=0.5))
    transport = make_transport("shared_memory", group, CPU, OPTIONS)
    side = Side(transport, group)
    if rank == 0:
        side.push([Transfer(1, 0, 0, 0)], 0).wait()
    dist.barrier()


def test_the_limit_is_that_of_the_group_unless_it_is_given() -> None:
    assert run_ranks(_limits, 2) == [(7.0, dist.default_pg_timeout.total_seconds())] * 2
    with pytest.raises(RuntimeError, match=r"rank 0 waited 0.5 s for rank 1 to fill slot 0"):
        run_ranks(_wait_as_long_as_the_group, 2)


def _abort(rank: int, where: str) -> None:
    """Rank 1 fails at some place of a step, the others where they miss it, then a clean step."""
    world_size = dist.get_world_size()
    side = side_of(timeout_s=2.0, relay_threshold=1)
    generator = random.Random(11)
    everything = [
        Transfer(home, home % 3, (home + hop) % world_size, hop - 1)
        for home in range(world_size)
        for hop in (1, 2)
    ]
    for attempt in range(2):
        for step in range(3):
            side.step(random_transfers(generator, world_size), step)
        failure = ""
        try:
            if (where, rank) == ("before the push", 1):
                raise ArithmeticError
            pending = side.push(everything, 90 + attempt)
            if (where, rank) == ("during the push", 1) or where == "everywhere during the push":
                raise ArithmeticError
            pending.wait()
            if (where, rank) == ("before the reduction", 1):
                raise ArithmeticError
            side.pull_add_and_check(everything, 5)
            side.push(everything, 80)
            side.pull_add_and_check(everything, 5)
        except (ArithmeticError, RuntimeError) as error:
            failure = str(error) or "mine"
        assert failure == "mine" or " waited 2.0 s for rank " in failure
        side.transport.reset()
        for step in range(3):
            side.step(random_transfers(generator, world_size), step)


@pytest.mark.parametrize(
    "where",
    ["before the push", "during the push", "everywhere during the push", "before the reduction"],
)
def test_a_step_after_an_aborted_one_is_clean(where: str) -> None:
    run_ranks(_abort, 3, where)


def _reset_slots(rank: int) -> None:
    """Slots that hold what the plan says are not filled again, except after an aborted step."""
    layout = ExpertLayout(num_experts=4, ep_size=2, slots=1, nvlink_domain=2)
    transfers = in_slots([Transfer(0, 0, 1, 0)], 2, mains=2, slots=1)
    transport = SharedMemoryTransport(dist.group.WORLD)
    buffers = SlotBuffers(
        layout,
        [Segment("w", (2,))],
        dtype=torch.float32,
        device=CPU,
        ep_rank=rank,
        transport=transport,
    )
    forward = mock.Mock()
    for is_reset, expected in ((False, 1.0), (False, 1.0), (True, 3.0)):
        value = 3.0 if is_reset else 1.0
        if is_reset:
            buffers.reset()
        weights = torch.full((2, 2), value)
        mains = MainWeights((StackedMains(weights, weights),), fused=False)
        if not buffers.hold_replicas_of(forward, columnwise=False):
            buffers.push(transfers, mains, "layer 3", owner=forward).wait()
        if rank == 1:
            assert buffers.weight_buffers[0].tolist() == [[expected, expected]]
    assert buffers.num_pushes == 2


def test_resetting_slots_forgets_what_they_hold() -> None:
    run_ranks(_reset_slots, 2)


def _run_ahead(rank: int) -> None:
    side = side_of(timeout_s=5.0)
    transfers = [Transfer(0, 0, 1, 0)]
    if rank == 1:
        for step in range(2):
            side.push([], step).wait()
    dist.barrier()
    if rank == 0:
        with pytest.raises(
            RuntimeError,
            match=r"rank 0 .*generation 1, .*rank 1 .*generation 2 of slot 0.*reset\(\)",
        ):
            side.push(transfers, 0).wait()
    side.transport.reset()
    side.step(transfers, 3)


def test_a_rank_that_is_ahead_is_refused() -> None:
    run_ranks(_run_ahead, 2)


def _ask_for_different_memory(rank: int) -> None:
    transport = SharedMemoryTransport(dist.group.WORLD)
    with pytest.raises(
        ValueError, match=r"ranks must share the same, .*(8 bytes .*12|12 bytes .*8) bytes"
    ):
        transport.allocate((1, 2 + rank), torch.float32, CPU)
    with pytest.raises(ValueError, match=r"must have 1 to 256 slots .*, got \[257, 1\]"):
        transport.allocate((257, 1), torch.float32, CPU)
    with pytest.raises(ValueError, match=r"shared_memory .*CPU only, not of meta"):
        transport.allocate((1, 1), torch.float32, torch.device("meta"))


def test_memory_that_cannot_be_shared_is_refused() -> None:
    run_ranks(_ask_for_different_memory, 2)


def _fail_to_share_once(rank: int) -> None:
    side = side_of()
    with (
        mock.patch.object(shared_memory, "share", side_effect=RuntimeError("no memory")),
        pytest.raises(RuntimeError, match="no memory"),
    ):
        check_rows(side, 0, 3)
    check_rows(side, 1, 3)


def test_memory_for_rows_is_asked_for_until_it_is_there() -> None:
    run_ranks(_fail_to_share_once, 2)


def _give_the_wrong_tensors(rank: int) -> None:
    side = side_of()
    with pytest.raises(ValueError, match=r"slot_weights .*must be .*allocate\(\)"):
        side.transport.push(in_slots([], 2), [], [torch.zeros(2, *shape) for shape in SHAPES])
    mains = [[torch.zeros(shape)] for shape in SHAPES]
    mains[0] = [torch.zeros(3, 4).T]
    if rank == 0:
        with pytest.raises(ValueError, match=r"main must be contiguous Float .* got non-"):
            side.transport.push(in_slots([Transfer(0, 0, 1, 0)], 2), mains, side.slot_weights)
        transfers = in_slots([Transfer(0, 0, 1, 0)], 2)
        for dtypes, wrong in (
            ((torch.float64, None), r"total must be contiguous Float .* got Double"),
            ((torch.bfloat16, None), r"total must be contiguous Float .* got BFloat16"),
            ((torch.float32, torch.bfloat16), r"aside must be contiguous Float .* got BFloat16"),
        ):
            totals, aside = (
                [[torch.zeros(shape, dtype=dtype)] if dtype else None for shape in SHAPES]
                for dtype in dtypes
            )
            with pytest.raises(ValueError, match=wrong):
                side.transport.pull_add(transfers, side.slot_grads, totals, aside)
    half = SharedMemoryTransport(dist.group.WORLD)
    slot_grads = [half.allocate((1, 2), torch.float16, CPU)]
    with pytest.raises(ValueError, match=r"slot_grads .*float32, float64 or bfloat16, got Half"):
        half.pull_add(in_slots([], 2, slots=1), slot_grads, [[]], [None])
    side.step([Transfer(0, 0, 1, 0)], 0)  # refused calls did not count


def test_wrong_tensors_are_refused_before_anything_moves() -> None:
    run_ranks(_give_the_wrong_tensors, 2)


def _live_on_two_machines(rank: int) -> None:
    from megatron_ext.transport import shared_heap

    elsewhere = shared_heap._Machine("node7", "another boot", "pid:[1]")
    here = shared_heap.machine_of_this_process()
    with mock.patch.object(
        shared_heap, "machine_of_this_process", return_value=elsewhere if rank == 1 else here
    ):
        assert agree_on_transport("auto", None, dist.group.WORLD, CPU) == ("collective", 2)
        with pytest.raises(
            RuntimeError,
            match=r"process \d+ .*cannot map.*process \d+ .*machine .*balance.transport=collective",
        ):
            make_transport("shared_memory", dist.group.WORLD, CPU, OPTIONS)


def test_ranks_of_several_machines_take_the_collective_transport() -> None:
    run_ranks(_live_on_two_machines, 2)
