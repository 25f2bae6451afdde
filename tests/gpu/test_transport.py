"""The cuda transport on one GPU: what arrives is what the transfers say, bit for bit.

Ranks are streams of one process ("virtual ranks"), or processes that share the GPU. The kernels'
logic has other tests, which need no GPU (tests/ops/test_kernels_on_host.py); here are the
hardware's memory order, streams, captured graphs and torch's symmetric memory.
"""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_ext.balance.solve import solve
from megatron_ext.ops import has_cuda_part
from megatron_ext.transport import (
    Transfer,
    Transfers,
    TransportOptions,
    agree_on_transport,
    make_transport,
)
from megatron_ext.transport.cuda import CudaTransport
from megatron_ext.transport.symmetric_heap import SymmetricHeap
from tests.gpu.sanitizer import SANITIZERS, needs_sanitizer, sanitize
from tests.gpu.virtual_ranks import BLOCKS, SHARE, ByTorch, VirtualRanks
from tests.ranks import run_ranks
from tests.transport.test_domains import within_domains
from tests.transport.test_transports import LARGE, MAINS, SHAPES, Side, in_slots, random_transfers

pytestmark = pytest.mark.gpu

ALIGNED = ((3 * 2**15, 4), (64,))
"""All in bulk copies, the first in several chunks; LARGE has tails and unaligned slots."""


GRAD_DTYPES = (torch.float32, torch.bfloat16)

OPTIONS = TransportOptions()

LIMIT_S = 50.0
"""Of ranks that are processes: less than a test may take, so that late ranks say where they are."""


def transport_of(ranks: VirtualRanks, rank: int, **options: Any) -> CudaTransport:
    options = {"timeout_s": 20.0, "push_blocks": BLOCKS, "grad_reduce_share": SHARE, **options}
    return ranks.transport(rank, **options)


def side_of(ranks: VirtualRanks, rank: int, shapes: Any = SHAPES, **options: Any) -> Side:
    grad_dtype = options.pop("grad_dtype", torch.float32)
    group = SimpleNamespace(rank=lambda: rank, size=lambda: ranks.num_ranks)
    transport = transport_of(ranks, rank, **options)
    return Side(transport, group, shapes, grad_dtype, ranks.device)


@pytest.fixture(scope="module", autouse=True)
def _kernels_are_loaded() -> None:
    """Call each kernel once where nothing waits: the first launch may wait for all that runs.

    What looks at replicas has kernels of torch for each type. No replica of one rank arrives, so
    they run once on replicas that torch moved.
    """
    group = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
    for shapes, grad_dtype in itertools.product((SHAPES, LARGE, ALIGNED), GRAD_DTYPES):
        ranks = VirtualRanks(1)
        side = side_of(ranks, 0, shapes, grad_dtype=grad_dtype)
        by_torch = Side(ByTorch(), group, shapes, grad_dtype, ranks.device)

        def move(side: Side, by_torch: Side = by_torch) -> None:
            for step in range(2):
                side.step([], step)
                for second in range(2):  # a replica of each of two experts, and two of one
                    by_torch.step([Transfer(0, 0, 0, 0), Transfer(0, second, 0, 1)], step)
            side.transport.gather(torch.ones(5, dtype=torch.int64, device=side.device), "a layer")

        ranks.run([side], move)


def test_the_library_has_the_kernels() -> None:
    assert has_cuda_part()


@pytest.mark.parametrize("grad_dtype", GRAD_DTYPES)
@pytest.mark.parametrize("relay_threshold", [0, 1000], ids=["relays", "direct"])
@pytest.mark.parametrize("shapes", [SHAPES, LARGE, ALIGNED], ids=["small", "odd", "aligned"])
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_random_transfers_back_to_back(
    num_ranks: int, shapes: Any, relay_threshold: int, grad_dtype: torch.dtype
) -> None:
    ranks = VirtualRanks(num_ranks)

    sides = [
        side_of(ranks, rank, shapes, relay_threshold=relay_threshold, grad_dtype=grad_dtype)
        for rank in range(num_ranks)
    ]

    def move(side: Side) -> None:
        generator = random.Random(5)
        for step in range(10):
            side.step(random_transfers(generator, num_ranks), step)
        side.transport.raise_failure()

    ranks.run(sides, move)


