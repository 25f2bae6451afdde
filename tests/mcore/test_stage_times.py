"""Times of stages are those that a clock beside them measures, with delays put into one stage.

Layer 2 (2 gloo ranks). A stage with the delays takes at least as long as they took; no other can
take longer than all of the step did without them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch

import megatron_ext
from megatron_ext.balance.stage_times import STAGES, TIMES
from megatron_ext.config import BalanceConfig
from tests.gpt import build_gpt  # first: it enables the CPU platform
from tests.mcore import inside
from tests.mcore.parity import balanced_layers
from tests.ranks import run_ranks

PULL_ADD = "megatron_ext.transport.shared_memory.SharedMemoryTransport.pull_add"
DELAY_S = 0.1
LAYERS = 2


class _Delays:
    """Sleeps, and says for how long it did by a clock of its own."""

    def __init__(self) -> None:
        self.ms = 0.0
        self.count = 0

    def sleep(self, *_: Any) -> None:
        started = time.monotonic_ns()
        time.sleep(DELAY_S)
        self.ms += (time.monotonic_ns() - started) / 1e6
        self.count += 1

    def before(self, do: Any) -> Any:
        def late(*args: Any, **kwargs: Any) -> Any:
            self.sleep()
            return do(*args, **kwargs)

        return late

    def before_wait(self, start: Any) -> Any:
        def started(*args: Any, **kwargs: Any) -> Any:
            pending = start(*args, **kwargs)
            return mock.Mock(wait=self.before(pending.wait))

        return started


@contextmanager
def _delayed(where: str, delays: _Delays, gpt: Any) -> Iterator[None]:
    if where == "after the router's backward":
        hooks = [
            layer.router.register_full_backward_hook(delays.sleep) for layer in balanced_layers(gpt)
        ]
        yield
        for hook in hooks:
            hook.remove()
        return
    point, wrap = {
        "plan": (inside.SOLVE, delays.before),
        "reroute": (inside.REROUTE, delays.before),
        "wait for weights": (inside.PUSH, delays.before_wait),
        "wait for gradients": (PULL_ADD, delays.before_wait),
    }[where]
    with mock.patch(point, wrap(inside.original(point))):
        yield


PLACES = {
    "plan": {"plan"},
    "reroute": {"materialize"},
    "wait for weights": {"materialize", "materialize_exposed"},
    # The replicas of the layer below move beside these two.
    "after the router's backward": {"reduce", "materialize"},
    "wait for gradients": {"reduce", "reduce_exposed", "materialize"},
}
"""Where delays are, and the stages that they are of."""

DELAYS = dict(zip(PLACES, (LAYERS, LAYERS, 2 * LAYERS - 1, LAYERS, LAYERS), strict=True))
"""How many there are: the last layer's backward finds its replicas in the slots."""

BESIDE = {
    (where, "materialize"): LAYERS - 1
    for where in ("after the router's backward", "wait for gradients")
}
"""How many of them a stage has, if not all: no layer is below the first."""


def _measure(rank: int) -> dict[str, tuple[dict[str, float], float, float, int]]:
    """For each place the times of the stages, those of the delays and of the step, all in ms."""
    balanced = partial(megatron_ext.balance_spec, balance=BalanceConfig(slots=2, tolerance=0.0))
    gpt = build_gpt(ep=2, num_layers=LAYERS, spec_transform=balanced)
    steps = megatron_ext.StepMetrics(gpt.chunks)
    gpt.forward_backward()
    steps.take()
    found = {}
    for where in PLACES:
        delays = _Delays()
        with _delayed(where, delays, gpt):
            started = time.monotonic_ns()
            gpt.forward_backward()
            step_ms = (time.monotonic_ns() - started) / 1e6
        metrics = steps.take()
        times = {stage: metrics[f"cost/{stage}_ms"] for stage in STAGES}
        found[where] = times, delays.ms, step_ms, delays.count
    steps.close()
    return found


def test_a_delay_is_in_the_times_of_its_stage_and_of_no_other() -> None:
    ranks = run_ranks(_measure, 2)
    for where, of in PLACES.items():
        measured = [found[where] for found in ranks]
        (times,) = {tuple(sorted(each[0].items())) for each in measured}
        least, most = (how(each[1] for each in measured) for how in (min, max))
        others_ms = max(each[2] for each in measured) - least
        assert [each[3] for each in measured] == [DELAYS[where]] * 2, where
        assert least >= 1e3 * DELAY_S * DELAYS[where]
        for stage, ms in times:
            highest = most if stage in of else 0
            some = BESIDE.get((where, stage))
            lowest = highest if some is None else 1e3 * DELAY_S * some
            assert lowest <= ms <= highest + others_ms, (where, stage, ms, measured)


def _measure_sent_ahead(rank: int) -> None:
    libra = BalanceConfig(strategy="libra", tolerance=0.0)
    balanced = partial(megatron_ext.balance_spec, balance=libra)
    gpt = build_gpt(ep=2, num_layers=LAYERS, spec_transform=balanced)
    gpt.forward_backward()  # Layers start.
    delays, send = _Delays(), inside.original(inside.SEND_AHEAD)

    def sent_late(*args: Any, **kwargs: Any) -> Any:
        sent = send(*args, **kwargs)
        inside.delay_arrival(sent, lambda pending: mock.Mock(wait=delays.before(pending.wait)))
        return sent

    with (
        mock.patch.object(TIMES, "readers", 1),
        mock.patch(inside.SEND_AHEAD, sent_late),
    ):
        gpt.forward_backward()
        times = TIMES.take()
        assert delays.count == LAYERS - 1
        assert delays.ms <= times["materialize_exposed"] <= times["materialize"]
        with torch.no_grad():
            gpt.forward_backward(forward_only=True)
        assert delays.count == 2 * (LAYERS - 1)
        assert not TIMES.take(), "evaluation is not timed"


def test_waits_for_replicas_that_were_sent_ahead_are_exposed() -> None:
    run_ranks(_measure_sent_ahead, 2)
