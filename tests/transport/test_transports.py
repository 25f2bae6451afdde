"""Replicas and gradients arrive where the transfers say, bit for bit, on every transport.

Layer 2 (2 to 8 gloo ranks). Slots are filled with NaN before each push, so a missing copy shows;
gradients are small integers, so their sums are exact in any order.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron_ext import config
from megatron_ext.ops import has_cuda_part
from megatron_ext.transport import (
    TRANSPORTS,
    Pending,
    Transfer,
    Transfers,
    Transport,
    TransportKind,
    TransportOptions,
    agree_on_transport,
    make_transport,
    resolve_transport,
)
from megatron_ext.transport.cuda import CudaTransport
from megatron_ext.transport.shared_memory import SharedMemoryTransport
from tests.ranks import run_ranks

CPU = torch.device("cpu")
# Those of CUDA are tested in tests/gpu/test_transport.py.
CPU_TRANSPORTS = tuple(n for n, kind in TRANSPORTS.items() if kind.device_type in (None, "cpu"))
MAINS, SLOTS = 3, 2
SHAPES = ((4, 3), (3, 4), (5,))
LARGE = ((700, 1001), (3,))
"""The first is many chunks of the shared-memory transport."""


def random_transfers(generator: random.Random, world_size: int) -> list[Transfer]:
    """Replicas as a legal plan has them: no expert at home, none twice on a rank."""
    transfers = []
    for rank in range(world_size):
        foreign = [(home, m) for home in range(world_size) if home != rank for m in range(MAINS)]
        chosen = generator.sample(foreign, generator.randint(0, SLOTS))
        transfers += [Transfer(home, m, rank, slot) for slot, (home, m) in enumerate(chosen)]
    return transfers


def in_slots(
    transfers: list[Transfer],
    num_ranks: int,
    *,
    mains: int = MAINS,
    slots: int = SLOTS,
    device: torch.device = CPU,
) -> Transfers:
    """Return these replicas as a plan has them."""
    experts = torch.full((num_ranks, slots), -1, dtype=torch.int32)
    for t in transfers:
        experts[t.replica_rank, t.slot_idx] = t.home_rank * mains + t.main_idx
    return Transfers(experts.to(device), mains)


def test_slots_list_the_replicas_that_they_hold() -> None:
    generator = random.Random(1)
    for num_ranks in (1, 2, 5, 8):
        transfers = random_transfers(generator, num_ranks)
        assert list(in_slots(transfers, num_ranks)) == transfers


def build(name: str, group: ProcessGroup, **options: Any) -> Transport:
    """Make a transport; options are those of the shared-memory one."""
    if options:
        assert name == "shared_memory", name
        return SharedMemoryTransport(group, **options)
    return TRANSPORTS[name].make(group, CPU, TransportOptions())


@dataclass
class Side:
    """One rank's buffers, and what its peers' must hold."""

    transport: Transport
    group: ProcessGroup
    shapes: tuple[tuple[int, ...], ...] = SHAPES
    grad_dtype: torch.dtype = torch.float32
    device: torch.device = CPU

    def __post_init__(self) -> None:
        self.rank = self.group.rank()
        self.slot_weights = self._allocate(torch.float32)
        self.slot_grads = self._allocate(self.grad_dtype)
        # Everybody knows everybody's values: [home][main][segment], [rank][slot][segment].
        generator = torch.Generator().manual_seed(1)
        ranks = range(self.group.size())
        self.weights = [
            [
                [torch.randn(shape, generator=generator).to(self.device) for shape in self.shapes]
                for _ in range(MAINS)
            ]
            for _ in ranks
        ]
        self.gradients = [
            [
                [
                    torch.randint(-8, 9, shape, generator=generator).float().to(self.device)
                    for shape in self.shapes
                ]
                for _ in range(SLOTS)
            ]
            for _ in ranks
        ]

    def _allocate(self, dtype: torch.dtype) -> list[torch.Tensor]:
        return [
            self.transport.allocate((SLOTS, *shape), dtype, self.device) for shape in self.shapes
        ]

    def push(
        self, transfers: list[Transfer] | Transfers, step: int, label: str = "", fill: bool = True
    ) -> Pending:
        for segment in self.slot_weights if fill else ():
            segment.fill_(float("nan"))
        mains = [
            [self.weights[self.rank][m][g] + step for m in range(MAINS)]
            for g in range(len(self.shapes))
        ]
        if not isinstance(transfers, Transfers):
            transfers = in_slots(transfers, self.group.size(), device=self.device)
        return self.transport.push(transfers, mains, self.slot_weights, label)

    def check_slots(self, transfers: list[Transfer], step: int, filled: bool = True) -> None:
        mine = {t.slot_idx: t for t in transfers if t.replica_rank == self.rank}
        for g, values in enumerate(self.slot_weights):
            for slot in range(SLOTS):
                if slot in mine:
                    source = self.weights[mine[slot].home_rank][mine[slot].main_idx][g]
                    assert torch.equal(values[slot], source + step)
                elif filled:
                    assert values[slot].isnan().all(), "an unused slot was written"

    def pull_add_and_check(
        self, transfers: list[Transfer] | Transfers, step: int, label: str = ""
    ) -> None:
        for g, values in enumerate(self.slot_grads):
            for slot in range(SLOTS):
                values[slot].copy_(self.gradients[self.rank][slot][g] + step % 7)
        # Where gradients are narrow, the totals are so, too, in every other step.
        wide = torch.promote_types(self.grad_dtype, torch.float32)
        dtype = self.grad_dtype if step % 2 else wide
        totals, aside = (
            [
                [
                    torch.full(shape, start + m, dtype=dtype, device=self.device)
                    for m in range(MAINS)
                ]
                for shape in self.shapes
            ]
            for start in (8.0, 16.0)
        )
        # Every other segment has something set aside, but for one main.
        asides = [
            [*of_segment[:-1], None] if g % 2 == 0 else None for g, of_segment in enumerate(aside)
        ]
        if not isinstance(transfers, Transfers):
            transfers = in_slots(transfers, self.group.size(), device=self.device)
        listed = list(transfers)
        self.transport.pull_add(transfers, self.slot_grads, totals, asides, label).wait()
        for t in listed:
            for values in self.slot_grads:
                if t.replica_rank == self.rank:
                    assert not values[t.slot_idx].any(), "gradients are zero again"
        for values in self.slot_grads:
            values.fill_(float("nan"))  # they belong to this rank again
        for g, of_segment in enumerate(totals):
            for m, total in enumerate(of_segment):
                parts = [
                    self.gradients[t.replica_rank][t.slot_idx][g] + step % 7
                    for t in listed
                    if (t.home_rank, t.main_idx) == (self.rank, m)
                ]
                expected = torch.full_like(total, 8.0 + m, dtype=wide)
                if parts:
                    expected += torch.stack(parts).sum(0).to(wide)
                    if asides[g] is not None and m < MAINS - 1:
                        expected += 16.0 + m
                assert torch.equal(total, expected.to(dtype))

    def step(self, transfers: list[Transfer], step: int) -> None:
        self.push(transfers, step).wait()
        self.check_slots(transfers, step)
        self.pull_add_and_check(transfers, step)


def _move(
    rank: int,
    name: str,
    num_steps: int,
    shapes: tuple[tuple[int, ...], ...] = SHAPES,
    grad_dtype: torch.dtype = torch.float32,
    **options: Any,
) -> None:
    transport = build(name, dist.group.WORLD, **options)
    side = Side(transport, dist.group.WORLD, shapes, grad_dtype)
    generator = random.Random(5)
    for step in range(num_steps):
        side.step(random_transfers(generator, dist.get_world_size()), step)


@pytest.mark.parametrize("kind", TRANSPORTS.values(), ids=TRANSPORTS.keys())
def test_the_functions_of_a_kind_exist(kind: TransportKind) -> None:
    """They are imported when they are called, on GPUs some of them."""
    for function in (kind.make, kind.obstacles, kind.is_slow):
        if isinstance(function, partial):
            module, name = function.args
            assert callable(getattr(import_module(f"megatron_ext.transport.{module}"), name))


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", CPU_TRANSPORTS)
def test_random_transfers_back_to_back(name: str, world_size: int) -> None:
    run_ranks(_move, world_size, name, 30)


@pytest.mark.parametrize("name", CPU_TRANSPORTS)
def test_segments_of_several_chunks(name: str) -> None:
    run_ranks(_move, 4, name, 3, LARGE)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (name, dtype)
        for name in CPU_TRANSPORTS
        for dtype in (torch.bfloat16, torch.float64, torch.float16)
        if dtype != torch.float16 or TRANSPORTS[name].adds_float16
    ],
)
def test_gradients_of_other_dtypes(name: str, dtype: torch.dtype) -> None:
    run_ranks(_move, 2, name, 5, SHAPES, dtype)


_SLOT_BYTES = (16, 1 << 19)
"""Slots of bytes; the second are several chunks."""


def _push_shorter(rank: int, name: str, **options: Any) -> None:
    """Mains of bytes fill the start of their slots; each push's are shorter or longer."""
    num_ranks = dist.get_world_size()
    transport = build(name, dist.group.WORLD, **options)
    slots = [transport.allocate((SLOTS, size), torch.uint8, CPU) for size in _SLOT_BYTES]
    generator = random.Random(7)
    for step in range(6):
        transfers = random_transfers(generator, num_ranks)
        sizes = [4 if step % 2 else 16, 1 << (18 + step % 2)] if step < 4 else list(_SLOT_BYTES)
        mains = [
            [torch.full((size,), _byte(rank, m, step), dtype=torch.uint8) for m in range(MAINS)]
            for size in sizes
        ]
        for buffer in slots:
            buffer.fill_(255)
        transport.push(in_slots(transfers, num_ranks), mains, slots).wait()
        mine = {t.slot_idx: t for t in transfers if t.replica_rank == rank}
        for buffer, size in zip(slots, sizes, strict=True):
            for slot_idx, slot in enumerate(buffer):
                t = mine.get(slot_idx)
                if t is not None:
                    assert slot[:size].eq(_byte(t.home_rank, t.main_idx, step)).all()
                # Behind it, a slot has what it had, or what a relay had behind its own.
                assert slot[0 if t is None else size :].eq(255).all()


