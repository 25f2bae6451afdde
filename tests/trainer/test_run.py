"""Runs of 8 steps on 2 ranks: what they write, and that stopping or evaluating changes nothing.

Losses are compared exactly: a continued run does the same arithmetic as one that never stopped.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_ext.config import COST_UNITS
from megatron_ext.cpu_platform import enable_cpu_platform
from megatron_ext.files.loads import TRACE_FIELDS, read_loads
from megatron_ext.files.routes import read_routes
from megatron_ext.methods.sem_moe.semantics import Semantics, write_semantics
from megatron_ext.telemetry.names import METRICS
from megatron_ext.trainer.compose import load_config
from megatron_ext.trainer.logs.run_log import read_metrics
from tests.ranks import run_ranks
from tests.trainer.dataset import overrides


def _train(rank: int, arguments: list[str], **recipe: str) -> None:
    enable_cpu_platform()
    from megatron.core import parallel_state

    from megatron_ext.trainer.loop import Training

    parallel_state.destroy_model_parallel()
    Training(load_config(arguments, **recipe)).run()


def _losses(run_dir: Path) -> list[float]:
    metrics = read_metrics(run_dir)
    assert [line["step"] for line in metrics] == list(range(1, len(metrics) + 1))
    return [line["loss"] for line in metrics]


@pytest.mark.slow
def test_killed_run_continues_exactly(data: Path, tmp_path: Path) -> None:
    """Nor is a load lost: steps 1 to 3, saved, were in a file of 7 steps that was not full."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run_ranks(_train, 2, overrides(data, whole))

    command = [sys.executable, "-m", "megatron_ext.train", *overrides(data, killed)]
    command += ["checkpoint.every=3", "checkpoint.keep=1", "eval_every=2", "eval_steps=1"]
    command += ["logging.trace_steps=7", "logging.route_samples=1"]
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, start_new_session=True, env=environment
    ) as process:
        assert process.stderr is not None
        seen = []
        for line in process.stderr:
            seen.append(line)
            if line.startswith("step 5/"):
                os.killpg(process.pid, signal.SIGKILL)
    assert seen[-1].startswith("step 5/"), "".join(seen)
    assert [path.name for path in (killed / "checkpoints").iterdir()] == ["step_00000003"]
    # What a run leaves that is killed while saving, or while writing a line.
    (killed / "checkpoints" / ".step_00000006.unfinished").mkdir()
    with (killed / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')

    subprocess.run(command, check=True, capture_output=True, env=environment)
    assert _losses(killed) == _losses(whole)
    assert [path.name for path in (killed / "checkpoints").iterdir()] == ["step_00000008"]
    evaluated = [line["step"] for line in read_metrics(killed) if "eval_loss" in line]
    assert evaluated == [2, 4, 6, 8]
    trace = read_loads(killed / "trace").trace
    keys = list(zip(*(trace[name].tolist() for name in TRACE_FIELDS), strict=True))
    assert keys == [(s, m, layer) for s in range(1, 9) for m in (0, 1) for layer in (1, 2)]
    assert read_routes(killed / "routes").num_samples == 8


@pytest.mark.slow
def test_pipeline_run_continues_exactly(data: Path, tmp_path: Path) -> None:
    settings = [
        "steps=4",
        "model.num_layers=4",
        "parallel.pp_size=2",
        "parallel.vpp_size=2",
        "parallel.overlap_grad_reduce=true",
        "parallel.overlap_param_gather=true",
        "parallel.recompute=selective",
        "balance.strategy=quota",
    ]
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    run_ranks(_train, 4, [*overrides(data, whole), *settings, "checkpoint.every=2"])
    start = f"checkpoint.load={whole}/checkpoints/step_00000002"
    run_ranks(_train, 4, [*overrides(data, stopped), *settings, start])
    assert [line["loss"] for line in read_metrics(stopped)] == _losses(whole)[2:]


@pytest.mark.parametrize(
    ("stages", "num_ranks"),
    [([], 2), (["model.num_layers=4", "parallel.pp_size=2", "parallel.vpp_size=2"], 4)],
    ids=["one stage", "interleaved"],
)
def test_two_microbatches_at_a_time_are_the_same_run(
    stages: list[str], num_ranks: int, data: Path, tmp_path: Path
) -> None:
    losses = []
    for name, schedule in (("turn", []), ("overlap", ["overlap_moe_expert_parallel_comm=true"])):
        settings = ["steps=2", "model.precision=bf16", "balance.strategy=quota", *stages]
        settings += [f"+megatron.{each}" for each in schedule]
        run_ranks(_train, num_ranks, [*overrides(data, tmp_path / name), *settings])
        losses.append(_losses(tmp_path / name))
    assert losses[0] == losses[1]


SHORT = ["steps=4", "optimizer.eps=1e-3"]


@pytest.fixture(scope="module")
def saved(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with `SHORT`, which has a checkpoint of step 2."""
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(_train, 2, [*overrides(data, folder), *SHORT, "checkpoint.every=2"])
    return folder


def test_the_last_step_is_saved(data: Path, tmp_path: Path) -> None:
    settings = [*SHORT, "steps=3", "checkpoint.every=2"]
    run_ranks(_train, 2, [*overrides(data, tmp_path), *settings])
    saved = sorted(each.name for each in (tmp_path / "checkpoints").glob("step_*"))
    assert saved == ["step_00000002", "step_00000003"]


@pytest.mark.parametrize(
    "changed",
    [
        ["parallel.ep_size=1", "balance.strategy=none", "model.experts=grouped_mm"],
        ["parallel.tp_size=2"],
    ],
)
def test_other_parallel_sizes_and_no_balancing_continue_the_same_model(
    changed: list[str], data: Path, saved: Path, tmp_path: Path
) -> None:
    start = f"checkpoint.load={saved}/checkpoints/step_00000002"
    run_ranks(_train, 2, [*overrides(data, tmp_path), *SHORT, *changed, start])
    continued = [line["loss"] for line in read_metrics(tmp_path)]
    assert continued == pytest.approx(_losses(saved)[2:], rel=1e-5)


@pytest.mark.slow
def test_tokens_go_to_their_experts_and_the_run_is_the_same(data: Path, tmp_path: Path) -> None:
    """Tensor parallelism of 2; the second run moves tokens by their ids, and continues exactly."""
    settings = ["steps=4", "optimizer.eps=1e-3", "parallel.tp_size=2", "checkpoint.every=2"]
    plain, dealt, moved = tmp_path / "plain", tmp_path / "dealt", tmp_path / "moved"
    rebatch = f"data.rebatch={_semantics(tmp_path / 'semantics.npz')}"
    run_ranks(_train, 2, [*overrides(data, plain), *settings])
    run_ranks(_train, 2, [*overrides(data, dealt), *settings, rebatch])
    assert _losses(dealt) == pytest.approx(_losses(plain), rel=1e-5)
    norms = [[line["grad_norm"] for line in read_metrics(run)] for run in (dealt, plain)]
    assert norms[0] != norms[1], "sums were not even rounded differently"
    start = f"checkpoint.load={dealt}/checkpoints/step_00000002"
    run_ranks(_train, 2, [*overrides(data, moved), *settings, rebatch, start])
    assert [line["loss"] for line in read_metrics(moved)] == _losses(dealt)[2:]


def _semantics(path: Path) -> Path:
    """Even ids belong to rank 0, odd ones to rank 1."""
    ids = np.arange(300)
    semantics = Semantics(
        (1, 2),
        np.tile(np.arange(4), (2, 1)),
        np.full((len(ids), 2), 0.5, np.float32),
        np.tile(ids % 2, (2, 1)).astype(np.int16),
        np.ones((2, len(ids)), np.float32),
        np.zeros((0, 2, 2, 2), np.float32),
    )
    write_semantics(path, semantics)
    return path


def test_run_directory(data: Path, tmp_path: Path) -> None:
    run_ranks(_train, 2, [*overrides(data, tmp_path), "steps=3"])
    for line in read_metrics(tmp_path):
        assert line.keys() <= {"step", "strategy", "num_ranks", *METRICS}
        assert line.keys() >= {
            *("step", "loss", "grad_norm", "skipped", "lr", "tokens_per_s", "step_ms"),
            *("imbalance_before", "imbalance_after", "replicas"),
        }
        assert line["imbalance_before"] >= line["imbalance_after"] >= 1.0
        assert line["tokens"] == 8 * 16 * line["step"]
        assert line["step_ms"] * line["tokens_per_s"] == pytest.approx(8 * 16 * 1e3)
        # Forward, and twice as much backward: two layers of attention (four matrices, and products
        # with half of 16 tokens), router and two experts of two matrices; and the logits.
        layer = 2 * (4 * 16 * 16 + 16 * 4 + 2 * 2 * 16 * 32) + 2 * 16 * 16
        flops = 3 * (2 * layer + 2 * 16 * 384) * line["tokens_per_s"]
        assert 2 * line["tflops_per_gpu"] == pytest.approx(flops / 1e12)
    # A run is reproduced by its config file alone.
    again = load_config((), str(tmp_path), "config")
    assert again == replace(load_config([*overrides(data, tmp_path), "steps=3"]), recipe="config")


@pytest.mark.parametrize("given", [[], ["balance.link_bandwidth=1e9"]])
def test_a_run_tells_what_it_measured(given: list[str], data: Path, tmp_path: Path) -> None:
    arguments = [*overrides(data, tmp_path), "steps=3", "balance.objective=time", *given]
    run_ranks(_train, 2, arguments)
    names = ("assignment_time",) if given else ("link_bandwidth", "assignment_time")
    lines = read_metrics(tmp_path)
    costs = {name: lines[0][name] for name in names}
    assert all(cost > 0 for cost in costs.values())
    for line in lines:
        assert {name: line.get(name) for name in COST_UNITS} == dict.fromkeys(COST_UNITS) | costs
    recipe = (tmp_path / "config.yaml").read_text()
    assert [line for line in recipe.splitlines() if line.startswith("#")] == [
        f"# measured: balance.{name} = {costs[name]:.4g} {COST_UNITS[name]}" for name in names
    ]
    assert all(float(f"{cost:.4g}") == cost for cost in costs.values()), "more is known than told"
    # It is still what the user asked for: on another machine, other costs are measured.
    again = load_config((), str(tmp_path), "config")
    assert again == replace(load_config(arguments), recipe="config")
