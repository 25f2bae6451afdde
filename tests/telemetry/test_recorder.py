"""The recorder's numbers equal those counted by hand, once per microbatch, also under recompute."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.balance.metrics import home_loads, imbalance
from megatron_ext.cpu_platform import enable_cpu_platform
from tests.ranks import run_ranks

EXPERTS = 6
LAYERS = 2
MICROBATCHES = 3


def imbalances(computed: Any) -> tuple[list[float], list[float]]:
    """Of each forward: if experts stay at home, and as computed."""
    after = [imbalance(one.rank_loads_after) for one in computed]
    return [imbalance(home_loads(one.load)) for one in computed], after


def _record(rank: int, strategy: str, recompute: str) -> dict[str, Any]:
    enable_cpu_platform()
    import torch.distributed as dist
    from megatron.core import parallel_state

    from megatron_ext.config import BalanceConfig
    from megatron_ext.mcore.spec import balance_spec
    from megatron_ext.telemetry.recorder import LoadRecorder
    from megatron_ext.trainer.model.build import moe_layers
    from tests.gpt import build_gpt

    gpt = build_gpt(
        ep=2,
        num_layers=LAYERS,
        experts=EXPERTS,
        recompute=recompute,
        spec_transform=lambda spec: balance_spec(spec, BalanceConfig(strategy=strategy)),
    )
    layers = moe_layers(gpt.chunks)
    recorder = LoadRecorder(layers, parallel_state.get_expert_model_parallel_group())
    by_hand = []

    def count(router: Any, inputs: Any, outputs: Any) -> None:
        if torch.is_grad_enabled():
            load = outputs[1].sum(0)
            dist.all_reduce(load)
            by_hand.append(load.view(2, EXPERTS // 2).sum(1).tolist())

    for layer in layers:
        layer.router.register_forward_hook(count)
    gpt.forward_backward(num_microbatches=MICROBATCHES)
    with torch.no_grad():
        gpt.forward_backward(num_microbatches=1, forward_only=True)
    loads = recorder.take_step()
    again = recorder.take_step()
    before = sum(2 * max(ranks) / sum(ranks) for ranks in by_hand)
    return {"loads": loads, "by_hand": before, "again": len(again.computed)}


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("strategy", ["none", "quota", "ideal", "libra"])
def test_counts_every_forward_once(strategy: str, recompute: str) -> None:
    for result in run_ranks(_record, 2, strategy, recompute):
        loads = result["loads"]
        forwards = len(loads.computed)
        assert forwards == LAYERS * MICROBATCHES
        assert result["again"] == 0
        # Not of a first layer.
        predicted = sum(map(Counter, loads.predicted_by_layer.values()), Counter())
        is_told = strategy == "libra" and recompute == "none"
        assert predicted["forwards"] == ((LAYERS - 1) * MICROBATCHES if is_told else 0)
        assert sum(one.predicted is not None for one in loads.computed) == predicted["forwards"]
        if is_told:
            assert 0 < predicted["choice_accuracy"] <= predicted["forwards"]
            assert 0 < predicted["load_accuracy"] <= predicted["forwards"]
        if strategy == "ideal":
            # Over all ranks, too.
            counts = [one.load.sum(0) for one in loads.computed]
            assert max(int(each.max() - each.min()) for each in counts) <= 1
        before, after = imbalances(loads.computed)
        if strategy != "ideal":
            assert sum(before) == pytest.approx(result["by_hand"])
        if strategy == "none":
            assert after == before
            assert not any((one.experts_in_slots >= 0).any() for one in loads.computed)
        else:
            assert sum(after) <= 1.05 * forwards


def _overlap(rank: int, strategy: str) -> tuple[int, int, list[str]]:
    enable_cpu_platform()
    from megatron.core import parallel_state

    from megatron_ext.config import BalanceConfig
    from megatron_ext.mcore.spec import balance_spec
    from megatron_ext.telemetry import heartbeat
    from megatron_ext.telemetry.recorder import LoadRecorder
    from megatron_ext.trainer.model.build import moe_layers
    from tests.gpt import build_gpt

    gpt = build_gpt(
        ep=2,
        overlap_moe_expert_parallel_comm=True,
        spec_transform=lambda spec: balance_spec(spec, BalanceConfig(strategy=strategy)),
    )
    layers = moe_layers(gpt.chunks)
    recorder = LoadRecorder(layers, parallel_state.get_expert_model_parallel_group())
    heartbeat.note_layers(layers)
    heartbeat.note("forward", step=5)
    gpt.forward_backward(num_microbatches=3)
    still_held = sum(sign for sign, _ in recorder._held.events)
    return len(recorder.take_step().computed), still_held, str(heartbeat.last_note()).split(", ")


@pytest.mark.parametrize("strategy", ["none", "quota"])
def test_two_microbatches_at_a_time_are_counted_and_let_go(strategy: str) -> None:
    """There Megatron calls no layer, so no hook of a layer runs."""
    for forwards, still_held, note in run_ranks(_overlap, 2, strategy):
        assert (forwards, still_held) == (2 * 3, 0)
        assert note == ["step 5", "backward", "layer 1"]


def _layer(number: int, experts: int) -> Any:
    layer: Any = torch.nn.Identity()
    layer.router = torch.nn.Identity()
    layer.router.layer_number = number
    layer.config = SimpleNamespace(num_moe_experts=experts)
    layer.token_dispatcher = SimpleNamespace(tp_group=None)
    return layer


def _record_ids(rank: int) -> Any:
    import torch.distributed as dist

    from megatron_ext.telemetry.recorder import LoadRecorder

    layer = _layer(1, EXPERTS)
    recorder = LoadRecorder([layer], dist.group.WORLD)
    layer.router((None, torch.tensor([[4, 0], [-1, 4]])))
    return recorder.take_step().computed


def test_counts_a_router_that_gives_ids() -> None:
    for (counted,) in run_ranks(_record_ids, 2):
        assert counted.load.tolist() == [[1, 0, 0, 0, 2, 0]] * 2


def test_the_host_waits_once_a_step() -> None:
    from megatron_ext.telemetry.recorder import LoadRecorder
    from tests.perf.launches import Counting, Work, as_on_a_gpu

    layer: Any = torch.nn.Identity()
    layer.observers = []
    recorder = LoadRecorder([layer], ep_group=None)
    for layer_number in range(4):
        report = SimpleNamespace(
            layer_number=layer_number,
            load=torch.tensor([[layer_number, 4], [2, 0]]),
            rank_loads_after=torch.tensor([3, 3 + layer_number]),
            experts_in_slots=torch.tensor([[-1], [0]], dtype=torch.int32),
            prediction=None,
            layout=None,
            weight_bytes=10,
            grad_bytes=20,
            moves=SimpleNamespace(pushes=2),
            rows_over=torch.tensor([0, layer_number]),
        )
        layer.observers[0](report)
    counting, work = Counting(), Work()
    with as_on_a_gpu(counting):
        counting.under_way.append(work)
        step = recorder.take_step()
    assert len(work.our_syncs) == 1
    before, after = imbalances(step.computed)
    assert before == pytest.approx([8 / 6, 8 / 7, 1, 10 / 9])
    assert after == pytest.approx([1, 8 / 7, 10 / 8, 12 / 9])
    assert [(one.pushed_bytes, one.pulled_bytes) for one in step.computed] == [(20, 20)] * 4
    assert [one.rows_over for one in step.computed] == [one.layer_number for one in step.computed]
    assert step.computed[3].load.tolist() == [[3, 4], [2, 0]]


def _record_different_layers(rank: int) -> Any:
    import torch.distributed as dist

    from megatron_ext.telemetry.recorder import LoadRecorder

    layers = [_layer(1, 4), _layer(2, 2)]
    recorder = LoadRecorder(layers, dist.group.WORLD)
    for layer in layers:
        layer.router((None, torch.tensor([[0], [rank]])))
    return recorder.take_step()


def test_layers_may_differ_in_their_experts() -> None:
    for step in run_ranks(_record_different_layers, 2):
        assert [one.load.tolist() for one in step.computed] == [
            [[2, 0, 0, 0], [1, 1, 0, 0]],
            [[2, 0], [1, 1]],
        ]
        assert imbalances(step.computed)[0] == pytest.approx([2, 1.5])


def _replayed(rank: int, strategy: str) -> None:
    enable_cpu_platform()
    from megatron.core import parallel_state

    from megatron_ext.balance import replays
    from megatron_ext.config import BalanceConfig
    from megatron_ext.mcore.spec import balance_spec
    from megatron_ext.telemetry.recorder import LoadRecorder
    from megatron_ext.trainer.model.build import moe_layers
    from tests.gpt import build_gpt

    balance = BalanceConfig(strategy=strategy)
    gpt = build_gpt(ep=2, experts=EXPERTS, spec_transform=lambda spec: balance_spec(spec, balance))
    layers = moe_layers(gpt.chunks)
    recorder = LoadRecorder(layers, parallel_state.get_expert_model_parallel_group())
    gpt.forward_backward(0)
    with replays.capture() as counted:
        gpt.forward_backward(1)
    for _ in range(2):
        replays.count_again(counted)
    once = recorder.take_step()
    gpt.forward_backward(0)
    for step in (1, 1):
        gpt.forward_backward(step)
    expected = recorder.take_step()
    told, expected_told = (
        [(one.layer_number, one.load.tolist(), one.rank_loads_after.tolist()) for one in computed]
        for computed in (once.computed, expected.computed)
    )
    assert told == expected_told
    assert once.own["max_cum_overload"] == expected.own["max_cum_overload"]
    recorder.close()


@pytest.mark.parametrize("strategy", ["none", "quota", "ideal"])
def test_a_captured_step_is_counted_when_it_is_replayed(strategy: str) -> None:
    run_ranks(_replayed, 2, strategy)
