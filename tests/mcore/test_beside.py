"""Shared experts are computed behind the push, beside plan and replicas."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from megatron_ext.balance import beside
from megatron_ext.config import BalanceConfig
from tests.mcore import inside
from tests.mcore.parity import balanced_gpt, balanced_layers
from tests.mcore.streams import Stream, WatchAll, clocked_streams
from tests.ranks import run_ranks

SHARED = "megatron.core.transformer.moe.shared_experts.SharedExpertMLP.forward"
SETTINGS = dict(ep=2, shared_ffn=24, num_layers=1)


def _order_of_stages(rank: int, settings: dict[str, Any]) -> list[str]:
    """What a forward calls, in order."""
    gpt = balanced_gpt(SETTINGS | settings, BalanceConfig(tolerance=0.0))
    calls: list[str] = []
    with (
        inside.noting(SHARED, "shared experts", calls),
        inside.noting(inside.SOLVE, "plan", calls),
        inside.noting(inside.START_MATERIALIZE, "push", calls),
        inside.noting(inside.REROUTE, "reroute", calls),
    ):
        gpt.forward_backward(0)
    return calls


@pytest.mark.parametrize("settings", [{}, dict(recompute="selective")], ids=["", "recomputed"])
def test_shared_experts_come_behind_the_push(settings: dict[str, Any]) -> None:
    in_order = ["plan", "push", "shared experts", "reroute"]
    again = ["push", "shared experts", "reroute"] if settings else []
    for calls in run_ranks(_order_of_stages, 2, settings):
        assert calls == in_order + again


def _streams_of_a_step(
    rank: int, joins: bool, settings: dict[str, Any]
) -> tuple[bool, set[str], list[str]]:
    """Whether shared experts wait for the plan, the streams, and operations without an order."""
    waits = []
    function = inside.original(SHARED)

    def noted(*args: Any, **kwargs: Any) -> Any:
        waits.append(Stream.current.knows((planning.name, planning.clock[planning.name])))
        return function(*args, **kwargs)

    with clocked_streams():
        gpt = balanced_gpt(SETTINGS | settings, BalanceConfig(tolerance=0.0))
        gpt.forward_backward(0)
        planning = Stream(name="planning")
        with (
            mock.patch.object(beside, "has_streams", return_value=True),
            mock.patch.object(beside, "_stream", return_value=planning),
            mock.patch(SHARED, noted),
            mock.patch("megatron_ext.mcore.moe_layer.rejoin", beside.rejoin if joins else print),
            WatchAll() as watch,
        ):
            gpt.forward_backward(1)
    return any(waits), watch.streams, watch.errors


def test_the_reroute_waits_for_the_plan_and_shared_experts_do_not() -> None:
    for waits, streams, errors in run_ranks(_streams_of_a_step, 2, True, {}):
        assert not waits
        assert streams == {"compute", "planning"}
        assert errors == []


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_a_second_pass_waits_for_what_it_needs(recompute: str) -> None:
    settings = dict(recompute=recompute, num_layers=2)
    for _, streams, errors in run_ranks(_streams_of_a_step, 2, True, settings):
        assert streams == {"compute", "planning"}
        assert errors == []


def test_a_missing_wait_is_found() -> None:
    for _, _, errors in run_ranks(_streams_of_a_step, 2, False, {}):
        assert any("aten." in error for error in errors), errors


def _held_after_an_error(rank: int, point: str) -> bool:
    gpt = balanced_gpt(SETTINGS, BalanceConfig(tolerance=0.0))
    with (
        mock.patch(point, side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        gpt.forward_backward(0)
    return any(map(inside.holds_a_graph, balanced_layers(gpt)))


@pytest.mark.parametrize("point", [SHARED, inside.REROUTE, inside.RUN_EXPERTS])
def test_after_an_error_no_layer_holds_a_graph(point: str) -> None:
    assert not any(run_ranks(_held_after_an_error, 2, point))


def test_without_a_gpu_there_is_nothing_to_wait_for() -> None:
    with beside.beside(torch.device("cpu")):
        beside.rejoin(torch.device("cpu"))
