"""Every CUDA source compiles for the two architectures, without Torch and without a GPU."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc"
SOURCES = sorted((CSRC / "cuda").glob("*.cu"))


def test_there_are_sources():
    assert SOURCES


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("architecture", ["90a", "100a"])
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_compiles(source, architecture, tmp_path):
    result = subprocess.run(
        [
            "nvcc",
            "-std=c++17",
            f"-gencode=arch=compute_{architecture},code=sm_{architecture}",
            "-Xptxas=-v",
            "--Werror=all-warnings",
            f"-I{CSRC / 'include'}",
            "-c",
            str(source),
            "-o",
            str(tmp_path / "out.o"),
        ],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    # A spilled register is traffic nobody planned for; there is one line for each kernel.
    spills = re.findall(r"\d+ bytes spill stores, \d+ bytes spill loads", result.stderr)
    assert set(spills) == {"0 bytes spill stores, 0 bytes spill loads"}