def _byte(rank: int, main_idx: int, step: int) -> int:
    return 40 * rank + 10 * main_idx + step


@pytest.mark.parametrize("name", CPU_TRANSPORTS)
def test_mains_of_bytes_may_be_shorter_than_their_slots(name: str) -> None:
    run_ranks(_push_shorter, 4, name)


def test_shorter_mains_go_through_relays() -> None:
    run_ranks(partial(_push_shorter, relay_threshold=0), 4, "shared_memory")


def _push_longer(rank: int, name: str) -> None:
    transport = build(name, dist.group.WORLD)
    slots = [transport.allocate((1, 16), torch.uint8, CPU)]
    mains = [[torch.zeros(17, dtype=torch.uint8)]]
    with pytest.raises(ValueError, match=r"main must be .*\[16\].* got .*\[17\]"):
        transport.push(
            in_slots([Transfer(0, 0, 1, 0), Transfer(1, 0, 0, 0)], 2, mains=1, slots=1),
            mains,
            slots,
        )


def test_mains_longer_than_their_slots_are_refused() -> None:
    run_ranks(_push_longer, 2, "shared_memory")


def _add_256_and_1(rank: int, name: str) -> None:
    transport = build(name, dist.group.WORLD)
    slot_grads = [transport.allocate((1, 2), torch.bfloat16, CPU)]
    # 1.0078125 is the next number after 1, and more than half of the step at 256.
    for start, expected in (
        (torch.zeros(2), 257.0),
        (torch.full((2,), 0.0078125).bfloat16(), 258.0),
    ):
        slot_grads[0].fill_({1: 256.0, 2: 1.0}.get(rank, 0.0))
        transfers = Transfers(torch.tensor([[-1], [0], [0], [-1]], dtype=torch.int32), 1)
        transport.pull_add(transfers, slot_grads, [[start]], [None]).wait()
        if rank == 0:
            assert start.tolist() == [expected] * 2, "bfloat16 has no 257"


