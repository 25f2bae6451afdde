"""What planning would take on a GPU: an operation count as a stand-in for a clock.

    python tests/perf/warp_ops.py [--cases NAME ...] [--seeds N] [--profile] [--json FILE]
    python tests/perf/warp_ops.py --record

`warp_ops.cpp` runs the planner as the device would, on a warp that counts, and its head says by
which rules; cycles become microseconds at 1.75 GHz. The plans are the op's own, which is checked.
A launch and code that is in no cache are not in the numbers: they are for comparing one planner
with another, and for finding where its time goes, until a GPU tells.

Sets of loads: `hard_loads` of `tests/workloads.py`, and, as `NAME smooth`, Zipf 0.25 to 0.9 and
Pareto 1.3 to 4.8 that are imbalanced by 1.4 to 3.5. `--json` writes p50, p95 and maximum of each.
`--profile` adds where the time goes. `--record` writes what `tests/ops/test_warp_ops.py` compares
with: do so where a growth is meant.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from megatron_ext.ops import load_library  # noqa: E402
from tests.workloads import hard_loads  # noqa: E402

CYCLES_PER_US = 1750.0
PER_RANK = 65536  # assignments, of the smooth set
SMOOTH_LOADS = 100
RECORD = Path(__file__).with_suffix(".json")

RECORDED_LOADS = ("W2 hot rank", "cold 1/4, warm by chance", "zipf 0.8", "few tokens, 64")


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
    "EP8_E256_S2": Case(8, 256, 2, aim_us=20),
    "EP32_E256_S2": Case(32, 256, 2),
    "EP64_E512_S2": Case(64, 512, 2),
}


@dataclass(frozen=True)
class Problem:
    """A load to plan: assignments of each expert, int64 [E], over all source ranks."""

    case: Case
    load: Tensor
    min_quota: int = 1


@dataclass(frozen=True)
class Try:
    """One try of one warp, as the program reports it."""

    method: str
    is_first: bool  # of the first round
    reached: bool
    work: int  # that the planner accounts for, in rounds of a warp
    rounds: int  # of 32 lanes that were counted
    cycles: int
    instructions: int


@dataclass(frozen=True)
class Counted:
    """What the program reports of a load."""

    problem: Problem
    budget: int  # of work, for all tries but UltraEP's search
    phases: dict[str, dict[str, Any]]
    tries: list[Try]
    replicas: list[list[int]]  # rank, slot, expert, assignments

    @property
    def cycles(self) -> int:
        """Of the whole block, all phases."""
        return sum(phase["cycles"] for phase in self.phases.values())

    @property
    def us(self) -> float:
        """The same as time."""
        return self.cycles / CYCLES_PER_US

    def plan(self) -> tuple[Tensor, Tensor]:
        """Quota, int64 [E, R], and slots, int32 [R, S], as the op returns them."""
        case, load = self.problem.case, self.problem.load
        quota = torch.zeros(case.experts, case.ranks, dtype=torch.int64)
        homes = torch.arange(case.experts) // (case.experts // case.ranks)
        quota[torch.arange(case.experts), homes] = load
        slots = torch.full((case.ranks, case.slots), -1, dtype=torch.int32)
        for rank, slot, expert, amount in self.replicas:
            quota[expert, homes[expert]] -= amount
            quota[expert, rank] = amount
            slots[rank, slot] = expert
        return quota, slots


def op_plan(problem: Problem) -> tuple[Tensor, Tensor]:
    """What the host build of the op plans for the same load."""
    load_library()
    case = problem.case
    load = torch.zeros(case.ranks, case.experts, dtype=torch.int64)
    load[0] = problem.load
    quota, slots = torch.ops.megatron_ext.solve_quota(
        load, case.slots, case.ranks, case.tolerance_ppm, problem.min_quota
    )
    return quota, slots


def build(folder: Path, include: Path = ROOT / "csrc" / "include") -> Path:
    """Compile the counting program, with the planner of `include`, into `folder`.

    Raises:
        RuntimeError: If g++ is missing or refuses it.
    """
    program = folder / "warp_ops"
    source = Path(__file__).with_suffix(".cpp")
    command = [
        "g++",
        "-std=c++20",
        "-O1",
        f"-I{include}",
        # Functions that stay functions on the device tell when they are called, by name.
        "-finstrument-functions",
        f"-finstrument-functions-exclude-file-list={source.name},/c++/,megatron_ext/warp.h",
        "-finstrument-functions-exclude-function-list=operator()",
        "-rdynamic",
        *(str(source), "-o", str(program), "-ldl"),
    ]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    except FileNotFoundError:
        raise RuntimeError("g++ is missing: it compiles the counting program") from None
    if result.returncode != 0:
        raise RuntimeError(f"g++ refuses {source}:\n{result.stderr}")
    return program


def count(program: Path, problems: Iterable[Problem]) -> list[Counted]:
    """Plan every load, and count."""
    problems = list(problems)
    lines = []
    for problem in problems:
        case = problem.case
        head = [case.ranks, case.experts, case.slots, case.tolerance_ppm, problem.min_quota]
        lines.append(" ".join(map(str, [*head, *problem.load.tolist()])) + "\n")
    result = subprocess.run([str(program)], input="".join(lines), capture_output=True, text=True)
    if result.returncode != 0:
        raise RuntimeError(f"{program} ended with {result.returncode}: {result.stderr}")
    counted = []
    for problem, line in zip(problems, result.stdout.splitlines(), strict=True):
        report = json.loads(line)
        tries = [Try(*each) for each in report["tries"]]
        counted.append(
            Counted(problem, report["budget"], report["phases"], tries, report["replicas"])
        )
    return counted


def smooth_loads(ranks: int, experts: int, number: int, seed: int = 0) -> Iterator[Tensor]:
    """Loads of experts, int64 [E], whose weights follow a curve, in random order."""
    generator = np.random.default_rng(seed)
    while number > 0:
        if generator.random() < 0.5:
            weights = np.arange(1, experts + 1) ** -generator.uniform(0.25, 0.9)
        else:
            weights = generator.random(experts) ** (-1 / generator.uniform(1.3, 4.8))
        generator.shuffle(weights)
        load = np.floor(weights / weights.sum() * PER_RANK * ranks).astype(np.int64)
        home = load.reshape(ranks, -1).sum(1)
        if 1.4 <= home.max() / home.mean() <= 3.5:
            number -= 1
            yield torch.from_numpy(load)


def percentiles(counted: list[Counted]) -> dict[str, float]:
    """p50, p95 (the least that 95 % do not exceed) and maximum, in microseconds."""
    times = sorted(each.us for each in counted)
    return {
        "p50_us": round(statistics.median(times), 1),
        "p95_us": round(times[math.ceil(0.95 * len(times)) - 1], 1),
        "max_us": round(times[-1], 1),
    }


def print_profile(counted: list[Counted]) -> None:
    """Where the time goes: means over the loads, in microseconds."""
    scale = CYCLES_PER_US * len(counted)

    def show(title: str, cycles: Counter[str]) -> None:
        total = max(sum(cycles.values()), 1)
        print(
            f"    {title}: "
            + ", ".join(
                f"{name} {each / scale:.1f} ({100 * each / total:.0f} %)"
                for name, each in cycles.most_common(12)
            )
        )

    phases: Counter[str] = Counter()
    spent: dict[str, Counter[str]] = {
        "parts": Counter(),
        "functions": Counter(),
        "kinds": Counter(),
    }
    methods: Counter[str] = Counter()
    slowest: Counter[str] = Counter()
    for each in counted:
        for name, phase in each.phases.items():
            phases[name] += phase["cycles"]
            for what, cycles in spent.items():
                cycles.update(phase["spent"][what])
        first = [one for one in each.tries if one.is_first]
        for one in first:
            methods[one.method] += one.cycles
        if first:
            slowest[max(first, key=lambda one: one.cycles).method] += 1
    show("phases", phases)
    for what, cycles in spent.items():
        show(f"{what} of the slowest warps", cycles)
    show("tries of the first round", methods)
    print("    slowest in it: " + ", ".join(f"{n} {times}" for n, times in slowest.most_common()))


def recorded_problems() -> dict[str, list[tuple[str, Problem]]]:
    """The loads whose counts are recorded, by case: name and problem."""
    found: dict[str, list[tuple[str, Problem]]] = {}
    loads: dict[tuple[int, int], dict[str, Tensor]] = {}
    for name in ("EP64_E256_S2", "EP64_E256_S1", "EP64_E256_S2_T0", "EP8_E256_S2"):
        case = CASES[name]
        size = (case.ranks, case.experts)
        if size not in loads:
            loads[size] = {text: load.sum(0) for text, load in hard_loads(*size)}
        found[name] = [(text, Problem(case, loads[size][text])) for text in RECORDED_LOADS]
    return found


def record(program: Path) -> dict[str, dict[str, int]]:
    """Cycles of the recorded loads, by case and load."""
    return {
        name: {
            text: counted.cycles
            for (text, _), counted in zip(
                problems, count(program, [problem for _, problem in problems]), strict=True
            )
        }
        for name, problems in recorded_problems().items()
    }


def main() -> None:
    """Count, print the table, and write what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="NAME")
    parser.add_argument("--seeds", type=int, default=3, help="of the hard loads (default: 3)")
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name}, nothing else")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the percentiles")
    options = parser.parse_args()
    if options.seeds < 1:
        parser.error(f"--seeds ({options.seeds}) must be at least 1")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        program = build(Path(folder))
        if options.record:
            RECORD.write_text(json.dumps(record(program), indent=2) + "\n")
            return
        table = {}
        print(f"{'case':24}{'loads':>6}{'p50 us':>9}{'p95 us':>9}{'max us':>9}{'aim':>6}  worst")
        for name in options.cases:
            case = CASES[name]
            hard = [
                (text, load.sum(0))
                for seed in range(options.seeds)
                for text, load in hard_loads(case.ranks, case.experts, seed)
            ]
            smooth = [
                (f"load {i}", load)
                for i, load in enumerate(smooth_loads(case.ranks, case.experts, SMOOTH_LOADS))
            ]
            for label, loads in ((name, hard), (f"{name} smooth", smooth)):
                counted = count(program, [Problem(case, load) for _, load in loads])
                for (text, _), each in zip(loads, counted, strict=True):
                    if not all(map(torch.equal, each.plan(), op_plan(each.problem))):
                        raise RuntimeError(f"{label}, {text}: the plan is not the op's")
                table[label] = percentiles(counted)
                worst, _ = max(zip(loads, counted, strict=True), key=lambda pair: pair[1].us)
                aim = f"{case.aim_us:.0f}" if case.aim_us else ""
                times = "".join(f"{value:9.1f}" for value in table[label].values())
                print(f"{label:24}{len(loads):6}{times}{aim:>6}  {worst[0]}", flush=True)
                if options.profile:
                    print_profile(counted)
    if options.json:
        options.json.write_text(json.dumps(table, indent=2) + "\n")


if __name__ == "__main__":
    main()
