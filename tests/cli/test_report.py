"""`report`: runs side by side, on made-up metrics."""

import base64
import json
import re

import pytest

from tests.cli.command import run


@pytest.fixture
def runs(tmp_path):
    """Two runs of ten steps, of which the second is twice as fast."""
    for name, step_ms, slots in (("none", 200.0, 0), ("quota", 100.0, 2)):
        folder = tmp_path / name
        folder.mkdir()
        lines = [
            {
                "step": step,
                "loss": 1.0 / step,
                "imbalance_before": 1.5,
                "imbalance_after": 1.5 if slots == 0 else 1.01,
                "replicas": float(slots),
                "step_ms": step_ms,
                "tokens_per_s": 1e6 / step_ms,
            }
            for step in range(1, 11)
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (folder / "config.yaml").write_text(
            f"steps: 10\nrun_dir: {folder}\nbalance:\n  slots: {slots}\n  tolerance: 0.01\n"
        )
    return tmp_path


def test_runs_are_compared_to_the_first(runs, capsys):
    page = runs / "pages" / "comparison.html"
    status, out, _ = run(capsys, "report", runs / "none", runs / "quota", "--out", page)
    assert status == 0
    row = next(line for line in out.split("\n") if line.startswith("| quota"))
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    assert cells == ["quota", "1.50", "1.01", "100", "10000", "2.00", "0.1000", "2.0"]
    text = re.sub(r">\s+<", "><", page.read_text())
    assert all(f"<td>{cell}</td>" in text for cell in cells)
    # What differs, and only that.
    assert "<td>balance.slots</td><td>0</td><td>2</td>" in text
    assert not re.search("tolerance|run_dir|steps</td>", text)
    picture = re.search('src="data:image/png;base64,([^"]+)"', text)
    assert base64.b64decode(picture[1]).startswith(b"\x89PNG")


def test_steps_are_said_where_runs_differ_in_them(runs, capsys):
    """Final losses of runs of different length are no comparison."""
    file = runs / "quota" / "metrics.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:4]))
    page = runs / "page.html"
    _, out, _ = run(capsys, "report", runs / "none", runs / "quota", "--out", page)
    said = "Steps: none 10, quota 4. Times are medians after the first 5."
    assert said in out.splitlines()
    assert f"<p>{said}</p>" in page.read_text()


def test_a_run_that_diverged_is_valid_json(runs, capsys):
    def refuse(constant):
        raise AssertionError(constant)

    file = runs / "none" / "metrics.jsonl"
    file.write_text(file.read_text().replace('"loss": 0.1,', '"loss": NaN,'))
    status, out, _ = run(capsys, "report", runs / "none", "--json")
    assert status == 0
    report = json.loads(out, parse_constant=refuse)["runs"]["none"]
    assert report["final_loss"] is report["losses"][-1] is None


def test_curves_are_of_imbalance_time_and_loss(runs, monkeypatch):
    import matplotlib.pyplot as plt

    from megatron_ext.trainer.report import draw, read_runs

    kept = []
    monkeypatch.setattr(plt, "close", kept.append)
    draw(read_runs([runs / "none", runs / "quota"]), runs / "curves.png")
    panels = {panel.get_ylabel(): panel for panel in kept[0].axes}
    assert list(panels) == ["imbalance (busiest rank / mean)", "step time (ms)", "loss"]
    assert [line.get_ydata()[-1] for line in panels["loss"].lines] == [0.1, 0.1]


def test_one_run_has_its_page_with_it(runs, capsys):
    status, out, _ = run(capsys, "report", runs / "quota", "--json")
    assert status == 0
    report = json.loads(out)
    assert report["page"] == str(runs / "quota" / "report.html")
    assert report["against"] == []
    assert report["runs"]["quota"]["step_ms"] == 100.0
    assert "<td>quota</td>" in (runs / "quota" / "report.html").read_text()


def test_names_that_repeat_become_paths(runs, capsys):
    (runs / "none" / "again").mkdir()
    (runs / "quota").rename(runs / "none" / "again" / "none")
    folders = [runs / "none", runs / "none" / "again" / "none"]
    status, out, _ = run(capsys, "report", *folders, "--json")
    assert status == 0
    assert list(json.loads(out)["runs"]) == [str(folder) for folder in folders]


def test_wrong_runs_are_refused_before_anything_is_written(runs, capsys):
    page = runs / "page.html"
    (runs / "begun").mkdir()
    (runs / "begun" / "metrics.jsonl").write_text('{"step": 1')
    lines = {"cut": '{"step": 1}\n\0\n', "list": "[1]\n", "other": '{"step": 1}\n'}
    for name, text in lines.items():
        (runs / name).mkdir()
        (runs / name / "metrics.jsonl").write_text(text)
    (runs / "quota").rename(runs / "settings")
    (runs / "settings" / "config.yaml").write_text("steps: [")
    for folders, message in (
        ([runs / "absent"], f"{runs / 'absent'} is no run directory: it has no metrics.jsonl"),
        ([runs / "begun"], f"{runs / 'begun'} has not finished a step yet"),
        ([runs / "none", runs / "none"], "a run is there twice"),
        ([runs / "cut"], "metrics.jsonl, line 2: no JSON (Expecting"),
        ([runs / "list"], "metrics.jsonl, line 1: not the metrics of a step"),
        ([runs / "other"], "metrics.jsonl: step 1 has no number 'loss'"),
        ([runs / "none", runs / "settings"], "config.yaml is no readable YAML (while parsing"),
    ):
        status, out, err = run(capsys, "report", *folders, "--out", page)
        assert (status, out) == (2, "")
        assert message in err
        assert not page.exists()
    page.write_text("precious")
    status, _, err = run(capsys, "report", runs / "none", "--out", page)
    assert status == 2
    assert "exists already" in err
    assert page.read_text() == "precious"
    assert run(capsys, "report", runs / "none", "--out", page, "--overwrite")[0] == 0


def test_a_folder_of_runs_offers_them(runs, tmp_path, capsys):
    status, _, stderr = run(capsys, "report", tmp_path)
    assert status == 2
    below = f"{tmp_path}/none, {tmp_path}/quota"
    assert stderr.endswith(f"has no metrics.jsonl; there are runs in it: {below}\n")
