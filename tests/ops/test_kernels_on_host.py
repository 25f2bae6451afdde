"""The CUDA kernels, run by the host compiler thread by thread, equal the host stages bit by bit.

No GPU is needed: `cuda_on_host/` stands in for CUDA. What it cannot show is speed, and whatever a
GPU does with memory that a single thread does not.
"""

import atexit
import functools
import itertools
import json
import platform
import random
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_ext.transport import Transfer
from megatron_ext.transport.relay import compile_copies

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "csrc"


def with_launches_as_calls(source: str) -> str:
    """Replace `kernel<<<grid, ...>>>(...);`, and memory of a size that the launch says."""
    text, launches = re.subn(
        r"(\w+)<<<(.*?)>>>\((.*?)\);",
        r"cuda_on_host::launch(\2, [=] { \1(\3); });",
        source,
        flags=re.DOTALL,
    )
    assert launches > 0
    text = re.sub(
        r"extern __shared__ (\w+) (\w+)\[\];",
        r"static \1* const \2 = reinterpret_cast<\1*>(cuda_on_host::dynamic_memory);",
        text,
    )
    # As nvcc does.
    return '#include "cuda_runtime_api.h"\n' + text


STAGES = ["assign", "count_load", "share_plan", "solve_quota"]
PEERS = ["gather_rows", "pull_add_peers", "push_peers", "set_aside", "wait_peers", "write_words"]


def test_all_kernels_are_run():
    assert sorted(STAGES + PEERS) == sorted(path.stem for path in (CSRC / "cuda").glob("*.cu"))


def compile_here(source: Path, folder: Path, *more: str | Path) -> Path:
    """Compile `source` for the host, with the headers of the kernels in `folder`."""
    done = folder / f"{source.stem}.o"
    run_compiler(folder, *more, "-c", source, "-o", done)
    return done


def compile_for_kernels(source: Path, folder: Path) -> Path:
    """The same of what begins with the stand-in for CUDA, whose headers are half of the work."""
    return compile_here(source, folder, "-include", first_header())


@functools.cache
def first_header() -> Path:
    """The stand-in for CUDA, compiled, as long as this process lives."""
    header = Path(tempfile.mkdtemp()) / "first.h"
    atexit.register(shutil.rmtree, header.parent)
    header.write_text('#include "cuda_runtime_api.h"\n')
    run_compiler(header.parent, "-x", "c++-header", header, "-o", f"{header}.gch")
    return header


def run_compiler(folder: Path, *words: str | Path) -> None:
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
            *map(str, words),
        ],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert build.returncode == 0, build.stderr


def run(
    objects: list[Path], rounds: int, folder: Path, given: str = ""
) -> subprocess.CompletedProcess[str]:
    program = folder / "program"
    subprocess.run(["g++", *map(str, objects), "-o", str(program)], check=True, timeout=300)
    return subprocess.run(
        [str(program), str(rounds)], input=given, capture_output=True, text=True, timeout=300
    )


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
    return [compile_for_kernels(source, folder) for source in written]


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
    pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc's contexts"),
]


def check_equal(objects: list[Path], rounds: int, folder: Path) -> None:
    result = run(objects, rounds, folder)
    assert (result.returncode, result.stdout) == (0, f"{rounds} rounds\n"), result.stderr


@pytest.fixture(scope="module")
def stages(tmp_path_factory):
    """The compiled kernels of STAGES, and the program that compares them with the host's."""
    folder = tmp_path_factory.mktemp("stages")
    sources = [HERE / "kernels_on_host.cpp", *(CSRC / "cpu").glob("*.cpp")]
    objects = [compile_here(source, folder) for source in sources]
    return [*objects, *compile_kernels(STAGES, folder, {})]


def test_kernels_of_stages_equal_the_host(stages, tmp_path):
    check_equal(stages, 12, tmp_path)


BROKEN_PLANNERS = {
    "steps before all verdicts are there": (
        "            sync_some<kThreadsBeside>();\n            const int chosen",
        "            const int chosen",
    ),
    "steps before a plan is kept": (
        "            sync_some<kThreadsBeside>();\n            goes_on =",
        "            goes_on =",
    ),
    "mains before zeros": (
        "            sync_some<kThreadsBeside>();\n            write_mains",
        "            write_mains",
    ),
}


