"""`plan`: the printed contract, the file of plans, and settings and files that are wrong."""

import json
import re

import pytest

from tests.cli.command import COSTS, run


def test_plan_prints_the_contract(loads, capsys):
    status, stdout, _ = run(capsys, "plan", loads, "--slots", 2, "--json")
    assert status == 0
    report = json.loads(stdout)
    assert len(report["instances"]) == 3
    for instance in report["instances"]:
        assert set(instance) == {
            "imbalance_before",
            "imbalance_after",
            "lower_bound",
            "replicas",
            "max_fanout",
            "max_rank_sends",
            "solve_us",
        }
        assert 1.0 <= instance["lower_bound"] <= instance["imbalance_after"] <= 1.01
        assert instance["imbalance_before"] == pytest.approx(1.5, rel=0.01)
        assert 0 < instance["max_fanout"] <= instance["max_rank_sends"] <= instance["replicas"]
        assert instance["solve_us"] > 0
    summary = report["summary"]
    assert (summary["instances"], summary["strategy"], summary["slots"]) == (3, "quota", 2)
    worst = max(one["imbalance_after"] for one in report["instances"])
    assert summary["imbalance_after"]["worst"] == worst
    assert summary["gap"]["mean"] >= 1.0
    assert {"mean", "worst", "p50", "p99"} == set(summary["solve_us"])
    status, stdout, _ = run(capsys, "plan", loads)
    assert status == 0
    assert "3 loads, strategy quota" in stdout
    assert "after / lower bound" in stdout


def test_plan_writes_plans(loads, capsys):
    import numpy as np

    out = loads.parent / "plans.npz"
    status, stdout, _ = run(capsys, "plan", loads, "--slots", 1, "--out", out, "--split")
    assert (status, stdout.splitlines()[-1]) == (0, f"Written: {out}")
    with np.load(out) as archive, np.load(loads) as given:
        assert (archive["quota"].sum(2) == given["load"].sum(1)).all()
        assert (archive["split"].sum(3) == given["load"]).all()
        assert (archive["split"].sum(1) == archive["quota"]).all()
        assert archive["slots"].shape == (3, 8, 1)
    # `exact` plans for as many slots as a rank has mains.
    words = ["--strategy", "exact", "--out", out, "--overwrite", "--json"]
    status, stdout, _ = run(capsys, "plan", loads, *words)
    assert status == 0
    assert json.loads(stdout)["summary"]["slots"] == 4
    with np.load(out) as archive:
        loads_after = archive["quota"].sum(1)
        assert (loads_after.max(1) - loads_after.min(1)).max() <= 1
        assert archive["slots"].shape == (3, 8, 4)


def test_plan_for_the_least_time(loads, capsys):
    words = ["--objective", "time", "balance.link_bandwidth=4e11", "balance.assignment_time=1e-7"]
    replicas = []
    for expert_bytes in (10**3, 10**12):
        status, stdout, _ = run(
            capsys, "plan", loads, *words, "--expert-bytes", expert_bytes, "--json"
        )
        assert status == 0
        replicas.append(json.loads(stdout)["summary"]["replicas"]["mean"])
    assert replicas[0] > replicas[1] == 0


def test_plan_from_history(loads, capsys):
    words = ["--strategy", "eplb", "balance.history.interval=1", "--slots", 2, "--json"]
    status, stdout, _ = run(capsys, "plan", loads, *words)
    assert status == 0
    report = json.loads(stdout)
    assert report["instances"][0]["replicas"] == 0
    assert report["summary"]["interval"] == 1


def test_settings_are_those_of_recipes(loads, capsys):
    """Wherever they stand, and the same as the options of the same names."""
    words = ["balance.llep.alpha=1.0", "--slots", 1, "balance.llep.min_tokens_per_gemm=8", "--json"]
    summaries = []
    for asked in (
        ["plan", *words[:1], loads, *words[1:], "balance.strategy=llep"],
        ["plan", loads, "--strategy", "llep", "balance.slots=1", words[0], *words[3:]],
    ):
        status, stdout, _ = run(capsys, *asked)
        assert status == 0
        summaries.append(json.loads(stdout)["summary"])
    for summary in summaries:
        del summary["solve_us"]
        assert summary["alpha"] == 1.0
        assert summary["min_tokens_per_gemm"] == 8
        assert summary["slots"] == 1
    assert summaries[0] == summaries[1]


