"""The page of runs in a browser: with what strangers may have put into it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Page

from megatron_ext.trainer.reports.layers import LayerLines
from megatron_ext.trainer.reports.page import page_html
from megatron_ext.trainer.reports.read import Run, read_runs
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


def test_steps_beyond_a_million_keep_their_places() -> None:
    steps = list(range(12_345_678, 12_345_688))
    run = Run([{"step": step, "loss": 1.0} for step in steps], None, {}, {}, [])
    (drawn,) = run_page({"run": run}).data["runs"]
    assert drawn["curves"]["step"] == steps


@browser.needs_chromium
def test_a_reader_toggles_runs_and_moves_the_slider(folders: list[Path], tmp_path: Path) -> None:
    write_run_page(read_runs(folders), tmp_path / "page.html")
    with browser.opened(tmp_path / "page.html") as page:
        assert page.text_content(".verdict").replace("\xa0", " ") == (
            "Run quota trains 1.26 x as fast as run none (95 % interval 1.26 to 1.26), at 0.97 "
            "(0.97 to 0.97) of the limit, run ideal."
        )
        assert (
            "Ranks of run quota wait 0.4 % of a step for balancing; at most another 1.7 % runs "
            "behind other work." in page.inner_text("#top").replace("\xa0", " ")
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
        assert page.inner_text("output") == "step 39"
        assert _traces(page, "Ranks if experts stay at home")[0]["z"] != before
        page.select_option("#quantity", label="if experts stay at home")
        shown = _traces(page, "Imbalance by layer and step")[0]["z"]
        assert len(shown) == 3
        assert len(shown[0]) == 40
        page.select_option("#layer_run", label="none")
        assert page.inner_text("output") == "step 39"
        page.wait_for_selector("body[data-drawn]")
        arrows = page.eval_on_selector_all(".annotation-arrow-g", "found => found.length")
        assert arrows == 4


@pytest.fixture
def swept(tmp_path: Path) -> list[Path]:
    """Runs of a sweep over two settings."""
    return [
        write_run(
            tmp_path / f"balance.slots={slots},balance.tolerance={tolerance}",
            **{"strategy": "quota", "seed": slots, "slots": slots, "ranks": 4, "layers": 3},
        )
        for slots in (1, 2, 4)
        for tolerance in (0.01, 0.05)
    ]


@browser.needs_chromium
@pytest.mark.parametrize("width", [1400, 420])
def test_pages_fit_screens_and_preferences(
    folders: list[Path], swept: list[Path], tmp_path: Path, width: int
) -> None:
    """Of one run, of three and of a sweep: nothing is cut off, and ticks are whole numbers."""
    inks = {"light": "#1d2129", "dark": "#e6e8eb"}
    for of_page in (folders[1:2], folders, swept):
        write_run_page(read_runs(of_page), tmp_path / "page.html")
        with browser.opened(tmp_path / "page.html", width=width) as page:
            page.wait_for_selector("body[data-drawn]")
            for scheme, ink in inks.items():
                page.emulate_media(color_scheme=scheme)
                page.wait_for_function(
                    "ink => charts.every(({ host }) => host.layout.font.color === ink)", arg=ink
                )
                assert browser.cut_off(page) == []
                assert _fractions(page) == []


def _fractions(page: Page) -> list[str]:
    """Ticks that are no whole numbers on axes of steps, ranks and layers; there are ticks."""
    axes = page.evaluate(
        """() => charts.flatMap(({ host }) => ["x", "y"]
          .filter((axis) => /^(step|rank|layer)/.test(host.layout[`${axis}axis`].title?.text))
          .map((axis) => [...host.querySelectorAll(`.${axis}tick text`)])
          .map((texts) => texts.map((text) => text.textContent)))"""
    )
    assert len(axes) >= 9
    assert all(axes)
    return [text for ticks in axes for text in ticks if not text.isdecimal()]


@browser.needs_chromium
def test_few_steps_and_ranks_have_whole_ticks_also_after_zooming(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "short", strategy="quota", steps=3, ranks=2, layers=2)
    write_run_page(read_runs([folder]), tmp_path / "page.html")
    with browser.opened(tmp_path / "page.html") as page:
        page.wait_for_selector("body[data-drawn]")
        assert _fractions(page) == []
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "config.yaml").write_text("steps: 3\n")
    write_run_page(read_runs([tmp_path / "new"]), tmp_path / "page.html")
    with browser.opened(tmp_path / "page.html") as page:  # Of no step yet.
        page.wait_for_selector("body[data-drawn]")
    write_run_page(read_runs([write_run(tmp_path / "long", strategy="quota")]), tmp_path / "a.html")
    with browser.opened(tmp_path / "a.html") as page:
        page.wait_for_selector("body[data-drawn]")
        page.evaluate("Plotly.relayout(charts[0].host, {'xaxis.range': [20, 23]})")
        page.wait_for_function("charts[0].host.layout.xaxis.tickmode === 'linear'")
        assert _fractions(page) == []


@browser.needs_chromium
def test_colours_mean_the_same_of_every_run(folders: list[Path], tmp_path: Path) -> None:
    """A perfect run is dark all over, unless the reader asks for its own colours."""

    def bounds(title: str) -> list[float]:
        _traces(page, title)
        chart = f'figure[aria-label="{title}"] .js-plotly-plot'
        return page.eval_on_selector(chart, "host => [host.data[0].zmin, host.data[0].zmax]")

    write_run_page(read_runs(folders), tmp_path / "page.html")
    with browser.opened(tmp_path / "page.html") as page:
        for run in ("none", "ideal"):
            page.select_option("#layer_run", label=run)
            assert bounds("Imbalance by layer and step") == [1, 2]
            assert bounds("Ranks if experts stay at home") == [0, 2]
            assert bounds("Ranks as computed") == [0, 2]
        page.select_option("#scale", label="from 1 to the most here")
        assert bounds("Imbalance by layer and step") == [1, 1]


@browser.needs_chromium
def test_curves_are_over_steps_or_tokens(folders: list[Path], tmp_path: Path) -> None:
    write_run_page(read_runs(folders), tmp_path / "page.html")
    with browser.opened(tmp_path / "page.html") as page:
        page.select_option("#over", label="tokens")
        _traces(page, "Loss")
        page.wait_for_selector("body[data-drawn]")
        drawn = page.evaluate("charts.slice(0, 3).map(({ host }) => host.data.map((one) => one.x))")
        assert all(max(x) == 40 * 4000 for of_chart in drawn for x in of_chart)
        titles = page.evaluate("charts.slice(0, 3).map(({ host }) => host.layout.xaxis.title.text)")
        assert titles == ["tokens"] * 3


def test_throughput_is_a_moving_median_with_a_band(folders: list[Path]) -> None:
    """A step that is slow by chance moves neither the curve nor the difference."""
    file = folders[1] / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    lines[19]["tokens_per_s"] /= 10
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = run_page(read_runs(folders)).data
    quota = data["runs"][1]
    for curves, least, most in ((quota["curves"], 23_500, 26_500), (quota["against"], 25.9, 26.1)):
        low, median, high = (np.array(curves[f"tokens_per_s{of}"]) for of in ("_low", "", "_high"))
        assert np.isnan(median[:5]).all()
        assert (low <= median)[5:].all()
        assert (median <= high)[5:].all()
        assert least < median[5:].min() <= median[5:].max() < most
    assert data["bands"]
    short = run_page(read_runs(folders[:1])).data["runs"][0]["curves"]
    assert len(short["tokens"]) == len(short["tokens_per_s"]) == 40


def test_curves_of_long_runs_have_points_of_their_steps(tmp_path: Path) -> None:
    """1,001 steps on 500 points or so: throughput stands where its steps are."""
    folder = tmp_path / "long"
    folder.mkdir()
    lines = [
        json.dumps({"step": step, "tokens_per_s": 1000.0 * step, "step_ms": 10.0}) + "\n"
        for step in range(1, 1002)
    ]
    (folder / "metrics.jsonl").write_text("".join(lines))
    (run,) = run_page(read_runs([folder])).data["runs"]
    steps, speeds = (np.array(run["curves"][name])[20:-20] for name in ("step", "tokens_per_s"))
    assert len(run["curves"]["step"]) == len(run["curves"]["tokens_per_s"]) <= 500
    np.testing.assert_allclose(speeds, 1000 * steps, rtol=0.02)


def test_runs_of_a_sweep_have_short_names(swept: list[Path]) -> None:
    page = run_page(read_runs(swept))
    assert page.title.startswith("slots 1, tolerance 0.01; slots 1, tolerance 0.05; slots 2, ")
    assert "balance.slots=" not in page.top + page.bottom
    table = page.top.replace("\n", "").replace("  ", "")
    assert "<td>slots 4, tolerance 0.05</td>" in table
    assert "<td>448</td>" in table  # TFLOP/s a rank, median.


def test_what_is_equal_of_machines_is_folded_and_commits_are_short(folders: list[Path]) -> None:
    commits = [f"{number}{39 * 'a'}{dirty}" for number, dirty in ((1, ""), (2, "-dirty"), (3, ""))]
    for folder, commit in zip(folders, commits, strict=True):
        about = json.loads((folder / "about.json").read_text())
        (folder / "about.json").write_text(json.dumps(about | {"commit": commit}))
    text = run_page(read_runs(folders)).bottom.replace("\n", "").replace("  ", "")
    shown, folded = text[text.index("Machine and versions") :].split("<details>")
    assert "<summary>Equal in all runs</summary>" in folded
    assert all(f"<td>{commit[:8] + commit[40:]}</td>" in shown for commit in commits)
    assert "torch" not in shown
    assert folded.count("2.13.0") == 1


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
        assert page.title() == f"{STRANGE}; {name}"
        assert page.inner_text("#show-0") == STRANGE
        assert page.locator("img, b").count() == 0
        labels = page.eval_on_selector_all(
            'figure[aria-label="Ranks wait"] .ytick text', "all => all.map(e => e.textContent)"
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
