"""Two checkpoints are the same up to the order of experts, or the tensor that differs is named."""

import re
import shutil

import pytest

from checkpoints_tools import compare, relayout
from checkpoints_tools.contents import read_metadata
from tests.checkpoints_tools.test_relayout import ORDER, STYLES, saved
from tests.cli.command import run

__all__ = ["saved"]  # a fixture


@pytest.mark.parametrize("style", STYLES)
def test_moved_experts_are_no_difference(saved, style, tmp_path, capsys):
    folder, _ = saved
    relayout(folder / style, ORDER, tmp_path / "moved")
    comparison = compare(folder / style, tmp_path / "moved")
    assert comparison.differences == []
    assert comparison.moved_layers == [1, 2]
    assert comparison.num_tensors > 10
    again = compare(folder / style, folder / style)
    assert (again.differences, again.moved_layers) == ([], [])
    status, told, _ = run(capsys, "checkpoint", "verify", folder / style, tmp_path / "moved")
    assert status == 0
    assert "experts have another order in layers 1, 2" in told


def _change(folder, key):
    """Flip a bit in the middle of a tensor's bytes; returns the file."""
    metadata = read_metadata(folder)
    stored = next(each for index, each in metadata.storage_data.items() if index.fqn == key)
    file = folder / stored.relative_path
    content = bytearray(file.read_bytes())
    content[stored.offset + stored.length // 2] ^= 1
    file.write_bytes(content)


def test_the_command_fails_where_something_differs(saved, tmp_path, capsys):
    folder = saved[0] / STYLES[0]
    shutil.copytree(folder, tmp_path / "changed")
    keys = {index.fqn for index in read_metadata(folder).storage_data}
    key = min(key for key in keys if key.endswith("linear_fc2.weight"))
    _change(tmp_path / "changed", key)
    status, told, _ = run(capsys, "checkpoint", "verify", folder, tmp_path / "changed")
    assert status == 1
    assert f"{key} has other values" in told
    status, _, wrong = run(capsys, "checkpoint", "verify", folder, tmp_path / "none")
    assert status != 0
    assert str(tmp_path / "none") in wrong


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("part", ["linear_fc1.weight", "router.weight", "word_embeddings.weight"])
def test_another_value_is_named(saved, style, part, tmp_path):
    folder, _ = saved
    shutil.copytree(folder / style, tmp_path / "changed")
    keys = {index.fqn for index in read_metadata(folder / style).storage_data}
    key = min(key for key in keys if key.endswith(part))
    _change(tmp_path / "changed", key)
    found = compare(folder / style, tmp_path / "changed").differences
    assert f"{key} has other values" in found
    # Where rows of a router differ, nobody knows the order of that layer's experts.
    assert len(found) == 1 or part == "router.weight"


def test_other_keys_are_named(saved):
    folder, _ = saved
    found = compare(folder / STYLES[0], folder / STYLES[1]).differences
    assert any(
        re.fullmatch(r".*experts\.experts\.linear_fc1\.weight is only in .*together", each)
        for each in found
    )
    assert any(
        re.fullmatch(r".*experts\.3\.linear_fc1\.weight is only in .*each expert", each)
        for each in found
    )
