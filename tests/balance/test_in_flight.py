"""Plans survive from forward to backward under their id, and no other plan is given out.

Layer 1. Stored plans are compared with `torch.equal`.
"""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from megatron_ext.balance.in_flight import InFlightPlans
from megatron_ext.balance.layout import ExpertLayout
from megatron_ext.balance.plan import BalancePlan

LAYOUT = ExpertLayout(num_experts=4, ep_size=2, slots=1, nvlink_domain=2)


def make_plan(value: int) -> BalancePlan:
    return BalancePlan(
        layout=LAYOUT,
        quota=torch.full((4, 2), value),
        slots=torch.full((2, 1), value % 4, dtype=torch.int32),
    )


def make_ring(ring_size: int) -> InFlightPlans:
    return InFlightPlans(
        LAYOUT,
        ring_size=ring_size,
        layer_number=3,
        first_virtual_layer_id=10,
        device=torch.device("cpu"),
    )


def test_plans_come_back_in_any_order() -> None:
    ring = make_ring(3)
    handles = [ring.keep(make_plan(value)) for value in range(3)]
    for value, handle in enumerate(handles):
        ring.slots_on_host(handle).start(make_plan(value).slots)
    assert [handle.virtual_layer_id for handle in handles] == [10, 11, 12]
    for value in (1, 0, 2):
        plan = ring.recall(handles[value])
        assert torch.equal(plan.quota, make_plan(value).quota)
        assert torch.equal(plan.slots, make_plan(value).slots)
        assert torch.equal(ring.recall_slots(handles[value]), make_plan(value).slots)
        ring.release(handles[value])
    assert ring.num_in_flight == 0


def test_a_released_place_is_used_again_under_a_new_generation() -> None:
    ring = make_ring(2)
    first, second = ring.keep(make_plan(0)), ring.keep(make_plan(1))
    ring.release(first)
    third = ring.keep(make_plan(2))
    assert third.virtual_layer_id == first.virtual_layer_id
    assert torch.equal(ring.recall(third).quota, make_plan(2).quota)
    assert torch.equal(ring.recall(second).quota, make_plan(1).quota)
    with pytest.raises(RuntimeError, match=r"layer 3: the plan of microbatch 0 .*generation 1"):
        ring.recall(first)
    with pytest.raises(RuntimeError, match=r"layer 3: the plan of microbatch 0 .*generation 1"):
        ring.recall_slots(first)
    # Releasing the old handle again must not free the new plan's place.
    ring.release(first)
    assert ring.num_in_flight == 2


def test_a_full_ring_refuses_and_names_the_setting() -> None:
    ring = make_ring(2)
    handles = [ring.keep(make_plan(0)), ring.keep(make_plan(1))]
    message = (
        r"layer 3: no entry for the plan of microbatch 2.*microbatches \[0, 1\].*"
        r"balance.max_in_flight to 3"
    )
    with pytest.raises(RuntimeError, match=message):
        ring.keep(make_plan(2))
    assert torch.equal(ring.recall(handles[1]).quota, make_plan(1).quota)


def test_a_dropped_graph_frees_its_place() -> None:
    ring = make_ring(1)
    handle = ring.keep(make_plan(0))
    del handle
    gc.collect()
    assert ring.num_in_flight == 0
    assert torch.equal(
        ring.recall(ring_handle := ring.keep(make_plan(1))).quota, make_plan(1).quota
    )
    assert ring_handle.generation == 2


def test_a_plan_is_kept_as_it_is_until_its_release() -> None:
    ring = make_ring(1)
    plan = make_plan(2)
    slots = weakref.ref(plan.slots)
    handle = ring.keep(plan)
    assert ring.recall(handle) is plan
    ring.slots_on_host(handle).start(plan.slots)
    assert torch.equal(ring.recall_slots(handle), plan.slots)
    ring.release(handle)
    ring.keep(make_plan(1))
    del plan
    assert slots() is None
