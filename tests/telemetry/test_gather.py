"""What a run writes of its steps equals what is counted by brute force from every rank's choices.

Layer 4: the trainer on kept ranks; with pipeline stages in chunks, and with two EP groups. Names
are tested without ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from megatron_ext.cpu_platform import enable_cpu_platform
from megatron_ext.files.run_dir import LAYERS_FILE
from megatron_ext.telemetry.names import METRICS, SECTIONS, shown
from megatron_ext.telemetry.step_lines import read_lines
from megatron_ext.trainer.compose import load_config
from megatron_ext.trainer.logs.run_log import read_metrics
from tests.mcore import inside
from tests.ranks import run_ranks
from tests.reference.bound import lower_bound
from tests.trainer.dataset import overrides

EXPERTS = 8
STEPS = 2
SETTINGS = [f"steps={STEPS}", "optimizer.warmup_steps=1", f"model.num_experts={EXPERTS}"]
SETTINGS += ["logging.heatmap_every=2", "data.global_batch_size=16", "model.aux_loss=0"]
STAGES = ["model.num_layers=4", "model.num_dense_layers=1", "parallel.pp_size=2"]
STAGES += ["parallel.vpp_size=2", "balance.slots=1"]
GROUPS = ["balance.strategy=none"]


@dataclass
class Found:
    """What a rank saw; steps, layers and microbatches count from 0."""

    choices: list[Any] = field(default_factory=list)
    """Step, layer, microbatch, EP group, EP rank, assignments to each expert, and of balanced
    layers slots and rank loads, of every forward."""
    bytes: dict[tuple[int, str], int] = field(default_factory=dict)
    """Bytes that the replicas of an EP group moved, by step and direction; of its first rank."""
    kept: list[tuple[int, int, int, int]] = field(default_factory=list)
    """Step, 1 where a plan is kept and -1 where it is released, layer and microbatch, in
    their order."""


def _counted(rank: int, arguments: list[str]) -> Found:
    enable_cpu_platform()
    from megatron.core import parallel_state

    from megatron_ext.trainer.loop import Training
    from megatron_ext.trainer.model import build
    from megatron_ext.transport.shared_memory import SharedMemoryTransport

    parallel_state.destroy_model_parallel()
    training = Training(load_config(arguments))
    found = Found()
    group = parallel_state.get_expert_data_parallel_rank()
    ep_rank = parallel_state.get_expert_model_parallel_rank()
    for layer in build.moe_layers(training.chunks):
        seen: dict[int, int] = {}

        def count(router: Any, inputs: Any, outputs: Any, layer=layer, seen=seen) -> None:
            step = training.step
            microbatch = seen[step] = seen.get(step, -1) + 1
            where = (step, layer.layer_number - 1, microbatch, group, ep_rank)
            found.choices.append((*where, outputs[1].sum(0).tolist(), [], []))

        def keep(report: Any) -> None:
            found.choices[-1][-2].extend(report.experts_in_slots.tolist())
            found.choices[-1][-1].extend(report.rank_loads_after.tolist())

        layer.router.register_forward_hook(count)
        if hasattr(layer, "observers"):
            layer.observers.append(keep)

    names: dict[Any, tuple[int, int]] = {}
    seen_plans: dict[tuple[int, int], int] = {}
    move = {way: getattr(SharedMemoryTransport, way) for way in ("push", "pull_add")}
    keep_plan, release_plan = map(inside.original, (inside.KEEP_PLAN, inside.RELEASE_PLAN))

    def moving(way: str) -> Any:
        def count(self: Any, transfers: Any, *buffers: Any, **kwargs: Any) -> Any:
            slots = next(each for each in buffers if isinstance(each[0], torch.Tensor))
            num_bytes = len(list(transfers)) * sum(slot[0].nbytes for slot in slots)
            if ep_rank == 0:
                key = training.step, way
                found.bytes[key] = found.bytes.get(key, 0) + num_bytes
            return move[way](self, transfers, *buffers, **kwargs)

        return count

    def kept(self: Any, forward: Any) -> Any:
        lent = keep_plan(self, forward)
        key = training.step, forward.layer_number - 1
        seen_plans[key] = seen_plans.get(key, -1) + 1
        names[forward.layer_number, forward.microbatch_idx] = key[1], seen_plans[key]
        found.kept.append((training.step, 1, *names[forward.layer_number, forward.microbatch_idx]))
        return lent

    def released(forward: Any) -> None:
        name = names[forward.layer_number, forward.microbatch_idx]
        found.kept.append((training.step, -1, *name))
        release_plan(forward)

    with (
        mock.patch.object(SharedMemoryTransport, "push", moving("push")),
        mock.patch.object(SharedMemoryTransport, "pull_add", moving("pull_add")),
        mock.patch(inside.KEEP_PLAN, kept),
        mock.patch(inside.RELEASE_PLAN, released),
    ):
        training.run()
    return found


@pytest.fixture(scope="module", params=[STAGES, GROUPS], ids=["stages", "groups"])
def run(
    request: pytest.FixtureRequest, data: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[Found]]:
    run_dir = tmp_path_factory.mktemp("run")
    arguments = [*overrides(data, run_dir), *SETTINGS, *request.param]
    return run_dir, run_ranks(_counted, 4, arguments)


def choices_of(found: list[Found], step: int) -> list[Any]:
    return [one for each in found for one in each.choices if one[0] == step]


def loads_of(found: list[Found], step: int) -> dict[tuple[int, int, int], np.ndarray]:
    """Assignments by EP rank and expert, of each group, layer and microbatch."""
    loads: dict[tuple[int, int, int], np.ndarray] = {}
    for _, layer, microbatch, group, ep_rank, counts, *_ in choices_of(found, step):
        key = group, layer, microbatch
        loads.setdefault(key, np.zeros((2, EXPERTS), int))[ep_rank] = counts
    return loads


def planned(found: list[Found], step: int, place: int) -> dict[tuple[int, int, int], np.ndarray]:
    """Slots (place 6) or rank loads (7) of each group, layer and microbatch."""
    first = (one for one in choices_of(found, step) if one[4] == 0)
    return {(one[3], one[1], one[2]): np.array(one[place], int) for one in first}


def test_a_step_is_what_was_counted(run: tuple[Path, list[Found]]) -> None:
    run_dir, found = run
    metrics, layers = read_metrics(run_dir), list(read_lines(run_dir / LAYERS_FILE))
    assert [line["step"] for line in layers] == [1, 2]
    for index in range(STEPS):
        loads = loads_of(found, index)
        line, columns = metrics[index], layers[index]
        numbers = sorted({layer for _, layer, _ in loads})
        assert columns["layer"] == [number + 1 for number in numbers]
        homes = {key: load.sum(0).reshape(2, -1).sum(1) for key, load in loads.items()}
        before = {key: 2 * max(home) / sum(home) for key, home in homes.items()}
        values = np.array(list(before.values()))
        assert line["imbalance_before"] == pytest.approx(values.mean())
        assert line["imbalance_before_max"] == pytest.approx(values.max())
        for percent in (50, 90, 99):
            expected = np.percentile(values, percent)
            assert line[f"imbalance_before_p{percent}"] == pytest.approx(expected)
        hottest = [EXPERTS * max(load.sum(0)) / load.sum() - 1 for load in loads.values()]
        assert line["maxvio"] == pytest.approx(np.mean(hottest))
        held = {key: of.reshape(2, -1) for key, of in planned(found, index, 6).items()}
        replicas = [int((of >= 0).sum()) for of in held.values()]
        assert line["replicas"] == np.mean(replicas)
        assert line["replicas_max"] == max(replicas)
        sends = [max((of // 4 == rank).sum() for rank in (0, 1)) for of in held.values()]
        assert line["rank_sends_max"] == max(sends)
        per_expert = [
            sum(load.sum(0) for key, load in loads.items() if key[1] == number)
            for number in numbers
        ]
        assert line["dead_experts"] == np.mean([(each == 0).sum() for each in per_expert])
        hot = [(each > 4 * each.mean()).sum() for each in per_expert]
        assert line["hot_experts"] == np.mean(hot)
        for place, number in enumerate(numbers):
            of_layer = [one for key, one in before.items() if key[1] == number]
            assert columns["imbalance_before"][place] == pytest.approx(np.mean(of_layer))
            assert columns["imbalance_before_max"][place] == pytest.approx(max(of_layer))
            home = sum(home for key, home in homes.items() if key[1] == number)
            assert columns["rank_loads_before"][place] == home.tolist()
            assert sum(columns["rank_loads_after"][place]) == sum(home)
        if index + 1 == 2:
            assert columns["expert_loads"] == [each.tolist() for each in per_expert]
        else:
            assert "expert_loads" not in columns
        worst = columns["worst"]
        key = max(before, key=lambda one: before[one])
        assert (worst["layer"], worst["num_experts"]) == (key[1] + 1, EXPERTS)
        assert homes[key].tolist() == worst["rank_loads_before"]
        assert worst["slots"] == held[key].tolist()
        assert worst["microbatch"] == key[2]
        if line["replicas"]:
            assert line["slot_use"] == pytest.approx(np.mean(replicas) / 2)
            assert line["imbalance_after"] < line["imbalance_before"]
            assert max(worst["rank_loads_after"]) < max(worst["rank_loads_before"])
        else:
            assert line["imbalance_after"] == line["imbalance_before"]
            assert "slot_use" not in line


def test_what_balancing_took_is_what_was_counted(run: tuple[Path, list[Found]]) -> None:
    run_dir, found = run
    for index, line in enumerate(read_metrics(run_dir)):
        loads, after = loads_of(found, index), planned(found, index, 7)
        if not line["replicas"]:
            costs = {name for name, metric in METRICS.items() if metric.section == "cost"}
            assert not costs & line.keys()
            assert "bound_gap" not in line
            assert line["max_cum_overload"] == line["max_cum_overload_routed"] > 1
            continue
        for name, way in (("pushed_bytes", "push"), ("pulled_bytes", "pull_add")):
            moved = sum(each.bytes.get((index, way), 0) for each in found)
            assert line[name] == moved > 0
        # Pushed again for backward, except where the slots still held the replicas.
        assert line["pulled_bytes"] < line["pushed_bytes"] < 2 * line["pulled_bytes"]
        bounds = {
            key: lower_bound(load.tolist(), num_slots=1, nvlink_domain=2)
            for key, load in loads.items()
            if key[2] == 0
        }
        gaps = [max(after[key]) / bound - 1 for key, bound in bounds.items()]
        assert line["bound_gap"] == pytest.approx(np.mean(gaps))
        homes = {key: load.sum(0).reshape(2, -1).sum(1) for key, load in loads.items()}
        for name, ranks in (("max_cum_overload", after), ("max_cum_overload_routed", homes)):
            most = []
            for each in found:
                steps = [one for one in each.kept if one[0] == index]
                held = np.cumsum([one[1] * ranks[0, one[2], one[3]] for one in steps], 0)
                most.append(held.max() / held.mean(1).max())
            assert line[name] == pytest.approx(max(most))
        for stage in ("materialize", "reduce"):
            assert 0 < line[f"{stage}_exposed_ms"] < line[f"{stage}_ms"] < line["step_ms"]
        assert 0 < line["plan_ms"] < line["step_ms"]


def test_replicas_that_are_sent_ahead_count_with_all_shards(data: Path, tmp_path: Path) -> None:
    given = ["balance.strategy=libra", "model.num_layers=3"]
    given += ["+megatron.expert_tensor_parallel_size=2"]
    found = run_ranks(_counted, 4, [*overrides(data, tmp_path), *SETTINGS, *given])
    for index, line in enumerate(read_metrics(tmp_path)):
        moved = sum(each.bytes.get((index, "push"), 0) for each in found)
        assert line["pushed_bytes"] == moved > 0
        # An expert has two weights of 16 x 32 elements in float32.
        sent = line["hit_replicas"] + line["wasted_replicas"]
        assert line["sent_ahead_bytes"] == pytest.approx(2 * 16 * 32 * 4 * sent) != 0


def test_names_are_of_sections_and_at_most_so_many() -> None:
    assert {metric.section for metric in METRICS.values()} == set(SECTIONS)
    layers = {
        "layer": [1, 2, 3],
        "imbalance_before": [1.1, 3.0, 2.0],
        "imbalance_after": [1.0, 1.2, 1.1],
    }
    line = {"step": 1, "loss": 1.0, "new": 2.0, "imbalance_before_max": 3.0}
    brief = {
        "train/loss": 1.0,
        "other/new": 2.0,
        "balance/imbalance_before_max": 3.0,
        "moe/max_overload_factor_routed": 3.0,
    }
    assert shown(line, layers, tier="brief", max_keys=99) == brief
    assert list(shown(line, layers, tier="brief", max_keys=2)) == ["train/loss", "other/new"]
    detailed = shown(line, layers, tier="detailed", max_keys=13)
    # Layers 2 and 3, counted from 0 by Megatron; the third has no room.
    assert detailed == brief | {
        "balance/imbalance_before_layer_2": 3.0,
        "moe/avg_overload_factor_routed_layer_1": 3.0,
        "balance/imbalance_after_layer_2": 1.2,
        "moe/avg_overload_factor_layer_1": 1.2,
        "balance/imbalance_before_layer_3": 2.0,
        "moe/avg_overload_factor_routed_layer_2": 2.0,
        "balance/imbalance_after_layer_3": 1.1,
        "moe/avg_overload_factor_layer_2": 1.1,
    }
