"""The command line: exit status, what goes to stdout and stderr, and that help needs no torch."""

import importlib.metadata
import json
import subprocess
import sys
import types
from pathlib import Path

import pytest

from checkpoints_tools import CheckpointContents, Entry
from megatron_ext import cli
from megatron_ext.cli import main


def run(capsys, *words):
    """Run the command in this process. Returns its status, stdout and stderr."""
    try:
        status = main([str(word) for word in words])
    except SystemExit as stop:
        status = stop.code
    output = capsys.readouterr()
    return status, output.out, output.err


@pytest.fixture
def texts(tmp_path):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "a.py").write_text("x = 1\n")
    (tmp_path / "code" / "b.bin").write_bytes(b"\0\1")
    return tmp_path


def test_as_a_process(texts):
    """Help without torch; one line for wrong input."""
    program = (
        "import sys\nfrom megatron_ext.cli import main\n"
        "try: main(['data', 'build', '--help'])\n"
        "except SystemExit as stop: assert stop.code == 0\n"
        "heavy = {'torch', 'numpy', 'megatron', 'rich', 'hydra'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    assert "example:\n  megatron-ext data build" in result.stdout

    result = subprocess.run(
        [sys.executable, "-m", "megatron_ext", "data", "build", "absent", "--out", texts / "out"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr == "megatron-ext data build: error: absent does not exist\n"


@pytest.mark.parametrize(
    "words",
    [
        ["data", "build"],
        ["data", "corpus"],
        ["data", "info"],
        ["checkpoint", "inspect"],
        ["checkpoint", "relayout"],
        ["doctor"],
        ["place", "craft"],
        ["place", "sem_moe"],
        ["plan"],
        ["replay"],
        ["synth"],
    ],
)
def test_help_has_an_example(capsys, words):
    status, out, _ = run(capsys, *words, "--help")
    assert status == 0
    assert f"example:\n  megatron-ext {' '.join(words)}" in out
    assert "--json" in out


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["data"],
        ["plant"],
        ["replay", "loads.npz"],
        ["data", "build"],
        ["data", "corpus", "--out", "x", "--limit-mb", "0"],
    ],
)
def test_wrong_usage(capsys, words):
    status, out, err = run(capsys, *words)
    assert (status, out) == (2, "")
    assert "usage: megatron-ext" in err


def test_train_gets_every_word(monkeypatch, capsys):
    seen = []
    fake = types.ModuleType("megatron_ext.train")
    fake.main = seen.append
    monkeypatch.setitem(sys.modules, "megatron_ext.train", fake)
    words = ["--config-name", "quickstart", "balance.slots=1", "+megatron.x=[1,2]", "--help"]
    assert main(["train", *words]) == 0
    assert seen == [words]


def test_build_and_info(texts, capsys):
    out = texts / "out"
    status, stdout, stderr = run(capsys, "data", "build", texts / "code", "--out", out)
    assert status == 0
    assert "code" in stdout
    assert f"skipped 1 files: {texts}/code/b.bin (it holds NUL bytes)" in stderr

    status, stdout, _ = run(capsys, "data", "info", out, "--json")
    assert status == 0
    assert json.loads(stdout) == {
        "folder": str(out),
        "tokenizer": "bytes",
        "vocab_size": 257,
        "eod": 256,
        "eod_token": "<eod>",
        "domains": {"code": {"prefix": "code", "documents": 1, "tokens": 7, "text_bytes": 6}},
    }

    status, stdout, stderr = run(capsys, "data", "build", texts / "code", "--out", out)
    assert (status, stdout) == (2, "")
    assert stderr == (
        f"megatron-ext data build: error: {out} exists already: replace it with --overwrite\n"
    )
    command = ["data", "build", texts / "code", "--out", out, "--overwrite"]
    assert run(capsys, *command)[0] == 0
    assert run(capsys, *command, "--strict")[0] == 2

    status, stdout, _ = run(capsys, *command, "--json")
    assert status == 0
    assert json.loads(stdout)["skipped"] == [
        {"path": f"{texts}/code/b.bin", "reason": "it holds NUL bytes"}
    ]


def test_info_notices_a_cut_file(texts, capsys):
    out = texts / "out"
    run(capsys, "data", "build", texts / "code" / "a.py", "--out", out)
    (out / "a.bin").write_bytes(b"\0\0")
    status, stdout, stderr = run(capsys, "data", "info", out)
    assert (status, stdout) == (2, "")
    assert "was changed or cut off" in stderr


def test_a_tokenizer_that_is_none(texts, capsys):
    pytest.importorskip("tokenizers")
    status, _, stderr = run(
        capsys,
        *("data", "build", texts / "code"),
        *("--out", texts / "out", "--tokenizer", texts / "code" / "a.py"),
    )
    assert status == 2
    assert "is not a Hugging Face tokenizer.json" in stderr
    assert stderr.count("\n") == 1

    status, _, stderr = run(
        capsys, "data", "build", texts / "code", "--out", texts / "out", "--eod", "x"
    )
    assert status == 2
    assert "--eod names a token of the --tokenizer" in stderr


def test_corpus(tmp_path, capsys, monkeypatch):
    from megatron_ext.data import corpus

    def texts_of(name):
        def candidates():
            return [
                corpus.Candidate(f"{i}.txt", lambda i=i: f"{name} {i} ".ljust(20_000, "x"))
                for i in range(10)
            ]

        return candidates

    domains = {name: texts_of(name) for name in ("a", "b", "c")} | {"d": list}
    monkeypatch.setattr(corpus, "DOMAINS", domains)
    status, stdout, stderr = run(
        capsys, "data", "corpus", "--out", tmp_path / "out", "--limit-mb", 1, "--json"
    )
    assert status == 0
    assert json.loads(stdout) == {
        "path": str(tmp_path / "out"),
        "domains": {name: {"documents": 10, "text_bytes": 200_000} for name in ("a", "b", "c")},
        "missing": ["d"],
    }
    assert "no text for d" in stderr

    del domains["a"]
    status, stdout, stderr = run(capsys, "data", "corpus", "--out", tmp_path / "less")
    assert (status, stdout) == (1, "")
    assert stderr.startswith("megatron-ext data corpus: error: this machine has text for 2 domains")
    assert stderr.count("\n") == 1


def test_checkpoint_inspect(tmp_path, capsys, monkeypatch):
    status, stdout, stderr = run(capsys, "checkpoint", "inspect", tmp_path)
    assert (status, stdout) == (2, "")
    assert "no Megatron checkpoint in" in stderr

    weight = "decoder.layers.mlp.experts.experts.linear_fc1.weight"
    contents = CheckpointContents(
        folder=Path("x"),
        step=7,
        num_experts=4,
        num_parameters=1234,
        entries=[Entry(key=weight, shape=(2, 4, 8, 4), dtype="float32", num_shards=8)],
    )
    monkeypatch.setattr("checkpoints_tools.read_contents", lambda path: contents)
    status, stdout, _ = run(capsys, "checkpoint", "inspect", "x")
    assert status == 0
    assert f"{weight}  2x4x8x4  float32       8" in stdout
    assert "parameters   1,234" in stdout
    assert "logical experts only" in stdout
    status, stdout, _ = run(capsys, "checkpoint", "inspect", "x", "--json")
    report = json.loads(stdout)
    assert (report["step"], report["num_experts"], report["problems"]) == (7, 4, [])
    assert report["entries"][0]["shape"] == [2, 4, 8, 4]

    contents.entries[0] = Entry(key=weight, shape=(2, 6, 8, 4), dtype="float32", num_shards=12)
    status, stdout, _ = run(capsys, "checkpoint", "inspect", "x")
    assert status == 1
    assert "holds 6 experts, the router 4" in stdout


def test_doctor(capsys):
    import torch

    status, stdout, _ = run(capsys, "doctor", "--json")
    report = json.loads(stdout)
    assert status == (1 if report["problems"] else 0)
    assert report["versions"]["torch"] == importlib.metadata.version("torch")
    assert report["versions"]["megatron-core"] == importlib.metadata.version("megatron-core")
    assert bool(report["devices"]) == torch.cuda.is_available()
    assert "quota" in report["strategies"]
    assert report["transport_auto"] in report["transports"]
    assert report["shared_memory"]["free_bytes"] <= report["shared_memory"]["total_bytes"]


def test_doctor_names_what_is_wrong(capsys, monkeypatch):
    known = {"numpy": "2.0.1", "megatron-ext": "0.1.0", "torch": "2.13.0", "hydra-core": "1.3.8"}

    def version(name):
        if name not in known:
            raise importlib.metadata.PackageNotFoundError(name)
        return known[name]

    def no_library():
        raise RuntimeError("the library is not built")

    requirements = ["numpy<1", "torch>=2.10", "wandb>=1; extra == 'wandb'"]
    monkeypatch.setattr("megatron_ext.ops.load_library", no_library)
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: requirements)
    monkeypatch.setattr(importlib.metadata, "version", version)
    status, stdout, _ = run(capsys, "doctor")
    assert status == 1
    assert [line for line in stdout.splitlines() if line.startswith("problem: ")] == [
        "problem: megatron-core is not installed",
        "problem: numpy 2.0.1 is installed, <1 is needed",
        "problem: the library is not built",
    ]


