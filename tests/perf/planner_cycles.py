"""What planning takes on a GPU, estimated from the kernel's PTX where there is no GPU.

    python tests/perf/planner_cycles.py [--cases NAME ...] [--profile] [--json FILE]
    python tests/perf/planner_cycles.py --record

nvcc makes PTX of `csrc/cuda/solve_quota.cu` for sm_90, and a machine in `tests/perf/cycles` runs
it: one block, 16 warps of 32 lanes. The rules of its cycles, and what they leave out, are at the
head of `cycles/machine.h`. It needs nvcc and g++. The plans are the host's own, which is checked,
and no two threads race for shared memory (`cycles/races.h`).
`Measured` says how cycles become microseconds, and how far the estimate may be from an H100.

Sets of loads, 30 each: `hard_loads` of `tests/workloads.py`, and, as `NAME smooth`, Zipf of 0.3,
0.6 and 1.0. `--json` writes p50, p95 and maximum of each set. `--profile` adds where the time goes.
`--record` writes what `tests/ops/test_planner_cycles.py` compares with: do so where a growth is
meant.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import re
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.workloads import hard_loads, zipf  # noqa: E402

MACHINE = Path(__file__).parent / "cycles"
RECORD = Path(__file__).with_suffix(".json")
RECORDED_CASES = (
    "EP64_E256_S2",
    "EP64_E256_S1",
    "EP64_E256_S2_T0",
    "EP32_E256_S2_T0",  # where the plan hangs on the work of a chain that finds nothing
    "EP8_E256_S2",
)
RECORDED_LOADS = ("W2 hot rank", "cold 1/4, warm by chance", "zipf 0.8", "few tokens, 64")
SMOOTH_SEEDS = 10
PER_RANK = 65536  # assignments, of the smooth set
ARCHITECTURE = "sm_90"


@dataclass(frozen=True)
class Measured:
    """A set of loads on an H100 of 1,980 cycles a microsecond (docs/results.md, section 7).

    One line fits p50, p95 and the worst load of the four sets: LAUNCH_US, and a factor, their mean,
    for what the machine leaves out. It is at most 14 % from each of the twelve.
    """

    us: tuple[float, float, float]
    cycles: tuple[int, int, int]  # of the machine for the same code

    CYCLES_PER_US = 1980.0
    LAUNCH_US = 10.0  # and the first reads

    def factors(self) -> list[float]:
        """Of each measured time to what its cycles say."""
        return [
            (us - self.LAUNCH_US) * self.CYCLES_PER_US / cycles
            for us, cycles in zip(self.us, self.cycles, strict=True)
        ]


MEASURED = {
    "EP64_E256_S2 smooth": Measured((86.5, 110.6, 112.9), (106423, 145001, 147133)),
    "EP64_E256_S2": Measured((95.0, 445.3, 778.9), (117544, 522827, 937298)),
    "EP8_E64_S2 smooth": Measured((33.9, 39.7, 43.4), (29789, 35469, 36996)),
    "EP8_E64_S1": Measured((43.4, 353.6, 537.7), (40519, 390246, 575077)),
}
FACTOR = statistics.geometric_mean(
    factor for measured in MEASURED.values() for factor in measured.factors()
)


def us_of(cycles: int) -> float:
    """An estimate of an H100's time, in microseconds."""
    return Measured.LAUNCH_US + FACTOR * cycles / Measured.CYCLES_PER_US


@dataclass(frozen=True)
class Case:
    """A setting to plan for, and what its p95 is hoped to be, if anything."""

    ranks: int
    experts: int
    slots: int
    tolerance_ppm: int = 10_000
    aim_us: float | None = None


CASES = {
    "EP64_E256_S2": Case(64, 256, 2, aim_us=40),
    "EP72_E288_S2": Case(72, 288, 2, aim_us=55),
    "EP64_E256_S1": Case(64, 256, 1, aim_us=60),
    "EP64_E256_S2_T0": Case(64, 256, 2, tolerance_ppm=0, aim_us=60),
    "EP64_E256_S4_T0": Case(64, 256, 4, tolerance_ppm=0),
    "EP64_E512_S2": Case(64, 512, 2),
    "EP32_E256_S2": Case(32, 256, 2),
    "EP32_E256_S2_T0": Case(32, 256, 2, tolerance_ppm=0),
    "EP8_E256_S2": Case(8, 256, 2, aim_us=20),
    "EP8_E64_S2": Case(8, 64, 2),
    "EP8_E64_S1": Case(8, 64, 1),
}


@dataclass(frozen=True)
class Problem:
    """A load to plan: int64 [R, E] assignments."""

    case: Case
    load: Tensor
    min_quota: int = 1


@dataclass(frozen=True)
class Place:
    """A line, and the function of PTX that it has become a part of."""

    function: str
    file: str
    line: int


