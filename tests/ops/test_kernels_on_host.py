"""The CUDA kernels, run by the host compiler thread by thread, equal the host stages bit by bit.

No GPU is needed: `cuda_on_host/` stands in for CUDA. What it cannot show is speed, and whatever a
GPU does with memory that a single thread does not.
"""

import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc"
ROUNDS = 25


def with_launches_as_calls(source: str) -> str:
    """Replace `kernel<<<grid, ...>>>(...);`, which C++ has not."""
    text, launches = re.subn(
        r"(\w+)<<<(.*?)>>>\((.*?)\);",
        r"cuda_on_host::launch(\2, [=] { \1(\3); });",
        source,
        flags=re.DOTALL,
    )
    assert launches > 0
    # As nvcc does.
    return '#include "cuda_runtime_api.h"\n' + text


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc's contexts")
def test_kernels_equal_the_host_stages(tmp_path):
    kernels = []
    for source in sorted((CSRC / "cuda").glob("*.cu")):
        kernels.append(tmp_path / f"{source.stem}_cu.cpp")
        kernels[-1].write_text(with_launches_as_calls(source.read_text()))
    here, program = Path(__file__).parent, tmp_path / "kernels_on_host"
    build = subprocess.run(
        [
            "g++",
            "-std=c++20",
            "-O1",
            # Some compilers fortify by default, and then a jump to another stack is refused.
            "-U_FORTIFY_SOURCE",
            f"-I{here / 'cuda_on_host'}",
            f"-I{CSRC / 'include'}",
            f"-I{CSRC / 'cuda'}",
            str(here / "kernels_on_host.cpp"),
            *map(str, kernels),
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
