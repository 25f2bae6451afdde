"""A sweep makes a run for each combination, here, after all are checked."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.config import ConfigError
from megatron_ext.trainer import sweep, train
from megatron_ext.trainer.command import parser
from megatron_ext.trainer.config import TrainConfig
from megatron_ext.trainer.logs.run_log import METRICS_FILE, read_metrics
from tests.trainer.dataset import overrides

WORDS = ["-m", "--config-name", "quickstart", "balance.slots=1,2", "steps=3"]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[TrainConfig]:
    """The runs that a sweep makes; none is trained."""
    runs: list[TrainConfig] = []

    def make(config: TrainConfig, num_ranks: int | None, verbose: bool) -> None:
        runs.append(config)
        Path(config.run_dir).mkdir(parents=True, exist_ok=True)
        (Path(config.run_dir) / METRICS_FILE).touch()

    monkeypatch.setattr(train, "train", make)
    return runs


def test_each_combination_is_a_run_with_a_folder(
    made: list[TrainConfig], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[Any] = []
    monkeypatch.setattr(sweep, "_compare", lambda folder, runs: compared.append((folder, runs)))
    words = [*WORDS, "balance.tolerance=0.0,0.1", f"data.path={data}", f"run_dir={tmp_path / 's'}"]
    sweep.sweep(parser().parse_intermixed_args(words))
    assert [(run.balance.slots, run.balance.tolerance, run.steps) for run in made] == [
        (slots, tolerance, 3) for slots in (1, 2) for tolerance in (0.0, 0.1)
    ]
    names = [
        f"balance.slots={run.balance.slots},balance.tolerance={run.balance.tolerance}"
        for run in made
    ]
    assert compared == [(tmp_path / "s", [tmp_path / "s" / name for name in names])]
    assert [Path(run.run_dir) for run in made] == compared[0][1]
    assert {run.logging.wandb_group for run in made} == {"s"}


def test_a_folder_may_have_any_name(
    made: list[TrainConfig], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "_compare", lambda *_: None)
    folder = tmp_path / "Läufe vom 1. Mai's"
    folder.mkdir()
    monkeypatch.chdir(folder)
    words = [*WORDS, f"data.path={data}", 'run_dir="alle läufe"']
    sweep.sweep(parser().parse_intermixed_args(words))
    assert [Path(run.run_dir) for run in made] == [
        folder / "alle läufe" / f"balance.slots={slots}" for slots in (1, 2)
    ]


def test_values_may_be_paths(
    made: list[TrainConfig], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "_compare", lambda *_: None)
    paths = [str(data), str(shutil.copytree(data, tmp_path / "other"))]
    words = [*WORDS, f"data.path={','.join(paths)}", f"run_dir={tmp_path / 's'}"]
    sweep.sweep(parser().parse_intermixed_args([word for word in words if "slots" not in word]))
    assert [run.data.path for run in made] == paths
    assert len({run.run_dir for run in made}) == 2


@pytest.mark.parametrize(
    "word", ["run_dir=alle läufe", "run_dir=a,b", "steps=${a", "seed", "hydra.swep.dir=x"]
)
def test_words_that_make_no_sense_are_one_problem(word: str, data: Path, tmp_path: Path) -> None:
    words = [*WORDS, f"data.path={data}", f"run_dir={tmp_path / 's'}", word]
    with pytest.raises(ConfigError) as wrong:
        sweep.sweep(parser().parse_intermixed_args(words))
    (problem,) = wrong.value.problems
    assert problem.startswith(word.split("=")[0])
    assert not (tmp_path / "s").exists()


def test_what_was_made_is_compared_where_a_run_fails(
    made: list[TrainConfig], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[Any] = []
    monkeypatch.setattr(sweep, "_compare", lambda folder, runs: compared.append(runs))
    make = train.train

    def fail_second(config: TrainConfig, num_ranks: int | None, verbose: bool) -> None:
        if config.balance.slots == 2:
            raise SystemExit(1)
        make(config, num_ranks=num_ranks, verbose=verbose)

    monkeypatch.setattr(train, "train", fail_second)
    words = [*WORDS, f"data.path={data}", f"run_dir={tmp_path / 's'}"]
    with pytest.raises(SystemExit):
        sweep.sweep(parser().parse_intermixed_args(words))
    assert compared == [[tmp_path / "s" / "balance.slots=1"]]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="about ranks on CPUs")
def test_a_sweep_trains_and_compares(data: Path, tmp_path: Path) -> None:
    settings = [word for word in overrides(data, tmp_path) if "steps=" not in word]
    words = ["-m", "--config-name", "quickstart", *settings, "steps=1", "balance.slots=1,2"]
    words += ["parallel.ep_size=1", "parallel.num_ranks=1"]  # A process a run.
    sweep.sweep(parser().parse_intermixed_args(words))
    runs = {path.name: len(read_metrics(path)) for path in tmp_path.glob("balance.*")}
    assert runs == {"balance.slots=1": 1, "balance.slots=2": 1}
    page = (tmp_path / "report.html").read_text()
    assert all(f"<td>{name}</td>" in page for name in ("slots 1", "slots 2"))


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["balance.slots=1"], "no setting has several values"),
        (["balance.slots=1,-1"], "balance.slots"),
    ],
)
def test_nothing_starts_where_a_run_is_wrong(
    words: list[str], line: str, made: list[TrainConfig], data: Path
) -> None:
    options = parser().parse_intermixed_args([*WORDS[:3], *words, f"data.path={data}"])
    with pytest.raises(ConfigError, match=line):
        sweep.sweep(options)
    assert made == []
