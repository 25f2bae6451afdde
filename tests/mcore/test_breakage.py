"""The parity measurement notices when the method is broken: each test breaks one thing on purpose.

Layer 2. Compared with `tests.mcore.test_parity.GRADIENT_TOLERANCE`, which the intact method meets
by five orders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest

from megatron_ext.config import BalanceConfig
from tests.mcore import inside
from tests.mcore.parity import gradient_difference
from tests.ranks import run_ranks

# Many small experts: no single one holds the excess of a rank, so both slots of the other rank are
# used.
CASE = dict(ep=2, experts=32, topk=1)


def _skip_reduce() -> Any:
    def nothing(*arguments: Any, **_: Any) -> Any:
        return mock.Mock(wait=lambda: arguments[4])  # The totals, as they are.

    return mock.patch(inside.START_REDUCE, nothing)


def _skip_rematerialize() -> Any:
    return mock.patch(inside.START_REMATERIALIZE)


def _swap_slots() -> Any:
    from megatron_ext.transport.shared_memory import SharedMemoryTransport

    push = SharedMemoryTransport.push

    def swapped(self: Any, transfers: Any, mains: Any, slots: Any, label: str) -> Any:
        push(self, transfers, mains, slots, label).wait()
        for segment in slots:
            segment.copy_(segment.flip(0))
        return mock.Mock()

    return mock.patch.object(SharedMemoryTransport, "push", swapped)


@contextmanager
def _reuse_plan_of_other_microbatch() -> Iterator[None]:
    recall = inside.original(inside.RECALL_REPLICAS)
    first: dict[int, Any] = {}

    def stale(forward: Any) -> Any:
        return first.setdefault(forward.layer_number, recall(forward))

    with mock.patch(inside.RECALL_REPLICAS, stale):
        yield


def _worst(rank: int, sabotage: Callable[[], Any] | None) -> Any:
    if sabotage is None:
        return gradient_difference(CASE, num_microbatches=4, balance=BalanceConfig(tolerance=0.0))
    with sabotage():
        return gradient_difference(CASE, num_microbatches=4, balance=BalanceConfig(tolerance=0.0))


def test_intact_method_meets_the_tolerance_with_several_slots_in_use() -> None:
    for difference in run_ranks(_worst, 2, None):
        assert difference.worst < 1e-14
        assert difference.replicas > 8, "more than one replica a layer and microbatch"


@pytest.mark.parametrize("sabotage", [_skip_reduce, _swap_slots, _reuse_plan_of_other_microbatch])
def test_parity_notices(sabotage: Callable[[], Any]) -> None:
    assert max(difference.worst for difference in run_ranks(_worst, 2, sabotage)) > 1e-3


def test_replicas_that_are_not_restored_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="overwrote their replicas"):
        run_ranks(_worst, 2, _skip_rematerialize)
