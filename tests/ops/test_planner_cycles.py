"""The estimate of the planner's time on a GPU: of the host's plans, and not more than it was.

Layer 1. `tests/perf/planner_cycles.py` runs the kernel's PTX on a machine; plans are compared with
the host's, cycles with recorded ones and with the work that tries account for, accesses to shared
memory with what barriers order, and the machine itself with small kernels whose results are known.
"""

import json
import random
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

from tests.perf import planner_cycles
from tests.perf.planner_cycles import (
    CASES,
    FACTOR,
    MEASURED,
    RECORD,
    ROOT,
    Built,
    Case,
    Problem,
    Report,
    build,
    compile_kernel,
    estimate,
    said_of_races,
    us_of,
)
from tests.workloads import hard_loads

pytestmark = [
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
]

MOST_GROWTH = 1.10
CYCLES_PER_WORK = 500  # at most 300 on all hard loads of five cases
ENDS = 16  # rounds of a try that nobody accounts for: its verdict, an order
WARP = 32


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return build(tmp_path_factory.mktemp("planner_cycles"))


def random_problem(generator: random.Random) -> Problem:
    ranks = generator.choice([2, 4, 6, 8, 33, 40, 72])
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
    load = torch.zeros(ranks, case.experts, dtype=torch.int64)
    for e in range(case.experts):
        assignments = generator.randint(0, scale) // (40 if e < cold else generator.randint(1, 10))
        load[generator.randrange(ranks), e] = assignments
    return Problem(case, load, generator.choice([1, 1, 1, 7]))


def test_plans_equal_the_hosts(built):
    generator = random.Random(5)
    problems = [random_problem(generator) for _ in range(40)]
    for problem, report in zip(problems, estimate(built, problems), strict=True):
        assert report.equal, problem
        assert not report.races, said_of_races(report)


@pytest.mark.parametrize(("ranks", "experts"), [(8, 64), (8, 512), (64, 64)])
def test_the_most_that_fits_a_word(ranks, experts, built):
    """A main's load stands above its number in a word of 32 bits, of which no word has all."""
    mains = experts // ranks
    problems = []
    for most in (2**22 - 1, 2**22 - 2):
        load = torch.zeros(ranks, experts, dtype=torch.int64)
        load[0, ::mains] = 1000 * torch.arange(ranks)
        load[0, 3 * mains] = most
        problems.append(Problem(Case(ranks, experts, slots=2), load))
    for report in estimate(built, problems):
        assert report.equal


@pytest.fixture(scope="module")
def hot_experts():
    case = CASES["EP72_E288_S2"]
    return Problem(case, dict(hard_loads(case.ranks, case.experts))["W1 hot expert set"])


def test_no_threads_race(built, of_recorded, hot_experts):
    (report,) = estimate(built, [hot_experts])
    for each in [report, *(each for reports in of_recorded.values() for each in reports.values())]:
        assert not each.races, said_of_races(each)


def test_a_race_is_found(built, hot_experts, tmp_path):
    """Of lanes where one writes what others may still read, and of warps behind no barrier."""
    csrc = tmp_path / "csrc"
    shutil.copytree(ROOT / "csrc", csrc)
    for file, line, faulty in (
        ("include/megatron_ext/planner/at_hand.h", "        __syncwarp();  // What lanes", "//"),
        (
            "cuda/solve_quota.cu",
            "        if (in_32_bits) {",
            "        if (is_narrow(job.domain.before(), job.domain.ranks, problem.min_quota)) {",
        ),
    ):
        text = (csrc / file).read_text()
        assert text.count(line) == 1, "the planner has changed: choose another line"
        (csrc / file).write_text(text.replace(line, faulty))
    racing = Built(built.program, compile_kernel(tmp_path, csrc))
    (report,) = estimate(racing, [hot_experts])
    assert report.equal
    earlier = {Path(one.file).name for _, one, _ in report.races}
    later = {Path(other.file).name for _, _, other in report.races}
    assert {"at_hand.h", "domain.h"} <= earlier
    assert {"at_hand.h", "solve_quota.cu"} <= later


@pytest.fixture(scope="module")
def of_recorded(built):
    found = {}
    for name, problems in planner_cycles.recorded_problems().items():
        reports = estimate(built, [problem for _, problem in problems])
        found[name] = dict(zip((text for text, _ in problems), reports, strict=True))
    return found


def growth(reports: dict[str, Report], recorded: dict[str, int]) -> float:
    """Mean over the loads of a case, so that the slowest one does not hide the others."""
    assert reports.keys() == recorded.keys()
    return sum(reports[text].cycles / recorded[text] for text in recorded) / len(recorded)


