"""The report's arithmetic on made-up metrics; and the quickstart itself on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megatron_ext.files.loads import Loads, write_loads
from megatron_ext.trainer import quickstart
from megatron_ext.trainer.compose import load_config
from megatron_ext.trainer.reports.summary import WARMUP_STEPS, Drift, summarize_runs, table
from tests.trainer.dataset import overrides


def _metrics(step_ms: float) -> list[dict[str, float]]:
    return [
        {
            "step": step,
            "loss": 1.0 / step,
            "imbalance_before": 1.5,
            "imbalance_after": 1.0 + 0.1 * (step % 2),
            "replicas": 2.0,
            "step_ms": 1e6 if step <= WARMUP_STEPS else step_ms,
            "tokens_per_s": 1e6 / step_ms,
        }
        for step in range(1, 31)
    ]


def test_summary_and_table() -> None:
    runs = {"none": 200.0, "quota": 125.0, "ideal": 100.0}
    metrics = {name: _metrics(step_ms) for name, step_ms in runs.items()}
    summaries = summarize_runs(metrics, against=("none", "ideal"))
    assert summaries["quota"]["step_ms"] == 125.0
    assert summaries["quota"]["imbalance_after"] == pytest.approx(1.05)
    assert summaries["quota"]["final_loss"] == 1 / 30
    lines = table(summaries).split("\n")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    ratios = ["1.60 (1.60-1.60)", "0.80 (0.80-0.80)"]
    assert rows[3] == ["quota", "1.50", "1.05", "125", "8000", *ratios, "0.0333", "2.0"]
    assert len({len(line) for line in lines}) == 1


@pytest.mark.parametrize(("run_dir", "folder"), [("x/${balance.strategy}", "x"), ("x/y", "x/y")])
def test_every_run_of_the_quickstart_has_a_folder(run_dir: str, folder: str) -> None:
    recipe = {"data.path": "d", "run_dir": run_dir}
    words = [f"{name}={value}" for name, value in recipe.items()]
    runs = {
        name: load_config([f"balance={name.split('_')[0]}", *words], config_name="quickstart")
        for name in ("none", "quota", "ideal", quickstart.YARDSTICK)
    }
    assert quickstart.give_each_a_folder(runs) == Path(folder)
    assert {each.logging.wandb_group for each in runs.values()} == {Path(folder).name}
    assert {name: config.run_dir for name, config in runs.items()} == {
        name: f"{folder}/{name}" for name in runs
    }


def test_losses_are_compared_up_to_the_first_other_choice(tmp_path: Path) -> None:
    """One token in a near tie makes more difference than all rounding before it."""
    runs = []
    for name, second in (("none", [[3, 1], [2, 2]]), ("quota", [[2, 2], [2, 2]])):
        load = torch.tensor([[[3, 1], [2, 2]], second, [[3, 1], [2, 2]]])
        ones = torch.ones(3, dtype=torch.int64)
        trace = {"step": torch.tensor([1, 2, 3]), "microbatch": ones, "layer": ones}
        (tmp_path / name / "trace").mkdir(parents=True)
        write_loads(tmp_path / name / "trace" / "loads.npz", Loads(load, trace))
        runs.append(load_config([f"run_dir={tmp_path / name}"], config_name="quickstart"))
    assert quickstart.steps_alike(*runs) == 1
    assert quickstart.steps_alike(runs[0], runs[0]) == 3
    drift = Drift.of([4.0, 2.0, 1.0], [4.0, 2.1, 1.1], steps_alike=1)
    assert drift.text() == "0.0e+00 in 1 steps of equal choices, then 1.0e-01"


@pytest.mark.slow
def test_quickstart_writes_its_files(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    runs = tmp_path / "${balance.strategy}"
    quickstart.main([*overrides(data, runs), "steps=3", "data.global_batch_size=4"])
    assert "vs ideal" in capsys.readouterr().out
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert list(summary) == ["none", "quota", "ideal"]
    for run in summary.values():
        assert run.keys() >= {
            *("imbalance_before", "imbalance_after", "step_ms", "tokens_per_s"),
            *("final_loss", "replicas", "losses"),
        }
        assert len(run["losses"]) == 3
    assert summary["quota"]["losses"] == pytest.approx(summary["none"]["losses"], rel=1e-4)
    for drift in (summary["quota"]["drift_from_none"], summary["none"]["drift_by_rounding"]):
        assert drift == {"steps_alike": 3, "while_alike": pytest.approx(0, abs=1e-6), "after": None}
    assert summary["ideal"]["imbalance_after"] == 1.0
    page = (tmp_path / "report.html").read_text("utf-8")
    assert "Which run is the fastest is said when two runs share 20 steps" in page
    assert "<td>ideal</td>" in page
    assert (tmp_path / "quota" / "config.yaml").is_file()
