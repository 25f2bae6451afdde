"""A plugin of pytest that says each failure when it happens, and how long each test took.

A part of a first run may be ended by its time limit, and pytest explains failures in the end.
Used by `-p tests.gpu.at_once -v`.
"""

from __future__ import annotations

import pytest

LAST_LINES = 60
"""Of what a failing test wrote to stderr: ranks that are late write there where they are."""


class AtOnce:
    """Writes reports to pytest's own output."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write the traceback of a failure."""
        if not report.failed:
            return
        out = self._config.get_terminal_writer()
        out.line()
        out.line(f"FAILED after {report.duration:.1f} s ({report.when}): {report.nodeid}")
        for line in [
            *report.longreprtext.splitlines(),
            *report.capstderr.splitlines()[-LAST_LINES:],
        ]:
            out.line(f"    {line}")
        out.flush()

    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """Say the time of a test that passed, where pytest names tests."""
        if report.when != "call" or not report.passed or hasattr(report, "wasxfail"):
            return None
        return "passed", ".", f"PASSED in {report.duration:.1f} s"


def pytest_configure(config: pytest.Config) -> None:
    """Take part in the run."""
    config.pluginmanager.register(AtOnce(config))