def test_interrupt(monkeypatch, capsys):
    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_doctor", interrupted)
    assert run(capsys, "doctor") == (130, "", "")


def test_an_error_of_our_own_keeps_its_traceback(monkeypatch):
    def broken(arguments):
        raise TypeError("a bug")

    monkeypatch.setattr(cli, "_doctor", broken)
    with pytest.raises(TypeError, match="a bug"):
        main(["doctor"])


COSTS = "--expert-bytes 1000 --link-bandwidth 1e9 --assignment-time 1e-6"


@pytest.fixture
def loads(tmp_path, capsys):
    path = tmp_path / "loads.npz"
    words = [
        "zipf",
        "--ranks",
        "8",
        "--experts",
        "32",
        "--tokens",
        "1024",
        "--top-k",
        "4",
        "--batch",
        "3",
        "--imbalance",
        "1.5",
    ]
    assert run(capsys, "synth", *words, "--out", path)[0] == 0
    return path


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
    assert "gap to the bound" in stdout


def test_plan_writes_plans(loads, capsys):
    import numpy as np

    out = loads.parent / "plans.npz"
    assert run(capsys, "plan", loads, "--slots", 1, "--out", out, "--split")[0] == 0
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


def test_place_craft(loads, capsys):
    """The loads are of no known layer: all of layer 0. The placement is used by plan and replay."""
    out = loads.parent / "placement.npz"
    words = ["place", "craft", loads, "--slots", 1, "--out", out]
    status, stdout, _ = run(capsys, *words, "--budget", 1, "--json")
    assert status == 0
    report = json.loads(stdout)
    (layer,) = report["layers"]
    assert (report["loads"], report["ranks"], report["slots"], report["budget"]) == (3, 8, 1, 1)
    assert (layer["layer"], layer["slot_limit"]) == (0, 1)
    assert 0 < layer["replicas"] <= 8
    assert list(layer["gains"]) == ["1", "2", "4", "8"]
    assert layer["balancedness_after"] > layer["balancedness_before"] + 0.1

    settings = ["--placement", out, "--slots", 2, "--json"]
    status, stdout, _ = run(capsys, "plan", loads, "--strategy", "craft", *settings)
    assert status == 0
    planned = json.loads(stdout)
    assert planned["summary"]["placement"] == {"0": layer["replicas"]}
    after = [1 / one["imbalance_after"] for one in planned["instances"]]
    assert sum(after) / 3 == pytest.approx(layer["balancedness_after"])
    status, stdout, _ = run(capsys, "replay", loads, "--strategies", "craft,quota", *settings)
    assert status == 0
    assert json.loads(stdout)["settings"]["placement"] == {"0": layer["replicas"]}

    status, stdout, stderr = run(capsys, *words)
    assert (status, stdout) == (2, "")
    assert stderr.endswith("exists already: replace it with --overwrite\n")
    status, stdout, _ = run(capsys, *words, "--overwrite", "--even")
    assert status == 0
    assert f"placement     {out}" in stdout
    assert "at most 1 a rank" in stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["place", "craft", "LOADS", "--slots", 0, "--out", "OUT"], "slots (0) must be >= 1"),
        (["place", "craft", "LOADS", "--budget", -1, "--out", "OUT"], "budget (-1) must be >= 0"),
        (["place", "craft", "absent", "--out", "OUT"], "absent does not exist"),
        (
            ["plan", "LOADS", "--strategy", "craft"],
            "'craft' needs a placement: `megatron-ext place",
        ),
        (["plan", "LOADS", "--placement", "absent"], "absent does not exist"),
        (["plan", "LOADS", "--placement", "LOADS"], "has no array 'layer'; it has load"),
    ],
)
def test_place_with_wrong_settings(loads, capsys, words, message):
    names = {"LOADS": loads, "OUT": loads.parent / "placement.npz"}
    status, stdout, stderr = run(capsys, *(names.get(word, word) for word in words))
    assert (status, stdout) == (2, "")
    assert stderr.startswith(f"megatron-ext {words[0]}")
    assert message in stderr
    assert stderr.count("\n") == 1


