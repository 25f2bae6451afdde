"""Runs a GPU test once more, below one of the tools of compute-sanitizer."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from tests.gpu.first_run.parts import SANITIZERS as SANITIZERS

LIMIT_S = 180
"""Of one tool. Three of them fit into a part of the first run."""

needs_sanitizer = pytest.mark.skipif(
    shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer"
)


def sanitize(tool: str, *tests: str) -> None:
    """Run tests below a tool, which finds nothing."""
    pytest_command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests)
    done = subprocess.run(
        ["compute-sanitizer", f"--tool={tool}", "--error-exitcode=9", *pytest_command],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