def test_a_domain_needs_no_memory_of_others() -> None:
    """Two domains of two ranks, each without the addresses of the other."""
    ranks = VirtualRanks(4, domain_ranks=2)

    sides = [side_of(ranks, rank, ALIGNED, relay_threshold=0) for rank in range(4)]

    def move(side: Side) -> None:
        generator = random.Random(5)
        for step in range(10):
            side.step(within_domains(random_transfers(generator, 4), 2), step)
        side.transport.raise_failure()

    ranks.run(sides, move)


def test_steps_wait_for_no_host() -> None:
    """Many steps are called for before the first has run; nothing is compared until the end."""
    ranks, steps = VirtualRanks(4), 20
    sides = [side_of(ranks, rank, ALIGNED) for rank in range(4)]
    ranks.warm()
    generator = random.Random(7)
    plans = [random_transfers(generator, 4) for _ in range(steps)]
    there = [in_slots(plan, 4, device=ranks.device) for plan in plans]
    pushed: list[list[list[torch.Tensor]]] = [[] for _ in sides]

    def step(side: Side, idx: int) -> None:
        side.push(there[idx], idx).wait()
        pushed[side.rank].append([each.clone() for each in side.slot_weights])

    for idx in range(2):  # the caching allocators get what a step needs
        for side in sides:
            with torch.cuda.stream(ranks.streams[side.rank]):
                step(side, idx)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for idx in range(2, steps):
            for side in sides:
                with torch.cuda.stream(ranks.streams[side.rank]):
                    step(side, idx)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    for side in sides:
        for idx, filled in enumerate(pushed[side.rank]):
            side.slot_weights = filled
            side.check_slots(plans[idx], idx)


def test_a_push_of_another_stream_waits_for_the_slots_readers() -> None:
    """As in Megatron's combined schedule: the experts read on a stream that the push is not on."""
    ranks = VirtualRanks(2)
    sides = [side_of(ranks, rank, ALIGNED) for rank in range(2)]
    ranks.warm()
    plan = [Transfer(0, 0, 1, 0), Transfer(1, 0, 0, 0)]
    there = in_slots(plan, 2, device=ranks.device)
    read: list[list[torch.Tensor]] = []

    def all_ranks(call: Callable[[Side], None]) -> None:
        for side in sides:
            with torch.cuda.stream(ranks.streams[side.rank]):
                call(side)

    all_ranks(lambda side: side.push(there, 0).wait())
    torch.cuda.synchronize()
    for side in sides:
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(10**8)
            read.append([each.clone() for each in side.slot_weights])
            side.transport.note_reads()
    all_ranks(lambda side: side.push(there, 1, fill=False).wait())
    torch.cuda.synchronize()
    for side, before in zip(sides, read, strict=True):
        side.check_slots(plan, 1)
        side.slot_weights = before
        side.check_slots(plan, 0)


