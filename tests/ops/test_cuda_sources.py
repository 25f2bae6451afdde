"""Every CUDA source compiles for all architectures, without Torch and without a GPU."""

import functools
import itertools
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch

from megatron_ext.transport.gpus import BUDGETS, PULL_BYTES, lack_here

CSRC = Path(__file__).parents[2] / "csrc"
SOURCES = sorted((CSRC / "cuda").glob("*.cu"))
PLANNER = CSRC / "cuda" / "solve_quota.cu"
BUILT = re.findall(r"CUDA_ARCHITECTURES \"(.*)\"", (CSRC / "CMakeLists.txt").read_text())[0].split(
    ";"
)
BINARIES = [each.removesuffix("-real") for each in BUILT if each.endswith("-real")]


def test_there_are_sources():
    assert SOURCES


def test_all_gpus_that_are_not_refused_find_code():
    """A binary runs on its own architecture only, PTX on all from its own on."""
    portable = [int(each.removesuffix("-virtual")) for each in BUILT if each.endswith("-virtual")]
    # With a letter behind the number it would be for one architecture, PTX included.
    assert sorted(map(int, BINARIES)) == sorted(10 * major for major in BUDGETS)
    assert portable == [max(map(int, BINARIES))]


def test_the_probe_asks_for_what_a_pull_takes():
    """The compiler checks the kernel's figure, and this the probe's."""
    source = (CSRC / "cuda" / "pull_add_peers.cu").read_text()
    assert f"static_assert(sizeof(Shared) == {PULL_BYTES}," in source


def test_older_gpus_are_refused():
    with mock.patch.multiple(
        torch.cuda,
        is_available=lambda: True,
        get_device_name=lambda: "NVIDIA A100-SXM4-80GB",
        get_device_capability=lambda: (8, 0),
    ):
        assert "compute capability 8.0) has no bulk copies" in lack_here()
    with mock.patch.object(torch.cuda, "is_available", return_value=False):
        assert lack_here() is None


DECLARED = 1 << 10
"""Bytes of shared memory that the planner leaves to what its kernels declare: kDeclared."""

SAVED_FOR_CALLERS = 160
"""Bytes. What runs once a plan or a try puts aside what its callers keep in registers. What runs
for every replica spills nothing."""


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_the_planners_inner_loops_spill_nothing():
    """Tries are one function, where they lie in shared memory, but for handing over. With three
    ranks a lane, what looks at ranks in registers puts some aside."""
    lines = compile_source(PLANNER, BINARIES[0]).told.splitlines()
    found = set()
    for name, told in itertools.pairwise(lines):
        function = re.search(r"Function properties for (\S+)", name)
        if function is None or "GlobalMemory" in name:
            continue
        called = re.search(r"BlockPlanner\S+?E3(run)E|14(HandOverAtOnce)I", function[1])
        if called is None:
            continue
        is_wide = "SharedMemoryILi96E" in function[1]
        found.add((called[1] or called[2], is_wide))
        spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", told)
        most = SAVED_FOR_CALLERS if is_wide else 0
        assert max(map(int, spills.groups())) <= most, function[1]
    assert found == set(itertools.product(("run", "HandOverAtOnce"), (False, True)))


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_the_code_of_all_tries_is_short():
    """A kernel that runs once a layer finds its code in no cache, which takes 5 us of 46 on an
    H100. Of all methods with all that they call; at 64 ranks or fewer, in shared memory."""
    once_a_plan = re.compile(
        "GlobalMemory|DeviceLanesIl|DomainBound|bound_of_warp|order_experts|share_of|"
        "ThresholdSearch|PublishedSearch|plan_domain|6search|5reach|4keep"
    )
    code = {
        name: size
        for name, size in compile_source(PLANNER, "90").code.items()
        if re.search(r"SharedMemoryILi64E.*\$", name)
        and not once_a_plan.search(name.split("$")[-1])
    }
    called = " ".join(code)
    for each in ("E3runE", "HandOver", "move_to_front"):
        assert each in called
    assert sum(code.values()) <= 92 << 10, code


def chains_with_a_minus(ptx):
    """Return the lines that look for the least or highest of three numbers of 32 bits, one of which
    is nothing but the negation of another.

    ptxas 13.0 makes one instruction of the three for Hopper, VIMNMX3, and loses the minus.
    """
    found = []
    for function in re.split(r"(?m)^\}", ptx):
        made = {}
        for operation, number, operands in re.findall(r"(\w+)\.s32\s+(%r\d+), ([^;]+);", function):
            made.setdefault(number, []).append((operation, operands.split(", ")))

        def are_all(number, *operations, made=made):
            return number in made and all(each[0] in operations for each in made[number])

        for number, ways in made.items():
            for operation, operands in ways:
                inner = [each for each in operands if are_all(each, operation)]
                numbers = [*operands, *(each for one in inner for each in made[one][0][1])]
                if operation in ("min", "max") and inner:
                    found += [number] * any(are_all(each, "neg") for each in numbers)
    return found