@pytest.mark.parametrize("name", CPU_TRANSPORTS)
def test_bfloat16_gradients_add_in_float32(name: str) -> None:
    run_ranks(_add_256_and_1, 4, name)


def _move_in_groups(rank: int, name: str) -> None:
    """Each rank is in two EP groups: group ranks are not global ranks."""
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    sides = []
    for group in (dist.group.WORLD, pairs[rank % 2]):
        chosen, _ = agree_on_transport(name, None, group, CPU)
        sides.append(Side(make_transport(chosen, group, CPU, TransportOptions()), group))
    generators = [random.Random(5) for _ in sides]
    for step in range(20):
        for side, generator in zip(sides, generators, strict=True):
            side.step(random_transfers(generator, side.group.size()), step)


@pytest.mark.parametrize("name", ["auto", *CPU_TRANSPORTS])
def test_several_groups_in_one_process(name: str) -> None:
    run_ranks(_move_in_groups, 4, name)


def test_settings_name_all_transports() -> None:
    assert ("auto", *TRANSPORTS) == config.TRANSPORTS
    with pytest.raises(ValueError, match=r"balance.transport \('rdma'\) must be one of auto, "):
        config.BalanceConfig(transport="rdma")


def test_devices_have_transports_of_their_own() -> None:
    assert resolve_transport("auto", device_type="cuda") == "cuda"
    assert resolve_transport("auto", device_type="cuda", mapped=False) == "collective"
    with pytest.raises(ValueError, match=r"transport \('shared_memory'\).*CPU ranks only.* cuda"):
        resolve_transport("shared_memory", device_type="cuda")
    with pytest.raises(ValueError, match=r"transport \('cuda'\) .*CUDA ranks only.* cpu"):
        resolve_transport("cuda")


