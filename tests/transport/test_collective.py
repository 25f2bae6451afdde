"""A replica is one message, and the host waits for a plan only when its messages are due.

Layer 2 (4 gloo ranks). That values arrive is tested for all transports in `test_transports.py`.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megatron_ext.transport import Transfer, Transfers, transport
from megatron_ext.transport.collective import CollectiveTransport
from tests.ranks import run_ranks
from tests.transport.test_transports import SHAPES, Side, in_slots

TRANSFERS = [Transfer(0, 0, 1, 0), Transfer(0, 0, 2, 1), Transfer(0, 2, 3, 0), Transfer(3, 1, 0, 0)]


class Watch:
    """Posted messages, and waits of the host for a plan on a device."""

    def __init__(self) -> None:
        self.posted, self.waited, self.copied = 0, 0, 0

    def post(self, ops: list[Any]) -> list[Any]:
        self.posted += len(ops)
        return post(ops)

    def copy(self, *arguments: Any) -> Any:
        """Make what stands for a plan's copy to the host."""
        self.copied += 1
        started: list[torch.Tensor] = []
        return SimpleNamespace(start=started.append, wait=lambda: self._wait(started[0]))

    def _wait(self, held: torch.Tensor) -> torch.Tensor:
        self.waited += 1
        return held


post = dist.batch_isend_irecv


def _count(rank: int) -> None:
    side = Side(CollectiveTransport(dist.group.WORLD), dist.group.WORLD)
    assert len(SHAPES) == 3, "several segments"
    mine = sum(rank in (t.home_rank, t.replica_rank) for t in TRANSFERS)
    plan = in_slots(TRANSFERS, 4)
    for is_on_device in (False, True):
        watch = Watch()
        on_device = mock.patch.object(Transfers, "is_on_host", False)
        with (
            mock.patch.object(dist, "batch_isend_irecv", watch.post),
            mock.patch.object(transport, "HostCopy", watch.copy),
            on_device if is_on_device else nullcontext(),
        ):
            plan = in_slots(TRANSFERS, 4)
            pending = side.push(plan, 1)
            assert (watch.posted, watch.waited) == (0 if is_on_device else mine, 0)
            pending.wait()
            assert (watch.posted, watch.waited) == (mine, int(is_on_device))
            side.check_slots(TRANSFERS, 1)
            side.pull_add_and_check(plan, 1)
            assert watch.posted == 2 * mine
            assert watch.copied == int(is_on_device), "the pull finds the push's copy"


def test_a_replica_is_a_message_and_its_plan_is_copied_meanwhile() -> None:
    run_ranks(_count, 4)
