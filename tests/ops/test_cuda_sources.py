"""Every CUDA source compiles for the two architectures, without Torch and without a GPU."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

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


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.skipif(torch.version.cuda is not None, reason="the library's build compiles them")
@pytest.mark.parametrize("source", ["device.cpp", "peer_exchange.cpp"])
def test_bindings_compile(source, tmp_path):
    # A torch without CUDA has all headers but this one, and its content does not matter here.
    generated = tmp_path / "c10" / "cuda" / "impl" / "cuda_cmake_macros.h"
    generated.parent.mkdir(parents=True)
    generated.write_text("")
    headers = Path(torch.__file__).parent / "include"
    result = subprocess.run(
        [
            "nvcc",
            "-std=c++20",
            "-Xcompiler=-Wall,-Wextra,-Werror,-fsyntax-only",
            f"-I{CSRC / 'include'}",
            *(
                f"-isystem={path}"
                for path in (tmp_path, headers, headers / "torch/csrc/api/include")
            ),
            "-c",
            str(CSRC / "bindings" / source),
            "-o",
            str(tmp_path / "out.o"),
        ],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
