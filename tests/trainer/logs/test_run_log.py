"""What rank 0 writes into a run directory, when it is killed, when a disk is full, when W&B fails.

No ranks are started.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import platform
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megatron_ext.telemetry import step_lines
from megatron_ext.trainer.config import TrainConfig
from megatron_ext.trainer.early import run_dir_problems
from megatron_ext.trainer.logs.run_log import RunLog, read_metrics
from megatron_ext.trainer.reports.read import column, read_runs
from megatron_ext.trainer.reports.summary import summarize_runs, table

SHOWN = {"imbalance_before": 1.5, "imbalance_after": 1.0, "step_ms": 9.0, "tokens_per_s": 5.0}


def config_of(run_dir: Path) -> TrainConfig:
    config = TrainConfig(run_dir=str(run_dir))
    config.data.path = "somewhere"
    return config


def write_lines(run_dir: Path, steps: Sequence[int]) -> None:
    lines = [json.dumps({"step": step, "loss": 1.0}) + "\n" for step in steps]
    (run_dir / "metrics.jsonl").write_text("".join(lines))


def steps_of(run_dir: Path) -> list[int]:
    return [line["step"] for line in read_metrics(run_dir)]


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """The system takes no more bytes into a file, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_run_that_continues_with_another_strategy_says_so(tmp_path: Path) -> None:
    for start_step, strategy in ((0, "none"), (2, "quota")):
        config = config_of(tmp_path)
        config.balance.strategy = strategy
        with RunLog(config, start_step=start_step) as log:
            for step in range(start_step + 1, start_step + 4):
                log.write({"step": step, "loss": 1.0, **SHOWN})
    (run,) = read_runs([tmp_path]).values()
    said = "balanced by 'none' in steps 1 to 2, by 'quota' in steps 3 to 5; "
    assert any(text.startswith(said) for text in run.missing)


CONTINUE_AND_DIE = """
import resource, signal, sys
from pathlib import Path
from megatron_ext.trainer.logs.run_log import RunLog
from tests.trainer.logs.test_run_log import config_of

# The system kills this process at its first byte beyond the limit.
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]),) * 2)
RunLog(config_of(Path(sys.argv[1])), start_step=20_000)
"""


def test_a_kill_while_a_run_is_continued_loses_no_line(tmp_path: Path) -> None:
    """The process is killed when it has written half of the 20,000 lines."""
    write_lines(tmp_path, range(1, 20_001))
    half = (tmp_path / "metrics.jsonl").stat().st_size // 2
    words = [sys.executable, "-c", CONTINUE_AND_DIE, str(tmp_path), str(half)]
    killed = subprocess.run(words, check=False, capture_output=True)
    assert killed.returncode == -signal.SIGXFSZ, killed.stderr
    assert steps_of(tmp_path) == list(range(1, 20_001))
    with RunLog(config_of(tmp_path), start_step=20_000):
        pass
    assert steps_of(tmp_path) == list(range(1, 20_001))
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["about.json", "config.yaml", "layers.jsonl", "metrics.jsonl"]


