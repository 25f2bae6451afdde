"""A model whose EP group is on two machines balances in each, and trains as Megatron's own."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from megatron_ext.config import BalanceConfig
from tests.mcore import inside
from tests.mcore.parity import GRADIENT_TOLERANCE, gradient_difference
from tests.ranks import run_ranks
from tests.transport.test_domains import on_machines


def _train_on_two_machines(rank: int) -> Any:
    make_slots = inside.original(inside.MAKE_SLOTS)
    with (
        on_machines(rank, ranks_each=2),
        mock.patch(inside.MAKE_SLOTS, side_effect=make_slots) as made,
    ):
        difference = gradient_difference(
            dict(ep=4, experts=8, num_layers=1),
            num_microbatches=2,
            balance=BalanceConfig(tolerance=0.0),
        )
    layout = made.call_args.args[0]
    asked = made.call_args.kwargs
    return difference, layout.nvlink_domain, asked["transport"], asked["options"].domain_ranks


@pytest.mark.slow
def test_two_machines_balance_in_a_domain_each() -> None:
    for difference, *found in run_ranks(_train_on_two_machines, 4):
        assert found == [2, "shared_memory", 2]
        assert difference.replicas > 0
        assert difference.worst < GRADIENT_TOLERANCE, difference
