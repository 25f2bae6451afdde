"""Ranks that plan differently are named by the next exchange of loads, or by `check_last_plan`."""

import pytest
import torch

from megatron_ext.balance.agreement import Agreement, shared_agreement
from megatron_ext.balance.batches import split_quota
from megatron_ext.balance.plan import BalancePlan
from megatron_ext.balance.solve import solve
from tests import workloads
from tests.ranks import run_ranks

CPU = torch.device("cpu")
EXPERTS = 8


def _flip_load(load, plan):
    load = load.clone()
    load[0, 3] ^= 1 << 40
    return load, plan


def _move_quota(load, plan):
    quota = plan.quota.clone()
    most = int(quota[0].argmax())
    quota[0, most] -= 1
    quota[0, most - 1] += 1
    return load, BalancePlan(plan.layout, quota, plan.experts_in_slots)


def _empty_slot(load, plan):
    held = plan.experts_in_slots.clone()
    held[-1, 0] = -1 if held[-1, 0] >= 0 else 0
    return load, BalancePlan(plan.layout, plan.quota, held)


FAULTS = [_flip_load, _move_quota, _empty_slot]


def _layer(agreement, rank, layer, fault=None):
    ranks = torch.distributed.get_world_size()
    routing_map = workloads.routing_map(40 + rank, EXPERTS, 2, seed=rank + 10 * layer)
    load, _ = agreement.gather_counts(routing_map)
    assert torch.equal(load[rank], routing_map.sum(0))
    plan = solve(load, ep_size=ranks, slots=1)
    spoiled, other = (load, plan) if fault is None else fault(load, plan)
    shares = agreement.share(load, spoiled, other, layer)
    if fault is None:
        assert torch.equal(shares.split, split_quota(load, plan, rank))


def _make_faults(rank, broken):
    agreement = shared_agreement(torch.distributed.group.WORLD, CPU)
    assert agreement is shared_agreement(torch.distributed.group.WORLD, CPU)
    said = []
    for fault in FAULTS:
        for layer in (1, 2, 3):
            _layer(agreement, rank, layer)
        _layer(agreement, rank, 4, fault if rank == broken else None)
        try:
            _layer(agreement, rank, 5)
        except RuntimeError as error:
            said.append(str(error))
        agreement.forget()
        # The last layer of all is followed by no other.
        _layer(agreement, rank, 6, fault if rank == broken else None)
        try:
            agreement.check_last_plan()
        except RuntimeError as error:
            said.append(str(error))
        agreement.forget()
    _layer(agreement, rank, 7)
    agreement.check_last_plan()
    return said


def _outlive(rank):
    before = shared_agreement(torch.distributed.group.WORLD, CPU)
    _layer(before, rank, 1)
    kept = before if rank == 0 else None
    del before
    after = shared_agreement(torch.distributed.group.WORLD, CPU)
    assert (after is kept) == (rank == 0)
    _layer(after, rank, 2)
    after.check_last_plan()


def test_a_new_user_does_not_find_what_only_some_ranks_remember():
    """When a model is freed is up to each rank's garbage collector."""
    run_ranks(_outlive, 2)


@pytest.mark.parametrize(("world_size", "broken", "right"), [(2, 1, 0), (4, 0, 1), (4, 2, 0)])
def test_every_rank_names_the_layer_and_the_rank_that_differs(world_size, broken, right):
    for said in run_ranks(_make_faults, world_size, broken):
        assert len(said) == 2 * len(FAULTS)
        for number, message in enumerate(said):
            expected = (
                f"layer {(4, 6)[number % 2]}: EP ranks [{broken}] had another load or plan than "
                f"rank {right} (digests ["
            )
            assert message.startswith(expected)


def _plan_alone_and_forget(rank):
    agreement = Agreement(torch.distributed.group.WORLD, CPU)
    _layer(agreement, rank, 1)
    if rank == 0:  # An aborted step: the other rank did not come to this layer.
        ones = torch.ones(2, 2, dtype=torch.int64)
        agreement.share(ones, ones, _plan_of_ones(), 2)
    agreement.forget()
    _layer(agreement, rank, 1)
    _layer(agreement, rank, 2)
    agreement.check_last_plan()


def test_a_difference_that_the_device_finds_after_an_abort_is_forgotten():
    run_ranks(_find_late, 2)


def _find_late(rank):
    agreement = Agreement(torch.distributed.group.WORLD, CPU)
    _layer(agreement, rank, 1)
    agreement._difference[:3] = torch.tensor([1, 1, rank])  # as a device writes it
    agreement.forget()
    _layer(agreement, rank, 1)


def _plan_of_ones():
    return solve(torch.ones(2, 2, dtype=torch.int64), ep_size=2, slots=0)


def test_an_aborted_step_is_forgotten():
    run_ranks(_plan_alone_and_forget, 2)
