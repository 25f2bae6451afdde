"""A training loop of one's own logs what its layers did, counted by hand from their routers.

Layer 2 (2 gloo ranks): no launcher, no trainer, no run directory.
"""

from __future__ import annotations

import logging
import math
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import megatron_ext
from megatron_ext.config import BalanceConfig
from megatron_ext.trainer.reports.read import column, read_runs
from tests import gpt as gpt_module
from tests.boards import tensorboard_events
from tests.gpt import build_gpt  # first: it enables the CPU platform
from tests.ranks import run_ranks

STEPS = 2
MICROBATCHES = 3
LAYERS = 2
EXPERTS = 6


class _Adapted(torch.nn.Module):
    """A router within another module, as in Megatron-Bridge's LoRA."""

    def __init__(self, to_wrap: torch.nn.Module) -> None:
        super().__init__()
        self.to_wrap = to_wrap

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.to_wrap(*args, **kwargs)


def _train(rank: int, strategy: str, folder: Path) -> dict[str, Any]:
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from torch.utils.tensorboard import SummaryWriter

    balanced = partial(
        megatron_ext.balance_spec, balance=BalanceConfig(strategy=strategy, tolerance=0.0)
    )
    gpt = build_gpt(ep=2, num_layers=LAYERS, experts=EXPERTS, spec_transform=balanced)
    routed: dict[tuple[int, int], list[list[int]]] = {}
    step = 0

    def count(layer: Any, router: Any, inputs: Any, outputs: Any) -> None:
        load = outputs[1].sum(0)
        dist.all_reduce(load)
        ranks = load.view(2, EXPERTS // 2).sum(1).tolist()
        routed.setdefault((step, layer.layer_number), []).append(ranks)

    layers = [
        each for chunk in gpt.chunks for each in chunk.modules() if isinstance(each, MoELayer)
    ]
    for layer in layers:
        layer.router = _Adapted(layer.router)
    hooks = [layer.router.register_forward_hook(partial(count, layer)) for layer in layers]
    others = sum(len(getattr(layer, "observers", ())) for layer in layers)
    steps = megatron_ext.StepMetrics(gpt.chunks)
    empty = steps.take()
    writer = SummaryWriter(str(folder)) if rank == 0 else None
    taken = []
    for step in range(1, STEPS + 1):
        gpt.forward_backward(step, num_microbatches=MICROBATCHES)
        taken.append(steps.take(tier="detailed"))
        if writer is not None:
            for name, value in taken[-1].items():
                writer.add_scalar(name, value, step)
    brief = steps.take()
    steps.close()
    for hook in hooks:
        hook.remove()
    left = sum(len(getattr(layer, "observers", ())) for layer in layers)
    if writer is not None:
        writer.close()
    return {"taken": taken, "routed": routed, "nothing": (empty, brief, left - others)}


@pytest.mark.parametrize("strategy", ["none", "quota", "libra"])
def test_a_loop_of_ones_own_logs_all_ranks_and_layers(strategy: str, tmp_path: Path) -> None:
    results = run_ranks(_train, 2, strategy, tmp_path)
    events = tensorboard_events(tmp_path)
    assert results[0]["taken"] == results[1]["taken"]
    for result in results:
        assert result["nothing"] == ({}, {}, 0)
    routed = results[0]["routed"]
    for step, metrics in enumerate(results[0]["taken"], start=1):
        by_layer = {
            layer: [2 * max(ranks) / sum(ranks) for ranks in routed[step, layer]]
            for layer in range(1, LAYERS + 1)
        }
        assert {len(each) for each in by_layer.values()} == {MICROBATCHES}
        every = [one for each in by_layer.values() for one in each]
        expected = {
            "balance/imbalance_before": sum(every) / len(every),
            "balance/imbalance_before_max": max(every),
            "moe/max_overload_factor_routed": max(every),
            **{
                f"balance/imbalance_before_layer_{layer}": sum(each) / len(each)
                for layer, each in by_layer.items()
            },
        }
        assert {name: metrics[name] for name in expected} == pytest.approx(expected)
        assert max(every) > 1.05
        if strategy == "none":
            assert metrics["balance/imbalance_after"] == metrics["balance/imbalance_before"]
            assert metrics["balance/replicas"] == 0
        else:
            # Tokens are whole, so ranks differ by one at most.
            assert (
                metrics["balance/imbalance_after_max"]
                <= 1 + 1 / torch.tensor(routed[step, 1]).sum(1).min().item()
            )
            assert metrics["balance/replicas"] > 0
            assert metrics["cost/plan_ms"] > 0
        for name, value in metrics.items():
            (logged,) = [event for event in events.Scalars(name) if event.step == step]
            assert logged.value == pytest.approx(value, rel=1e-6)


def _train_once(rank: int, strategy: str, case: dict[str, Any]) -> dict[str, Any]:
    """Return the metrics of a step, and the router's choices: by layer and microbatch, of all
    tokens, the assignments to the experts of each EP rank."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    balanced = partial(megatron_ext.balance_spec, balance=BalanceConfig(strategy=strategy))
    gpt = build_gpt(num_layers=LAYERS, ep=2, spec_transform=balanced, **case)
    chosen: dict[int, list[list[int]]] = {}

    def count(layer: int, router: Any, inputs: Any, outputs: Any) -> None:
        chosen.setdefault(layer, []).append(outputs[1].sum(0).view(2, -1).sum(1).tolist())

    numbers = iter(range(LAYERS + 1, LAYERS + 9))
    for chunk in gpt.chunks:
        for name, layer in chunk.named_modules():
            if isinstance(layer, MoELayer):
                number = next(numbers) if "mtp." in name else layer.layer_number
                layer.router = _Adapted(layer.router)
                layer.router.register_forward_hook(partial(count, number))
    steps = megatron_ext.StepMetrics(gpt.chunks)
    gpt.forward_backward(1, num_microbatches=MICROBATCHES)
    metrics = steps.take(tier="detailed")
    steps.close()
    return {"metrics": metrics, "chosen": chosen}


@pytest.mark.parametrize("strategy", ["none", "quota", "ideal"])
@pytest.mark.parametrize(
    ("layers", "case"), [(2, dict(tp=2, etp=2)), (3, dict(pp=2, mtp_num_layers=1))]
)
def test_all_shards_and_predicting_layers_are_counted(
    strategy: str, layers: int, case: dict[str, Any]
) -> None:
    """Experts compute the tokens of all shards. Layers that predict further tokens follow the
    decoder's: their loads are not those of layer 1, which is on another stage."""
    results = run_ranks(_train_once, 4, strategy, case)
    for layer in range(1, layers + 1):
        of_ranks = [each["chosen"][layer] for each in results if layer in each["chosen"]]
        # Of the tensor-parallel case, whose ranks are one EP group of two shards each.
        loads = torch.tensor(of_ranks).sum(0)
        by_hand = (2 * loads.amax(1) / loads.sum(1)).mean().item()
        found = results[0]["metrics"][f"balance/imbalance_before_layer_{layer}"]
        expected = by_hand if strategy != "ideal" else 1.0
        assert found == pytest.approx(expected, abs=0.05 * (strategy == "ideal") + 1e-6)
    assert f"balance/imbalance_before_layer_{layers + 1}" not in results[0]["metrics"]


EP_GROUPS, EXPERT_DP_GROUPS = ([0, 2], [1, 3]), ([0, 1], [2, 3])
"""Others than those of `parallel_state`, which has ranks 0 and 1 in one EP group."""


def _train_in_given_groups(rank: int, strategy: str) -> tuple[dict[str, float], list[list[int]]]:
    """Return the metrics of a step, and what the first router chose: by microbatch, for each EP
    rank."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    given = ProcessGroupCollection.use_mpu_process_groups
    chosen: list[list[int]] = []

    def groups_of_a_program() -> Any:
        groups = given()
        made = [[dist.new_group(ranks) for ranks in each] for each in (EP_GROUPS, EXPERT_DP_GROUPS)]
        groups.ep = groups.tp_ep = made[0][rank % 2]
        groups.expt_dp = made[1][rank // 2]
        return groups

    class InGivenGroups(gpt_module.GPTModel):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, pg_collection=groups_of_a_program(), **kwargs)

    balanced = partial(megatron_ext.balance_spec, balance=BalanceConfig(strategy=strategy))
    with mock.patch.object(gpt_module, "GPTModel", InGivenGroups):
        gpt = build_gpt(num_layers=LAYERS, ep=2, experts=EXPERTS, spec_transform=balanced)
    first = gpt.chunks[0].module.decoder.layers[0].mlp
    assert dist.get_process_group_ranks(first.ep_group) == EP_GROUPS[rank % 2]
    first.router.register_forward_hook(
        lambda router, inputs, outputs: chosen.append(outputs[1].sum(0).view(2, -1).sum(1).tolist())
    )
    steps = megatron_ext.StepMetrics(gpt.chunks)
    gpt.forward_backward(1, num_microbatches=MICROBATCHES)
    metrics = steps.take(tier="detailed")
    steps.close()
    return metrics, chosen


@pytest.mark.parametrize("strategy", ["none", "quota"])
def test_ep_groups_that_a_program_gave_are_counted(strategy: str) -> None:
    """One of them had no rank that Megatron's global groups had first, and was left out."""
    results = run_ranks(_train_in_given_groups, 4, strategy)
    loads = torch.tensor([chosen for _, chosen in results])
    of_groups = torch.stack([loads[ranks].sum(0) for ranks in EP_GROUPS])
    by_hand = (2 * of_groups.amax(-1) / of_groups.sum(-1)).mean().item()
    for metrics, _ in results:
        assert metrics["balance/imbalance_before_layer_1"] == pytest.approx(by_hand)


def test_a_model_that_is_no_list_and_a_tier_that_is_none_are_refused() -> None:
    with pytest.raises(TypeError, match=r"not a Identity: give \[model\]"):
        megatron_ext.StepMetrics(torch.nn.Identity())
    with pytest.raises(ValueError, match=r"tier \('all'\) must be one of brief, detailed"):
        megatron_ext.StepMetrics(()).take(tier="all")


def _write_run(
    rank: int, folder: Path, numbers: list[int | None], strategy: str = "none"
) -> list[str]:
    """Train a step for each number, and write it; returns what the logger says."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megatron_ext").addHandler(handler)
    balanced = partial(megatron_ext.balance_spec, balance=BalanceConfig(strategy=strategy))
    gpt = build_gpt(ep=2, num_layers=LAYERS, experts=EXPERTS, spec_transform=balanced)
    steps = megatron_ext.StepMetrics(gpt.chunks, run_dir=folder)
    steps.take(loss=0.0)  # Nothing was trained.
    for number in numbers:
        gpt.forward_backward(1, num_microbatches=MICROBATCHES)
        steps.take(step=number, loss=1.5, tokens=torch.tensor(64))  # type: ignore[arg-type]
    steps.close()
    logging.getLogger("megatron_ext").removeHandler(handler)
    return said


def test_a_loop_of_ones_own_writes_a_run_directory(tmp_path: Path) -> None:
    assert run_ranks(_write_run, 2, tmp_path, [None, None, None]) == [[], []]
    (run,) = read_runs([tmp_path]).values()
    assert [step["step"] for step in run.metrics] == [1, 2, 3]
    assert run.num_ranks == 2
    assert column(run.metrics, "loss") == [1.5] * 3
    assert min(column(run.metrics, "imbalance_before")) > 1
    for name in ("step_ms", "tokens_per_s"):
        first, *others = column(run.metrics, name)
        assert math.isnan(first)
        assert min(others) > 0
    assert run.layers is not None
    # Once more: behind the steps that are there, or instead of those of a killed run.
    run_ranks(_write_run, 2, tmp_path, [None])
    said, _ = run_ranks(_write_run, 2, tmp_path, [3, 4])
    dropped = f"warning: steps from 3 to 4 in {tmp_path} are dropped, as of a run that was killed"
    assert said == [dropped]
    (run,) = read_runs([tmp_path]).values()
    assert [step["step"] for step in run.metrics] == [1, 2, 3, 4]


def test_a_loop_may_count_from_0(tmp_path: Path) -> None:
    assert run_ranks(_write_run, 2, tmp_path, [0, 1]) == [[], []]
    (run,) = read_runs([tmp_path]).values()
    assert [step["step"] for step in run.metrics] == [0, 1]


@pytest.mark.parametrize("strategy", ["none", "quota", "ideal"])
def test_a_run_directory_names_its_strategy(strategy: str, tmp_path: Path) -> None:
    run_ranks(_write_run, 2, tmp_path, [None], strategy)
    (run,) = read_runs([tmp_path]).values()
    assert run.strategy == strategy
    if strategy == "quota":
        assert run.settings["balance.slots"] == str(BalanceConfig().slots)


def _write_program(rank: int, folder: Path, strategy: str, case: dict[str, Any]) -> None:
    """Train two steps of a program that knows nothing of balancing, as `pretrain.py` does."""
    from megatron_ext.mcore import process_hooks
    from megatron_ext.mcore.models import balance_models

    steps = megatron_ext.StepMetrics((), run_dir=folder)
    balance_models(BalanceConfig(strategy=strategy), steps.watch)
    try:
        gpt = build_gpt(ep=2, experts=EXPERTS, **case)
        for _ in range(2):
            gpt.forward_backward(1, num_microbatches=MICROBATCHES)
            steps.take()
    finally:
        steps.close()
        process_hooks.uninstall()


@pytest.mark.parametrize("strategy", ["none", "quota"])
def test_a_programs_run_directory_names_its_strategy(strategy: str, tmp_path: Path) -> None:
    run_ranks(_write_program, 2, tmp_path, strategy, dict(num_layers=LAYERS))
    (run,) = read_runs([tmp_path]).values()
    assert run.strategy == strategy
    assert len(run.metrics) == 2
    before, after = (column(run.metrics, f"imbalance_{when}") for when in ("before", "after"))
    assert (before == after) == (strategy == "none")
    assert min(before) > 1


def test_a_first_stage_without_moe_layers_learns_the_strategy(tmp_path: Path) -> None:
    case = dict(pp=2, num_layers=2, moe_layer_freq=[0, 1])
    run_ranks(_write_program, 4, tmp_path, "quota", case)
    (run,) = read_runs([tmp_path]).values()
    assert run.strategy == "quota"


def test_a_run_directory_that_cannot_be_written_is_warned_of(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ours, others = run_ranks(_write_run, 2, tmp_path / "file" / "run", [None, None])
    assert len(ours) == 1
    assert "steps are not written to" in ours[0]
    assert others == []
