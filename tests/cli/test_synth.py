"""`synth`: the numbers printed, and settings that are wrong."""

import json

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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["heap", "--ranks", 8, "--experts", 32], "unknown kind 'heap'"),
        (["zipf", "--ranks", 8, "--experts", 30], "must be a multiple of ranks (8)"),
        (["zipf", "--ranks", 8, "--experts", 32, "--imbalance", 9], "imbalance (9.0) must be from"),
        (["zipf", "--ranks", 8, "--experts", 32, "--imbalance", 7], "cannot be had within 1%"),
        (["zipf", "--ranks", 8, "--experts", 32, "--share", 0.5], "share is no setting of zipf"),
        (
            ["drift", "--ranks", 8, "--experts", 32, "--batch", 1],
            "batch (1) must be >= 2 for drift",
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
