"""Files are listed once: the package's in `docs/map.md`, the specification's beside them."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# The package's own map follows a microbatch through the rooms instead.
ROOMS = [path.parent for path in sorted((ROOT / "megatron_ext").glob("*/**/__init__.py"))]


def named_in(folder):
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()), clean=False)
    return set(re.findall(r"^ {4}(\w+(?:\.py|/))", text, re.MULTILINE))


def test_the_specification_names_its_files():
    folder = ROOT / "tests" / "reference"
    assert named_in(folder) == {path.name for path in folder.glob("*.py")} - {"__init__.py"}


@pytest.mark.parametrize("folder", ROOMS, ids=lambda folder: folder.relative_to(ROOT).as_posix())
def test_a_room_leaves_the_list_to_the_map(folder):
    assert named_in(folder) == set()


def test_there_are_rooms():
    assert {"balance", "files", "mcore", "methods", "trainer"} <= {path.name for path in ROOMS}
