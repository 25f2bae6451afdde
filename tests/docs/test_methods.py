"""Every paper's folder says what it is, and names its own files and no others."""

import re
from pathlib import Path

import pytest

from megatron_ext.methods import STRATEGIES

METHODS = Path(__file__).parents[2] / "megatron_ext" / "methods"
PAPERS = sorted(path.parent for path in METHODS.glob("*/__init__.py"))
PARTS = ("**What runs here", "**What was measured", "**What differs from the ")


@pytest.mark.parametrize("folder", PAPERS, ids=lambda folder: folder.name)
def test_readme_names_the_files_of_its_folder(folder):
    text = (folder / "README.md").read_text()
    # Files of other rooms are named by their paths, and looked for in `test_readme.py`.
    named = set(re.findall(r"`(\w+\.py)`", text))
    assert named == {path.name for path in folder.glob("*.py")} - {"__init__.py"}
    neighbours = set(re.findall(r"`(\w+)/`", text))
    assert neighbours <= {path.name for path in PAPERS}


@pytest.mark.parametrize("folder", PAPERS, ids=lambda folder: folder.name)
def test_readme_has_its_parts_and_figures_stand_where_it_says(folder):
    text = (folder / "README.md").read_text()
    places = [text.find(part) for part in PARTS]
    assert -1 not in places
    assert places == sorted(places)
    measured = text[places[1] : places[2]]
    pages = re.findall(r"\]\(([^)]+\.md)\)", measured)
    there = "\n".join((folder / page).read_text() for page in pages)
    figures = re.findall(r"\d+\.\d+", measured)
    assert figures
    absent = [one for one in figures if not re.search(rf"(?<![\d.]){re.escape(one)}(?!\d)", there)]
    assert absent == []


def test_readme_names_the_strategies_of_its_folder():
    for name, place in STRATEGIES.items():
        folder = METHODS / place.split(".")[2]
        assert f"strategy `{name}`" in (folder / "README.md").read_text(), name


def test_there_are_papers():
    assert {"craft", "eplb", "libra", "sem_moe"} <= {folder.name for folder in PAPERS}