def test_replays_of_a_graph_go_on_counting() -> None:
    ranks = VirtualRanks(3)
    plan = [Transfer(0, 0, 1, 0), Transfer(0, 0, 2, 1), Transfer(2, 1, 0, 0)]
    device, shape = ranks.device, (5000,)
    there = in_slots(plan, 3, mains=2, device=device)
    transports = [transport_of(ranks, rank, relay_threshold=0) for rank in range(3)]
    ranks.warm()
    slot_weights = [[each.allocate((2, *shape), torch.float32, device)] for each in transports]
    slot_grads = [[each.allocate((2, *shape), torch.float32, device)] for each in transports]
    mains = [[[torch.zeros(shape, device=device) for _ in range(2)]] for _ in transports]
    totals = [[[torch.zeros(shape, device=device) for _ in range(2)]] for _ in transports]

    def step(rank: int) -> None:
        transports[rank].push(there, mains[rank], slot_weights[rank]).wait()
        slot_grads[rank][0].copy_(slot_weights[rank][0])
        for total in totals[rank][0]:
            total.zero_()
        transports[rank].pull_add(there, slot_grads[rank], totals[rank], [None]).wait()

    def all_ranks(call: Any) -> None:
        for rank in range(3):
            with torch.cuda.stream(ranks.streams[rank]):
                call(rank)
        torch.cuda.synchronize()

    all_ranks(step)
    graphs = [torch.cuda.CUDAGraph() for _ in transports]
    for rank, graph in enumerate(graphs):
        with torch.cuda.graph(graph, stream=ranks.streams[rank]):
            step(rank)
    for replay in range(5):
        for rank in range(3):
            for m in range(2):
                mains[rank][0][m].fill_(100 * replay + 10 * rank + m)
        torch.cuda.synchronize()
        all_ranks(lambda rank: graphs[rank].replay())
        for t in plan:
            value = 100.0 * replay + 10 * t.home_rank + t.main_idx
            assert slot_weights[t.replica_rank][0][t.slot_idx].eq(value).all()
            num_replicas = sum((o.home_rank, o.main_idx) == (t.home_rank, t.main_idx) for o in plan)
            assert totals[t.home_rank][0][t.main_idx].eq(value * num_replicas).all()
            assert not slot_grads[t.replica_rank][0][t.slot_idx].any()
    # A call outside of the graphs finds the generation that the replays have come to.
    all_ranks(step)
    for transport in transports:
        transport.raise_failure()


@pytest.mark.parametrize("are_mains_known", [True, False])
@pytest.mark.parametrize("relay_threshold", [0, 1000], ids=["relays", "direct"])
def test_replays_of_a_graph_follow_the_plan_in_memory(
    relay_threshold: int, are_mains_known: bool
) -> None:
    num_ranks = 4
    ranks = VirtualRanks(num_ranks)
    sides = [side_of(ranks, rank, relay_threshold=relay_threshold) for rank in range(num_ranks)]
    ranks.warm()
    there = in_slots([], num_ranks, device=ranks.device)
    mains = [
        [[side.weights[side.rank][m][g] for m in range(MAINS)] for g in range(len(SHAPES))]
        for side in sides
    ]

    def push(side: Side) -> None:
        side.transport.push(there, mains[side.rank], side.slot_weights).wait()

    def all_ranks(call: Any) -> None:
        for side in sides:
            with torch.cuda.stream(ranks.streams[side.rank]):
                call(side)
        torch.cuda.synchronize()

    all_ranks(push)
    # Addresses of mains are known from their first push; else the graph writes them, as those of
    # quantized weights that a captured step makes.
    if not are_mains_known:
        mains = [[[each.clone() for each in main] for main in of_side] for of_side in mains]
    graphs = [torch.cuda.CUDAGraph() for _ in sides]
    for side, graph in zip(sides, graphs, strict=True):
        with torch.cuda.graph(graph, stream=ranks.streams[side.rank]):
            push(side)
    generator = random.Random(9)
    for _ in range(10):
        plan = random_transfers(generator, num_ranks)
        there.experts_in_slots.copy_(in_slots(plan, num_ranks).experts_in_slots)
        for side in sides:
            for segment in side.slot_weights:
                segment.fill_(float("nan"))
        torch.cuda.synchronize()
        all_ranks(lambda side: graphs[side.rank].replay())
        for side in sides:
            side.check_slots(plan, 0)
            side.transport.raise_failure()


def rows_of(ranks: VirtualRanks, step: int, num_words: int) -> torch.Tensor:
    """What ranks gather in a step, int64 [R, W]."""
    words = torch.arange(ranks.num_ranks * num_words, device=ranks.device)
    return 10_000 * step + words.view(-1, num_words)


