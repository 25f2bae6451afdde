"""The documents as a site: built in strict mode, complete, and read from disk and served."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import megatron_ext
from tests import browser

ROOT = Path(__file__).parents[2]
SITE = ROOT / "docs" / "site"


def load(name: str) -> Any:
    """Import a file of the site, which is no package."""
    spec = importlib.util.spec_from_file_location(name, SITE / name)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build it as CONTRIBUTING.md says; a warning, as of a link to nowhere, fails."""
    folder = tmp_path_factory.mktemp("site")
    command = ["mkdocs", "build", "--strict", "-f", str(SITE / "mkdocs.yml"), "-d", str(folder)]
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,  # Wherever it is called.
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_every_document_is_a_page(site: Path) -> None:
    for document in (ROOT / "docs").rglob("*.md"):
        page = document.relative_to(ROOT / "docs").with_suffix(".html")
        assert (site / page.parent / page.name.replace("README", "index")).is_file(), page
    home = (site / "index.html").read_text()
    assert 'href="guides/balance-your-script.html"' in home
    traces = (site / "repository" / "traces.html").read_text()
    assert "<h1" in traces
    assert (
        'href="../repository/traces.html"' in (site / "guides/compare-balancers.html").read_text()
    )


def test_every_public_name_is_described(site: Path) -> None:
    page = (site / "api.html").read_text()
    for name in megatron_ext.__all__:
        (start,) = [match.end() for match in re.finditer(rf'<h3 id="megatron_ext.{name}"', page)]
        described = re.sub(r"<[^>]*>", "", page[start : page.find("<h3", start)])
        assert len(described) > 300, name


def test_it_asks_nothing_of_others(site: Path) -> None:
    for page in site.rglob("*.html"):
        tags = re.findall(r"<(?:script|img|link|iframe)[^>]*>", page.read_text())
        asked = re.findall(r'\s(?:src|href)="?([^" >]+)', "".join(tags))
        assert asked
        assert [one for one in asked if one.startswith(("http", "//"))] == []


def test_a_link_out_of_the_documents_leads_to_a_page_or_stays() -> None:
    hooks = load("hooks.py")
    for page, link, turned in (
        ("guides/a.md", "../../recipes/traces/README.md#form", "../repository/traces.md#form"),
        ("guides/a.md", "../method.md", "../method.md"),
        ("index.md", "docs/guides/a.md", "guides/a.md"),
        ("index.md", "CONTRIBUTING.md", "repository/CONTRIBUTING.md"),
        ("repository/traces.md", "../../docs/results.md", "../results.md"),
        ("guides/a.md", "../../pyproject.toml", "../../pyproject.toml"),
        ("guides/a.md", "https://arxiv.org", "https://arxiv.org"),
        ("guides/a.md", "#here", "#here"),
    ):
        file = SimpleNamespace(file=SimpleNamespace(src_uri=page))
        assert hooks.on_page_markdown(f"[text]({link})", page=file) == f"[text]({turned})"


def test_the_chain_is_as_planned() -> None:
    """The picture is that of today's planner, and shows what the page says of it."""
    pictures = load("pictures.py")
    assert pictures.chain_svg() == (ROOT / "docs" / "pictures" / "chain.svg").read_text()
    moves = pictures.planned_moves(pictures.CHAIN, 4)
    loads = [13, 5, 21, 9]
    for move in moves:
        loads[move.home] -= move.count
        loads[move.host] += move.count
    assert loads == [12, 12, 12, 12]
    assert moves[0].host == moves[1].home
    assert len({move.home for move in moves}) == len(moves)


@browser.needs_chromium
@pytest.mark.parametrize("how", ["from disk", "served"])
def test_a_reader_searches_and_follows_a_link(site: Path, how: str) -> None:
    """Without an error on the console, and asking nobody else."""
    with browser.served(site) as address:
        place = address + "index.html" if how == "served" else site / "index.html"
        with browser.opened(place) as page:
            page.keyboard.press("s")
            page.get_by_text("Type to start searching").wait_for()
            page.keyboard.insert_text("break-even")  # At once: each key would bring other results.
            page.keyboard.press("End")
            page.get_by_text("matching document").wait_for()
            found = page.locator("a.md-search-result__link", has_text="What would it bring?")
            found.first.click()
            page.wait_for_url("**/what-would-it-bring.html*")
            page.locator("a.md-footer__link--next").click()
            page.wait_for_url("**/train-from-recipes.html")
            assert page.locator("h1").inner_text().startswith("Train from recipes")
