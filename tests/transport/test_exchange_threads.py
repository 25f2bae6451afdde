"""The exchange under ThreadSanitizer: ranks are threads, so every unordered access is seen.

Between processes, which map the same memory at different addresses, no sanitizer could.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc"
ROUNDS = 60


def _build(program: Path, source: str, *inputs: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            *("g++", "-std=c++20", "-O1", "-g", "-fsanitize=thread", "-pthread"),
            *("-x", "c++", source, *map(str, inputs), f"-I{CSRC / 'include'}", "-o", str(program)),
        ],
        input="int main() {}",
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.slow
def test_no_access_is_unordered(tmp_path: Path) -> None:
    program = tmp_path / "exchange_threads"
    probe = _build(program, "-")
    if probe.returncode or subprocess.run([str(program)], capture_output=True).returncode:
        pytest.skip(f"g++ has no working -fsanitize=thread here: {probe.stderr.strip()}")
    source = Path(__file__).with_name("exchange_threads.cpp")
    build = _build(program, str(source), CSRC / "cpu" / "exchange.cpp")
    assert build.returncode == 0, build.stderr
    run = subprocess.run([str(program), str(ROUNDS)], capture_output=True, text=True, timeout=300)
    assert (run.returncode, run.stdout) == (0, f"{ROUNDS} rounds\n"), run.stderr
