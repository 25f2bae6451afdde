"""`report`: runs side by side, on made-up metrics."""

import json
import os
import re
from unittest import mock

import pytest

from tests.cli.command import run


@pytest.fixture
def runs(tmp_path):
    """Two runs of 30 steps, of which the second is twice as fast."""
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
            for step in range(1, 31)
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (folder / "config.yaml").write_text(
            f"steps: 30\nrun_dir: {folder}\nbalance:\n  slots: {slots}\n  tolerance: 0.01\n"
        )
    return tmp_path


def test_runs_are_compared_to_the_first(runs, capsys):
    page = runs / "pages" / "comparison.html"
    status, out, _ = run(capsys, "report", runs / "none", runs / "quota", "--out", page)
    assert status == 0
    row = next(line for line in out.split("\n") if line.startswith("| quota"))
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    assert cells == ["quota", "1.50", "1.01", "100", "10000", "2.00 (2.00-2.00)", "0.0333", "2.0"]
    text = re.sub(r">\s+<", "><", page.read_text())
    assert all(f"<td>{cell}</td>" in text for cell in cells)
    # What differs, and only that.
    assert "<td>balance.slots</td><td>0</td><td>2</td>" in text
    assert not re.search("<td>(balance.tolerance|run_dir|steps)</td>", text)
    first = "Run quota trains 2.00 x as fast as run none (95 % interval 2.00 to 2.00)."
    assert f'<p class="verdict">{first.replace(" %", "&nbsp;%")}</p>' in text
    assert out.startswith(first)


def test_table_sentences_and_page_share_the_intervals(runs, capsys, monkeypatch):
    """Of runs of 100,000 steps one takes 8 s."""
    from megatron_ext.trainer.reports import speed

    drawn = mock.Mock(wraps=speed._interval)
    monkeypatch.setattr(speed, "_interval", drawn)
    run(capsys, "report", runs / "none", runs / "quota", "--out", runs / "page.html")
    assert drawn.call_count == 2  # Of each run beside the first.


def test_a_run_of_a_program_is_not_called_faulty(tmp_path, capsys):
    """`StepMetrics` writes no machine, and without a loss or tokens no loss and no speed."""
    settings = {"num_ranks": 2, "balance": {"strategy": "quota", "slots": 2}}
    (tmp_path / "config.yaml").write_text(json.dumps(settings))
    known = {"imbalance_before": 1.5, "imbalance_after": 1.0, "replicas": 2.0}
    lines = [{"step": step, **known, **({"step_ms": 50.0} if step > 1 else {})} for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "layers.jsonl").touch()
    _, out, _ = run(capsys, "report", tmp_path)
    said = [line for line in out.splitlines() if line.startswith(f"{tmp_path.name}: ")]
    assert said == [
        f"{tmp_path.name}: `take` was given no loss.",
        f"{tmp_path.name}: `take` was given no tokens, so nothing is said about speed.",
    ]
    assert "is said from" not in out


def test_steps_are_said_where_runs_differ_in_them(runs, capsys):
    """Final losses of runs of different length are no comparison."""
    file = runs / "quota" / "metrics.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:4]))
    page = runs / "page.html"
    _, out, _ = run(capsys, "report", runs / "none", runs / "quota", "--out", page)
    said = [
        "Steps: none: 30; quota: 4.",
        "Times are medians after the first 5 steps.",
        "Times of quota are those of first steps, which are slow.",
    ]
    assert set(said) <= set(out.splitlines())
    assert f"<p>{' '.join(said)} vs none: ratio" in page.read_text()
    assert "as fast as" not in out