@pytest.mark.parametrize("num_ranks", [2, 8])
def test_rows_gathered_back_to_back(num_ranks: int) -> None:
    """Of changing sizes, beside pushes; what arrived is looked at when all have been called for."""
    ranks = VirtualRanks(num_ranks)
    # The longest first: a larger table is shared by processes together, which streams are not.
    plan = [(step, random.Random(step).randrange(1, 600) if step else 600) for step in range(40)]

    sides = [side_of(ranks, rank) for rank in range(num_ranks)]

    def gather(side: Side) -> None:
        given = [rows_of(ranks, *each) for each in plan]
        moved = random_transfers(random.Random(5), num_ranks)
        found = []
        for step, rows in enumerate(given):
            found.append(side.transport.gather(rows[side.rank].clone(), "layer 1"))
            if step % 8 == 0:
                side.push(moved, step).wait()
        torch.cuda.current_stream().synchronize()
        side.transport.raise_failure()
        for rows, arrived in zip(given, found, strict=True):
            assert torch.equal(arrived, rows)

    ranks.run(sides, gather)


def test_replays_of_a_graph_gather_what_is_there() -> None:
    ranks, num_words = VirtualRanks(3), 257
    transports = [transport_of(ranks, rank) for rank in range(3)]
    ranks.warm()
    mine = [rows_of(ranks, 0, num_words)[rank].clone() for rank in range(3)]
    found: dict[int, torch.Tensor] = {}

    def gather(rank: int) -> None:
        found[rank] = transports[rank].gather(mine[rank], "layer 1")

    def all_ranks(call: Any) -> None:
        for rank in range(3):
            with torch.cuda.stream(ranks.streams[rank]):
                call(rank)
        torch.cuda.synchronize()

    all_ranks(gather)  # makes the table
    graphs = [torch.cuda.CUDAGraph() for _ in transports]
    for rank, graph in enumerate(graphs):
        with torch.cuda.graph(graph, stream=ranks.streams[rank]):
            gather(rank)
    for step in range(1, 6):
        rows = rows_of(ranks, step, num_words)
        for rank in range(3):
            mine[rank].copy_(rows[rank])
        torch.cuda.synchronize()
        all_ranks(lambda rank: graphs[rank].replay())
        for rank in range(3):
            assert torch.equal(found[rank], rows)
            transports[rank].raise_failure()


def test_the_row_of_a_late_rank_is_zeros() -> None:
    ranks = VirtualRanks(2)
    transports = [transport_of(ranks, rank, timeout_s=0.2) for rank in range(2)]
    ranks.warm()
    rows = transports[0].gather(torch.ones(5, dtype=torch.int64, device=ranks.device), "layer 3")
    torch.cuda.synchronize()
    assert rows.tolist() == [[1] * 5, [0] * 5]
    with pytest.raises(RuntimeError, match=r"rank 0 waited 0.2 s for rank 1 to send its row"):
        transports[0].raise_failure()


def test_a_push_of_a_plan_waits_for_no_host() -> None:
    """From a load on the device to filled slots and added gradients."""
    ranks = VirtualRanks(1)
    device = ranks.device
    transport = transport_of(ranks, 0)
    slot_weights = [transport.allocate((1, 64), torch.float32, device)]
    mains = [[torch.ones(64, device=device) for _ in range(4)]]
    load = torch.ones(1, 4, dtype=torch.int64, device=device)
    slot_grads = [transport.allocate((1, 64), torch.float32, device)]
    totals = [[torch.ones(64, device=device) for _ in range(4)]]
    for is_first in (True, False):  # the caching allocators get what a step needs
        torch.cuda.set_sync_debug_mode("default" if is_first else "error")
        try:
            plan = solve(load, ep_size=1, slots=1)
            replicas = Transfers(plan.experts_in_slots, 4)
            transport.push(replicas, mains, slot_weights).wait()
            transport.pull_add(replicas, slot_grads, totals, [None]).wait()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("relay_threshold", [0, 1000], ids=["relays", "direct"])
