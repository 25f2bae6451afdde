"""What a tiny training on 2 ranks shows: its profile and its boards, compared with its own lines.

What GPUs add is compared with what torch's profiler writes of them, made by hand.
"""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.balance import ranges
from megatron_ext.config import ConfigError
from megatron_ext.files.run_dir import LAYERS_FILE
from megatron_ext.telemetry.profile import PROFILE_FILE, StepProfile, merge_traces
from megatron_ext.telemetry.step_lines import read_lines
from megatron_ext.trainer import quickstart
from megatron_ext.trainer.compose import load_config
from megatron_ext.trainer.logs.run_log import read_metrics
from megatron_ext.trainer.validate import validate
from tests.boards import tensorboard_events, wandb_records, written_for_wandb
from tests.ranks import run_ranks
from tests.trainer.dataset import overrides
from tests.trainer.test_run import _train

Events = list[dict[str, Any]]

IN_FORWARD = {
    *(ranges.PLAN, ranges.LOAD, ranges.PUSH_START, ranges.REROUTE, ranges.PUSH_WAIT),
    *(ranges.DISPATCH, ranges.EXPERTS, ranges.COMBINE),
}
IN_BACKWARD = {ranges.PUSH_START, ranges.PUSH_WAIT, ranges.REDUCE_START, ranges.REDUCE_WAIT}


def read_events(file: Path) -> Events:
    with gzip.open(file, "rt") as stream:
        return json.load(stream)["traceEvents"]


def within(events: Events, outer: dict[str, Any]) -> set[str]:
    """Names of our ranges inside a range of the same thread."""
    began, ended = outer["ts"], outer["ts"] + outer["dur"]
    return {
        each["name"]
        for each in events
        if each is not outer
        and each["tid"] == outer["tid"]
        and began <= each["ts"]
        and each["ts"] + each["dur"] <= ended
    }