@dataclass(frozen=True)
class Report:
    """What the machine says of a load."""

    cycles: int
    equal: bool  # whether the plan is the host's
    segments: list[tuple[int, int, Place]]  # between barriers: cycles, slowest warp, where it ends
    lines: list[tuple[int, Place]]  # cycles of the slowest warps
    tries: list[tuple[int, int]]  # work that a try accounts for, and its cycles
    races: list[tuple[int, Place, Place]]  # how often, the earlier access, the later one


@dataclass(frozen=True)
class Built:
    """The machine, and the kernel that it runs."""

    program: Path
    ptx: Path

    def run(self, *arguments: str, text: str = "") -> str:
        """Returns the program's output.

        Raises:
            RuntimeError: If it ends with an error, as at an instruction that it does not know.
        """
        command = [str(self.program), str(self.ptx), *arguments]
        result = subprocess.run(command, input=text, capture_output=True, text=True)
        if result.returncode != 0:
            said = result.stderr.strip() or f"ended with {result.returncode}"
            raise RuntimeError(f"{self.program.name}: {said}")
        return result.stdout


def compile_with(*command: str) -> None:
    """Run a compiler.

    Raises:
        RuntimeError: If it is missing, or refuses its source.
    """
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    except FileNotFoundError:
        raise RuntimeError(
            f"{command[0]} is missing: it compiles the planner or the machine"
        ) from None
    if result.returncode != 0:
        raise RuntimeError(f"{command[0]} refuses its source:\n{result.stderr}")


def build_machine(folder: Path) -> Path:
    """Compile the machine, with the host's planner, into `folder`."""
    program = folder / "planner_cycles"
    sources = [*sorted(MACHINE.glob("*.cpp")), ROOT / "csrc" / "cpu" / "solve_quota.cpp"]
    flags = ("-std=c++20", "-O1", f"-I{ROOT / 'csrc' / 'include'}")
    compile_with("g++", *flags, *map(str, sources), "-o", str(program))
    return program


def compile_kernel(folder: Path, csrc: Path = ROOT / "csrc") -> Path:
    """Compile the planner's kernel of `csrc` to PTX, in `folder`."""
    ptx = folder / "solve_quota.ptx"
    flags = ("-std=c++17", "-O3", "-DNDEBUG", f"-arch={ARCHITECTURE}", "-lineinfo", "-ptx")
    source = csrc / "cuda" / "solve_quota.cu"
    compile_with("nvcc", *flags, f"-I{csrc / 'include'}", str(source), "-o", str(ptx))
    return ptx


def build(folder: Path) -> Built:
    """Compile both."""
    return Built(build_machine(folder), compile_kernel(folder))


def estimate(built: Built, problems: Iterable[Problem]) -> list[Report]:
    """Plan every load on the machine.

    Raises:
        RuntimeError: If the machine cannot run the kernel.
    """
    lines = []
    for problem in problems:
        case = problem.case
        head = [case.ranks, case.experts, case.slots, case.tolerance_ppm, problem.min_quota]
        lines.append(" ".join(map(str, [*head, *problem.load.flatten().tolist()])) + "\n")
    reports = []
    for line in built.run(text="".join(lines)).splitlines():
        report = json.loads(line)
        report["segments"] = [(cycles, warp, Place(*at)) for cycles, warp, at in report["segments"]]
        report["lines"] = [(cycles, Place(*at)) for cycles, at in report["lines"]]
        report["tries"] = [(work, cycles) for work, cycles in report["tries"]]
        report["races"] = [
            (times, Place(*one), Place(*other)) for times, one, other in report["races"]
        ]
        reports.append(Report(**report))
    return reports


def smooth_loads(ranks: int, experts: int) -> Iterator[tuple[str, Tensor]]:
    """Zipf, as measured on an H100: name and load, int64 [R, E]."""
    for seed in range(SMOOTH_SEEDS):
        for exponent in (0.3, 0.6, 1.0):
            yield (
                f"zipf {exponent}, seed {seed}",
                zipf(ranks, experts, PER_RANK, exponent, seed=seed),
            )


def percentiles(reports: list[Report]) -> dict[str, float]:
    """p50, p95 (the least that 95 % do not exceed) and maximum, in microseconds."""
    times = sorted(us_of(report.cycles) for report in reports)
    return {
        "p50_us": round(statistics.median(times), 1),
        "p95_us": round(times[math.ceil(0.95 * len(times)) - 1], 1),
        "max_us": round(times[-1], 1),
    }


def plain_names(symbols: Iterable[str]) -> dict[str, str]:
    """By symbol, the name without namespaces, template arguments and parameters: Moves::add."""
    symbols = list(symbols)
    result = subprocess.run(["c++filt", *symbols], capture_output=True, text=True, check=True)
    names = {}
    for symbol, name in zip(symbols, result.stdout.splitlines(), strict=True):
        name = re.sub(r"megatron_ext::|\(anonymous namespace\)::|_INTERNAL_\w+::", "", name)
        while name != (shorter := re.sub(r"<[^<>]*>", "", name)):
            name = shorter
        names[symbol] = name.split("(")[0].split()[-1]
    return names