def test_mains_of_bytes_may_be_shorter_than_their_slots(relay_threshold: int) -> None:
    """Parts of quantized weights are: a push fills a slot from its start, and no more."""
    ranks = VirtualRanks(3)
    plan = [Transfer(0, 0, 1, 0), Transfer(0, 0, 2, 1), Transfer(2, 1, 0, 0)]
    there = in_slots(plan, 3, mains=2, device=ranks.device)
    transports = [transport_of(ranks, r, relay_threshold=relay_threshold) for r in range(3)]
    ranks.warm()
    sizes = (16, 1 << 19)
    slots = [
        [each.allocate((2, size), torch.uint8, ranks.device) for size in sizes]
        for each in transports
    ]
    for step, used in enumerate([sizes, (4, 1 << 18), sizes]):
        mains = [
            [[_bytes(size, rank, m, step, ranks.device) for m in range(2)] for size in used]
            for rank in range(3)
        ]
        torch.cuda.synchronize()
        for rank in range(3):
            with torch.cuda.stream(ranks.streams[rank]):
                for buffer in slots[rank]:
                    buffer.fill_(255)
                transports[rank].push(there, mains[rank], slots[rank]).wait()
        torch.cuda.synchronize()
        for t in plan:
            for g, size in enumerate(used):
                slot = slots[t.replica_rank][g][t.slot_idx]
                assert torch.equal(slot[:size], mains[t.home_rank][g][t.main_idx])
                assert slot[size:].eq(255).all()


def _bytes(size: int, rank: int, main_idx: int, step: int, device: torch.device) -> torch.Tensor:
    return torch.full((size,), 40 * rank + 10 * main_idx + step, dtype=torch.uint8, device=device)


def test_a_plan_that_is_too_large_is_refused() -> None:
    """The ranks when the transport is made, the slots with their memory, the experts by a push."""
    make = torch.classes.megatron_ext.PeerExchange
    device = VirtualRanks(1).device
    most = r"^transport cuda is for at most 512 ranks, 8192 slots .* less than 524288 experts, got "
    given = (1.0, torch.empty(0, device=device), 4, 1, 1)
    for rank, first_peer, num_peers in ((0, 0, 513), (600, 576, 64)):
        with pytest.raises(ValueError, match=rf"{most}\d+ ranks .*balance\.transport=collective"):
            make(rank, first_peer, num_peers, *given)
    exchange = make(0, 0, 1, *given)
    slots = torch.zeros(33, 4, device=device)
    addresses = torch.zeros(256, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match=rf"{most}256 ranks with 33 slots"):
        exchange.add_segment(slots, addresses)
    transport = transport_of(VirtualRanks(1), 0)
    slot_weights = [transport.allocate((1, 4), torch.float32, device)]
    plan = in_slots([], 1, mains=1 << 19, slots=1, device=device)
    with pytest.raises(ValueError, match=rf"{most}1 ranks with 1 slots and 524288 experts each"):
        transport.push(plan, [[torch.ones(4, device=device)]], slot_weights)


def test_a_late_peer_is_named() -> None:
    ranks = VirtualRanks(2)
    transports = [transport_of(ranks, rank, timeout_s=0.2) for rank in range(2)]
    ranks.warm()
    slot_weights = [[each.allocate((1, 64), torch.float32, ranks.device)] for each in transports]
    main = [[torch.ones(64, device=ranks.device)]]
    plan = in_slots([Transfer(0, 0, 1, 0)], 2, mains=1, slots=1, device=ranks.device)
    transports[0].push(plan, main, slot_weights[0], "layer 3").wait()
    start = time.monotonic()
    torch.cuda.synchronize()
    assert time.monotonic() - start < 10
    message = r"rank 0 waited 0.2 s for rank 1 to free slot 0 \(generation 1, seen 0\), layer 3"
    with pytest.raises(RuntimeError, match=message):
        transports[0].raise_failure()
    with pytest.raises(RuntimeError, match=message):
        transports[0].push(plan, main, slot_weights[0])


def test_an_aborted_step_is_forgotten() -> None:
    """The time limit is longer than the test may take: the reset ends the waits."""
    ranks = VirtualRanks(2)
    everywhere = [Transfer(0, 0, 1, 0), Transfer(1, 0, 0, 0)]

    sides = [side_of(ranks, rank, timeout_s=600.0) for rank in range(2)]

    def move(side: Side) -> None:
        side.step(everywhere, 0)
        if side.rank == 0:  # waits for the other, which does not come
            side.push(everywhere, 1).wait()
        start = time.monotonic()
        side.transport.reset()
        assert time.monotonic() - start < 10, "a reset ends waits at once"
        for step in range(2, 5):
            side.step(everywhere, step)

    ranks.run(sides, move)