@pytest.fixture(scope="module")
def run_dir(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of 4 steps, of which the last two are recorded."""
    run_dir = tmp_path_factory.mktemp("profiled")
    arguments = [*overrides(data, run_dir), "steps=4", "profile.first=3", "profile.steps=2"]
    arguments += ["logging.tensorboard=true", "logging.wandb=offline", "logging.tier=detailed"]
    arguments += ["logging.heatmap_every=2", "logging.trace_steps=3"]
    run_ranks(_train, 2, [*arguments, "balance.tolerance=0", "data.global_batch_size=4"])
    return run_dir


def test_some_steps_of_all_ranks_become_one_trace(run_dir: Path) -> None:
    events = read_events(run_dir / PROFILE_FILE)
    assert {each["pid"] for each in events} == {0, 1}
    assert not list(run_dir.glob(".profile*"))
    for rank in (0, 1):
        shown = [
            each for each in events if each["pid"] == rank and each.get("cat") == "user_annotation"
        ]
        steps = [each for each in shown if each["name"].startswith("step ")]
        assert [each["name"] for each in steps] == ["step 3", "step 4"]
        ours = [each for each in shown if each["name"].startswith(ranges.PREFIX)]
        forwards = [each for each in ours if each["name"].endswith("_forward")]
        backwards = [each for each in ours if each["name"].endswith("_backward")]
        # Two steps of a microbatch in each of two layers.
        assert sorted(each["name"] for each in forwards) == [
            ranges.PREFIX + f"layer_{layer}_forward" for layer in (1, 1, 2, 2)
        ]
        for forward in forwards:
            assert within(ours, forward) == IN_FORWARD
        for layer in (1, 2):
            of_layer = [each for each in backwards if each["name"].endswith(f"{layer}_backward")]
            inside = [within(ours, each) for each in of_layer]
            assert set.union(*inside) == IN_BACKWARD
            assert {len(each) for each in inside} == {1}
        # No stage is outside of a layer.
        around = forwards + backwards
        assert len(ours) == len(around) + sum(
            each["name"] in IN_FORWARD | IN_BACKWARD
            and any(each["name"] in within([each], layer) for layer in around)
            for each in ours
        )
    lines = zip(read_metrics(run_dir)[2:], list(read_lines(run_dir / LAYERS_FILE))[2:], strict=True)
    expected = [
        (track, values)
        for line, layers in lines
        for track, values in (
            ("imbalance", {n: line[f"imbalance_{n}"] for n in ("before", "after")}),
            ("replicas", {"a layer": line["replicas"]}),
            *(
                (f"{name.replace('_', ' ')}, by layer", {"layer 1": first, "layer 2": second})
                for name in ("imbalance_before", "imbalance_after", "replicas")
                for first, second in [layers[name]]
            ),
        )
    ]
    counters = [each for each in events if each["ph"] == "C"]
    assert [(each["name"], each["args"]) for each in counters] == expected
    began = {each["ts"] for each in events if each["pid"] == 0 and each["name"][:5] == "step "}
    assert {each["ts"] for each in counters} == began


def test_a_run_without_balancing_shows_the_same_stages_of_megatrons_layers(
    data: Path, tmp_path: Path
) -> None:
    settings = ["steps=2", "profile.first=2", "profile.steps=1", "balance.strategy=none"]
    run_ranks(_train, 2, [*overrides(data, tmp_path), *settings])
    names = [each["name"] for each in read_events(tmp_path / PROFILE_FILE)]
    ours = {name for name in names if name.startswith(ranges.PREFIX)}
    layers = {f"{ranges.PREFIX}layer_{number}_forward" for number in (1, 2)}
    assert ours == layers | {ranges.DISPATCH, ranges.EXPERTS, ranges.COMBINE}


def test_boards_say_what_the_lines_of_a_training_say(run_dir: Path) -> None:
    events = tensorboard_events(run_dir / "tensorboard")
    lines, layers = read_metrics(run_dir), list(read_lines(run_dir / LAYERS_FILE))
    for name, shown in (
        ("loss", "train/loss"),
        ("imbalance_before", "balance/imbalance_before"),
        ("imbalance_before", "moe/avg_overload_factor_routed"),
        ("replicas", "balance/replicas"),
        ("step_ms", "system/step_ms"),
    ):
        values = [line[name] for line in lines]
        assert written_for_wandb(run_dir, shown) == values
        assert [event.value for event in events.Scalars(shown)] == pytest.approx(values, rel=1e-6)
    of_second = [line["imbalance_after"][1] for line in layers]
    assert written_for_wandb(run_dir, "balance/imbalance_after_layer_2") == of_second
    assert [event.step for event in events.Images("balance/rank_loads_map")] == [2, 4]
    records = wandb_records(run_dir)
    (run,) = (record.run for record in records if record.HasField("run"))
    settings = {item.key: json.loads(item.value_json) for item in run.config.update}
    known = {"num_ranks": 2, "transport": "shared_memory", "nvlink_domains": 1}
    assert {name: settings["facts"][name] for name in known} == known
    # With the last file of the trace, which is written when the run ends.
    artifacts = {r.artifact.type: r.artifact for r in records if r.HasField("artifact")}
    assert len(artifacts["trace"].manifest.contents) == len(list(run_dir.glob("trace/*"))) == 2
    assert [one.path for one in artifacts["profile"].manifest.contents] == [PROFILE_FILE]


def _record_too_few(rank: int, folder: Path) -> tuple[Path | None, Path | None]:
    recorder = StepProfile(folder, first=1, steps=3, ranks=[0])
    with recorder.step(1):
        torch.ones(1).sum()
    return recorder.write({}), recorder.write({})


def test_a_run_that_is_stopped_keeps_what_was_recorded(tmp_path: Path) -> None:
    written = run_ranks(_record_too_few, 2, tmp_path)
    assert written == [(tmp_path / PROFILE_FILE, None), (None, None)]
    steps = [each for each in read_events(tmp_path / PROFILE_FILE) if each["name"] == "step 1"]
    assert [each["pid"] for each in steps] == [0]


@pytest.mark.parametrize("place", [PROFILE_FILE, ".profile_rank_00000.json"])
def test_a_profile_that_cannot_be_written_is_left_out(place: str, tmp_path: Path) -> None:
    (tmp_path / place).mkdir()
    assert run_ranks(_record_too_few, 2, tmp_path) == [(None, None)] * 2
    assert [each.name for each in tmp_path.iterdir()] == [place]


def test_runs_that_take_turns_are_not_recorded(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        quickstart.main([*overrides(data, tmp_path), "profile.steps=1"])
    assert stop.value.code == 2
    assert "profile.steps (1) must be 0" in capsys.readouterr().err


def test_streams_of_gpus_are_threads_and_clocks_are_one(tmp_path: Path) -> None:
    parts = {}
    for rank, base in ((4, 5_000_000), (9, 5_002_000)):
        parts[rank] = tmp_path / f"{rank}.json"
        of_gpu = {"pid": 0, "tid": 7, "ts": 10.0}
        events = [
            {"ph": "M", "name": "process_labels", **of_gpu, "args": {"labels": "GPU 0"}},
            {"ph": "M", "name": "thread_name", **of_gpu, "args": {"name": "stream 7"}},
            {"ph": "X", "name": "kernel", "dur": 2.0, **of_gpu},
            {"ph": "X", "name": "aten::mm", "dur": 1.0, "pid": 71, "tid": 7, "ts": 9.0},
            {"ph": "f", "name": "ac2g", "id": 3, **of_gpu},
            {"ph": "X", "name": "PyTorch Profiler", "pid": "Spans", "tid": "x", "ts": 0, "dur": 9},
        ]
        parts[rank].write_text(json.dumps({"baseTimeNanoseconds": base, "traceEvents": events}))
    merge_traces(parts, {}, tmp_path / "merged.json.gz")
    events = read_events(tmp_path / "merged.json.gz")
    kernels = [each for each in events if each["name"] == "kernel"]
    assert [(each["pid"], each["tid"], each["ts"]) for each in kernels] == [(4, 7, 10), (9, 7, 12)]
    named = [each for each in events if each["name"] == "thread_name"]
    assert [each["tid"] for each in named] == [7, 7]
    assert all(each["tid"] != 7 for each in events if each["name"] == "aten::mm")
    assert len({each["id"] for each in events if each["ph"] == "f"}) == 2
    assert "PyTorch Profiler" not in {each["name"] for each in events}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            ["profile.first=7", "profile.steps=3"],
            "profile.first (7) + profile.steps (3) must be <= steps + 1 (9): the run ends before",
        ),
        (["profile.steps=-1"], "profile.steps (-1) must be >= 0"),
        (["profile.ranks=[0,2,5]"], "profile.ranks ([2, 5]) must be < the number of ranks (2)"),
        (["profile.ranks=[1,1]"], "profile.ranks ([1, 1]) must be different numbers >= 0"),
        (["profile.ranks=[one]"], "profile.ranks ('[one]') must be a list of whole numbers"),
    ],
)
def test_what_cannot_be_profiled_is_said_before_ranks_start(
    given: list[str], said: str, data: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as error:
        validate(load_config([*overrides(data, tmp_path), *given]), num_ranks=2)
    (problem,) = error.value.problems
    assert problem.startswith(said), problem


def test_the_profiler_writes_no_lines_of_its_own(tmp_path: Path) -> None:
    """A fresh process: the profiler looks at its level once."""
    program = (
        "import sys, torch.distributed as dist\n"
        "from pathlib import Path\n"
        "from megatron_ext.telemetry.profile import StepProfile\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "profile = StepProfile(Path(sys.argv[1]), first=1, steps=1, ranks=())\n"
        "with profile.step(1): pass\n"
        "print(profile.write({}))\n"
        "dist.destroy_process_group()"
    )
    command = [sys.executable, "-W", "ignore", "-c", program, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert result.stdout == f"{tmp_path / PROFILE_FILE}\n"
    assert "profiler_st" not in result.stderr
