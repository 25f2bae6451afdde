"""Replicas and gradients arrive where the transfers say, bit for bit, on every transport.

Layer 2 (2 and 4 gloo ranks). Slots are filled with NaN before each push, so a missing copy shows;
gradients are small integers, so their sums are exact in any order.
"""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist

from megatron_ext.transport import TRANSPORTS, Transfer, make_transport, resolve_transport
from tests.ranks import run_ranks

MAINS, SLOTS = 3, 2
SHAPES = [(4, 3), (3, 4), (5,)]


def random_transfers(generator: random.Random, world_size: int) -> list[Transfer]:
    """Replicas as a legal plan has them: no expert at home, none twice on a rank."""
    transfers = []
    for rank in range(world_size):
        foreign = [(home, m) for home in range(world_size) if home != rank for m in range(MAINS)]
        chosen = generator.sample(foreign, generator.randint(0, SLOTS))
        transfers += [Transfer(home, m, rank, slot) for slot, (home, m) in enumerate(chosen)]
    return transfers


def weight(home: int, main_idx: int, segment: int, round_idx: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(hash((home, main_idx, segment, round_idx)) % 2**31)
    return torch.randn(SHAPES[segment], generator=generator)


def gradient(rank: int, slot: int, segment: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + 10 * slot + segment)
    return torch.randint(-8, 9, SHAPES[segment], generator=generator).float()


def _move(rank: int, name: str) -> None:
    world_size = dist.get_world_size()
    cpu = torch.device("cpu")
    transport = make_transport(name, dist.group.WORLD, cpu)
    slots = [transport.allocate((SLOTS, *shape), torch.float32, cpu) for shape in SHAPES]
    grads = [transport.allocate((SLOTS, *shape), torch.float32, cpu) for shape in SHAPES]
    generator = random.Random(5)
    for round_idx in range(30):
        transfers = random_transfers(generator, world_size)
        for segment in slots:
            segment.fill_(float("nan"))
        mains = [
            [weight(rank, m, segment, round_idx) for m in range(MAINS)]
            for segment in range(len(SHAPES))
        ]
        transport.push(transfers, mains, slots).wait()
        mine = {t.slot_idx: t for t in transfers if t.replica_rank == rank}
        for slot in range(SLOTS):
            for segment, values in enumerate(slots):
                if slot in mine:
                    source = mine[slot]
                    expected = weight(source.home_rank, source.main_idx, segment, round_idx)
                    assert torch.equal(values[slot], expected)
                else:
                    assert values[slot].isnan().all(), "an unused slot was written"

        for segment, values in enumerate(grads):
            for slot in range(SLOTS):
                values[slot].copy_(gradient(rank, slot, segment))
        homes = {t.main_idx for t in transfers if t.home_rank == rank}
        sums = {m: [torch.full(shape, float("nan")) for shape in SHAPES] for m in homes}
        transport.pull_add(transfers, grads, sums)
        for m, totals in sums.items():
            for segment, total in enumerate(totals):
                parts = [
                    gradient(t.replica_rank, t.slot_idx, segment)
                    for t in transfers
                    if (t.home_rank, t.main_idx) == (rank, m)
                ]
                assert torch.equal(total, torch.stack(parts).sum(0))


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", TRANSPORTS)
def test_random_transfers_back_to_back(name: str, world_size: int) -> None:
    run_ranks(_move, world_size, name)


def _move_in_subgroups(rank: int) -> None:
    """Two EP groups at once: group ranks are not global ranks."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group = groups[rank % 2]
    transport = make_transport("auto", group, torch.device("cpu"))
    slots = [transport.allocate((1, 2), torch.float32, torch.device("cpu"))]
    main = torch.full((2,), float(rank))
    transport.push([Transfer(0, 0, 1, 0)], [[main]], slots).wait()
    if group.rank() == 1:
        assert slots[0].tolist() == [[float(rank - 2)] * 2]


def test_ranks_are_those_of_the_group() -> None:
    run_ranks(_move_in_subgroups, 4)


def test_unknown_transport_is_refused() -> None:
    with pytest.raises(ValueError, match=r"balance.transport \('rdma'\).*'auto' or one of"):
        resolve_transport("rdma")
