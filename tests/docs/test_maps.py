"""The maps in docstrings of packages name every file of their folders, and no other."""

import re
from pathlib import Path

import pytest

from megatron_ext import balance
from tests import reference


@pytest.mark.parametrize("package", [balance, reference], ids=lambda package: package.__name__)
def test_map_names_every_file(package):
    named = set(re.findall(r"^ {4}(\w+(?:\.py|/))", package.__doc__, re.MULTILINE))
    folder = Path(__file__).parents[2].joinpath(*package.__name__.split("."))
    files = {path.name for path in folder.glob("*.py")}
    folders = {f"{path.parent.name}/" for path in folder.glob("*/__init__.py")}
    assert named == (files | folders) - {"__init__.py"}
