"""The map in the package's docstring names every file of the folder, and no other."""

import re
from pathlib import Path

from megatron_ext import balance


def test_map_names_every_file():
    named = set(re.findall(r"^ {4}(\w+(?:\.py|/))", balance.__doc__, re.MULTILINE))
    folder = Path(__file__).parents[2] / "megatron_ext" / "balance"
    there = {path.name for path in folder.glob("*.py")} | {"strategies/"}
    assert named == there - {"__init__.py"}