def test_arguments_are_checked() -> None:
    ranks = VirtualRanks(1)
    transport = transport_of(ranks, 0)
    slot_weights = [transport.allocate((1, 4), torch.float32, ranks.device)]
    slot_grads = [transport.allocate((1, 4), torch.float64, ranks.device)]
    plan = in_slots([], 1, mains=1, slots=1, device=ranks.device)
    with pytest.raises(ValueError, match=r"transport cuda .*cuda:0 only, not of cpu"):
        transport.allocate((1, 4), torch.float32, torch.device("cpu"))
    with pytest.raises(ValueError, match="main must be contiguous"):
        transport.push(plan, [[torch.ones(4)]], slot_weights)
    with pytest.raises(ValueError, match=r"slot_grads .*float32 or bfloat16, got Double"):
        transport.pull_add(plan, slot_grads, [[torch.ones(4, device=ranks.device)]], [None])
    transport.close()
    with pytest.raises(RuntimeError, match="closed"):
        transport.push(plan, [[torch.ones(4, device=ranks.device)]], slot_weights)


def _move_between_gpus(rank: int) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    assert agree_on_transport("auto", None, dist.group.WORLD, device)[0] == "cuda"
    transport = make_transport("cuda", dist.group.WORLD, device, OPTIONS)
    side = Side(transport, dist.group.WORLD, LARGE, torch.float32, device)
    generator = random.Random(5)
    for step in range(20):
        side.step(random_transfers(generator, dist.get_world_size()), step)


@pytest.mark.gpu(n=2)
def test_gpus_reach_each_other() -> None:
    run_ranks(_move_between_gpus, 2)


@needs_sanitizer
@pytest.mark.parametrize("tool", SANITIZERS)
def test_sanitizers_find_nothing(tool: str) -> None:
    # A tool that lets one kernel run after the other never ends here: ranks wait for each other.
    sanitize(tool, f"{__file__}::test_random_transfers_back_to_back[2-small-relays-grad_dtype0]")


def _work_goes_on(rank: int) -> None:
    """Rank 0 moves and works, and only then does its peer make the same call."""
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    heap = SymmetricHeap(dist.group.WORLD, device)
    transport = CudaTransport(heap, timeout_s=60.0, push_blocks=BLOCKS, grad_reduce_share=SHARE)
    slot_weights, slot_grads = (
        [transport.allocate((1, 4096), torch.float32, device)] for _ in ("weights", "gradients")
    )
    moved = [Transfer(0, 0, 1, 0), Transfer(1, 0, 0, 0)]
    plan = in_slots(moved, 2, mains=1, slots=1, device=device)
    main, total = torch.full((4096,), 1.0 + rank, device=device), torch.zeros(4096, device=device)
    calls = (
        lambda: transport.push(plan, [[main]], slot_weights),
        lambda: transport.pull_add(plan, slot_grads, [[total]], [None]),
    )

    def work() -> torch.Tensor:
        return (torch.ones(64, 64, device=device) @ main[:64]).sum()

    # What the first product loads waits for all that runs, and the push would wait for the peer.
    work()
    torch.cuda.synchronize()
    rounds = 3  # the first loads kernels, and writes addresses
    for round_idx in range(rounds):
        for call in calls:
            if rank == 0:
                under_way = call()
                beside = work()
                done = torch.cuda.Event()
                done.record()
                while round_idx and not done.query():
                    transport.raise_failure()  # which comes if the work waits for the peer
            dist.barrier()
            if rank == 1:
                under_way = call()
            under_way.wait()
            torch.cuda.synchronize()
            transport.raise_failure()
            slot_grads[0].copy_(slot_weights[0])
    assert slot_weights[0].eq(2.0 - rank).all()
    assert total.eq(rounds * (1.0 + rank)).all()
    assert rank == 1 or beside == 64 * 64


def test_processes_work_beside_a_push_and_a_pull() -> None:
    run_ranks(_work_goes_on, 2, timeout_s=LIMIT_S)


