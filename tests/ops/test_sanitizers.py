"""The host build under AddressSanitizer and UndefinedBehaviorSanitizer."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ops import sanitizers

HERE = Path(__file__).parent
ROUNDS = 800
TRIES = 300


@pytest.fixture(scope="module")
def built():
    if shutil.which(sanitizers.COMPILER) is None:
        pytest.skip(f"needs {sanitizers.COMPILER}")
    return sanitizers.build()


@pytest.mark.slow
def test_random_problems_under_sanitizers(built, tmp_path):
    program = tmp_path / "sanitized"
    build = subprocess.run(
        [
            sanitizers.COMPILER,
            "-std=c++20",
            *sanitizers.FLAGS.split(),
            f"-I{HERE.parents[1] / 'csrc' / 'include'}",
            str(HERE / "sanitized.cpp"),
            *map(str, built.glob("CMakeFiles/megatron_ext.dir/cpu/*.o")),
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


@pytest.mark.slow
def test_odd_arguments_under_sanitizers(built):
    run = subprocess.run(
        [sys.executable, str(HERE / "fuzz.py"), "--tries", str(TRIES), "--sanitize"],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"{TRIES} tries" in run.stdout