def _add_a_toy(rank: int) -> None:
    group, device = dist.group.WORLD, torch.device("meta")
    asked = TransportOptions(grad_reduce_share=0.5)
    toy = TransportKind(
        name="toy",
        device_type="meta",
        obstacles=lambda *arguments: [""],
        make=lambda *arguments: ("toy", *arguments),
    )
    with mock.patch.dict(TRANSPORTS, {"toy": toy}):
        assert agree_on_transport("auto", None, group, device) == ("toy", 1)
        assert make_transport("toy", group, device, asked) == ("toy", group, device, asked)
        assert resolve_transport("toy", device_type="meta") == "toy"
        with pytest.raises(ValueError, match=r"transport \('toy'\) .*META ranks only.* cpu"):
            resolve_transport("toy")


def test_a_line_of_the_registry_is_all_that_a_transport_needs() -> None:
    run_ranks(_add_a_toy, 1)


@pytest.mark.skipif(has_cuda_part(), reason="the library has its CUDA part")
def test_a_library_without_cuda_says_how_to_get_it() -> None:
    heap = SimpleNamespace(rank=0, num_ranks=1, peers=range(1), device=torch.device("cuda", 0))
    with pytest.raises(RuntimeError, match=r"transport cuda needs the CUDA part.*nvcc"):
        CudaTransport(heap, timeout_s=1.0)
