"""`checkpoint`: what is shown, and what is asked of the tools, which have tests of their own."""

import json
from pathlib import Path

import numpy as np
import pytest

from checkpoints_tools import CheckpointContents, Entry
from tests.cli.command import run


def test_checkpoint_show(tmp_path, capsys, monkeypatch):
    status, stdout, stderr = run(capsys, "checkpoint", "show", tmp_path)
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
    status, stdout, _ = run(capsys, "checkpoint", "show", tmp_path)
    assert status == 0
    assert f"{weight}  2x4x8x4  float32       8" in stdout
    assert "parameters   1,234" in stdout
    assert "logical experts only" in stdout
    status, stdout, _ = run(capsys, "checkpoint", "show", tmp_path, "--json")
    report = json.loads(stdout)
    assert (report["step"], report["num_experts"], report["problems"]) == (7, 4, [])
    assert report["entries"][0]["shape"] == [2, 4, 8, 4]

    contents.entries[0] = Entry(key=weight, shape=(2, 6, 8, 4), dtype="float32", num_shards=12)
    status, stdout, _ = run(capsys, "checkpoint", "show", tmp_path)
    assert status == 1
    assert "holds 6 experts, the router 4" in stdout


class _Prepared:
    """Stands for a checked relayout of 12 tensors; remembers what was asked of it."""

    num_tensors, num_bytes = 12, 3000

    def __init__(self, layouts, out):
        self.layouts, self.out, self.written = layouts, out, []

    def write(self, on_bytes):
        on_bytes(self.num_bytes)
        self.written.append(True)


@pytest.fixture
def prepared(monkeypatch):
    """The relayouts that were asked for."""
    import checkpoints_tools

    asked = []

    def prepare(path, layouts, out):
        asked.append(_Prepared(layouts, out))
        return asked[-1]

    monkeypatch.setattr(checkpoints_tools, "prepare_relayout", prepare)
    monkeypatch.setattr(checkpoints_tools.folder, "free_bytes", lambda out: 2000)
    return asked


def test_checkpoint_relayout(routes, capsys, prepared):
    """What is asked of the tool, which has tests of its own."""
    semantics = routes.parent / "semantics.npz"
    assert run(capsys, "place", "sem_moe", routes, "--ranks", 4, "--out", semantics)[0] == 0
    words = ["checkpoint", "relayout", semantics.parent, semantics, "--out", "b"]
    status, stdout, _ = run(capsys, *words)
    assert status == 0
    assert "moved       12 tensors in 3 layers" in stdout
    (asked,) = prepared
    assert asked.written
    assert list(asked.layouts) == [1, 2, 3]
    assert [sorted(order.tolist()) for order in asked.layouts.values()] == [list(range(16))] * 3
    status, stdout, _ = run(capsys, *words, "--dry-run")
    assert status == 0
    assert "would move  12 tensors in 3 layers" in stdout
    assert "needs       3,000 bytes, 2,000 are free: NOT enough" in stdout
    assert not prepared[-1].written


def test_checkpoint_relayout_by_loads(tmp_path, capsys, prepared):
    """A layout is all that is needed; layers keep their numbers."""
    from megatron_ext.files.relayout import write_layout

    write_layout(tmp_path / "layout.npz", {3: np.array([2, 0, 1])})
    words = ["checkpoint", "relayout", tmp_path, tmp_path / "layout.npz", "--out", "b"]
    assert run(capsys, *words)[0] == 0
    layouts = prepared[0].layouts
    assert {layer: order.tolist() for layer, order in layouts.items()} == {3: [2, 0, 1]}


@pytest.mark.parametrize(
    ("semantics", "message"),
    [
        ("routes.npz", "holds routes (logging.route_samples), not an arr"),
        ("semantics.npz", "no Megatron checkpoint in "),
    ],
)
def test_relayout_of_wrong_files(routes, capsys, semantics, message):
    made = ["place", "sem_moe", routes, "--ranks", 4, "--out", routes.parent / "semantics.npz"]
    assert run(capsys, *made)[0] == 0
    out = routes.parent / "out"
    (routes.parent / "empty").mkdir()
    words = ["checkpoint", "relayout", routes.parent / "empty", routes.parent / semantics]
    words += ["--out", out]
    status, stdout, stderr = run(capsys, *words)
    assert (status, stdout) == (2, "")
    assert stderr.startswith("megatron-ext checkpoint relayout: error: ")
    assert message in stderr
    assert stderr.count("\n") == 1
    assert not out.exists()