@pytest.mark.parametrize("name", json.loads(RECORD.read_text()))
def test_the_cycles_have_not_grown(name, of_recorded):
    reports = of_recorded[name]
    assert all(report.equal for report in reports.values())
    recorded = json.loads(RECORD.read_text())[name]
    assert growth(reports, recorded) <= MOST_GROWTH, (
        f"{name}: cycles { ({text: each.cycles for text, each in reports.items()}) } "
        f"against {recorded}; if that is meant: python tests/perf/planner_cycles.py --record"
    )


def test_all_recorded_cases_are_run(of_recorded):
    assert json.loads(RECORD.read_text()).keys() == of_recorded.keys()


def test_a_planner_that_does_more_is_noticed(built, of_recorded, tmp_path):
    csrc = tmp_path / "csrc"
    shutil.copytree(ROOT / "csrc", csrc)
    kernel = csrc / "cuda" / "solve_quota.cu"
    text = kernel.read_text()
    of_a_try = "        const Verdict verdict = attempt.run("
    assert text.count(of_a_try) == 1, "the planner has changed: choose another line"
    more = "        for (int i = 0; i < 3000; ++i) __syncwarp();\n"
    kernel.write_text(text.replace(of_a_try, more + of_a_try))
    slower = Built(built.program, compile_kernel(tmp_path, csrc))
    problems = planner_cycles.recorded_problems()["EP64_E256_S2"]
    reports = estimate(slower, [problem for _, problem in problems])
    assert all(report.equal for report in reports)
    again = dict(zip((text for text, _ in problems), reports, strict=True))
    before = {text: report.cycles for text, report in of_recorded["EP64_E256_S2"].items()}
    assert growth(again, before) > MOST_GROWTH


@pytest.mark.parametrize("name", ["EP64_E256_S2", "EP32_E256_S2", "EP8_E64_S1"])
def test_work_accounts_for_the_cycles(name, built):
    case = CASES[name]
    loads = dict(hard_loads(case.ranks, case.experts))
    hardest = [Problem(case, loads[f"cold 1/{n}, warm by chance"]) for n in (8, 4)]
    for report in estimate(built, hardest):
        assert report.equal
        assert report.tries
        for work, cycles in report.tries:
            assert cycles <= CYCLES_PER_WORK * (work + ENDS)


def test_the_estimate_is_near_what_was_measured():
    errors = [
        abs(us_of(cycles) / us - 1)
        for measured in MEASURED.values()
        for us, cycles in zip(measured.us, measured.cycles, strict=True)
    ]
    assert max(errors) <= 0.15
    assert 1.5 < FACTOR < 1.7


@pytest.fixture
def run_kernel(built, tmp_path):
    """Run the lines of a kernel in a block; [%out] is the first of its words, all 0."""

    def run(body: str, warps: int = 1, words: int = WARP) -> list[int]:
        ptx = tmp_path / "kernel.ptx"
        ptx.write_text(
            ".version 8.0\n.target sm_90\n.address_size 64\n"
            ".visible .entry kernel(\n\t.param .u64 out_param\n)\n{\n"
            "\t.shared .align 4 .b8 counter[4];\n"
            "\tld.param.u64 \t%out, [out_param];\n"
            "\tmov.u32 \t%thread, %tid.x;\n"
            "\tmul.wide.u32 \t%bytes, %thread, 8;\n"
            "\tadd.s64 \t%own, %out, %bytes;\n"
            f"{body}\n\tret;\n}}\n"
        )
        said = Built(built.program, ptx).run(str(warps), str(words))
        return [int(word) for word in said.split()]

    return run


def test_lanes_that_part_meet_again(run_kernel):
    # Odd lanes take a detour; the vote behind it counts all of them.
    body = """
    and.b32 %odd, %thread, 1;
    setp.eq.s32 %even, %odd, 0;
    mov.u32 %sum, 1;
    @%even bra $met;
    mov.u32 %i, 0;
$again:
    add.s32 %sum, %sum, 2;
    add.s32 %i, %i, 1;
    setp.lt.s32 %more, %i, %thread;
    @%more bra $again;
$met:
    bar.warp.sync -1;
    setp.gt.s32 %large, %sum, 1;
    vote.sync.ballot.b32 %votes, %large, -1;
    cvt.u64.u32 %wide, %votes;
    shl.b64 %wide, %wide, 8;
    cvt.u64.u32 %value, %sum;
    or.b64 %value, %value, %wide;
    st.global.u64 [%own], %value;"""
    votes = 0xAAAAAAAA << 8
    assert run_kernel(body) == [votes | (1 + 2 * lane if lane % 2 else 1) for lane in range(WARP)]


def test_lanes_that_never_meet_are_told(run_kernel):
    body = """
    setp.eq.s32 %first, %thread, 0;
    @%first bra $end;
    bar.warp.sync -1;
$end:"""
    with pytest.raises(RuntimeError, match=r"lanes wait for others for ever in kernel: bar\.warp"):
        run_kernel(body)


