"""The ranges of MoE layers' stages: in other profilers than torch's own, and those of baselines.

What torch's own shows of a training is in tests/trainer/test_profile.py.
"""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
import torch

from megatron_ext.balance import ranges
from megatron_ext.config import BalanceConfig
from megatron_ext.cpu_platform import enable_cpu_platform

enable_cpu_platform()

from megatron.core.utils import configure_nvtx_profiling  # noqa: E402

from megatron_ext.mcore import process_hooks  # noqa: E402
from megatron_ext.mcore.spec import balance_spec, name_stages  # noqa: E402
from tests.gpt import build_gpt  # noqa: E402
from tests.ranks import run_ranks  # noqa: E402


@pytest.fixture
def pushed(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """NVTX ranges in order; None where one ends."""
    process_hooks.install()  # It hands Megatron's switch in.
    seen: list[str | None] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", seen.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: seen.append(None))
    return seen


def make_all() -> None:
    with ranges.layer_forward(3), ranges.stage(ranges.PLAN):
        pass
    with ranges.stage_of_backward(ranges.REDUCE_WAIT, 3):
        pass


ALL = [
    *("expert_balance_layer_3_forward", "expert_balance_plan", None, None),
    *("expert_balance_layer_3_backward", "expert_balance_grad_reduce_wait", None, None),
]


def test_nvtx_ranges_follow_the_switch_of_megatron(pushed: list[str | None]) -> None:
    make_all()
    assert pushed == []
    configure_nvtx_profiling(True)
    try:
        make_all()
        assert pushed == ALL
        # A name is one object: a captured range has nothing but its address.
        first, again = (name for name in 2 * pushed if name == ALL[0])
        assert first is again
    finally:
        configure_nvtx_profiling(False)


def test_under_torchs_profiler_each_range_is_there_once(pushed: list[str | None]) -> None:
    """Also where Megatron turns on its switch and torch's ranges for NVTX together."""
    configure_nvtx_profiling(True)
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            make_all()
    finally:
        configure_nvtx_profiling(False)
    assert pushed == []
    names = [event.name for event in profile.events()]
    assert sorted(names) == sorted(name for name in ALL if name)


def test_without_a_profiler_nothing_is_made() -> None:
    assert ranges.stage(ranges.PLAN) is ranges.layer_forward(1)
    assert ranges.stage(ranges.PLAN) is ranges.stage_of_backward(ranges.PUSH_WAIT, 1)


def _profiled(rank: int, strategy: str) -> list[tuple[str, str]]:
    """Our ranges of a schedule of 3 microbatches, with the layer's range that each is in."""
    balanced = partial(balance_spec, balance=BalanceConfig(strategy=strategy))
    gpt = build_gpt(ep=2, spec_transform=lambda spec: name_stages(balanced(spec)))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        gpt.forward_backward(num_microbatches=3)
    ours = [event for event in profile.events() if event.name.startswith(ranges.PREFIX)]
    seen = []
    for event in ours:
        around = event.cpu_parent
        while around is not None and not around.name.startswith(ranges.PREFIX):
            around = around.cpu_parent
        seen.append((event.name, around.name if around is not None else ""))
    return seen


@pytest.mark.parametrize("strategy", ["none", "ideal"])
def test_baselines_have_the_stages_that_they_have_in_common(strategy: str) -> None:
    layers = [f"{ranges.PREFIX}layer_{number}_forward" for number in (1, 2)]
    stages = (ranges.DISPATCH, ranges.EXPERTS, ranges.COMBINE)
    expected = {(layer, "") for layer in layers}
    expected |= {(name, layer) for layer in layers for name in stages}
    for seen in run_ranks(_profiled, 2, strategy):
        assert Counter(seen) == dict.fromkeys(expected, 3)