def _forget_an_aborted_step(rank: int, where: str) -> None:
    """The last rank leaves a step, its peers where they miss it; then all go on after a reset."""
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    num_ranks = dist.get_world_size()
    heap = SymmetricHeap(dist.group.WORLD, device)
    # Longer than the test may take: the reset ends the waits.
    transport = CudaTransport(heap, timeout_s=600.0, push_blocks=BLOCKS, grad_reduce_share=SHARE)
    side = Side(transport, dist.group.WORLD, LARGE, torch.float32, device)
    generator = random.Random(11)
    everywhere = [Transfer(home, 0, (home + 1) % num_ranks, 0) for home in range(num_ranks)]
    for attempt in range(2):
        for step in range(2):
            side.step(random_transfers(generator, num_ranks), step)
        leaves = rank == num_ranks - 1
        if not (leaves and where == "before the push"):
            under_way = side.push(everywhere, 90 + attempt)
            if where == "before the reduction":
                under_way.wait()
                if not leaves:
                    totals = [
                        [torch.zeros(shape, device=device) for _ in range(MAINS)]
                        for shape in side.shapes
                    ]
                    plan = in_slots(everywhere, num_ranks, device=device)
                    transport.pull_add(plan, side.slot_grads, totals, [None] * len(totals))
        dist.barrier()
        start = time.monotonic()
        transport.reset()
        torch.cuda.synchronize()
        assert time.monotonic() - start < 30, "a reset ends waits at once"
        for segment in side.slot_grads:
            segment.zero_()
        for step in range(2):
            side.step(random_transfers(generator, num_ranks), step)


@pytest.mark.parametrize("where", ["before the push", "during the push", "before the reduction"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_processes_forget_an_aborted_step(num_ranks: int, where: str) -> None:
    run_ranks(_forget_an_aborted_step, num_ranks, where, timeout_s=LIMIT_S)


def _move_between_processes(
    rank: int, shapes: Any, relay_threshold: int, grad_dtype: torch.dtype
) -> None:
    # They share the GPU here; in training each rank has its own.
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    heap = SymmetricHeap(dist.group.WORLD, device)
    transport = CudaTransport(
        heap,
        timeout_s=20.0,
        relay_threshold=relay_threshold,
        push_blocks=BLOCKS,
        grad_reduce_share=SHARE,
    )
    side = Side(transport, dist.group.WORLD, shapes, grad_dtype, device)
    generator = random.Random(5)
    for step in range(5):
        side.step(random_transfers(generator, dist.get_world_size()), step)
        row = torch.arange(300, device=device) + 1000 * rank + step
        found = transport.gather(row, "layer 1")
        expected = row - 1000 * rank + 1000 * torch.arange(len(found), device=device)[:, None]
        assert torch.equal(found, expected)
    transport.reset()
    side.step(random_transfers(generator, dist.get_world_size()), 5)
    chosen, _ = agree_on_transport("auto", None, dist.group.WORLD, device)
    assert chosen == "collective", "ranks that share a GPU are not to be expected"


@pytest.mark.parametrize(
    ("shapes", "relay_threshold", "grad_dtype"),
    [(LARGE, 1000, torch.float32), (ALIGNED, 0, torch.bfloat16)],
    ids=["odd", "relays"],
)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_processes_reach_each_other(
    num_ranks: int, shapes: Any, relay_threshold: int, grad_dtype: torch.dtype
) -> None:
    """Cases of virtual ranks once more, without what several ranks in a process may wait for."""
    run_ranks(
        _move_between_processes, num_ranks, shapes, relay_threshold, grad_dtype, timeout_s=LIMIT_S
    )


@pytest.mark.timeout(300)
@pytest.mark.parametrize("queues", [1, 8, 32])
def test_processes_have_any_number_of_queues(queues: int) -> None:
    """Ranks that are processes, as in training; the launcher sets one queue."""
    result = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", __file__),
            *("-k", "processes_work or (processes_reach and 2-)"),
        ],
        env={**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": str(queues)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert result.returncode == 0, result.stdout + result.stderr