def test_a_long_run_continues_without_parsing_its_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 60 layers and 64 ranks, 100,000 steps have 4 GB."""
    file = tmp_path / "layers.jsonl"
    lines = [f'{{"step": {step}, "layer": [1], "replicas": [1.50]}}\n' for step in (1, 2, 3)]
    file.write_text("".join([*lines, '{"step": 4, "lay']))
    monkeypatch.setattr(step_lines, "parse_object", mock.Mock(side_effect=AssertionError))
    assert run_dir_problems(config_of(tmp_path), begins=False) == []
    with RunLog(config_of(tmp_path), start_step=2) as log:
        log.write({"step": 3}, {"step": 3, "layer": []})
        assert list(step_lines.read_lines(file, first=4)) == []  # As for a profile.
    assert file.read_text() == "".join([*lines[:2], '{"step": 3, "layer": []}\n'])


@pytest.mark.parametrize(
    ("kept", "tail", "missing"),
    [
        ([1, 2, 3, 4], "", None),
        ([1, 2, 3, 4, 5, 6], "", None),
        ([1, 2], '{"step": 3, "lo', "3-4"),
        ([1, 2, 3], "\0" * 64, "4"),
        ([1, 3], "", "2, 4"),
        ([], "", "1-4"),
    ],
)
def test_lines_that_were_lost_are_named(
    kept: list[int],
    tail: str,
    missing: str | None,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    write_lines(tmp_path, kept)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(tail)
    (tmp_path / "checkpoints" / "step_00000004").mkdir(parents=True)
    with RunLog(config_of(tmp_path), start_step=4) as log:
        log.write({"step": 5, "loss": 1.0})
    said = [record.getMessage() for record in caplog.records]
    file_ = tmp_path / "metrics.jsonl"
    assert said == (
        [
            f"warning: {file_} has no lines of the steps {missing}: they were lost before this run "
            "continued"
        ]
        if missing
        else []
    )
    assert steps_of(tmp_path) == [*(step for step in kept if step <= 4), 5]


def test_a_run_from_the_checkpoint_of_another_lost_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with RunLog(config_of(tmp_path), start_step=4):
        pass
    assert not caplog.records


def test_no_number_is_null_and_comes_back_as_nan(tmp_path: Path) -> None:
    with RunLog(config_of(tmp_path / "run"), start_step=0) as log:
        log.write({"step": 1, "loss": math.nan, "replicas": math.inf, **SHOWN})
        log.write({"step": 2, "loss": 2.0, "replicas": 1.0, **SHOWN})
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert json.loads(text.splitlines()[0])["loss"] is None
    assert "NaN" not in text
    assert "Infinity" not in text
    run = read_runs([tmp_path / "run"])["run"]
    assert [str(loss) for loss in column(run.metrics, "loss")] == ["nan", "2.0"]
    assert "2.0000" in table(summarize_runs({"run": run.metrics}))


def test_a_run_says_where_and_with_what_it_trains(tmp_path: Path) -> None:
    with RunLog(config_of(tmp_path), start_step=0):
        pass
    about = json.loads((tmp_path / "about.json").read_text())
    assert about["versions"]["torch"] == importlib.metadata.version("torch")
    assert about["versions"]["megatron-core"] == importlib.metadata.version("megatron-core")
    assert datetime.now(UTC) >= datetime.fromisoformat(about["started"])
    assert about["host"] == platform.node()
    assert about["cpus"] > 0


def test_lines_that_a_full_disk_refuses_are_written_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with RunLog(config_of(tmp_path), start_step=0) as log:
        log.write({"step": 1, "loss": 1.0})
        # Half of a line fits.
        with files_of_at_most((tmp_path / "metrics.jsonl").stat().st_size + 10):
            for step in (2, 3):
                log.write({"step": step, "loss": 1.0})
        log.write({"step": 4, "loss": 1.0})
    assert steps_of(tmp_path) == [1, 2, 3, 4]
    said = [record.getMessage() for record in caplog.records]
    assert [line.split(":")[1] for line in said] == [
        f" {tmp_path / 'metrics.jsonl'} lacks {number} lines, kept for later" for number in (1, 2)
    ]


def test_costs_that_a_full_disk_refuses_end_no_run(tmp_path: Path) -> None:
    with RunLog(config_of(tmp_path), start_step=0) as log, files_of_at_most(200):
        log.write({"step": 1, "loss": 1.0, "link_bandwidth": 1e9})
    assert read_metrics(tmp_path)[0]["link_bandwidth"] == 1e9
    assert "measured" not in (tmp_path / "config.yaml").read_text()


@pytest.mark.parametrize("failing", ["init", "log", "finish"])
def test_wandb_ends_no_run(
    failing: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = mock.Mock(id="x", starting_step=0)
    wandb = mock.Mock(Error=type("Error", (Exception,), {}))
    wandb.init.return_value = run
    broken: Any = wandb.init if failing == "init" else getattr(run, failing)
    broken.side_effect = ConnectionError("no network")
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    config = config_of(tmp_path)
    config.logging.wandb = "online"
    with RunLog(config, start_step=0) as log:
        for step in (1, 2):
            log.write({"step": step, "loss": 1.0})
    assert [record.getMessage() for record in caplog.records] == [
        "warning: W&B is written no more: no network"
    ]
    assert broken.call_count == 1
    assert steps_of(tmp_path) == [1, 2]