@pytest.fixture
def routes(tmp_path):
    from megatron_ext.offline.routes import write_routes
    from tests import workloads

    path = tmp_path / "routes.npz"
    sizes = dict(samples=64, topics=4, layers=3, experts=16, top_k=2, fidelity=0.8)
    write_routes(path, workloads.topical_routes(**sizes))
    return path


def test_place_sem_moe(routes, capsys):
    from megatron_ext.offline.sem_moe import read_semantics

    out = routes.parent / "semantics.npz"
    words = ["place", "sem_moe", routes, "--ranks", 4, "--out", out]
    status, stdout, _ = run(capsys, *words, "--global-batch", 16, "--json")
    assert status == 0
    report = json.loads(stdout)
    assert (report["samples"], report["layers"], report["global_batch"]) == (64, [1, 2, 3], 16)
    rate = {name: one["local_activation_rate"] for name, one in report["measured"].items()}
    assert list(rate) == ["round robin", "experts", "samples", "both"]
    assert rate["both"] > 2 * rate["round robin"]
    assert read_semantics(out).expert.shape == (3, 16)
    status, _, stderr = run(capsys, *words)
    assert status == 2
    assert stderr.endswith("exists already: replace it with --overwrite\n")
    status, stdout, _ = run(
        capsys, *words, "--overwrite", "--evaluate", routes, "--global-batch", 16
    )
    assert status == 0
    assert "learned from  64 samples, 3 layers" in stdout
    assert f"{rate['both']:.3f}" in stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["place", "sem_moe", "absent", "--ranks", 4, "--out", "OUT"], "absent does not exist"),
        (["place", "sem_moe", "ROUTES", "--ranks", 3, "--out", "OUT"], "a multiple of ranks (3)"),
        (
            ["place", "sem_moe", "ROUTES", "--ranks", 4, "--global-batch", 6, "--out", "OUT"],
            "global batch (6) must be a multiple of ranks (4)",
        ),
        (["place", "sem_moe", "LOADS", "--ranks", 4, "--out", "OUT"], "has no array 'token'"),
        (["checkpoint", "relayout", "absent", "ROUTES", "--out", "OUT"], "no array 'expert'"),
        (["checkpoint", "relayout", "absent", "SEMANTICS", "--out", "OUT"], "is not a folder"),
    ],
)
def test_sem_moe_with_wrong_settings(loads, routes, capsys, words, message):
    names = {
        "LOADS": loads,
        "ROUTES": routes,
        "OUT": routes.parent / "out",
        "SEMANTICS": routes.parent / "semantics.npz",
    }
    if "SEMANTICS" in words:
        made = ["place", "sem_moe", routes, "--ranks", 4, "--out", names["SEMANTICS"]]
        assert run(capsys, *made)[0] == 0
    status, stdout, stderr = run(capsys, *(names.get(word, word) for word in words))
    assert (status, stdout) == (2, "")
    assert stderr.startswith(f"megatron-ext {words[0]} {words[1]}: error: ")
    assert message in stderr
    assert stderr.count("\n") == 1
    assert not names["OUT"].exists()


