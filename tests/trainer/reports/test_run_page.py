"""The page of runs in a browser: with what strangers may have put into it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from playwright.sync_api import Page

from megatron_ext.trainer.reports.layers import LayerLines
from megatron_ext.trainer.reports.page import page_html
from megatron_ext.trainer.reports.read import read_runs
from megatron_ext.trainer.reports.run_page import run_page, write_run_page
from tests import browser
from tests.run_folders import write_run

STRANGE = "<img src=x onerror=alert(1)></script><b>bold</b> %{y} & $x$"


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    return [
        write_run(tmp_path / "none", strategy="none", ranks=8),
        write_run(tmp_path / "quota", strategy="quota", speed=1.26, ranks=8),
        write_run(tmp_path / "ideal", strategy="ideal", speed=1.3, ranks=8),
    ]


def _traces(page: Page, title: str) -> list[dict]:
    """Plotly's traces of a chart."""
    page.wait_for_selector(f'figure[aria-label="{title}"] .main-svg', state="attached")
    return page.eval_on_selector(
        f'figure[aria-label="{title}"] .js-plotly-plot',
        "host => host.data.map(({name, y, z}) => ({name, y, z}))",
    )


@browser.needs_chromium
def test_a_reader_toggles_runs_and_moves_the_slider(folders: list[Path], tmp_path: Path) -> None:
    write_run_page(read_runs(folders), tmp_path / "page.html")
    with browser.opened(tmp_path / "page.html") as page:
        assert page.inner_text(".verdict") == (
            "quota trains 1.26 x as fast as none, at 0.97 of the limit (ideal)."
        )
        assert "Balancing costs 2.1% of a step of quota, of which 0.4% is exposed" in (
            page.inner_text("#top")
        )
        # A curve of each run, and what differs from the first.
        assert [one["name"] for one in _traces(page, "Loss")] == [
            *("none", "quota", "ideal"),
            *(None, "quota", "ideal"),
        ]
        page.focus("#show-1")
        page.keyboard.press("Space")
        assert page.get_attribute("#show-1", "aria-pressed") == "false"
        assert "quota" not in [one["name"] for one in _traces(page, "Throughput")]
        page.keyboard.press("Enter")
        assert "quota" in [one["name"] for one in _traces(page, "Throughput")]

        before = _traces(page, "Ranks if experts stay at home")[0]["z"]
        page.focus("#rank_step")
        page.keyboard.press("ArrowLeft")
        assert page.inner_text("output") == "step 11"
        assert _traces(page, "Ranks if experts stay at home")[0]["z"] != before
        page.select_option("#quantity", label="if experts stay at home")
        shown = _traces(page, "Imbalance by layer and step")[0]["z"]
        assert len(shown) == 3
        assert len(shown[0]) == 12
        page.select_option("#layer_run", label="none")
        assert page.inner_text("output") == "step 11"
        page.wait_for_selector("body[data-drawn]")
        arrows = page.eval_on_selector_all(".annotation-arrow-g", "found => found.length")
        assert arrows == 4


@browser.needs_chromium
def test_pages_fit_screens_and_preferences(folders: list[Path], tmp_path: Path) -> None:
    write_run_page(read_runs(folders), tmp_path / "page.html")
    papers = []
    for width, dark in ((1200, False), (360, True)):
        with browser.opened(tmp_path / "page.html", width=width, dark=dark) as page:
            page.wait_for_selector(".main-svg")
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            papers.append(page.eval_on_selector("body", "body => getComputedStyle(body).color"))
    assert papers[0] != papers[1]


@browser.needs_chromium
def test_strange_names_are_text(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / "none", strategy="none")]
    folders += [write_run(tmp_path / STRANGE.replace("/", "\u2215"), strategy="quota")]
    (folders[1] / "config.yaml").write_text(
        json.dumps({"balance": {"strategy": STRANGE, STRANGE: STRANGE}})
    )
    (folders[1] / "about.json").write_text(json.dumps({STRANGE: STRANGE, "gpus": [STRANGE]}))
    name = folders[1].name
    with_script = {STRANGE: next(iter(read_runs(folders).values())), **read_runs(folders[1:])}
    (tmp_path / "page.html").write_text(page_html(run_page(with_script)), "utf-8")
    with browser.opened(tmp_path / "page.html") as page:
        page.wait_for_selector(".main-svg")
        assert page.title() == f"{STRANGE}, {name}"
        assert page.inner_text("#show-0") == STRANGE
        assert page.locator("img, b").count() == 0
        labels = page.eval_on_selector_all(
            'figure[aria-label="Share of a step"] .ytick text', "all => all.map(e => e.textContent)"
        )
        assert labels == [name]
        assert page.locator(f"td:text-is({json.dumps(STRANGE)})").count() >= 3


def test_equal_names_of_runs_become_paths(tmp_path: Path) -> None:
    folders = [
        write_run(tmp_path / place / "quota", strategy=strategy)
        for place, strategy in (("a", "none"), ("b", "quota"))
    ]
    page = run_page(read_runs(folders))
    assert [run["name"] for run in page.data["runs"]] == [str(folder) for folder in folders]


def test_a_large_run_is_cut_down_while_it_is_read() -> None:
    """The page of 1,000 steps x 60 layers x 64 ranks holds the loads of some steps."""
    lines = LayerLines()
    loads = [[64] * 64] * 2
    for step in range(1, 1001):
        lines.add(
            {
                **{"step": step, "layer": [1, 2], "imbalance_before": [1.5, 1.0 + step]},
                **{"rank_loads_before": loads, "rank_loads_after": loads},
            }
        )
    layers = lines.layers()
    assert layers is not None
    assert 20 <= len(layers.kept_steps) <= 40
    assert layers.kept_steps[0] == 1
    assert layers.kept_steps[-1] > 1000 - 2 * layers.kept_steps[1]
    assert layers.columns["imbalance_before"].shape == (2, 1000)