def test_a_run_that_diverged_is_valid_json(runs, capsys):
    def refuse(constant):
        raise AssertionError(constant)

    file = runs / "none" / "metrics.jsonl"
    file.write_text(file.read_text().replace(f'"loss": {1 / 30},', '"loss": NaN,'))
    status, out, _ = run(capsys, "report", runs / "none", "--json")
    assert status == 0
    report = json.loads(out, parse_constant=refuse)["runs"]["none"]
    assert report["final_loss"] is report["losses"][-1] is None


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
    for folders, message in (
        ([runs / "absent"], f"{runs / 'absent'} does not exist"),
        ([runs], f"{runs} is no run directory: it has no metrics.jsonl; there are runs in it"),
        ([runs / "none", runs / "none"], "a run is there twice"),
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


WHOLE = '{"step": 1, "loss": 2.5, "step_ms": 100.0, "tokens_per_s": 50}\n'
HUGE = WHOLE.replace('"loss": 2.5', '"replicas": 1e308')


@pytest.mark.parametrize(
    ("files", "known", "missing"),
    [
        ({"metrics.jsonl": '{"step": 1'}, "Run none trains 5,000", "no step is finished yet"),
        (
            {"config.yaml": "steps: 3\n"},
            "Run none trains 5,000 tokens/s (95 %",
            "metrics.jsonl is not there",
        ),
        ({"metrics.jsonl": WHOLE}, "2.5000", "1 of 1 steps have no number 'imbalance_after'"),
        (
            {"metrics.jsonl": WHOLE.replace("2.5", "1e999").replace("50", '"50"')},
            "100",
            "1 of 1 steps have no number 'loss'",
        ),
        (
            {"metrics.jsonl": HUGE + HUGE.replace('"step": 1', '"step": 2')},
            "100",
            "2 of 2 steps have no number 'replicas'",
        ),
        ({"metrics.jsonl": WHOLE, "layers.jsonl": '{"step"'}, "2.5000", "config.yaml is not there"),
    ],
)
def test_what_can_be_read_is_shown_and_what_is_missing_said(runs, capsys, files, known, missing):
    (runs / "half").mkdir()
    for name, text in files.items():
        (runs / "half" / name).write_text(text)
    status, out, err = run(capsys, "report", runs / "half", runs / "none", "--out", runs / "a.html")
    assert (status, err) == (0, "")
    assert known in out or known in (runs / "a.html").read_text()
    assert missing in out
    page = (runs / "a.html").read_text().replace("&#x27;", "'")
    assert missing in page


DEEP = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{chr(98 + place)}: &{chr(98 + place)} [{','.join(['*' + chr(97 + place)] * 9)}]\n"
    for place in range(8)
)
"""YAML of half a kilobyte that is 9 to the power of 9 words, written out."""


