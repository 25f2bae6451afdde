"""A forward has a virtual layer until its backward is over, and one backward.

Layer 1. That gradients are right is tested by `tests/mcore`.
"""

from __future__ import annotations

import gc
from unittest import mock

import pytest
import torch

from megatron_ext.balance.autograd import OnBackward
from megatron_ext.balance.forward import Forward, VirtualLayers
from megatron_ext.transport import Transfers


def new_forward() -> Forward:
    return Forward(3, mock.Mock(), mock.Mock(), mock.Mock(), None)


def lent(layers: VirtualLayers, value: int) -> Forward:
    """A forward whose plan has that expert in all slots."""
    forward = new_forward()
    forward.buffers.new_virtual_layer_id.return_value = 10 + layers._num_made
    forward.replicas = Transfers(torch.full((2, 1), value, dtype=torch.int32), 8)
    layers.lend(forward)
    return forward


def held(forward: Forward) -> list[int]:
    return [transfer.main_idx for transfer in forward.replicas_of_backward()]


def test_plans_come_back_in_any_order() -> None:
    layers = VirtualLayers(limit=None)
    forwards = [lent(layers, value) for value in range(3)]
    assert [each.virtual_layer.virtual_layer_id for each in forwards] == [10, 11, 12]
    assert [each.label for each in forwards] == [
        f"layer 3, virtual layer {number}" for number in (10, 11, 12)
    ]
    for value in (1, 0, 2):
        assert held(forwards[value]) == [value, value]
        forwards[value].release_plan()
    assert layers.num_in_flight == 0


def test_a_virtual_layer_is_lent_again_and_the_old_forward_does_not_read_it() -> None:
    layers = VirtualLayers(limit=None)
    first, second = lent(layers, 0), lent(layers, 1)
    first.release_plan()
    third = lent(layers, 2)
    assert third.virtual_layer is first.virtual_layer
    assert (held(second), held(third)) == ([1, 1], [2, 2])
    with pytest.raises(RuntimeError, match=r"layer 3: .*microbatch 0 .*id 10\) is gone"):
        held(first)
    # The end of the old forward must not give back what the new one has.
    first.release_plan()
    assert layers.num_in_flight == 2


def test_the_lowest_free_id_is_lent_first() -> None:
    layers = VirtualLayers(limit=None)
    forwards = [lent(layers, 0) for _ in range(3)]
    for each in (forwards[2], forwards[0]):
        each.release_plan()
    assert lent(layers, 0).virtual_layer is forwards[0].virtual_layer


def test_a_limit_that_is_reached_names_the_setting() -> None:
    layers = VirtualLayers(limit=2)
    forwards = [lent(layers, 0), lent(layers, 1)]
    message = r"layer 3: balance.max_in_flight \(2\) must be 3 .* \[0, 1\] .*microbatch 2"
    with pytest.raises(RuntimeError, match=message):
        lent(layers, 2)
    assert held(forwards[1]) == [1, 1]
    forwards[0].release_plan()
    assert held(lent(layers, 2)) == [2, 2]


def test_a_dropped_graph_gives_its_virtual_layer_back() -> None:
    layers = VirtualLayers(limit=1)
    passed = torch.zeros(1, requires_grad=True)
    (output,) = OnBackward.apply(lent(layers, 0)._await_replicas, (passed,), passed)
    gc.collect()
    assert layers.num_in_flight == 1
    del output
    assert layers.num_in_flight == 0, "by its reference count: no garbage collector is needed"
    assert held(lent(layers, 1)) == [1, 1]


def test_no_backward_follows_an_aborted_step() -> None:
    layers = VirtualLayers(limit=None)
    forwards = [lent(layers, value) for value in range(2)]
    layers.forget_step()
    assert layers.num_in_flight == 0
    for value, forward in enumerate(forwards):
        with pytest.raises(RuntimeError, match=f"layer 3: .*microbatch {value} .*is gone"):
            held(forward)
    assert held(lent(layers, 1)) == [1, 1]


def test_backward_calls_with_the_gradients_of_what_was_passed() -> None:
    calls = []

    def call(*grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        calls.append(grads)
        return grads[0], torch.full((2,), 7.0)

    first, second = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    buffer = torch.ones(3)
    passed, unused = OnBackward.apply(call, (first, buffer), first, second)
    assert unused.requires_grad
    (2 * passed).sum().backward()
    ((grad, none),) = calls
    assert none is None
    assert grad.tolist() == first.grad.tolist() == [2.0, 2.0]
    assert second.grad.tolist() == [7.0, 7.0]
