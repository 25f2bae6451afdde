"""A replay's page in a browser."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_ext.balance.strategies import PlanSettings
from megatron_ext.files.loads import read_loads
from megatron_ext.lab.planning import Asked
from megatron_ext.lab.replay import make_report, replay, write_report
from tests import browser

pytestmark = browser.needs_chromium


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    loads = read_loads(Path(__file__).parents[2] / "recipes" / "traces" / "late_ep8.npz")
    asked = Asked(planning=PlanSettings(), slots=2, nvlink_domain=None)
    replayed = replay(loads, ["quota", "exact", "llep"], asked)
    report = make_report(loads, replayed, asked)
    write_report(tmp_path, report)
    return tmp_path


def test_strategies_side_by_side(folder: Path) -> None:
    with browser.served(folder) as address, browser.opened(f"{address}replay.html") as page:
        page.wait_for_selector('figure[aria-label="Planning"] .main-svg')
        charts = page.locator("main figure .js-plotly-plot")
        titles = page.locator("figure").evaluate_all("all => all.map(one => one.ariaLabel)")
        assert titles == [
            *("Imbalance that is left", "Imbalance by layer", "Replicas", "Busiest sender"),
            *("Tokens on other ranks", "Planning"),
        ]
        # No panel is empty, and a strategy that is hidden is hidden in all of them.
        assert all(charts.evaluate_all("all => all.map(one => one.data.length)"))
        page.click("nav >> text=llep")
        names = charts.evaluate_all(
            "all => all.flatMap(one => one.data.flatMap(of => [of.name, ...(of.y ?? [])]))"
        )
        assert "exact" in names
        assert "llep" not in names


def test_pages_fit_screens(folder: Path) -> None:
    for width, dark in ((1400, True), (420, False)):
        with browser.opened(folder / "replay.html", width=width, dark=dark) as page:
            page.wait_for_selector("body[data-drawn]")
            assert browser.cut_off(page) == []
            chart = 'figure[aria-label="Imbalance by layer"] .js-plotly-plot'
            bounds = page.eval_on_selector(chart, "host => [host.data[0].zmin, host.data[0].zmax]")
            assert bounds == [1, 2]


def test_a_strategy_that_had_nothing_to_place_by_is_named(tmp_path: Path) -> None:
    loads = read_loads(Path(__file__).parents[2] / "recipes" / "traces" / "late_ep8.npz")
    asked = Asked(planning=PlanSettings(), slots=2, nvlink_domain=None)
    replayed = replay(loads, ["quota", "eplb"], asked)
    write_report(tmp_path, make_report(loads, replayed, asked))
    for name in ("replay.md", "replay.html"):
        assert (
            "eplb without replicas in the first 25 of 25 microbatches"
            in (tmp_path / name).read_text()
        )