def test_checkpoint_relayout(routes, capsys, monkeypatch):
    """What is asked of the tool, which has tests of its own."""
    import checkpoints_tools

    asked = []
    monkeypatch.setattr(
        checkpoints_tools, "relayout", lambda path, layouts, out: asked.append(layouts) or 12
    )
    semantics = routes.parent / "semantics.npz"
    assert run(capsys, "place", "sem_moe", routes, "--ranks", 4, "--out", semantics)[0] == 0
    status, stdout, _ = run(capsys, "checkpoint", "relayout", "runs/a", semantics, "--out", "b")
    assert status == 0
    assert "12 tensors in 3 layers" in stdout
    assert list(asked[0]) == [1, 2, 3]
    assert [sorted(order.tolist()) for order in asked[0].values()] == [list(range(16))] * 3


def test_plan_for_the_least_time(loads, capsys):
    words = ["--objective", "time", "--link-bandwidth", "4e11", "--assignment-time", "1e-7"]
    replicas = []
    for expert_bytes in (10**3, 10**12):
        status, stdout, _ = run(
            capsys, "plan", loads, *words, "--expert-bytes", expert_bytes, "--json"
        )
        assert status == 0
        replicas.append(json.loads(stdout)["summary"]["replicas"]["mean"])
    assert replicas[0] > replicas[1] == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--slots", -1], "slots (-1) must be >= 0"),
        (["--tolerance", -0.5], "tolerance (-0.5) must be from 0"),
        (["--min-quota", 0], "min_quota (0) must be >= 1"),
        (["--nvlink-domain", 3], "nvlink_domain (3) must divide ep_size (8)"),
        (["--strategy", "best"], "unknown strategy 'best'; known: craft, eplb"),
        (["--strategy", "ideal"], "strategy 'ideal' makes no plans"),
        (["--split"], "--split adds to the file of --out, which is not given"),
        (["--out", "."], ". is a folder"),
        (["--objective", "speed"], "--objective (speed) must be tolerance or time"),
        (["--objective", "time"], "--objective time needs --expert-bytes, --link-bandwidth"),
        (["--expert-bytes", 5], "--expert-bytes is for --objective time"),
        (["--strategy", "time"], "--strategy time needs --expert-bytes, --link-bandwidth"),
        (["--strategy", "eplb", "--interval", 0], "interval (0) must be >= 1"),
        (["--strategy", "llep", "--alpha", 0.5], "alpha (0.5) must be from 1"),
        (["--min-tokens-per-gemm", 0], "min_tokens_per_gemm (0) must be >= 1"),
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