LAYERS = {"step": 7, "layer": [1], "rank_loads_before": [[3, 1]], "rank_loads_after": [[2, 2]]}


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("metrics.jsonl", f'{{"st\n{WHOLE}', "metrics.jsonl, line 1 is no readable JSON: "),
        ("metrics.jsonl", f"{WHOLE}[1]\n", "metrics.jsonl, line 2 is no readable JSON: no object"),
        *(
            ("metrics.jsonl", f'{WHOLE}{{"step": {step}}}\n', f"metrics.jsonl, line 2{said}")
            for step, said in (
                (10**400, " is no readable JSON: 10000000000000000000... is beyond 64 bits"),
                (-1, ": not the metrics of a step"),
                ("true", ": not the metrics of a step"),
            )
        ),
        (
            "metrics.jsonl",
            '{"step": 1, "step": 2}\n',
            "line 1 is no readable JSON: 'step' is there",
        ),
        ("config.yaml", "a: [", "config.yaml, line 2 is no readable YAML: "),
        ("config.yaml", "[1]", "config.yaml holds no mapping"),
        ("config.yaml", "hello", "config.yaml, line 1 is no readable YAML: it holds one value"),
        ("config.yaml", DEEP, "line 5 is no readable YAML: it has more than 10000 values"),
        ("config.yaml", "a: &a\n  b: *a\n", "line 2 is no readable YAML: *a names nothing above"),
        ("config.yaml", "a: " + 3000 * "[", "config.yaml, line 1 is no readable YAML: it has more"),
        ("about.json", "[1]", "about.json is no readable JSON: no object"),
        ("about.json", 100_000 * "[", "about.json is no readable JSON: maximum recursion depth"),
        *(
            ("layers.jsonl", json.dumps(LAYERS | wrong) + "\n", "step 7: not the layers of a step")
            for wrong in (
                {"layer": "all"},
                {"layer": [10**6]},
                {"imbalance_after": [1.0, 2.0]},
                {"rank_loads_before": [[1], ["x", 2]]},
                {"worst": 3},
                {"worst": {"layer": 1}},
            )
        ),
    ],
)
def test_a_file_that_cannot_be_read_is_one_line(runs, capsys, name, text, said):
    (runs / "none" / name).write_text(text)
    status, out, err = run(capsys, "report", runs / "none")
    assert (status, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1
    assert not (runs / "none" / "report.html").exists()


def test_odd_values_of_a_strangers_file(runs, capsys):
    (runs / "none" / "about.json").write_text('{"host": "\\ud800half", "cpus": 1e999}')
    assert run(capsys, "report", runs / "none")[::2] == (0, "")
    assert (runs / "none" / "report.html").stat().st_size > 10**6


def test_a_strangers_settings_are_shown_as_they_stand_there(runs, monkeypatch):
    """Nothing of this machine is looked up for them, as its environment."""
    from megatron_ext.trainer.reports.read import read_runs

    monkeypatch.setenv("SECRET", "hunter2")
    (runs / "none" / "config.yaml").write_text("data: {path: '${oc.env:SECRET}', list: [1, a]}\n")
    settings = read_runs([runs / "none"])["none"].settings
    assert settings == {"data.path": "${oc.env:SECRET}", "data.list": "[1, 'a']"}


def test_links_and_pipes_in_a_strangers_folder_lead_nowhere(runs, tmp_path, capsys):
    """What is written replaces a link; a pipe that nobody writes to is not waited for."""
    folder, precious = runs / "none", tmp_path / "precious.txt"
    precious.write_text("mine")
    for name in ("report.html", ".report.html.partial"):
        (folder / name).symlink_to(precious)
    for name in ("about.json", "config.yaml"):
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
    (folder / "layers.jsonl").symlink_to("layers.jsonl")
    assert run(capsys, "report", folder)[0] == 0
    assert precious.read_text() == "mine"
    assert not (folder / "report.html").is_symlink()


def test_layers_may_be_others_in_each_step(runs):
    """Lines of another version, or of a run that went on with other ranks."""
    from megatron_ext.trainer.reports.read import read_runs

    loads = {"rank_loads_before": [[30, 10], [10, 10]], "rank_loads_after": [[20, 20], [10, 10]]}
    worst = {
        **{"layer": 1, "microbatch": 0, "num_experts": 4, "slots": [[-1], [1]]},
        **{"rank_loads_before": [30, 10], "rank_loads_after": [20, 20]},
    }
    after = {"imbalance_before": [1.5, 1.0], "imbalance_after": [1.0, None]}
    lines = [
        {"step": 1, "layer": [1, 2], **after, **loads, "worst": worst},
        {"step": 2, "layer": [1, 2]},
        {"step": 3, "layer": []},
        {"step": 5, "layer": [2], "imbalance_after": [1.25]},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (runs / "quota" / "layers.jsonl").write_text(text)
    layers = read_runs([runs / "quota"])["quota"].layers
    assert (layers.steps, layers.numbers) == ([1, 2, 3, 5], [1, 2])
    assert layers.columns["imbalance_after"][1].tolist()[3] == 1.25
    assert layers.worst_layer() == (2, 1.25)
    assert layers.kept_steps == [1]
    assert layers.rank_loads["before"].tolist() == [[[1.5, 0.5], [1.0, 1.0]]]
    assert [one["replicas"] for one in layers.worst] == [[[1, 0, 1]]]
    assert [one["step"] for one in layers.worst] == [1]
