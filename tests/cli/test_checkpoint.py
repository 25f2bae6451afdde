"""`checkpoint`: what is shown, and what is asked of the tools, which have tests of their own."""

import json
from pathlib import Path

import numpy as np
import pytest

from checkpoints_tools import CheckpointContents, Entry
from tests.cli.command import run


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


def test_checkpoint_relayout_by_loads(tmp_path, capsys, monkeypatch):
    """A layout is all that is needed; layers keep their numbers."""
    import checkpoints_tools
    from megatron_ext.files.relayout import write_layout

    asked = []
    monkeypatch.setattr(
        checkpoints_tools, "relayout", lambda path, layouts, out: asked.append(layouts) or 1
    )
    write_layout(tmp_path / "layout.npz", {3: np.array([2, 0, 1])})
    words = ["checkpoint", "relayout", "runs/a", tmp_path / "layout.npz", "--out", "b"]
    assert run(capsys, *words)[0] == 0
    assert {layer: order.tolist() for layer, order in asked[0].items()} == {3: [2, 0, 1]}


@pytest.mark.parametrize(
    ("semantics", "message"),
    [("routes.npz", "no array 'expert'"), ("semantics.npz", "is not a folder")],
)
def test_relayout_of_wrong_files(routes, capsys, semantics, message):
    made = ["place", "sem_moe", routes, "--ranks", 4, "--out", routes.parent / "semantics.npz"]
    assert run(capsys, *made)[0] == 0
    out = routes.parent / "out"
    words = ["checkpoint", "relayout", "absent", routes.parent / semantics, "--out", out]
    status, stdout, stderr = run(capsys, *words)
    assert (status, stdout) == (2, "")
    assert stderr.startswith("megatron-ext checkpoint relayout: error: ")
    assert message in stderr
    assert stderr.count("\n") == 1
    assert not out.exists()