def test_plan_lists_the_strategies(capsys):
    from megatron_ext.balance.strategies import STRATEGIES

    status, stdout, _ = run(capsys, "plan", "--list")
    assert status == 0
    lines = stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(STRATEGIES)
    for line, strategy in zip(lines, STRATEGIES.values(), strict=True):
        assert line.endswith(strategy.summary)
        assert "training" in line
        assert ("offline" in line) == (strategy.name != "ideal")
    status, stdout, _ = run(capsys, "plan", "--list", "--json")
    assert status == 0
    assert json.loads(stdout)["eplb"]["training"] is True
    status, _, stderr = run(capsys, "plan")
    assert status == 2
    assert stderr == "megatron-ext plan: error: LOADS.npz is not given (nor --list)\n"


def test_plan_from_history(loads, capsys):
    words = ["--strategy", "eplb", "--interval", 1, "--slots", 2, "--json"]
    status, stdout, _ = run(capsys, "plan", loads, *words)
    assert status == 0
    report = json.loads(stdout)
    assert report["instances"][0]["replicas"] == 0
    assert report["summary"]["interval"] == 1


def test_replay_prints_the_contract(loads, capsys, tmp_path):
    words = ["--strategies", "none,quota,time", "--slots", 2, *COSTS.split()]
    out = tmp_path / "out"
    status, stdout, _ = run(capsys, "replay", loads, *words, "--out", out, "--json")
    assert status == 0
    report = json.loads(stdout)
    assert list(report["strategies"]) == ["none", "quota", "time"]
    for numbers in report["strategies"].values():
        assert numbers.keys() >= {
            *("imbalance_mean", "imbalance_p50", "imbalance_p95", "imbalance_worst"),
            *("replicas_mean", "max_rank_sends", "remote_assignments_mean", "solve_us_p50"),
        }
    assert report["strategies"]["none"]["imbalance_mean"] == pytest.approx(1.5, rel=0.01)
    assert report["strategies"]["quota"]["imbalance_worst"] <= 1.01
    assert json.loads((out / "replay.json").read_text()) == report
    assert report["papers"]["ultraep_table_4"]["columns"] == ["metric", "none", "quota", "time"]
    status, stdout, _ = run(capsys, "replay", loads, *words)
    assert status == 0
    assert "| quota " in stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--strategies", "none,ideal"], "strategy 'ideal' makes no plans"),
        (["--strategies", "none,,quota"], "unknown strategy ''; known: craft, eplb"),
        (["--strategies", "none,none"], "strategy 'none' is there twice"),
        (["--strategies", "none,time"], "time among --strategies needs --expert-bytes"),
        (["--strategies", "none", "--slots", -1], "slots (-1) must be >= 0"),
        (["--strategies", "none", "--nvlink-domain", 3], "nvlink_domain (3) must divide"),
        (["--strategies", "none", "--token-bytes", 3], "--token-bytes is for time among"),
        (["--strategies", "none", "--out", "pyproject.toml"], "pyproject.toml is no folder"),
    ],
)
def test_replay_with_wrong_settings(loads, capsys, words, message):
    status, stdout, stderr = run(capsys, "replay", loads, *words)
    assert (status, stdout) == (2, "")
    assert stderr.startswith("megatron-ext replay: error: ")
    assert message in stderr
    assert stderr.count("\n") == 1


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
