"""The host build under AddressSanitizer and UndefinedBehaviorSanitizer."""

import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc"
COMPILER = shutil.which("g++") or shutil.which("clang++")
ROUNDS = 800


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler (g++ or clang++)")
def test_random_problems_under_sanitizers(tmp_path):
    program = tmp_path / "sanitized"
    build = subprocess.run(
        [
            COMPILER,
            "-std=c++20",
            "-O1",
            "-g",
            "-fsanitize=address,undefined",
            "-fno-sanitize-recover=all",
            f"-I{CSRC / 'include'}",
            str(Path(__file__).with_name("sanitized.cpp")),
            *map(str, sorted((CSRC / "cpu").glob("*.cpp"))),
            "-o",
            str(program),
        ],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert build.returncode == 0, build.stderr
    run = subprocess.run([str(program), str(ROUNDS)], capture_output=True, text=True, timeout=300)
    assert (run.returncode, run.stdout) == (0, f"{ROUNDS} rounds\n"), run.stderr