def test_a_minus_in_a_chain_is_found():
    lost = """.func f() {
    neg.s32 \t%r3, %r1;
    min.s32 \t%r4, %r2, %r3;
    min.s32 \t%r5, %r4, %r6;
}"""
    assert chains_with_a_minus(lost) == ["%r5"]
    # Counted on in a loop, the number stands in a register of its own.
    counted = lost.replace("min.s32 \t%r5", "sub.s32 \t%r3, %r3, %r5;\n    min.s32 \t%r5")
    assert chains_with_a_minus(counted) == []
    assert chains_with_a_minus(lost.replace("%r4, %r6", "%r7, %r6")) == []


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_no_minus_is_lost(source):
    ptx = compile_source(source, BINARIES[0]).ptx
    assert ".target sm_90" in ptx
    assert chains_with_a_minus(ptx) == []


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("architecture", BINARIES)
def test_the_planner_declares_no_more_shared_memory_than_it_leaves(architecture):
    declared = re.findall(r"(\d+) bytes smem", compile_source(PLANNER, architecture).told)
    assert declared
    assert max(map(int, declared)) <= DECLARED
    assert "kDeclared = 1 << 10;" in PLANNER.read_text()


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("architecture", BINARIES)
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_compiles(source, architecture):
    told = compile_source(source, architecture).told
    # A spilled register is traffic nobody planned for; there is one line for each function.
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", told)
    assert spills
    most = SAVED_FOR_CALLERS if source.name == "solve_quota.cu" else 0
    assert max(int(count) for pair in spills for count in pair) <= most


@dataclass(frozen=True)
class Compiled:
    """What the assembler says of each function, and how long the code of each is, in bytes; and
    what it was given. For `BINARIES[0]`, what the host's half defines, too."""

    told: str
    code: dict[str, int]
    ptx: str
    defined: set[str]


@functools.cache
def compile_source(source, architecture):
    # The host's half is the same for all architectures.
    half = "-c" if architecture == BINARIES[0] else "-cubin"
    with tempfile.TemporaryDirectory() as folder:
        result = subprocess.run(
            [
                "nvcc",
                "-std=c++17",
                f"-gencode=arch=compute_{architecture},code=sm_{architecture}",
                "-Xptxas=-v",
                "--Werror=all-warnings",
                f"-I{CSRC / 'include'}",
                *("--keep", "--keep-dir", folder),
                half,
                str(source),
                "-o",
                f"{folder}/out",
            ],
            capture_output=True,
            text=True,
            timeout=600,  # It takes a minute on a calm machine, and cores may be shared by eight.
        )
        assert result.returncode == 0, result.stderr
        binaries = sorted(Path(folder).glob("*.cubin")) or [Path(folder) / "out"]
        symbols = subprocess.run(
            ["readelf", "--syms", "--wide", *map(str, binaries)],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        ptx = "".join(path.read_text() for path in Path(folder).glob("*.ptx"))
        defined = symbols_of(f"{folder}/out", "--defined-only") if half == "-c" else set()
    code = {
        name: int(size, 0)
        for size, name in re.findall(r":\s+\S+\s+(\S+)\s+FUNC\s.*\s(\S+)$", symbols, re.MULTILINE)
    }
    return Compiled(result.stderr, code, ptx, defined)


def symbols_of(path, which):
    """Return the names of functions that an object defines, or wants, with their arguments."""
    told = subprocess.run(
        ["nm", "--demangle", which, path], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    return set(re.findall(r"^[0-9a-f ]*[TUW] (megatron_ext::.*)$", told, re.MULTILINE))


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.skipif(torch.version.cuda is not None, reason="the library's build compiles them")
@pytest.mark.parametrize("source", ["device.cpp", "peer_exchange.cpp"])
def test_bindings_find_their_kernels(source, tmp_path):
    # A torch without CUDA has all headers but this one, and its content does not matter here.
    generated = tmp_path / "c10" / "cuda" / "impl" / "cuda_cmake_macros.h"
    generated.parent.mkdir(parents=True)
    generated.write_text("")
    headers = Path(torch.__file__).parent / "include"
    result = subprocess.run(
        [
            "nvcc",
            "-std=c++20",
            "-Xcompiler=-Wall,-Wextra,-Werror",
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
        timeout=600,
    )
    assert result.returncode == 0, result.stderr
    wanted = symbols_of(tmp_path / "out.o", "--undefined-only")
    of_kernels = {name for name in wanted if "_cuda" in name}
    assert of_kernels
    assert of_kernels <= set().union(
        *(compile_source(each, BINARIES[0]).defined for each in SOURCES)
    )