def said_of_races(report: Report) -> str:
    """Say which lines race, those that do so most often first."""
    races = sorted(report.races, key=lambda race: -race[0])
    said = [
        " and ".join(f"{Path(at.file).name}:{at.line}" for at in places) for _, *places in races
    ]
    return f"no barrier orders {', '.join(said)}"


def print_profile(reports: list[Report], number: int = 12) -> None:
    """Where the time goes: means over the loads, in microseconds."""
    names = plain_names({at.function for report in reports for _, at in report.lines})
    functions: Counter[str] = Counter()
    lines: Counter[tuple[str, int]] = Counter()
    segments: Counter[tuple[str, int]] = Counter()
    for report in reports:
        for cycles, at in report.lines:
            functions[names[at.function]] += cycles
            lines[at.file, at.line] += cycles
        for cycles, _, at in report.segments:
            segments[at.file, at.line] += cycles
    scale = FACTOR / (Measured.CYCLES_PER_US * len(reports))
    print("    functions, of the slowest warps, us:")
    for name, cycles in functions.most_common(number):
        print(f"    {cycles * scale:8.1f}  {name}")
    for title, places in (("lines", lines), ("segments, by the line that ends them", segments)):
        print(f"    {title}, us:")
        for (file, line), cycles in places.most_common(number):
            source = Path(file).read_text().splitlines()[line - 1].strip()
            print(f"    {cycles * scale:8.1f}  {Path(file).name}:{line}  {source}")


def recorded_problems() -> dict[str, list[tuple[str, Problem]]]:
    """The loads whose cycles are recorded, by case: name and problem."""
    found: dict[str, list[tuple[str, Problem]]] = {}
    loads_of = functools.cache(lambda ranks, experts: dict(hard_loads(ranks, experts)))
    for name in RECORDED_CASES:
        case = CASES[name]
        loads = loads_of(case.ranks, case.experts)
        found[name] = [(text, Problem(case, loads[text])) for text in RECORDED_LOADS]
    return found


def record(built: Built) -> dict[str, dict[str, int]]:
    """Cycles of the recorded loads, by case and load."""
    found = {}
    for name, problems in recorded_problems().items():
        reports = estimate(built, [problem for _, problem in problems])
        texts = [text for text, _ in problems]
        found[name] = {text: report.cycles for text, report in zip(texts, reports, strict=True)}
    return found


def print_case(built: Built, name: str, profile: bool) -> dict[str, dict[str, float]]:
    """The rows of a case: its hard loads, and its smooth ones.

    Raises:
        RuntimeError: If a plan is not the host's.
    """
    case = CASES[name]
    sizes = (case.ranks, case.experts)
    rows = {}
    for label, loads in ((name, hard_loads(*sizes)), (f"{name} smooth", smooth_loads(*sizes))):
        texts, each_load = zip(*loads, strict=True)
        reports = estimate(built, [Problem(case, load) for load in each_load])
        for text, report in zip(texts, reports, strict=True):
            if not report.equal:
                raise RuntimeError(f"{label}, {text}: the plan is not the host's")
            if report.races:
                raise RuntimeError(f"{label}, {text}: {said_of_races(report)}")
        rows[label] = percentiles(reports)
        worst, _ = max(zip(texts, reports, strict=True), key=lambda pair: pair[1].cycles)
        times = "".join(f"{value:9.1f}" for value in rows[label].values())
        aim = f"{case.aim_us:.0f}" if case.aim_us else ""
        print(f"{label:24}{len(reports):6}{times}{aim:>6}  {worst}", flush=True)
        if profile:
            print_profile(reports)
    return rows


def main() -> None:
    """Estimate, print the table, and write what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="NAME")
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name}, nothing else")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the percentiles")
    options = parser.parse_args()
    torch.set_num_threads(1)
    table: dict[str, dict[str, float]] = {}
    try:
        with tempfile.TemporaryDirectory() as folder:
            built = build(Path(folder))
            if options.record:
                RECORD.write_text(json.dumps(record(built), indent=2) + "\n")
                return
            print(
                f"{'case':24}{'loads':>6}{'p50 us':>9}{'p95 us':>9}{'max us':>9}{'aim':>6}  worst"
            )
            for name in options.cases:
                table |= print_case(built, name, options.profile)
    except RuntimeError as error:
        raise SystemExit(f"planner_cycles: {error}") from None
    if options.json:
        options.json.write_text(json.dumps(table, indent=2) + "\n")


if __name__ == "__main__":
    main()
