"""Every CUDA source compiles for the two architectures, without Torch and without a GPU."""

import itertools
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


SAVED_FOR_CALLERS = 256
"""Bytes. The planner's functions are called, not written out at each place; those that run once a
try put aside what their callers keep in registers. Its inner functions spill nothing."""


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_the_planners_inner_functions_spill_nothing(tmp_path):
    """What runs for every replica, where it runs in shared memory."""
    lines = compile_source(CSRC / "cuda" / "solve_quota.cu", "90a", tmp_path).splitlines()
    inner = ["relieve", "move", "take", "refill", "update_host", "add", "larger_of_tightest_pair"]
    found = set()
    for name, told in itertools.pairwise(lines):
        function = re.search(r"Function properties for (\S+)", name)
        if function is None or "GlobalMemory" in name:
            continue
        called = [each for each in inner if re.search(rf"\d{each}[EI]", function[1])]
        if called:
            found.update(called)
            assert "0 bytes spill stores, 0 bytes spill loads" in told, function[1]
    assert found == set(inner)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("architecture", ["90a", "100a"])
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_compiles(source, architecture, tmp_path):
    told = compile_source(source, architecture, tmp_path)
    # A spilled register is traffic nobody planned for; there is one line for each function.
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", told)
    assert spills
    most = SAVED_FOR_CALLERS if source.name == "solve_quota.cu" else 0
    assert max(int(count) for pair in spills for count in pair) <= most


def compile_source(source, architecture, tmp_path):
    """Compile, and return what the assembler says of each function."""
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
    return result.stderr


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
