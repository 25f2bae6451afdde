"""The maps in docstrings of packages name every file of their folders, and no other."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# The package's own map follows a microbatch through the rooms instead.
ROOMS = [path.parent for path in sorted((ROOT / "megatron_ext").glob("*/**/__init__.py"))]


@pytest.mark.parametrize(
    "folder",
    [*ROOMS, ROOT / "tests" / "reference"],
    ids=lambda folder: folder.relative_to(ROOT).as_posix(),
)
def test_map_names_every_file(folder):
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()), clean=False)
    named = set(re.findall(r"^ {4}(\w+(?:\.py|/))", text, re.MULTILINE))
    files = {path.name for path in folder.glob("*.py")}
    folders = {f"{path.parent.name}/" for path in folder.glob("*/__init__.py")}
    assert named == (files | folders) - {"__init__.py"}


def test_there_are_rooms():
    assert {"balance", "files", "mcore", "methods", "trainer"} <= {path.name for path in ROOMS}
