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

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "csrc"


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


STAGES = ["assign", "count_load", "solve_quota", "split_quota"]
PEERS = ["pull_add_peers", "push_peers", "wait_peers", "write_words"]


def test_all_kernels_are_run():
    assert sorted(STAGES + PEERS) == sorted(path.stem for path in (CSRC / "cuda").glob("*.cu"))


def compile_here(source: Path, folder: Path) -> Path:
    """Compile `source` for the host, with the headers of the kernels in `folder`."""
    done = folder / f"{source.stem}.o"
    build = subprocess.run(
        [
            "g++",
            "-std=c++20",
            "-O1",
            # Some compilers fortify by default, and then a jump to another stack is refused.
            "-U_FORTIFY_SOURCE",
            f"-I{folder}",
            f"-I{HERE / 'cuda_on_host'}",
            f"-I{CSRC / 'include'}",
            *("-c", str(source), "-o", str(done)),
        ],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert build.returncode == 0, build.stderr
    return done


def run(objects: list[Path], rounds: int, folder: Path) -> subprocess.CompletedProcess[str]:
    program = folder / "program"
    subprocess.run(["g++", *map(str, objects), "-o", str(program)], check=True, timeout=300)
    return subprocess.run([str(program), str(rounds)], capture_output=True, text=True, timeout=300)


def compile_kernels(
    names: list[str], folder: Path, broken: dict[str, tuple[str, str]]
) -> list[Path]:
    """Compile these kernels; `broken` replaces a piece of text in the file of that name."""
    written = []
    for path in (CSRC / "cuda").iterdir():
        text = path.read_text()
        if path.name in broken:
            right, wrong = broken[path.name]
            assert text.count(right) == 1, f"{path.name} has changed: {right!r}"
            text = text.replace(right, wrong)
        if path.suffix == ".cuh":
            (folder / path.name).write_text(text)
        elif path.stem in names:
            written.append(folder / f"{path.stem}_cu.cpp")
            written[-1].write_text(with_launches_as_calls(text))
    # In the place of the real one: what is nothing but PTX.
    shutil.copy(HERE / "cuda_on_host" / "ptx.cuh", folder)
    return [compile_here(source, folder) for source in written]


pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
    pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc's contexts"),
]


def check_equal(objects: list[Path], rounds: int, folder: Path) -> None:
    result = run(objects, rounds, folder)
    assert (result.returncode, result.stdout) == (0, f"{rounds} rounds\n"), result.stderr


def test_kernels_of_stages_equal_the_host(tmp_path):
    sources = [HERE / "kernels_on_host.cpp", *(CSRC / "cpu").glob("*.cpp")]
    objects = [compile_here(source, tmp_path) for source in sources]
    check_equal([*objects, *compile_kernels(STAGES, tmp_path, {})], 25, tmp_path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The compiled kernels of PEERS, and the program that runs them."""
    folder = tmp_path_factory.mktemp("whole")
    return [*compile_kernels(PEERS, folder, {}), compile_here(HERE / "peers_on_host.cpp", folder)]


def test_replicas_arrive_and_gradients_add_up(whole, tmp_path):
    check_equal(whole, 100, tmp_path)


WAIT_FOR_WRITES = "    bulk_wait();\n"
BROKEN = {
    "a flag before the writes are complete": {
        "push_peers.cu": (WAIT_FOR_WRITES, "    bulk_wait_read<0>();\n")
    },
    "a stage filled again before it is read": {"push_peers.cu": ("bulk_wait_read<1>();", "")},
    "a relay that does not wait": {
        "push_peers.cu": ("            ready = wait_for(", "            ready = true || wait_for(")
    },
    "slots filled before they are free": {"push_peers.cu": ("if (c != last_copy)", "if (false)")},
    "a flag before the other lanes have written": {
        "push_peers.cu": (
            "        __syncwarp();  // All lanes have written what",
            "        // what",
        )
    },
    "the first block counts the generation": {
        "peers.cuh": ("!= gridDim.x - 1) return", "> 0) return")
    },
    "gradients given back before all are read": {
        "pull_add_peers.cu": ("        __syncthreads();  // All have read what", "        // what")
    },
    "gradients added before they are offered": {
        "pull_add_peers.cu": ("s != last_sum && r <", "false && r <")
    },
    "a bulk load behind a flag without a fence": {"pull_add_peers.cu": ("fence_bulk();", "")},
}
"""What only the order of things shows, and what must notice it."""


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_kernel_is_noticed(broken, whole, tmp_path):
    (name,) = broken
    changed = [Path(name).stem] if name.endswith(".cu") else PEERS
    objects = compile_kernels(changed, tmp_path, broken)
    replaced = {path.name for path in objects}
    objects += [path for path in whole if path.name not in replaced]
    result = run(objects, 100, tmp_path)
    assert result.returncode == 1, "it was not"
    assert result.stderr