@pytest.mark.parametrize("broken", BROKEN_PLANNERS.values(), ids=BROKEN_PLANNERS.keys())
def test_a_broken_planner_is_noticed(broken, stages, tmp_path):
    (planner,) = compile_kernels(["solve_quota"], tmp_path, {"solve_quota.cu": broken})
    others = [path for path in stages if path.name != planner.name]
    result = run([planner, *others], 60, tmp_path)
    assert result.returncode == 1, "it was not"
    assert result.stderr


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The compiled kernels of PEERS, and the program that runs them."""
    folder = tmp_path_factory.mktemp("whole")
    kernels = compile_kernels(PEERS, folder, {})
    return [*kernels, compile_for_kernels(HERE / "peers_on_host.cpp", folder)]


def test_replicas_arrive_and_gradients_add_up(whole, tmp_path):
    check_equal(whole, 50, tmp_path)


def test_the_sweep_of_stages_times_a_push_that_arrives(whole, tmp_path):
    """tests/gpu/first_run/stages.cu, which a GPU runs with other stages and blocks."""
    program = tmp_path / "stages"
    sweep = tmp_path / "stages.cpp"
    source = (CSRC.parent / "tests" / "gpu" / "first_run" / "stages.cu").read_text()
    sweep.write_text(with_launches_as_calls(source))
    compiled = [path for path in whole if path.stem != "peers_on_host"]
    objects = [*compiled, compile_for_kernels(sweep, whole[0].parent)]
    subprocess.run(["g++", *map(str, objects), "-o", str(program)], check=True, timeout=300)
    words = [program, 0, 0, 1_000_000, 3, 5]
    told = subprocess.run(map(str, words), check=True, capture_output=True, text=True, timeout=300)
    found = json.loads(told.stdout)
    assert found.keys() == {"GB/s", "of a copy", "right"}
    assert found["right"] is True


BROKEN = {
    "a flag before the writes are complete": {
        "push_peers.cu": ("bulk_wait();", "bulk_wait_read<0>();")
    },
    "a chunk's flags while its last tile is under way": {
        "push_peers.cu": ("bulk_wait<kUnderWay>();", "bulk_wait<kUnderWay + 1>();")
    },
    "a wait before what was begun is complete": {
        "push_peers.cu": ("if (!pipeline.taken.has(n)) complete();", "")
    },
    "a chunk taken before the one in its place is told": {
        "push_peers.cu": ("if (n >= kUnits) pipeline.told.wait(n - kUnits);", "")
    },
    "a chunk taken before the loader knows that the one in its place had no tiles": {
        "push_peers.cu": ("if (n > 0) pipeline.told.arrive(n - 1);", "pipeline.told.arrive(n);")
    },
    "a chunk told before all lanes have read what it is": {
        "push_peers.cu": ("        __syncwarp();  // All lanes have read", "        // read")
    },
    "a chunk moved behind a flag without a fence": {"push_peers.cu": ("fence_bulk();", "")},
    "a stage filled again before it is read": {
        "push_peers.cu": ("bulk_wait_read<kReading>();", "")
    },
    "a stage filled again before its last store": {
        "push_peers.cu": ("bulk_wait_read<kReading>", "bulk_wait_read<kReading + 1>")
    },
    "a chunk's flags without a fence": {"push_peers.cu": ("            fence_system();\n", "")},
    "a chunk's fence before the other lanes have written": {
        "push_peers.cu": (
            "        __syncwarp();  // All lanes have written what the flags speak of.\n"
            "        if (first != nullptr) {\n            fence_system();\n",
            "        fence_system();\n        __syncwarp();\n        if (first != nullptr) {\n",
        )
    },
    "a row's flags without a fence": {
        "gather_rows.cu": ("    if (peer_of(lane) < table.num_ranks) fence_system();\n", "")
    },
    "a flag that is not acquired": {
        "peers.cuh": (
            "    seen = load_acquire(flag);\n    if (seen == generation) return true;",
            "    if (load_relaxed(flag) == generation) return true;",
        )
    },
    "a relay that does not wait": {
        "push_peers.cu": ("        ready = wait_for(", "        ready = true || wait_for(")
    },
    "slots filled before they are free": {"push_peers.cu": ("if (is_new) {", "if (false) {")},
    "a flag before the other lanes have written": {
        "push_peers.cu": (
            "        __syncwarp();  // All lanes have written what the flags",
            "        // flags",
        )
    },
    "a row's flag before the other lanes have stored": {
        "gather_rows.cu": (
            "    __syncwarp();  // All lanes have stored what",
            "    // what",
        )
    },
    "a row read before it is there": {
        "gather_rows.cu": (
            "const bool is_there = wait_for(",
            "const bool is_there = true || wait_for(",
        )
    },
    "the first block counts the generation": {
        "peers.cuh": ("!= gridDim.x - 1) return", "> 0) return")
    },
    "gradients given back before all are read": {
        "pull_add_peers.cu": (
            "        barrier_wait(&shared.done[room], phase);  // All",
            "        // All",
        )
    },
    "a chunk done before all lanes are": {
        "pull_add_peers.cu": ("        __syncwarp();  // All lanes are done.\n", "")
    },
    "a stage loaded again before it is read": {
        "pull_add_peers.cu": (
            "barrier_wait(&shared.read[stage], num_steps / kStages - 1);",
            "",
        )
    },
    "a stage given back before all lanes have read it": {
        "pull_add_peers.cu": (
            "        __syncwarp();  // All lanes have read the stage, so",
            "        //",
        )
    },
    "a chunk told in the place of one that is under way": {
        "pull_add_peers.cu": ("if (num_told >= kUnits) barrier_wait(", "if (false) barrier_wait(")
    },
    "gradients added before they are offered": {
        "pull_add_peers.cu": ("is_new && r <", "false && r <")
    },
    "gradients zeroed before they are read": {
        "pull_add_peers.cu": ("ready = wait_for(self, done", "ready = true || wait_for(self, done")
    },
    "sums taken before they are compiled": {
        "pull_add_peers.cu": (
            "while (load_acquire(&self.state->summed) != generation) pause();",
            ";",
        )
    },
    "a bulk load behind a flag of which lanes only tell each other": {
        "pull_add_peers.cu": (
            "        __syncwarp();\n        unit.bulk_bytes =",
            "        unit.bulk_bytes =",
        )
    },
    "a bulk load behind a flag without a fence": {"pull_add_peers.cu": ("fence_bulk();", "")},
}
"""What only the order of things shows, and what must notice it."""


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_kernel_is_noticed(broken, whole, tmp_path):
    (name,) = broken
    # What all kernels share is wrong in the push alone.
    changed = [Path(name).stem if name.endswith(".cu") else "push_peers"]
    objects = compile_kernels(changed, tmp_path, broken)
    replaced = {path.name for path in objects}
    objects += [path for path in whole if path.name not in replaced]
    # Ends where it notices; what happens seldom takes more rounds.
    result = run(objects, 400, tmp_path)
    assert result.returncode == 1, "it was not"
    assert result.stderr


@dataclass(frozen=True)
class Plan:
    """Which expert each slot of each rank holds, or -1."""

    mains_per_rank: int
    relay_threshold: int
    slots: list[list[int]]
    domain: int
    """Ranks that have experts of each other only."""

    def given(self) -> str:
        """Return the line that copies_on_host.cpp reads."""
        head = [len(self.slots), len(self.slots[0]), self.mains_per_rank, self.relay_threshold]
        return " ".join(map(str, [*head, self.domain, *itertools.chain(*self.slots)]))

    def expected(self) -> list[str]:
        """Return the lines that it must print."""
        transfers = [
            Transfer(expert // self.mains_per_rank, expert % self.mains_per_rank, rank, slot)
            for rank, held in enumerate(self.slots)
            for slot, expert in enumerate(held)
            if expert >= 0
        ]
        copies = compile_copies(transfers, len(self.slots), self.relay_threshold)
        filled_by = {
            place: rank
            for rank, each in enumerate(copies)
            for copy in each
            for place in copy.destinations
        }
        lines = []
        for rank, each in enumerate(copies):
            words = [len(each)]
            for copy in each:
                is_main = copy.relay_slot_idx is None
                words += (-1, -1) if is_main else (copy.home_rank, copy.relay_slot_idx)
                words += (copy.main_idx, len(copy.destinations))
                words += itertools.chain(*copy.destinations)
            for slot in range(len(self.slots[0])):
                words += (filled_by.get((rank, slot), -1), slot)
            lines.append(" ".join(map(str, words)))
        return lines


def random_plan(generator: random.Random, num_ranks: int, num_domains: int = 1) -> Plan:
    """A plan of domains of so many ranks."""
    mains = generator.choice([1, 2, 3, 8])
    num_slots = generator.choice([0, 1, 2, 3, 16])
    num_hot = generator.choice([1, 2, num_ranks])  # homes of most replicas
    slots = []
    for domain, rank in itertools.product(range(num_domains), range(num_ranks)):
        homes = num_hot if generator.random() < 0.9 else num_ranks
        foreign = [e for e in range(homes * mains) if e // mains != rank]
        held = generator.sample(foreign, min(len(foreign), generator.randint(0, num_slots)))
        held = [domain * num_ranks * mains + expert for expert in held]
        held += [-1] * (num_slots - len(held))
        generator.shuffle(held)
        slots.append(held)
    return Plan(mains, generator.choice([0, 1, 4, 4, 1000]), slots, num_ranks)


def plans() -> list[Plan]:
    generator = random.Random(3)
    sizes = [1, 2, 3, 4, 8, 16, 64]
    found = [random_plan(generator, generator.choice(sizes)) for _ in range(50)]
    # One rank sends all its experts to all others, the most there can be.
    everywhere = [[-1] * 3, *[list(range(3)) for _ in range(63)]]
    apart = [random_plan(generator, generator.choice([1, 2, 4, 8]), 3) for _ in range(15)]
    # As many ranks and slots as there may be.
    large = [[-1] * 15 + [0] for _ in range(512)]
    large[0] = list(range(3, 19))
    return [
        *found,
        *apart,
        *(Plan(4, threshold, everywhere, 64) for threshold in (4, 189)),
        Plan(3, 4, large, 512),
    ]


@pytest.fixture(scope="module")
def compiling(tmp_path_factory):
    """The program that prints what is compiled."""
    return compile_compiler(tmp_path_factory.mktemp("compiling"), {})


def compile_compiler(folder: Path, broken: dict[str, tuple[str, str]]) -> list[Path]:
    """Compile the program that prints what is compiled; `broken` as for `compile_kernels`."""
    compile_kernels([], folder, broken)
    return [compile_for_kernels(HERE / "copies_on_host.cpp", folder)]


@functools.cache
def given_and_expected() -> tuple[str, list[str]]:
    """What the program reads, and what it must print."""
    made = plans()
    expected = itertools.chain(*(plan.expected() for plan in made))
    return "\n".join(plan.given() for plan in made), list(expected)


def run_plans(objects: list[Path], folder: Path) -> subprocess.CompletedProcess[str]:
    return run(objects, 0, folder, given_and_expected()[0])


def test_copies_equal_those_of_the_host(compiling, tmp_path):
    result = run_plans(compiling, tmp_path)
    assert result.returncode == 0, result.stderr
    _, expected = given_and_expected()
    assert sum(line.count(" ") for line in expected) > 10000, "there is something to compare"
    assert result.stdout.splitlines() == expected


WRONG_CHOICES = {
    "slots of another domain": ("slots_(slots + first_ * num_slots_)", "slots_(slots)"),
    "destinations in another domain": (
        "return {first_ + place / num_slots_",
        "return {place / num_slots_",
    ),
    "fills from another domain": ("expert < 0 ? -1 : first_ + expert", "expert < 0 ? -1 : expert"),
    "homes of relays in another domain": (
        "{{first_ + expert.home, relay.slot}",
        "{{expert.home, relay.slot}",
    ),
    "homes in another order": ("others > sends ||", "others < sends ||"),
    "a threshold one too low": (
        "is_relayed = sends > threshold_",
        "is_relayed = sends >= threshold_",
    ),
    "busy ranks chosen as relays": ("other < planned ||", "other > planned ||"),
    "direct sends not planned": ("sends <= threshold_ ? sends : 0", "0"),
    "a home's own sends not planned": (".planned[expert.home] += expert.num_relays", ".planned[0]"),
    "relays that pass on not planned": ("scratch_.planned[relay.rank - first_] = level;", ""),
    "relays of one level in another order": (
        "scratch_.place[j] < scratch_.place[i]",
        "scratch_.place[j] > scratch_.place[i]",
    ),
    "slots that wait for the home and not the relay": (
        "if (other.rank == mine) out_.used[other.slot].rank = relay.rank;",
        "",
    ),
    "relays chosen before all have read": (
        "            order_replicas(expert);\n            __syncwarp();",
        "            order_replicas(expert);",
    ),
    "the next expert before all relays have chosen": (
        "            __syncwarp();\n            begin +=",
        "            begin +=",
    ),
    "experts in another order": ("if ((a > b) == rises)", "if (a > b)"),
}


@pytest.mark.parametrize("wrong", WRONG_CHOICES.values(), ids=WRONG_CHOICES.keys())
def test_wrong_choices_are_noticed(wrong, tmp_path):
    objects = compile_compiler(tmp_path, {"compile_copies.cuh": wrong})
    result = run_plans(objects, tmp_path)
    _, expected = given_and_expected()
    assert result.returncode != 0 or result.stdout.splitlines() != expected, "they were not"
