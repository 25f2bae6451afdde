"""`replay`: the printed contract, and settings that are wrong."""

import json
import re

import pytest

from tests.cli.command import COSTS, run


def test_replay_prints_the_contract(loads, capsys, tmp_path):
    words = ["--strategies", "none,quota,quota:time", "--slots", 2, *COSTS.split()]
    out = tmp_path / "out"
    status, stdout, _ = run(capsys, "replay", loads, *words, "--out", out, "--json")
    assert status == 0
    report = json.loads(stdout)
    assert list(report["strategies"]) == ["none", "quota", "quota:time"]
    for numbers in report["strategies"].values():
        assert numbers.keys() >= {
            *("imbalance_mean", "imbalance_p50", "imbalance_p95", "imbalance_worst"),
            *("replicas_mean", "max_rank_sends", "remote_assignments_mean", "solve_us_p50"),
        }
    assert report["strategies"]["none"]["imbalance_mean"] == pytest.approx(1.5, rel=0.01)
    assert report["strategies"]["quota"]["imbalance_worst"] <= 1.01
    assert json.loads((out / "replay.json").read_text()) == report
    status, stdout, _ = run(capsys, "replay", loads, *words)
    assert status == 0
    assert "| quota " in stdout


def test_bytes_that_move(loads, capsys):
    """Of one size of experts; without a size there is no table."""
    words = ["replay", loads, "--strategies", "none,moonep"]
    status, stdout, stderr = run(capsys, *words, "--expert-bytes", 2**20)
    assert (status, stderr) == (0, "")
    assert "moved, MiB" in stdout
    slots_mib = {line.split()[1]: line.split()[3] for line in stdout.splitlines()[-2:]}
    assert slots_mib == {"none": "2.00", "moonep": "4.00"}
    assert "MiB" not in run(capsys, *words)[1]
    status, _, stderr = run(capsys, *words, "--expert-bytes", 0)
    assert status == 2
    assert "--expert-bytes: '0' must be a whole number >= 1" in stderr


def test_slots_that_nothing_can_fill_are_named(loads, capsys):
    """8 ranks of 4 experts: 28 are on other ranks."""
    for words in (
        ["replay", loads, "--strategies", "quota"],
        ["plan", loads],
        ["place", "craft", loads, "--out", loads.parent / "placement.npz", "--overwrite"],
    ):
        status, _, stderr = run(capsys, *words, "--slots", 29)
        assert status == 0
        assert re.fullmatch(r"warning: slots \(29\) beyond 28 stay empty.*\n", stderr)
        assert run(capsys, *words, "--slots", 28)[::2] == (0, "")


def test_strategies_without_a_past_are_named(loads, capsys):
    """Three loads of one layer: placed after 50 by default, so never."""
    status, _, stderr = run(capsys, "replay", loads, "--strategies", "quota,eplb")
    assert status == 0
    assert re.fullmatch(r"warning: eplb .*first 3 of 3 .*interval \(50\) .*\n", stderr)
    words = ["plan", loads, "--strategy", "eplb"]
    assert "first 2 of 3" in run(capsys, *words, "balance.history.interval=2")[2]
    assert run(capsys, *words, "balance.history.interval=1")[2] == ""
    assert run(capsys, "replay", loads, "--strategies", "quota,eplb_exact")[2] == ""


def test_strategies_that_never_acted_are_named(loads, capsys, tmp_path):
    """And no sentence takes a strategy's name `none` for a number of strategies."""
    words = ["--strategies", "none,quota,llep,exact", "balance.llep.alpha=1000000"]
    status, out, _ = run(capsys, "replay", loads, *words, "--out", tmp_path / "out")
    assert re.search(r"^Written: \S+/out/replay.json, .*/replay.html$", out, re.MULTILINE)
    assert status == 0
    said = "Never acted, so the same as without balancing: llep. "
    assert said in out
    page = (tmp_path / "out" / "replay.html").read_text()
    assert said in page
    assert said in (tmp_path / "out" / "replay.md").read_text()
    (first,) = re.findall('<p class="verdict">(.*?)</p>', page)
    assert re.fullmatch(
        r"exact leaves the busiest rank \d\.\d{3} x the mean load, no other strategy less; without "
        r"balancing it has \d\.\d{3} x\.",
        first,
    )
    few = json.loads(run(capsys, "replay", loads, "--strategies", "none,quota", "--json")[1])
    assert few["never_acted"] == []
    words = ["--strategies", "none,llep", "balance.llep.alpha=1000000"]
    run(capsys, "replay", loads, *words, "--out", tmp_path / "idle")
    assert "No strategy made a replica: the busiest rank has 1.5" in (
        (tmp_path / "idle" / "replay.html").read_text()
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--strategies", "none,ideal"], "strategy 'ideal' makes no plans"),
        (["--strategies", "none,,quota"], "unknown strategy ''; known: craft, eplb"),
        (["--strategies", "none,none"], "strategy 'none' is there twice"),
        (["--strategies", "none,quota:time"], "NAME:time among --strategies needs --expert-bytes"),
        (
            ["--strategies", "none", "balance.strategy=llep"],
            "balance.strategy: --strategies says which are compared",
        ),
        (["--strategies", "none,time"], "'time' is no strategy but an objective"),
        (
            ["--strategies", "none,quota:speed"],
            "balance.objective ('speed') must be one of tolerance, time",
        ),
        (["--strategies", "none", "--slots", -1], "slots (-1) must be >= 0"),
        (["--strategies", "none", "--nvlink-domain", 3], "nvlink_domain (3) must divide"),
        (["--strategies", "none", "--token-bytes", 3], "--token-bytes is for NAME:time among"),
        (["--strategies", "none", "--out", "pyproject.toml"], "pyproject.toml is no folder"),
    ],
)
def test_replay_with_wrong_settings(loads, capsys, words, message):
    status, stdout, stderr = run(capsys, "replay", loads, *words)
    assert (status, stdout) == (2, "")
    assert stderr.startswith("megatron-ext replay: error: ")
    assert message in stderr
    assert stderr.count("\n") == 1