@pytest.mark.parametrize(
    ("first", "second", "low", "high"),
    [(2**32 - 1, 1, 0, 1), (2**32 - 1, 2**32 - 1, 2**32 - 2, 1), (7, 8, 15, 0)],
)
def test_a_carry_goes_on(run_kernel, first, second, low, high):
    body = f"""
    mov.u32 %a, {first};
    mov.u32 %b, {second};
    add.cc.u32 %low, %a, %b;
    addc.u32 %high, 0, 0;
    mov.b64 %sum, {{%low, %high}};
    st.global.u64 [%own], %sum;"""
    assert run_kernel(body) == [high << 32 | low] * WARP


def test_a_borrow_goes_on_and_is_no_carry(run_kernel):
    body = """
    sub.cc.u32 %low, 3, %thread;
    subc.u32 %high, 1, 0;
    addc.u32 %high, %high, 10;
    mov.b64 %difference, {%low, %high};
    st.global.u64 [%own], %difference;"""
    assert run_kernel(body) == [
        (10 if lane > 3 else 12) << 32 | (3 - lane) % 2**32 for lane in range(WARP)
    ]


def test_reductions_know_signs(run_kernel):
    body = """
    sub.s32 %signed, %thread, 5;
    redux.sync.min.s32 %least, %signed, -1;
    redux.sync.max.u32 %most, %signed, -1;
    redux.sync.add.s32 %sum, %thread, -1;
    sub.s32 %difference, %least, %most;
    cvt.u64.u32 %a, %difference;
    cvt.u64.u32 %b, %sum;
    bfi.b64 %both, %b, %a, 32, 32;
    st.global.u64 [%own], %both;"""
    # Of -5 to 26; unsigned, -1 is the most.
    assert run_kernel(body) == [sum(range(WARP)) << 32 | (-5 - -1) % 2**32] * WARP


def test_shuffles_exchange(run_kernel):
    body = """
    shfl.sync.bfly.b32 %a|%p, %thread, 3, 31, -1;
    shfl.sync.idx.b32 %b|%p, %thread, 7, 31, -1;
    mul.wide.u32 %wide, %a, 100;
    cvt.u64.u32 %c, %b;
    add.s64 %wide, %wide, %c;
    st.global.u64 [%own], %wide;"""
    assert run_kernel(body) == [100 * (lane ^ 3) + 7 for lane in range(WARP)]


def test_warps_share_memory_and_barriers(run_kernel):
    body = """
    mov.u32 %address, counter;
    setp.eq.s32 %first, %thread, 0;
    @%first st.shared.u32 [%address], 0;
    bar.sync 0;
    atom.shared.add.u32 %before, [%address], 2;
    bar.sync 0;
    ld.shared.u32 %all, [%address];
    cvt.u64.u32 %wide, %all;
    st.global.u64 [%own], %wide;"""
    assert run_kernel(body, warps=3, words=3 * WARP) == [2 * 3 * WARP] * (3 * WARP)


def test_some_warps_wait_for_each_other_alone(run_kernel):
    """The last two of three add; the first one does not wait for them."""
    body = """
    mov.u32 %address, counter;
    setp.eq.s32 %first, %thread, 0;
    @%first st.shared.u32 [%address], 0;
    bar.sync 0;
    mov.u32 %all, 1;
    setp.lt.s32 %first, %thread, 32;
    @%first bra STORE;
    atom.shared.add.u32 %before, [%address], 2;
    bar.sync 1, 64;
    ld.shared.u32 %all, [%address];
STORE:
    cvt.u64.u32 %wide, %all;
    st.global.u64 [%own], %wide;"""
    expected = [1] * WARP + [2 * 2 * WARP] * (2 * WARP)
    assert run_kernel(body, warps=3, words=3 * WARP) == expected


@pytest.mark.parametrize("line", ["sin.approx.f32 %f1, %f2;", "add.rn.f32 %f1, %f2, %f3;"])
def test_an_unknown_instruction_is_named(run_kernel, line):
    with pytest.raises(RuntimeError, match="unknown instruction: ") as told:
        run_kernel(line)
    assert line.removesuffix(";") in str(told.value)
    assert len(str(told.value).splitlines()) == 1


def test_percentiles_and_a_profile_are_written(built, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(planner_cycles, "build", lambda _: built)
    monkeypatch.setattr(planner_cycles, "SMOOTH_SEEDS", 1)
    file = tmp_path / "estimate.json"
    command = ["planner_cycles.py", "--cases", "EP8_E64_S2", "--profile", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", command)
    planner_cycles.main()
    table = json.loads(file.read_text())
    assert table.keys() == {"EP8_E64_S2", "EP8_E64_S2 smooth"}
    for row in table.values():
        assert list(row) == ["p50_us", "p95_us", "max_us"]
        assert 0 < row["p50_us"] <= row["p95_us"] <= row["max_us"]
    said = capsys.readouterr().out
    assert re.search(r"(?m)^ +[0-9.]+  \w+::\w+$", said), "functions are named"
    assert "solve_quota.cu:" in said, "and lines"
