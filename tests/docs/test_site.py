"""The documents as a site: built in strict mode, complete, and read from disk and served."""

from __future__ import annotations

import dataclasses
import html
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

import megatron_ext
from megatron_ext import cli
from megatron_ext.config import Section
from megatron_ext.trainer.config import MISSING, TrainConfig
from megatron_ext.trainer.settings_list import sections
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


def test_every_setting_is_on_its_page_with_its_default_and_a_meaning(site: Path) -> None:
    page = html.unescape((site / "settings.html").read_text())
    rows = re.findall(r"<tr>\s*<td><code>([\w.]+)</code>(.*?)</tr>", page, re.S)
    listed = {name: re.sub(r"<[^>]*>", " ", row) for name, row in rows}
    assert len(rows) == len(listed)

    def walk(values: Any, name: str = "") -> Iterator[tuple[str, Any]]:
        for each in dataclasses.fields(values):
            value, full = getattr(values, each.name), f"{name}.{each.name}".lstrip(".")
            yield from walk(value, full) if dataclasses.is_dataclass(value) else [(full, value)]

    wanted = dict(walk(TrainConfig()))
    assert listed.keys() == wanted.keys()
    for name, row in listed.items():
        default, _, _ = row.strip().partition("\n")
        if wanted[name] == MISSING:
            assert default.strip() == "(no default)"
        else:  # As on the command line.
            read = OverridesParser.create().parse_override(f"{name}={default.strip()}").value()
            assert read == wanted[name], name
        assert len(row.split()) > 4, name


def test_a_setting_without_a_meaning_is_no_setting() -> None:
    @dataclasses.dataclass(kw_only=True)
    class Silent(Section):
        NAME: ClassVar[str] = "silent"
        number: int = 3

    with pytest.raises(KeyError, match="number"):
        list(sections(Silent))


def test_every_command_is_on_its_page_with_a_line_and_its_options(site: Path) -> None:
    page = html.unescape((site / "commands.html").read_text())
    helped = {
        heading: block
        for heading, block in re.findall(r'<h2 id="[^"]*">(.*?)<a.*?<code>(.*?)</code>', page, re.S)
    }
    lines = dict(re.findall(r"<td><a[^>]*><code>(.*?)</code></a></td>\s*<td>(.*?)</td>", page))
    assert lines.keys() == helped.keys()
    named = re.findall(r"^    (\w+)", cli.parser().format_help(), re.M)
    assert len(named) > 10
    for name in named:
        of_command = [each for each in helped if f"{each} ".startswith(f"megatron-ext {name} ")]
        assert of_command, name
        assert all(len(lines[each]) > 10 for each in of_command)
    for name, option in (
        ("megatron-ext train", "--config-name"),
        ("megatron-ext submit", "--sbatch"),
        ("megatron-ext data build", "--tokenizer"),
        ("python -m megatron_ext.pretrain", "--moe-balance-slots"),
    ):
        assert f"  {option}" in re.sub(r"<[^>]*>", "", helped[name])


def test_balance_config_shows_settings_and_nothing_else(site: Path) -> None:
    page = (site / "api.html").read_text()
    shown = re.findall(r'<h4 id="megatron_ext.BalanceConfig.(\w+)"', page)
    assert shown == [each.name for each in dataclasses.fields(megatron_ext.BalanceConfig)]
    assert shown[:3] == ["strategy", "slots", "tolerance"]


def test_slots_of_known_models_cost_what_a_dry_run_counts() -> None:
    models = load("models.py")
    (written,) = models.BLOCK.findall(models.PAGE.read_text())
    assert written == models.table()
    assert written.count("\n") >= 12


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


def test_the_first_picture_is_as_planned() -> None:
    """The picture is that of today's planner, and shows README's numbers."""
    pictures = load("pictures.py")
    drawn = (ROOT / "docs" / "pictures" / "balanced.svg").read_text()
    assert pictures.balanced_svg() == drawn
    named = re.findall(r">(copy of )?e(\d): (\d+)<", drawn)
    assert [(expert, count) for _, expert, count in named] == [
        *(("0", "10"), ("1", "3"), ("2", "2"), ("3", "1")),
        *(("0", "5"), ("1", "3"), ("2", "2"), ("3", "1"), ("0", "5")),
    ]
    assert "16 choices" in (ROOT / "README.md").read_text()


@browser.needs_chromium
def test_diagrams_fit_the_column(site: Path) -> None:
    """The first page's, and the help of commands, which is as wide as `reference.WIDTH`."""
    with browser.opened(site / "index.html", width=1400) as page:
        (diagram,) = page.locator("pre", has_text="FORWARD").all()
        assert diagram.evaluate("it => it.firstChild.scrollWidth <= it.clientWidth")
        longest = max(map(len, diagram.inner_text().splitlines()))
    assert longest <= load("reference.py").WIDTH


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
