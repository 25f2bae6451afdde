"""`place`: what is written is what other commands use, and settings that are wrong."""

import dataclasses
import json

import numpy as np
import pytest

from megatron_ext.files.routes import read_routes, write_routes
from tests.cli.command import run


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

    settings = [f"balance.placement={out}", "--slots", 2, "--json"]
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
        (["plan", "LOADS", "balance.placement=absent"], "absent does not exist"),
        (
            ["plan", "LOADS", "balance.placement=LOADS"],
            "holds loads, not replicas placed",
        ),
    ],
)
def test_place_with_wrong_settings(loads, capsys, words, message):
    out = loads.parent / "placement.npz"
    words = [str(word).replace("LOADS", str(loads)).replace("OUT", str(out)) for word in words]
    status, stdout, stderr = run(capsys, *words)
    assert (status, stdout) == (2, "")
    assert stderr.startswith(f"megatron-ext {words[0]}")
    assert message in stderr
    assert stderr.count("\n") == 1


@pytest.fixture
def trace(loads):
    """The loads as of one layer each."""
    path = loads.parent / "trace.npz"
    with np.load(loads) as arrays:
        np.savez(path, load=arrays["load"], layer=np.arange(1, 4))
    return path


def test_place_eplb(trace, capsys):
    """What is written is the order of a checkpoint's experts; with it the loads are more even."""
    from megatron_ext.files.relayout import read_layout

    out = trace.parent / "layout.npz"
    words = ["place", "eplb", trace, "--out", out]
    status, stdout, _ = run(capsys, *words, "--json")
    assert status == 0
    report = json.loads(stdout)
    assert (report["loads"], report["ranks"], report["experts"], report["nodes"]) == (3, 8, 32, 1)
    layout = read_layout(out)
    assert list(layout) == [layer["layer"] for layer in report["layers"]] == [1, 2, 3]
    with np.load(trace) as arrays:
        load = arrays["load"]
    for layer in report["layers"]:
        moved = load[layer["layer"] - 1][:, layout[layer["layer"]]]
        rank_loads = moved.sum(0).reshape(8, 4).sum(1)
        assert layer["imbalance_after"] == pytest.approx(rank_loads.max() / rank_loads.mean())
        assert layer["imbalance_after"] < layer["imbalance_before"] == pytest.approx(1.5, abs=0.2)

    status, stdout, stderr = run(capsys, *words)
    assert (status, stdout) == (2, "")
    assert stderr.endswith("exists already: replace it with --overwrite\n")
    status, stdout, _ = run(capsys, *words, "--overwrite", "--groups", 4, "--nodes", 2)
    assert status == 0
    assert f"layout        {out}" in stdout
    for order in read_layout(out).values():
        assert {len(set(node // 8)) for node in order.reshape(2, 16)} == {2}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["place", "eplb", "absent", "--out", "OUT"], "absent does not exist"),
        (["place", "eplb", "LOADS", "--out", "OUT"], "the loads are of no known layer"),
        (
            ["place", "eplb", "TRACE", "--nodes", 3, "--out", "OUT"],
            "ranks (8) must be a multiple of nodes (3)",
        ),
        (
            ["place", "eplb", "TRACE", "--nodes", 0, "--out", "OUT"],
            "'0' must be a whole number >= 1",
        ),
    ],
)
def test_eplb_with_wrong_settings(loads, trace, capsys, words, message):
    names = {"LOADS": loads, "TRACE": trace, "OUT": loads.parent / "out"}
    status, stdout, stderr = run(capsys, *(names.get(word, word) for word in words))
    assert (status, stdout) == (2, "")
    assert message in stderr
    assert not names["OUT"].exists()


def test_place_sem_moe(routes, capsys):
    from megatron_ext.methods.sem_moe.semantics import read_semantics

    out = routes.parent / "semantics.npz"
    words = ["place", "sem_moe", routes, "--ranks", 4, "--out", out]
    status, stdout, _ = run(capsys, *words, "--global-batch", 16, "--json")
    assert status == 0
    report = json.loads(stdout)
    assert (report["samples"], report["layers"], report["global_batch"]) == (64, [1, 2, 3], 16)
    rate = {name: one["local_activation_rate"] for name, one in report["measured"].items()}
    assert list(rate) == ["round robin", "experts", "samples", "both"]
    assert rate["both"] > 2 * rate["round robin"]
    tokens = report["measured_tokens"]
    assert list(tokens) == ["sequence order", "round robin", "by id", "re-batched"]
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
    assert f"{tokens['re-batched']['sent']:.3f}" in stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["place", "sem_moe", "absent", "--ranks", 4, "--out", "OUT"], "absent does not exist"),
        (["place", "sem_moe", "ROUTES", "--ranks", 3, "--out", "OUT"], "a multiple of ranks (3)"),
        (
            ["place", "sem_moe", "ROUTES", "--ranks", 4, "--global-batch", 6, "--out", "OUT"],
            "global batch (6) must be a multiple of ranks (4)",
        ),
        (
            ["place", "sem_moe", "LOADS", "--ranks", 4, "--out", "OUT"],
            "holds loads, not routes (log",
        ),
    ],
)
def test_sem_moe_with_wrong_settings(loads, routes, capsys, words, message):
    names = {"LOADS": loads, "ROUTES": routes, "OUT": routes.parent / "out"}
    status, stdout, stderr = run(capsys, *(names.get(word, word) for word in words))
    assert (status, stdout) == (2, "")
    assert stderr.startswith("megatron-ext place sem_moe: error: ")
    assert message in stderr
    assert stderr.count("\n") == 1
    assert not names["OUT"].exists()


def test_sem_moe_learns_only_what_it_can_measure(routes, capsys, monkeypatch):
    learned = []
    monkeypatch.setattr("megatron_ext.methods.sem_moe.learn.learn", learned.append)
    other = routes.parent / "other.npz"
    whole = read_routes(routes)
    write_routes(other, dataclasses.replace(whole, vocab_size=whole.vocab_size + 1))
    words = ["place", "sem_moe", routes, "--ranks", 4, "--out", routes.parent / "out"]
    for wrong, message in (
        (["--global-batch", 128], "global batch (128) must be a multiple of ranks (4) and at most"),
        (["--evaluate", other], f"{whole.vocab_size + 1} ids do not fit what was learned from"),
    ):
        status, _, stderr = run(capsys, *words, *wrong)
        assert status == 2
        assert message in stderr
    assert learned == []
