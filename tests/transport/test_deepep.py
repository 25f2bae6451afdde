"""The transport on DeepEP's primitives calls them as DeepEP 2.5 wants it, and moves what it must.

Layer 2 (gloo ranks), with `deep_ep_on_cpu.py` in the place of DeepEP. On GPUs: not run.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_ext.transport import TRANSPORTS, Transfer, TransportOptions, resolve_transport
from megatron_ext.transport.deepep import DeepEPTransport
from tests.ranks import run_ranks
from tests.transport.deep_ep_on_cpu import deep_ep
from tests.transport.test_domains import within_domains
from tests.transport.test_transports import CPU, MAINS, SLOTS, Side, in_slots, random_transfers

ALIGNED = ((4, 8), (16, 3, 2), (8,))
"""Slots of 128, 384 and 32 bytes."""


ABSENT = "absent"


@contextmanager
def installed(package: Any = None) -> Iterator[None]:
    # Only this name: what is imported meanwhile stays.
    sys.modules["deep_ep"] = None if package == ABSENT else package or deep_ep()  # type: ignore
    try:
        yield
    finally:
        del sys.modules["deep_ep"]


def transport_of(group: Any, first_rank: int = 0) -> DeepEPTransport:
    return DeepEPTransport(group, first_rank, timeout_s=1.5)


def _move(rank: int, num_steps: int) -> None:
    with installed():
        side = Side(transport_of(dist.group.WORLD), dist.group.WORLD, ALIGNED)
        generator = random.Random(5)
        for step in range(num_steps):
            side.step(random_transfers(generator, dist.get_world_size()), step)


@pytest.mark.parametrize("world_size", [2, 4])
def test_random_transfers_back_to_back(world_size: int) -> None:
    run_ranks(_move, world_size, 20)


def _move_in_domains(rank: int) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    with installed():
        first = rank // 2 * 2
        side = Side(transport_of(pairs[rank // 2], first), dist.group.WORLD, ALIGNED)
        generator = random.Random(5)
        for step in range(10):
            side.step(within_domains(random_transfers(generator, 4), 2), step)


def test_a_domain_counts_its_own_experts() -> None:
    run_ranks(_move_in_domains, 4)


def _drop_handles(rank: int) -> None:
    """A call whose handle was dropped ends before the next one of its kind."""
    transfers = [Transfer(0, 1, 1, 0), Transfer(1, 2, 0, 1)]
    with installed():
        side = Side(transport_of(dist.group.WORLD), dist.group.WORLD, ALIGNED)
        side.push(transfers, 1)
        side.push(transfers, 2, fill=False).wait()
        side.check_slots(transfers, 2, filled=False)
        for grads in side.slot_grads:
            grads.fill_(1.0)
        totals = [[torch.zeros(shape) for _ in range(MAINS)] for shape in ALIGNED]
        side.transport.pull_add(in_slots(transfers, 2), side.slot_grads, totals, [None] * 3)
        nothing = [[torch.zeros(shape) for _ in range(MAINS)] for shape in ALIGNED]
        side.transport.pull_add(in_slots([], 2), side.slot_grads, nothing, [None] * 3).wait()
        sums = [[float(each.unique()) for each in of_segment] for of_segment in totals]
        assert sums == [[0.0, 1.0, 0.0] if rank == 0 else [0.0, 0.0, 1.0]] * 3


def test_a_dropped_call_is_ended() -> None:
    run_ranks(_drop_handles, 2)


def _push_what_lies_side_by_side(rank: int) -> None:
    """Mains in one tensor are read there; shorter ones fill the start of their slots."""
    transfers = in_slots([Transfer(0, 1, 1, 0), Transfer(1, 2, 0, 1)], 2)
    with installed():
        transport = transport_of(dist.group.WORLD)
        slots = transport.allocate((SLOTS, 4, 8), torch.float32, CPU)
        assert not slots.any(), "DeepEP's memory is garbage"
        together = torch.arange(MAINS * 32.0).view(MAINS, 4, 8) + 100 * rank
        given = transport._beside(list(together), slots)
        assert given.data_ptr() == together.data_ptr()
        assert torch.equal(given, together)
        transport.push(transfers, [list(together)], [slots]).wait()
        expected = torch.arange(32.0).view(4, 8) + (32 if rank == 1 else 164)
        assert torch.equal(slots[0 if rank == 1 else 1], expected)
        turned = list(together.flip(0))[::-1]
        assert torch.equal(
            transport._beside(turned, slots).view(torch.float32), together.view(3, 32)
        )
        shorter = transport.allocate((SLOTS, 64), torch.uint8, CPU)
        values = 10 * rank + torch.arange(MAINS, dtype=torch.uint8).view(MAINS, 1)
        for lie in (40, 64):  # one behind the other, and as far apart as slots
            mains = list(values.repeat(1, lie)[:, :40])
            transport.push(transfers, [mains], [shorter]).wait()
            assert (shorter[0 if rank == 1 else 1, :40] == (1 if rank == 1 else 12)).all()
            shorter.fill_(99)
        with pytest.raises(ValueError, match="at most as large as its slot, 64 bytes, got 65"):
            transport.push(transfers, [[torch.zeros(65).byte()] * MAINS], [shorter])


def test_mains_are_copied_only_where_they_lie_apart() -> None:
    run_ranks(_push_what_lies_side_by_side, 2)


def _refuse(rank: int) -> None:
    with installed():
        transport = transport_of(dist.group.WORLD)
        with pytest.raises(ValueError, match=r"slot of 20 bytes \(\[5\], .*multiple of 32 bytes"):
            transport.allocate((SLOTS, 5), torch.float32, CPU)
        grads = transport.allocate((SLOTS, 16), torch.bfloat16, CPU)
        with pytest.raises(ValueError, match=r"must be float32 .*got torch.bfloat16"):
            transport.pull_add(in_slots([], 1), [grads], [[torch.zeros(16)] * MAINS], [None])
        with pytest.raises(RuntimeError, match="cannot forget an aborted step"):
            transport.reset()
    other = deep_ep()
    other.EPBuffer = type("EPBuffer", (other.EPBuffer,), {"num_nvlink_ranks": property(_two, _no)})
    with (
        installed(other),
        pytest.raises(RuntimeError, match=r"finds 2 ranks .* not 1; set balance"),
    ):
        transport_of(dist.group.WORLD).allocate((SLOTS, 16), torch.float32, CPU)


def _two(self: Any) -> int:
    return 2


def _no(self: Any, value: int) -> None:
    pass


def test_what_deepep_cannot_do_is_refused() -> None:
    run_ranks(_refuse, 1)


def _make_without(rank: int, package: Any, found: str) -> None:
    """Rank 1 has none, or an old one; all ranks say so."""
    kind, device = TRANSPORTS["deepep"], torch.device("cuda", 0)
    with (
        installed(deep_ep() if rank == 0 else package),
        pytest.raises(RuntimeError, match=rf"rank 1: .*needs DeepEP 2.5 or later.*{found}"),
    ):
        kind.make(dist.group.WORLD, device, TransportOptions())


@pytest.mark.parametrize(
    ("version", "found"),
    [
        ("1.2.1", r"version 1\.2\.1 has not; install it, or use balance.transport=cuda"),
        (None, r"cannot be imported \("),
    ],
)
def test_an_old_or_missing_deepep_is_named_on_all_ranks(version: str | None, found: str) -> None:
    old = SimpleNamespace(Buffer=object, __version__=version) if version else ABSENT
    run_ranks(_make_without, 2, old, found)


def test_only_who_asks_gets_it() -> None:
    assert resolve_transport("deepep", device_type="cuda") == "deepep"
    assert resolve_transport("auto", device_type="cuda") == "cuda"
    assert not TRANSPORTS["deepep"].in_graphs


def _train(rank: int) -> None:
    from megatron_ext.config import BalanceConfig
    from megatron_ext.mcore.spec import balance_spec
    from tests.gpt import build_gpt

    def losses_and_weights(name: str) -> tuple[list[float], dict[str, torch.Tensor]]:
        balance = BalanceConfig(slots=1, tolerance=0.0, transport=name)
        gpt = build_gpt(ep=2, spec_transform=lambda spec: balance_spec(spec, balance))
        losses = [float(gpt.train_step(step)) for step in range(3)]
        return losses, {name: each.detach() for name, each in gpt.named_parameters()}

    on_cpu = replace(
        TRANSPORTS["shared_memory"],
        name="deepep",
        make=lambda group, device, options: transport_of(group),
    )
    with installed(), mock.patch.dict(TRANSPORTS, {"deepep": on_cpu}):
        losses, weights = losses_and_weights("deepep")
    expected_losses, expected = losses_and_weights("shared_memory")
    assert losses == expected_losses
    assert all(torch.equal(weights[name], each) for name, each in expected.items())


def test_a_balanced_model_trains_alike() -> None:
    """With one slot a rank a main has at most one replica here, so the order of sums is one."""
    run_ranks(_train, 2)
