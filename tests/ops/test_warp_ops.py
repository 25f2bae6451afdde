"""The count that stands in for a GPU's clock: of the plans that are made, and not more than it was.

Layer 1. `tests/perf/warp_ops.py` runs the planner on a warp that counts; plans are compared with
the host op's, cycles with recorded ones, and what the planner accounts for with what was counted.
"""

import json
import random
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

from tests.perf import warp_ops
from tests.perf.warp_ops import CASES, RECORD, Case, Counted, Problem, build, count, op_plan
from tests.workloads import hard_loads

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

MOST_GROWTH = 1.10
ROUNDS_PER_WORK = 2  # of 32 lanes, for each that a try accounts for
CYCLES_PER_WORK = 1000  # 0.6 us; about 200 where a pass over the ranks takes two rounds
ENDS = 16  # rounds of a try that nobody accounts for: its verdict, an order


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return build(tmp_path_factory.mktemp("warp_ops"))


def assert_plans_equal(counted: list[Counted]) -> None:
    for each in counted:
        quota, slots = op_plan(each.problem)
        assert torch.equal(each.plan()[0], quota), each.problem
        assert torch.equal(each.plan()[1], slots), each.problem


def random_problem(generator: random.Random) -> Problem:
    ranks = generator.choice([2, 4, 6, 8, 33, 40])
    mains = generator.choice([1, 2, 3, 8])
    case = Case(
        ranks,
        ranks * mains,
        generator.choice([0, 1, 1, 2, 3, 8]),
        generator.choice([0, 10_000, 200_000]),
    )
    # Of hot and cold experts, and ranks that have only cold ones; from ties to what leaves 32 bits.
    scale = generator.choice([1, 3, 50, 4000, 2**33, 2**62 // case.experts])
    cold = generator.randrange(ranks) * mains
    load = [
        generator.randint(0, scale) // (40 if e < cold else generator.randint(1, 10))
        for e in range(case.experts)
    ]
    return Problem(case, torch.tensor(load), generator.choice([1, 1, 1, 7]))


def test_plans_equal_the_ops(program):
    generator = random.Random(5)
    problems = [random_problem(generator) for _ in range(150)]
    counted = count(program, problems)
    assert_plans_equal(counted)
    phases = {name for each in counted for name, phase in each.phases.items() if phase["cycles"]}
    assert phases == {"before", "first", "published", "thresholds", "write"}, "each was needed"
    assert {one.method for each in counted for one in each.tries} == {
        *("BestFit", "PairFit", "Rising", "Remainder", "RemainderRising"),
        *("Refill", "Roomiest", "Fill"),
    }


def test_sizes_are_the_kernels():
    kernel = (warp_ops.ROOT / "csrc" / "cuda" / "solve_quota.cu").read_text()
    counting = Path(warp_ops.__file__).with_suffix(".cpp").read_text()
    for size in ("kWarps", "kSteps", "kStepsBeside"):
        line = re.compile(rf"^constexpr int {size} = \d+;", re.MULTILINE)
        assert line.findall(kernel) == line.findall(counting) != []
    memories = re.findall(r"SharedMemory<(\d+, \d+, \d+)>", kernel)
    listed = ", ".join(f"{{{each}}}" for each in memories)
    assert f"kSharedMemories[] = {{{listed}}};" in counting
    (declared,) = re.findall(r"kDeclared = (\d+) << 10;", kernel)
    assert f"kMostShared = {227 - int(declared)} << 10;" in counting, "of Hopper's 227 KB"


@pytest.fixture(scope="module")
def of_recorded(program):
    return {
        name: {
            text: counted
            for (text, _), counted in zip(
                problems, count(program, [problem for _, problem in problems]), strict=True
            )
        }
        for name, problems in warp_ops.recorded_problems().items()
    }


def growth(counted: dict[str, Counted], recorded: dict[str, int]) -> float:
    """Mean over the loads of a case, so that the slowest one does not hide the others."""
    assert counted.keys() == recorded.keys()
    return sum(counted[text].cycles / recorded[text] for text in recorded) / len(recorded)


@pytest.mark.parametrize("name", json.loads(RECORD.read_text()))
def test_the_count_has_not_grown(name, of_recorded):
    counted = of_recorded[name]
    assert_plans_equal(list(counted.values()))
    recorded = json.loads(RECORD.read_text())[name]
    assert growth(counted, recorded) <= MOST_GROWTH, (
        f"{name}: cycles { ({text: each.cycles for text, each in counted.items()}) } "
        f"against {recorded}; if that is meant: python tests/perf/warp_ops.py --record"
    )


def test_all_recorded_cases_are_counted(of_recorded):
    assert json.loads(RECORD.read_text()).keys() == of_recorded.keys()


def test_a_planner_that_does_more_is_noticed(of_recorded, tmp_path):
    include = tmp_path / "include"
    shutil.copytree(warp_ops.ROOT / "csrc" / "include", include)
    header = include / "megatron_ext" / "planner" / "shed.h"
    once = "            moves_.spend(8 * rounds_of(moves_.domain().ranks));\n"
    text = header.read_text()
    assert text.count(once) == 1, "the planner has changed: choose another line"
    header.write_text(text.replace(once, once + "            moves_.roomiest_host();\n"))
    slower = build(tmp_path, include)
    counted = of_recorded["EP64_E256_S2"]
    again = count(slower, [each.problem for each in counted.values()])
    assert_plans_equal(again)
    more = dict(zip(counted, again, strict=True))
    assert growth(more, {text: each.cycles for text, each in counted.items()}) > 1.03


def assert_work_accounts_for_the_time(counted: Counted) -> None:
    for one in counted.tries:
        assert one.rounds <= ROUNDS_PER_WORK * (one.work + ENDS), one
        assert one.cycles <= CYCLES_PER_WORK * (one.work + ENDS), one


@pytest.mark.parametrize("name", ["EP64_E256_S2", "EP64_E256_S2_T0", "EP32_E256_S2", "EP8_E256_S2"])
def test_work_accounts_for_the_time(name, program):
    case = CASES[name]
    problems = [Problem(case, load.sum(0)) for _, load in hard_loads(case.ranks, case.experts)]
    counted = count(program, problems)
    assert_plans_equal(counted)
    for each in counted:
        assert_work_accounts_for_the_time(each)
        assert_work_within_bounds(each)


def rounds_of(number: int) -> int:
    return -(-number // 32)


def assert_work_within_bounds(counted: Counted) -> None:
    """One try after the other, the slowest of each round, does not take more than is budgeted."""
    case = counted.problem.case
    passes = rounds_of(case.ranks)
    step = 64 * (passes + rounds_of(case.ranks * case.slots))  # that begins within the limit
    work = {name: phase["work"] for name, phase in counted.phases.items()}
    assert work["first"] + work["thresholds"] <= counted.budget + step, work
    # A try of UltraEP's search: four passes for each replica, and each expert that no host takes.
    # That leaves enough for handing over, as no plan has so many of both.
    most = 4 * passes * (case.ranks * case.slots + case.experts) + rounds_of(case.experts)
    for one in counted.tries:
        if one.method == "Roomiest" and not one.is_first:
            assert one.work <= most, one


def changed(load: torch.Tensor, ranks: int, generator: random.Random) -> torch.Tensor:
    """Experts or whole ranks colder or hotter, and two experts in each other's place."""
    load = load.clone()
    experts = len(load)
    for _ in range(generator.randint(1, 3)):
        e, other = generator.randrange(experts), generator.randrange(experts)
        home = generator.randrange(ranks)
        of_rank = slice(home * experts // ranks, (home + 1) * experts // ranks)
        way = generator.randrange(6)
        if way == 0:
            load[e] = 0
        elif way == 1:
            load[of_rank] = 0
        elif way == 2:
            load[e] = int(load[e]) * generator.randint(3, 30) // 10
        elif way == 3:
            load[of_rank] = load[of_rank] * generator.randint(5, 20) // 10
        elif way == 4:
            load[e], load[other] = int(load[other]), int(load[e])
        else:
            load[e] = int(load.sum()) // ranks * generator.randint(1, 3) // 2
    return load


CLIMBS = {"EP8_E32_S2": Case(8, 32, 2), "EP16_E64_S2": Case(16, 64, 2)}


@pytest.mark.parametrize("case", CLIMBS.values(), ids=CLIMBS)
def test_no_load_is_found_that_breaks_the_bounds(case, program):
    """A climb from the hard loads towards those that take the most work."""
    generator = random.Random(7)
    loads = [load.sum(0) for _, load in hard_loads(case.ranks, case.experts)]
    best: list[tuple[int, Counted]] = []
    for _ in range(12):
        counted = count(program, [Problem(case, load) for load in loads if load.sum() > 0])
        for each in counted:
            assert_work_accounts_for_the_time(each)
            assert_work_within_bounds(each)
        best += [(sum(phase["work"] for phase in each.phases.values()), each) for each in counted]
        best = sorted(best, key=lambda pair: -pair[0])[:8]
        loads = [
            changed(generator.choice(best)[1].problem.load, case.ranks, generator)
            for _ in range(12)
        ]
    assert_plans_equal([each for _, each in best])


def test_percentiles_are_written(program, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(warp_ops, "build", lambda _: program)
    monkeypatch.setattr(warp_ops, "SMOOTH_LOADS", 3)
    file = tmp_path / "counted.json"
    command = ["warp_ops.py", "--cases", "EP8_E256_S2", "--seeds", "1", "--profile"]
    monkeypatch.setattr(sys, "argv", [*command, "--json", str(file)])
    warp_ops.main()
    table = json.loads(file.read_text())
    assert table.keys() == {"EP8_E256_S2", "EP8_E256_S2 smooth"}
    for row in table.values():
        assert list(row) == ["p50_us", "p95_us", "max_us"]
        assert 0 < row["p50_us"] <= row["p95_us"] <= row["max_us"]
    assert "Moves::add" in capsys.readouterr().out, "the profile names functions"
