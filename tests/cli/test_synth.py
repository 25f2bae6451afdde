"""`synth`: the numbers printed, and settings that are wrong."""

import json
import re
from pathlib import Path

import pytest

from tests.cli.command import run


def test_synth_says_what_it_made(loads, capsys):
    words = ["cold-ranks", "--ranks", 8, "--experts", 32, "--share", 0.25, "--seed", 5]
    out = loads.parent / "cold.npz"
    status, stdout, stderr = run(capsys, "synth", *words, "--out", out, "--json")
    assert (status, stderr) == (0, "")
    report = json.loads(stdout)
    assert report["shape"] == [1, 8, 32]
    assert report["imbalance"][0] > 8 / 6
    status, stdout, _ = run(capsys, "synth", *words, "--out", out, "--overwrite")
    assert status == 0
    assert "cold-ranks: a share of the ranks gets nothing" in stdout


def test_synth_of_a_public_workload(tmp_path, capsys):
    from megatron_ext.files.loads import read_loads

    out = tmp_path / "burst.npz"
    words = ["w7-burst", "--ranks", 8, "--experts", 32, "--top-k", 4, "--batch", 4]
    status, stdout, stderr = run(capsys, "synth", *words, "--out", out, "--json")
    assert (status, stderr) == (0, "")
    *steady, burst = json.loads(stdout)["imbalance"]
    assert max(steady) < 1.1
    # Chance is a few percent of that.
    assert 2.4 < burst < 2.6
    assert read_loads(out).trace["step"].tolist() == [0, 1, 2, 3]


def test_synth_without_chance(tmp_path, capsys):
    out = tmp_path / "cold.npz"
    words = ["cold-ranks", "--ranks", 8, "--experts", 32, "--exponent", 0, "--share", 0.25]
    _, stdout, _ = run(capsys, "synth", *words, "--out", out, "--json")
    assert json.loads(stdout)["imbalance"][0] > 8 / 6 + 1e-4
    words += ["--without-chance", "--overwrite"]
    _, stdout, _ = run(capsys, "synth", *words, "--out", out, "--json")
    assert json.loads(stdout)["imbalance"] == [pytest.approx(8 / 6, abs=1e-4)]


def test_synth_lists_the_kinds(capsys):
    from megatron_ext.lab.synthetic import KINDS

    status, stdout, _ = run(capsys, "synth", "--list")
    assert status == 0
    lines = stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(KINDS)
    for line, kind in zip(lines, KINDS.values(), strict=True):
        assert kind.summary in line
        assert all(setting in line for setting in kind.settings)
    assert lines[-1].endswith("; --batch 8")
    assert any(line.endswith("; --without-chance") for line in lines)
    status, stdout, _ = run(capsys, "synth", "--list", "--json")
    assert status == 0
    listed = json.loads(stdout)
    assert listed["w5-zero-expert-rank"]["settings"] == ["share"]
    assert listed["w5-zero-expert-rank"]["defaults"] == {"share": 0.5}


@pytest.mark.parametrize("folder", ["absent_disk/dir", "absent_disk"])
def test_synth_makes_no_folder_of_the_root(capsys, folder, monkeypatch):
    words = ["synth", "zipf", "--ranks", 8, "--experts", 32, "--out"]
    rule = ".*there is no /absent_disk;.*\n"
    for start in ("/", ""):
        monkeypatch.chdir("/")
        out = f"{start}{folder}/x.npz"
        status, stdout, stderr = run(capsys, *words, out)
        assert (status, stdout) == (2, "")
        assert re.fullmatch(f"megatron-ext synth: error: {out} {rule}", stderr)
        assert not Path("/absent_disk").exists()


@pytest.mark.parametrize("missing", ["KIND", "--ranks", "--experts", "--out"])
def test_synth_needs_sizes(tmp_path, capsys, missing):
    given = {"KIND": ["zipf"], "--ranks": [8], "--experts": [32], "--out": [tmp_path / "x.npz"]}
    words = []
    for name, values in given.items():
        if name != missing:
            words += values if name == "KIND" else [name, *values]
    status, stdout, stderr = run(capsys, "synth", *words)
    assert (status, stdout) == (2, "")
    assert re.fullmatch(f"megatron-ext synth: error: {missing} .*--list.*\n", stderr)


def test_a_wrong_kind_is_said_before_what_is_missing(capsys):
    status, stdout, stderr = run(capsys, "synth", "zip")
    assert (status, stdout) == (2, "")
    assert re.fullmatch(r"megatron-ext synth: error: unknown kind 'zip'.*mean zipf\?\n", stderr)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["heap", "--ranks", 8, "--experts", 32], "unknown kind 'heap'"),
        (["zip", "--ranks", 8, "--experts", 32], "; did you mean zipf?"),
        (["zipf", "--ranks", 8, "--experts", 30], "must be a multiple of ranks (8)"),
        (["zipf", "--ranks", 8, "--experts", 32, "--imbalance", 9], "imbalance (9.0) must be from"),
        (["zipf", "--ranks", 8, "--experts", 32, "--imbalance", 7], "cannot be had within 1%"),
        (["zipf", "--ranks", 8, "--experts", 32, "--share", 0.5], "share is no setting of zipf"),
        (
            ["drift", "--ranks", 8, "--experts", 32, "--batch", 1],
            "batch (1) must be >= 2 for drift",
        ),
        (
            ["w2-hot-rank", "--ranks", 8, "--experts", 32, "--exponent", 1],
            "exponent is no setting of w2-hot-rank; it has none",
        ),
        (
            ["w5-zero-expert-rank", "--ranks", 8, "--experts", 32, "--share", 0.9],
            "share (0.9) leaves 3 experts for top_k (8) choices",
        ),
    ],
)
def test_synth_with_wrong_settings(tmp_path, capsys, words, message):
    status, stdout, stderr = run(capsys, "synth", *words, "--out", tmp_path / "loads.npz")
    assert (status, stdout) == (2, "")
    assert stderr.startswith("megatron-ext synth: error: ")
    assert message in stderr
    assert stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_synth_of_more_than_fits_into_memory(tmp_path, capsys):
    words = ["zipf", "--ranks", 8, "--experts", 32, "--tokens", 10**14]
    status, stdout, stderr = run(capsys, "synth", *words, "--out", tmp_path / "loads.npz")
    assert (status, stdout) == (1, "")
    assert stderr.startswith("megatron-ext synth: error: Unable to allocate")
    assert stderr.count("\n") == 1