def test_settings_of_commands_without_a_balancer(capsys):
    status, _, stderr = run(capsys, "doctor", "balance.slots=1")
    assert status == 2
    assert "unrecognized arguments: balance.slots=1" in stderr


def test_plan_lists_the_strategies(capsys):
    from megatron_ext.balance.strategies import STRATEGIES

    status, stdout, _ = run(capsys, "plan", "--list")
    assert status == 0
    lines = stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(STRATEGIES)
    for line, strategy in zip(lines, STRATEGIES.values(), strict=True):
        assert line.endswith(strategy.summary)
        assert "training" in line
        assert ("offline" in line) == (strategy.name not in ("ideal", "sem_moe"))
    status, stdout, _ = run(capsys, "plan", "--list", "--json")
    assert status == 0
    assert json.loads(stdout)["eplb"]["training"] is True
    status, _, stderr = run(capsys, "plan")
    assert status == 2
    assert re.fullmatch(r"megatron-ext plan: error: LOADS\.npz .*--list.*\n", stderr)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--slots", -1], "slots (-1) must be >= 0"),
        (["--tolerance", -0.5], "tolerance (-0.5) must be from 0"),
        (["--min-quota", 0], "min_quota (0) must be >= 1"),
        (["--nvlink-domain", 3], "nvlink_domain (3) must divide ep_size (8)"),
        (["--strategy", "best"], "unknown strategy 'best'; known: craft, eplb"),
        (["--strategy", "ideal"], "strategy 'ideal' makes no plans"),
        (["--slots", 1, "balance.slots=2"], "balance.slots is given twice"),
        (["balance.llep.alpha=1", "balance.llep.alpha=2"], "balance.llep.alpha is given twice"),
        (["balance.slot=2"], "balance.slot: there is no setting of this name; did you mean slots?"),
        (
            ["balance.history.intervall=2"],
            "balance.history.intervall: there is no setting of this name; did you mean interval?",
        ),
        (["balance.llep.alpha=x"], "balance.llep.alpha: Value 'x' of type 'str'"),
        (["--strategy", "quotaa"], "; did you mean quota?"),
        (["balance.llep.alpha=0"], "balance.llep.alpha (0.0) must be from 1 to 1000000"),
        (["balance.slots=-1", "balance.min_quota=0"], "balance.min_quota (0) must be >= 1"),
        (["--split"], "--split adds to the file of --out, which is not given"),
        (["--out", "."], ". is a folder"),
        (["--objective", "speed"], "balance.objective ('speed') must be one of tolerance, time"),
        (
            ["--objective", "time"],
            "time needs --expert-bytes, balance.link_bandwidth, balance.assignment_time",
        ),
        (["--expert-bytes", 5], "--expert-bytes is for --objective time"),
        (["--strategy", "time"], "'time' is no strategy but an objective: balance.objective=time"),
        (["balance.history.interval=0"], "interval (0) must be >= 1"),
        (["balance.llep.min_tokens_per_gemm=0"], "min_tokens_per_gemm (0) must be >= 1"),
        (
            f"--strategy eplb --objective time {COSTS}".split(),
            "strategy 'eplb' fills replicas placed before, without a tolerance",
        ),
    ],
)
def test_plan_with_wrong_settings(loads, capsys, words, message):
    status, stdout, stderr = run(capsys, "plan", loads, *words)
    assert (status, stdout) == (2, "")
    assert stderr.startswith("megatron-ext plan: error: ")
    assert message in stderr
    assert stderr.count("\n") == 1


def test_plan_of_wrong_files(tmp_path, capsys):
    import numpy as np

    np.savez(tmp_path / "floats.npz", load=np.ones((4, 8)))
    np.savez(tmp_path / "overflow.npz", load=np.full((4, 8), 2**62))
    (tmp_path / "text.npz").write_text("load")
    for name, message in {
        "floats.npz": "floats.npz: load must be int64, got float64: convert it with",
        "overflow.npz": "for sums to fit int64 at most",
        "text.npz": "text.npz is no .npz file",
        "absent.npz": "absent.npz does not exist",
    }.items():
        out = tmp_path / "plans.npz"
        status, stdout, stderr = run(capsys, "plan", tmp_path / name, "--out", out)
        assert (status, stdout) == (2, "")
        assert stderr.startswith("megatron-ext plan: error: ")
        assert message in stderr
        assert stderr.count("\n") == 1
        assert not out.exists()
