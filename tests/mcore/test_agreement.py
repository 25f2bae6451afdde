"""A rank with a wrong load, or with another plan, stops a model within one layer. Layer 2.

Nothing is set for it: `check_plans` stays off.
"""

from __future__ import annotations

import re
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_ext.config import BalanceConfig, HistorySettings
from tests.gpt import TinyGPT  # first: it enables the CPU platform
from tests.mcore import inside
from tests.mcore.parity import balanced_gpt, balanced_layers
from tests.ranks import run_ranks

LAYERS = 4
BROKEN = 1
"""A rank, of the first EP group."""


def spoil(gpt: TinyGPT, fault: str) -> Any:
    """Break the second MoE layer of this rank."""
    from megatron_ext.balance.plan import BalancePlan

    second = balanced_layers(gpt)[1]
    if fault == "load":
        gather, calls = inside.original(inside.GATHER_LOAD), []

        def with_a_flipped_bit(agreement: Any, *args: Any) -> Any:
            load, marks = gather(agreement, *args)
            calls.append(load)
            if len(calls) == 2:
                load[0, 0] ^= 1  # Of a rank's copy of the load, as memory may fail.
            return load, marks

        return mock.patch(inside.GATHER_LOAD, with_a_flipped_bit)
    solve = inside.original(inside.SOLVE)

    def otherwise(planner: Any, *args: Any) -> BalancePlan:
        plan = solve(planner, *args)
        if planner is not inside.planner(second):
            return plan
        # Legal, but without replicas: all assignments stay at home.
        quota = torch.zeros_like(plan.quota)
        homes = torch.arange(len(quota)) // plan.layout.mains_per_rank
        quota[torch.arange(len(quota)), homes] = plan.quota.sum(1)
        return BalancePlan(plan.layout, quota, torch.full_like(plan.experts_in_slots, -1))

    return mock.patch(inside.SOLVE, otherwise)


def _train(rank: int, case: dict[str, Any], balance: BalanceConfig, fault: str) -> None:
    gpt = balanced_gpt(case, balance, num_layers=LAYERS)
    gpt.train_step(0)
    loads = _count_loads(balanced_layers(gpt)[1])
    try:
        if rank == BROKEN:
            with spoil(gpt, fault):
                gpt.train_step(1)
        else:
            gpt.train_step(1)
        gpt.train_step(2)
    except RuntimeError as error:
        raise RuntimeError(f"{error} -- noticed {len(loads) - 1} loads later") from error


def _count_loads(spoiled: Any) -> list[Any]:
    """Notes of this rank's loads, from the next one of that layer on."""
    solve, loads = inside.original(inside.SOLVE), []

    def counted(planner: Any, *args: Any) -> Any:
        if loads or planner is inside.planner(spoiled):
            loads.append(planner)
        return solve(planner, *args)

    mock.patch(inside.SOLVE, counted).start()  # The process ends with the error.
    return loads


@pytest.mark.parametrize("fault", ["load", "plan"])
@pytest.mark.parametrize(
    ("world_size", "case", "balance"),
    [
        (2, dict(ep=2), BalanceConfig(tolerance=0.0)),
        (2, dict(ep=2), BalanceConfig(strategy="eplb", history=HistorySettings(interval=1))),
        (4, dict(ep=4, experts=8), BalanceConfig(tolerance=0.0)),
        (4, dict(ep=2, pp=2), BalanceConfig(tolerance=0.0)),
    ],
    ids=["ep2", "ep2 from history", "ep4", "ep2 pp2"],
)
def test_ranks_that_differ_stop_within_one_layer(
    world_size: int, case: dict[str, Any], balance: BalanceConfig, fault: str
) -> None:
    with pytest.raises(RuntimeError) as caught:
        run_ranks(_train, world_size, case, balance, fault)
    found = re.findall(
        rf"RuntimeError: (?:layer 2: EP ranks \[{BROKEN}\] had another load or plan than rank 0 .*"
        rf"|rank \d and rank \d were given different replicas to push .*, layer 2, .*)"
        r" -- noticed (\d) loads later",
        str(caught.value),
    )
    assert found, caught.value
    assert all(int(number) <= 1 for number in found)


def test_seals_are_compared_with_collectives_too() -> None:
    # With another plan, ranks would wait in vain for each other's replicas before that.
    test_ranks_that_differ_stop_within_one_layer(
        2, dict(ep=2), BalanceConfig(tolerance=0.0, transport="collective"), "load"
    )
