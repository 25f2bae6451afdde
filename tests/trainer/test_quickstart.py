"""The quickstart opens its page for whoever can see it, and never fails because of that."""

from __future__ import annotations

import logging
import os
import runpy
import signal
import sys
import webbrowser
from pathlib import Path

import pytest

from megatron_ext.trainer.quickstart import open_page
from tests.processes import running

NAMES = ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY", "CI")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As on a machine without a display."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def stand_in(folder: Path) -> Path:
    """A browser that writes down what it is to open, and then fails."""
    browser = folder / "browser.sh"
    browser.write_text(f'#!/bin/sh\necho "$1" >> "{folder}/opened"\nexit 3\n')
    browser.chmod(0o755)
    return browser


@pytest.mark.parametrize("in_ci", [False, True])
def test_the_page_is_opened_where_somebody_looks(
    in_ci: bool, alone: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Python reads `BROWSER` once in a process.
    alone.setattr(webbrowser, "_tryorder", None)
    alone.setattr(webbrowser, "_browsers", {})
    page = tmp_path / "runs of mine" / "report.html"
    alone.setenv("BROWSER", f"{stand_in(tmp_path)} %s")
    if in_ci:
        alone.setenv("CI", "true")
    open_page(page)
    opened = tmp_path / "opened"
    assert opened.exists() != in_ci
    if not in_ci:
        assert opened.read_text().split() == [page.as_uri()]
        assert "%20" in page.as_uri()


@pytest.mark.parametrize(
    ("names", "asked"),
    [
        ({}, 0),
        ({"DISPLAY": ":0"}, 1),
        ({"WAYLAND_DISPLAY": "wayland-0"}, 1),
        ({"DISPLAY": ""}, 0),
        ({"DISPLAY": ":0", "CI": "1"}, 0),
    ],
)
def test_a_display_is_asked_for_and_a_browser_may_fail(
    names: dict[str, str], asked: int, alone: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls = []

    def fail(address: str) -> bool:
        calls.append(address)
        raise OSError("no such browser")

    alone.setattr("webbrowser.open", fail)
    for name, value in names.items():
        alone.setenv(name, value)
    open_page(tmp_path / "report.html")
    assert len(calls) == asked


@pytest.mark.slow
def test_ctrl_c_before_there_are_ranks_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, "-m", "megatron_ext.trainer.quickstart"]
    with running(command, tmp_path / "output") as run:
        maps = Path(f"/proc/{run.pid}/maps")
        run.wait_for(lambda: "libtorch_python" in maps.read_text(), "import of torch")
        os.kill(run.pid, signal.SIGINT)
        assert (run.status(), run.output()) == (-signal.SIGINT, "")
    with running(command, tmp_path / "output") as run:
        run.wait_for(lambda: list(tmp_path.glob("runs/.corpus.*")), "folder of text")
        os.kill(run.pid, signal.SIGINT)
        assert (run.status(), run.output()) == (130, "gathering text into runs/corpus\n")
    assert not any((tmp_path / "runs").iterdir())


def test_a_run_with_m_says_that_it_gathers_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_text(*_: object, **__: object) -> None:
        raise RuntimeError("no text")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("megatron_ext.data.corpus.gather_corpus", no_text)
    monkeypatch.setattr("megatron_ext.trainer.ranks.launch.quiet_megatron", lambda: None)
    monkeypatch.setattr(sys, "argv", ["quickstart", "data.path=absent"])
    caplog.set_level(logging.INFO, logger="megatron_ext")
    with pytest.raises(SystemExit, match="no text"):
        runpy.run_module("megatron_ext.trainer.quickstart", run_name="__main__")
    assert "gathering text into runs/corpus" in caplog.text
