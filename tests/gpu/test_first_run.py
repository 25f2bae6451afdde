"""The programs of a first run on GPUs, as far as a machine without one can run them."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch

from megatron_ext.cpu_platform import enable_cpu_platform
from megatron_ext.trainer.compose import load_config
from megatron_ext.trainer.ranks.launch import launch_ranks
from tests.gpu.first_run import __main__ as first_run
from tests.gpu.first_run import (
    abort,
    beside,
    failing_rank,
    links,
    litmus,
    mps,
    parity,
    planner_profile,
    recipe,
    stages,
)
from tests.gpu.first_run import parts as parts_module
from tests.gpu.first_run.environment import (
    QUEUES,
    ROOT,
    launcher_environment,
    queues,
)
from tests.gpu.first_run.parts import BETWEEN_GPUS, JSON_FILE, KERNELS, SOON, Part, parts
from tests.ranks import run_ranks
from tests.trainer import dataset

on_a_cpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the part itself runs on a machine with GPUs"
)
SCRIPT = ROOT / "tests" / "gpu" / "first_run.sh"


def python(name: str, code: str, **given: Any) -> Part:
    return Part(
        name, "a test", (sys.executable, "-c", code, JSON_FILE), **({"limit_s": 60} | given)
    )


WRITES = (
    "import json, sys; json.dump({'rows': [{'ms': 1.23456, 'what': 'a'}]}, open(sys.argv[1], 'w'))"
)


def test_it_goes_on_after_what_fails(tmp_path: Path) -> None:
    chosen = [
        python("fails", "print('so it is'); raise SystemExit(3)"),
        python("hangs", "import time; time.sleep(60)", limit_s=1),
        python("is_too_large", "", gpus=2),
        python("says_nonsense", "import sys; open(sys.argv[1], 'w').write('7')"),
        python("measures", WRITES),
    ]
    outcomes = list(first_run.run_all(chosen, 1, tmp_path))
    assert [(one.name, one.status, one.why) for one in outcomes] == [
        ("fails", "failed", "status 3"),
        ("hangs", "took too long", "1 s"),
        ("is_too_large", "left out", "needs 2 GPUs"),
        ("says_nonsense", "failed", "says_nonsense.json: has no list of rows"),
        ("measures", "passed", ""),
    ]
    assert outcomes[0].output == ["so it is"]
    first_run.write_results(outcomes, 1, tmp_path)
    written = json.loads((tmp_path / "first_run.json").read_text())
    assert written["gpus"] == 1
    assert written["parts"][-1]["rows"] == [{"ms": 1.23456, "what": "a"}]
    text = (tmp_path / "first_run.md").read_text()
    assert "took too long 1 s" in text
    assert "so it is" in text
    assert "1.235" in text


def test_it_ends_in_time_and_goes_on_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_run, "LEAST_S", 0.5)
    made = [
        python("measures", WRITES),
        python("fails", "raise SystemExit(1)"),
        python("is_slow", "import time; time.sleep(8)"),
        python("comes_last", ""),
    ]
    monkeypatch.setattr(first_run, "parts", lambda gpus: made)
    asked = ["--gpus", "1", "--out", str(tmp_path), "--go-on"]

    def statuses() -> dict[str, str]:
        results = json.loads((tmp_path / "first_run.json").read_text())
        return {one["name"]: one["status"] for one in results["parts"]}

    assert first_run.main([*asked, "--minutes", "0.05"]) == 1
    assert statuses() == {
        "measures": "passed",
        "fails": "failed",
        "is_slow": "left out",
        "comes_last": "left out",
    }
    made[:3] = [
        python("measures", "raise SystemExit(1)"),
        python("fails", ""),
        python("is_slow", ""),
    ]
    assert first_run.main(asked) == 0
    assert {*statuses().values()} == {"passed"}
    assert json.loads((tmp_path / "first_run.json").read_text())["parts"][0]["rows"], "kept"


def test_what_takes_all_the_time_comes_last_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_run, "LEAST_S", 0.5)
    made = [
        python("hangs", "import time; time.sleep(60)"),
        python("fails", "raise SystemExit(1)"),
        python("measures", WRITES),
        python("is_slow", "import time; time.sleep(4)"),
    ]
    monkeypatch.setattr(first_run, "parts", lambda gpus: made)
    asked = ["--gpus", "1", "--out", str(tmp_path), "--go-on"]
    first_run.main([*asked, "--minutes", "0.02"])  # cut
    first_run.main([*asked, "--minutes", "0.05"])
    found = {one.name: one for one in first_run.outcomes_of(tmp_path)}
    assert (found["measures"].status, found["fails"].why) == ("passed", "status 1")
    assert found["is_slow"].why == "no time was left"
    assert found["hangs"].seconds > 0, "what it did is kept"
    first_run.main([*asked, "--minutes", "0.02"])
    assert next(one.name for one in first_run.outcomes_of(tmp_path)) == "measures"
    assert first_run.main([*asked, "--skip", "hangs", "is_slow"]) == 1


def test_what_a_part_leaves_behind_is_ended(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    code = (
        "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', "
        f"'import time; time.sleep(60)']); open({str(file)!r}, 'w').write(str(child.pid))"
    )
    assert first_run.run_part(python("leaves", code), tmp_path).status == "passed"
    with suppress(psutil.NoSuchProcess):
        left = psutil.Process(int(file.read_text()))
        deadline = time.monotonic() + 30
        while left.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_gpus_that_are_hidden_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\nprintf 'GPU %s: H100\\n' 0 1 2 3\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert first_run.num_gpus() == 4
    for visible, count in (("0,1", 2), ("", 0), ("GPU-a,GPU-b,GPU-c,GPU-d,GPU-e", 4)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert first_run.num_gpus() == count


def test_nccl_says_why_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_DEBUG", raising=False)
    asks = python("asks", "import os; print(os.environ['NCCL_DEBUG'])")
    assert first_run.run_part(asks, tmp_path).output == ["WARN"]
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    assert first_run.run_part(asks, tmp_path).output == ["INFO"]


def test_results_of_an_earlier_run_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "silent.json").write_text('{"rows": [{"ms": 1}]}')
    assert first_run.run_part(python("silent", ""), tmp_path).rows == []


@pytest.mark.parametrize("gpus", [0, 1, 2, 8])
def test_every_command_of_every_part_is_there(gpus: int) -> None:
    names = [part.name for part in parts(gpus)]
    assert len(set(names)) == len(names)
    for part in parts(gpus):
        for word in part.command_for(Path("x.json")):
            if word.startswith("tests.gpu"):
                assert (ROOT / f"{word.replace('.', '/')}.py").is_file()
            elif word.startswith("tests/"):
                assert (ROOT / word).exists(), word


@pytest.mark.parametrize(("capability", "connections"), [("9.0", "1"), ("10.0", "32")])
def test_parts_run_as_the_launcher_runs_trainings(
    capability: str, connections: str, tmp_path: Path
) -> None:
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho {capability}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    set_by_launcher = launcher_environment(f"{tmp_path}:{os.environ['PATH']}")
    assert set_by_launcher == {"CUDA_DEVICE_MAX_CONNECTIONS": connections, "OMP_NUM_THREADS": "4"}
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 1\n")
    assert launcher_environment(f"{tmp_path}:{os.environ['PATH']}") == {}
    tried = [queues(count)["CUDA_DEVICE_MAX_CONNECTIONS"] for count in QUEUES]
    assert tried == ["1", "8", "32"]
    one, eight = ({part.name for part in parts(gpus) if part.gpus <= gpus} for gpus in (1, 8))
    assert {"parity_ep8", "recipe", "beside_nccl_1_queues", "failing_rank", "abort"} <= eight - one
    assert {"litmus", "planner", "tests_planner", "tests_transport", "transport"} <= one
    assert "launches" in eight - one, "a layer is balanced over two GPUs or more"


def parts_by_name(gpus: int) -> dict[str, Part]:
    return {part.name: part for part in parts(gpus)}


@pytest.mark.parametrize(("gpus", "most"), [(2, 2), (8, 8)])
def test_several_gpus_begin_with_what_only_they_show(gpus: int, most: int) -> None:
    names = [part.name for part in parts(gpus) if not part.left_out(gpus) or part.lacks]
    expected = [name.format(most=most) for name in BETWEEN_GPUS]
    there = [name for name in expected if name in names]
    assert names[: len(there)] == there
    assert {name for name in expected if name not in names} <= {
        *("recipe", "parity_ep2_pp2", "parity_ep2_pp2_dp2")
    }
    assert names.index("processes") > names.index("launches")
    before = [part for part in parts(8)[:6] if part.name != "recipe"]
    assert sum(part.limit_s for part in before) < 40 * 60, "the recipe begins within the hour"


def test_no_wait_for_a_rank_is_longer_than_its_part() -> None:
    """Else a run that stands still ends without a word about who waits for whom."""
    for part in (*parts(1), *parts(8)):
        program = part.command_for(Path("x.json"))[2].rpartition(".")[2]
        if program in ("parity", "failing_rank", "abort", "recipe"):
            assert float(SOON.removeprefix("timeout_s=")) < part.limit_s - 60, part.name
            assert {SOON, KERNELS} <= {*part.command}, part.name
        elif program in ("beside", "links"):
            limit = {"beside": beside, "links": links}[program].LIMIT
            assert limit.total_seconds() < part.limit_s - 60, part.name


@pytest.mark.parametrize("gpus", [1, 8])
def test_parts_fit_a_machine_that_is_lent(gpus: int) -> None:
    assert all(part.limit_s <= 600 for part in parts(gpus) if part.gpus == 1)
    names = [part.name for part in parts(gpus)]
    assert names[:3] == ["doctor", "tests_planner", "tests_transport"]
    assert names[-1].startswith("sanitizers")


def test_ranks_that_are_streams_have_a_queue_each() -> None:
    """One queue would hold up a rank's launch behind another rank's kernel, which waits for it."""
    words = ("tests/gpu/test_transport.py", "tests/perf/transport.py")
    of_streams = [part for part in parts(1) if {*words} & {*part.command}]
    of_streams = [part for part in of_streams if part.name != "processes"]
    assert len(of_streams) == 3
    assert {part.environment["CUDA_DEVICE_MAX_CONNECTIONS"] for part in of_streams} == {"32"}


def test_ranks_share_a_gpu_where_there_is_one_only() -> None:
    shared = [part for part in parts(1) if part.name.startswith("one_gpu")]
    names = [part.name for part in shared]
    for asked in ("parity_ep2", "parity_ep4", "failing_rank", "abort", "beside", "te_parity_ep2"):
        assert f"one_gpu_{asked}" in names
    assert all(part.gpus == 1 for part in shared)
    assert {part.name for part in parts(1) if part.shares_gpu} == {*names, "processes"}
    for gpus in (2, 8):
        assert not any(part.name.startswith("one_gpu") for part in parts(gpus))
        assert {part.name for part in parts(gpus) if part.shares_gpu} == {"processes"}
    for part in shared:
        if "parity" in part.name or "failing" in part.name:
            assert "balance.transport=cuda" in part.command
        if "parity" in part.name:
            settings = part.command[part.command.index("--json") + 2 :]
            assert "model.experts=grouped_mm" in settings
            config = load_config([*settings, "balance=quota"], config_name="quickstart")
            assert config.run_dir == f"runs/first_run/{part.name}/quota"


def test_parts_need_what_they_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformer Engine and ncu: left out with a reason, and no failure."""
    monkeypatch.setattr(parts_module.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(parts_module.shutil, "which", lambda name: None)
    without = {part.name: part for gpus in (1, 8) for part in parts(gpus)}
    of_te = ["one_gpu_te_parity_ep2", "te_parity_ep2", "te_parity_ep8"]
    chosen = [without[name] for name in [*of_te, "planner_profile"]]
    outcomes = list(first_run.run_all(chosen, 8, tmp_path))
    assert {outcome.status for outcome in outcomes} == {"left out"}
    assert all("Transformer Engine is not installed" in outcome.why for outcome in outcomes[:3])
    assert outcomes[3].why == "there is no ncu in PATH or below CUDA_HOME"
    monkeypatch.setattr(parts_module.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(parts_module.shutil, "which", lambda name: name)
    assert not any(part.lacks for gpus in (1, 8) for part in parts(gpus))
    assert sorted(part.gpus for part in parts(8) if part.name in of_te) == [2, 8]


ENDED = """
import runpy, sys
from tests.gpu.first_run import parts
from tests.gpu.first_run.parts import Part

code = f"import os, time; print(os.getpid(), file=open({PID!r}, 'w'), flush=True); time.sleep(60)"
parts.parts = lambda gpus: [Part("hangs", "a test", (sys.executable, "-c", code), 60)]
sys.argv = ["first_run", "--gpus", "1", "--out", OUT]
runpy.run_module("tests.gpu.first_run", run_name="__main__")
"""


def test_what_runs_is_ended_with_the_program(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    code = f"PID, OUT = {str(file)!r}, {str(tmp_path)!r}\n{ENDED}"
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) as program:
        for _ in range(600):
            if file.is_file() and file.read_text():
                break
            time.sleep(0.1)
        program.terminate()
        assert program.wait(30) == 128 + signal.SIGTERM
    assert not psutil.pid_exists(int(file.read_text()))


MPS = """#!/bin/sh
pid=$CUDA_MPS_PIPE_DIRECTORY/nvidia-cuda-mps-control.pid
if [ "$1" = -d ]; then
    sleep 60 &
    echo $! > $pid
elif [ "$(cat)" = get_server_list ]; then
    cat $pid
else
    kill $(cat $pid)
fi
"""
SAYS = "import os, sys; print(os.environ.get('CUDA_MPS_PIPE_DIRECTORY')); sys.exit(0)"


def mps_here(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str, client: str) -> None:
    program = folder / mps.CONTROL
    program.write_text(text)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    monkeypatch.setattr(mps, "CLIENT", client)


def test_parts_that_share_a_gpu_use_mps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mps_here(tmp_path, monkeypatch, MPS, "")
    kept = []
    end = mps._end

    def note(environment: Any, folder: Path) -> None:
        kept.append(int((folder / f"{mps.CONTROL}.pid").read_text()))
        end(environment, folder)

    monkeypatch.setattr(mps, "_end", note)
    made = [python(name, SAYS, shares_gpu=name != "alone") for name in ("one", "alone", "other")]
    one, alone, other = (each.output for each in first_run.run_all(made, 1, tmp_path / "out"))
    assert one == other != ["None"]
    assert alone == ["None"]
    assert capsys.readouterr().out == "one: with MPS\nother: with MPS\n"
    (pid,) = kept
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    assert not Path(one[0]).exists()


@pytest.mark.parametrize(
    ("text", "client", "why"),
    [
        ("#!/bin/sh\necho no; exit 3", "", f"{mps.CONTROL} ended with status 3 no"),
        (MPS, "raise SystemExit(7)", r"python\S* ended with status 7"),
        (MPS.replace("    cat $pid", "    true"), "", "the first processes did not use it"),
    ],
)
def test_parts_run_in_turns_where_mps_does_not(
    text: str, client: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mps_here(tmp_path, monkeypatch, text, client)
    with mps.service() as (environment, line):
        assert environment == {}
        assert re.fullmatch(f"in turns, without MPS: {why}", line)
    monkeypatch.setattr(mps, "CONTROL", "no-such-program")
    with mps.service() as (environment, line):
        assert (environment, line) == ({}, "in turns, without MPS: there is no no-such-program")


CLIENTS_DRIVER = """
import os, tempfile
from types import SimpleNamespace
from megatron_ext.transport import gpu_driver

class Driver:
    def share(self, device, token):
        file = tempfile.TemporaryFile()
        file.write(token)
        file.flush()
        handle = file.fileno() if WITH_FILES else token
        return SimpleNamespace(handle=handle, num_bytes=4, file=file)

    def read(self, device, handle, num_bytes, length):
        return os.pread(handle, length, 0) if WITH_FILES else handle[:length]

gpu_driver.Driver = Driver
"""


@pytest.mark.parametrize(("with_files", "token", "status"), [(1, "", 0), (0, "x", 1)])
def test_two_processes_try_mps(with_files: int, token: str, status: int) -> None:
    client = mps.CLIENT.replace('(0, b"page")', f'(0, b"{token}page")')
    code = CLIENTS_DRIVER.replace("WITH_FILES", str(with_files)) + client
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    assert ("it read b'xpag'" in done.stderr) == bool(status)


def test_failures_are_said_before_a_run_is_ended(tmp_path: Path) -> None:
    test = "import os\ndef test_good(): pass\ndef test_bad(): assert 7 == 8\n"
    (tmp_path / "test_three.py").write_text(test + "def test_ended(): os._exit(9)\n")
    command = list(parts_module._pytest("transport", "test"))
    command[-1] = str(tmp_path / "test_three.py")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 9
    assert "test_good PASSED in 0.0 s" in done.stdout
    assert "assert 7 == 8" in done.stdout


NCU = """#!/bin/sh
if [ "$1" = --import ]; then
    cat <<'END'
"ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value"
"0","solve_quota_kernel","GPU Speed Of Light Throughput","Duration","us","50.1"
"0","solve_quota_kernel","Rules","","",""
END
else
    while [ "$1" != --export ]; do shift; done
    touch "$2"
fi
"""


def test_a_profile_has_a_row_for_each_metric(tmp_path: Path) -> None:
    program, report = tmp_path / "ncu", tmp_path / "x.json.ncu-rep"
    program.write_text(NCU)
    program.chmod(0o755)
    rows = planner_profile.profile(str(program), report)
    assert rows == [{"what": "Duration", "value": "50.1", "unit": "us"}]
    assert report.is_file()


def test_tests_are_required_for_the_gpus_that_are_there() -> None:
    for gpus in (1, 2, 8):
        required = [
            part.environment.get("MEGATRON_EXT_REQUIRE_GPU")
            for part in parts(gpus)
            if part.name.startswith("tests_")
        ]
        assert required == [str(gpus)] * 2


@on_a_cpu
@pytest.mark.parametrize(("said", "skipped"), [("0", 2), ("1", 1), ("2", 0)])
def test_required_gpus_are_not_skipped(said: str, skipped: int, tmp_path: Path) -> None:
    test = "import pytest\n@pytest.mark.gpu\ndef test_one(): 1 / 0\n"
    test += "@pytest.mark.gpu(n=2)\ndef test_two(): 1 / 0\n"
    (tmp_path / "test_gpu.py").write_text(test)
    command = ["-m", "pytest", "-q", "-p", "tests.conftest", "-c", str(ROOT / "pyproject.toml")]
    done = subprocess.run(
        [sys.executable, *command, "-p", "no:cacheprovider", str(tmp_path / "test_gpu.py")],
        env={**os.environ, "MEGATRON_EXT_REQUIRE_GPU": said},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert (f"{skipped} skipped" in done.stdout) == (skipped > 0), done.stdout
    assert (f"{2 - skipped} failed" in done.stdout) == (skipped < 2), done.stdout


class Ordered:
    """A stream that notes what it waits for."""

    def __init__(self, name: str, notes: list[str]) -> None:
        self.name, self.notes = name, notes

    def wait_stream(self, other: Ordered) -> None:
        self.notes.append(f"{self.name} waits for {other.name}")


def test_all_ranks_begin_before_one_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.perf import transport

    notes: list[str] = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Ordered("now", notes))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    streams = [Ordered(f"stream {rank}", notes) for rank in range(2)]
    transport.on_all(streams, ["rank 0", "rank 1"], lambda rank: notes.append(f"{rank} begins"))
    assert notes == [
        *("stream 0 waits for now", "stream 1 waits for now", "rank 0 begins", "rank 1 begins"),
        *("now waits for stream 0", "now waits for stream 1"),
    ]


class Moves:
    """Stands for a transport, and for what makes one."""

    device = torch.device("cpu")

    def __init__(self, num_ranks: int) -> None:
        self.streams = [None] * num_ranks

    def transport(self, rank: int, **options: Any) -> Moves:
        self.push_blocks = options["push_blocks"]
        return self

    def warm(self) -> None:
        pass

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: Any) -> torch.Tensor:
        return torch.zeros(1, device=device).expand(shape)

    def push(self, *given: Any) -> Moves:
        BLOCKS_USED.append(self.push_blocks)
        return self

    pull_add = push

    def wait(self) -> None:
        pass


BLOCKS_USED: list[int] = []


def test_blocks_of_a_push_are_swept(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.perf import transport

    def time_once(calls: dict[str, Any], rounds: int) -> dict[str, float]:
        calls[next(iter(calls))]()
        swept.append((next(iter(calls)), BLOCKS_USED[-1]))
        return dict.fromkeys(calls, 1.0)

    swept: list[tuple[str, int]] = []
    monkeypatch.setattr(transport, "MIB", 1024)
    monkeypatch.setattr("tests.gpu.virtual_ranks.VirtualRanks", Moves)
    monkeypatch.setattr(transport, "_time_gpu", time_once)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: mock.Mock(multi_processor_count=132)
    )
    monkeypatch.setattr(
        transport, "on_all", lambda streams, setups, call: [call(setup) for setup in setups]
    )
    rows = transport.measure_gpu(1)
    found = [row for row in rows if row["what"].endswith("blocks")]
    assert [row["what"] for row in found] == [f"push, {n} blocks" for n in (8, 16, 32, 64, 132)]
    assert {row["compared with"] for row in found} == {"device copy"}
    assert ("push", 8) in swept
    assert [blocks for _, blocks in swept[2:7]] == [8, 16, 32, 64, 132]


BROUGHT = r"""
import importlib, importlib.abc, re, sys
from importlib.metadata import packages_distributions

lines = open("tests/gpu/first_run/packages.txt").read().splitlines()
listed = {re.match(r"[\w.-]+", line)[0] for line in lines if line and line[0] != "#"}
# What is there already, and what these need.
listed |= {"torch", "numpy", "pytest", "pluggy", "iniconfig", "setuptools", "megatron-ext"}
listed |= {"typing_extensions", "sympy", "mpmath", "networkx", "jinja2", "markupsafe", "fsspec"}
listed |= {"filelock", "tqdm", "triton", "cuda-bindings", "cuda-pathfinder", "packaging"}
plain = lambda name: name.lower().replace("_", "-")
listed = {plain(name) for name in listed}
owners = packages_distributions()

class Others(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        of_name = owners.get(name.partition(".")[0], [])
        if of_name and not {plain(each) for each in of_name} & listed:
            raise ModuleNotFoundError(f"{name} is not brought", name=name)

sys.meta_path.insert(0, Others())
sys.argv[1:] = []
for name in MODULES:
    importlib.import_module(name)
from megatron_ext.trainer.ranks.launch import launch_ranks
from megatron_ext.cpu_platform import enable_cpu_platform
from megatron_ext.trainer.compose import load_config
load_config(["steps=1"], config_name="quickstart")
"""


def test_the_packages_to_bring_are_all_that_parts_need() -> None:
    modules = [
        "pytest_timeout",
        "tests.conftest",
        "tests.gpu.test_planner",
        "tests.gpu.test_transport",
    ]
    for part in parts(8):
        words = [word for word in part.command if word.startswith(("tests.", "tests/perf"))]
        modules += [word.removesuffix(".py").replace("/", ".") for word in words]
    code = BROUGHT.replace("MODULES", repr(sorted({*modules, "tests.gpu.first_run.__main__"})))
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_it_says_what_it_would_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert first_run.main(["--dry-run", "--gpus", "2"]) == 0
    said = capsys.readouterr().out
    assert "needs 8 GPUs" in said
    assert "litmus" in said
    assert "At most" in said
    assert first_run.main(["--gpus", "0", "--only", "litmus"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("There is no GPU here.")
    assert "transport" not in said
    assert first_run.main(["--only", "litmuss"]) == 2
    assert "there is no part litmuss; parts: doctor, " in capsys.readouterr().err


def test_only_the_parts_asked_for_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [python("measures", WRITES), python("fails", "raise SystemExit(1)")]
    monkeypatch.setattr(first_run, "parts", lambda gpus: made)
    asked = ["--gpus", "1", "--out", str(tmp_path)]
    assert first_run.main([*asked, "--skip", "fails"]) == 0
    assert first_run.main(asked) == 1


def test_the_script_passes_its_arguments_on() -> None:
    text = SCRIPT.read_text()
    assert 'exec "$python" -m tests.gpu.first_run "$@"' in text
    assert subprocess.run(["bash", "-n", str(SCRIPT)]).returncode == 0


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("architecture", ["sm_90", "sm_100"])
def test_the_litmus_compiles(architecture: str, tmp_path: Path) -> None:
    command = [*litmus.compile_command(architecture), "-o", str(tmp_path / "litmus")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_launches_write_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.perf import launches

    counted = {"quota": {"launches": 7}, "stock": {"launches": 5}}
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(launches, "count_on_gpus", lambda: counted)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    file = tmp_path / "launches.json"
    monkeypatch.setattr(sys, "argv", ["launches", "--json", str(file)])
    launches.main()
    assert first_run._read_rows(file) == [
        {"run": "quota", "launches": 7},
        {"run": "stock", "launches": 5},
    ]


def test_collectives_run_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of one group would run one after the other, and so need fewer multiprocessors."""
    groups = [mock.Mock(**{"size.return_value": 2, "rank.return_value": 0}) for _ in range(2)]
    used = []
    for name in ("all_to_all_single", "reduce_scatter_tensor"):
        monkeypatch.setattr(
            torch.distributed, name, lambda *_, group, **__: used.append(group) or mock.Mock()
        )
    monkeypatch.setattr(beside, "WORDS_A_RANK", 4)
    beside.Collectives(*groups, torch.device("cpu")).start(0)
    assert used == groups


def test_transports_are_measured_side_by_side(tmp_path: Path) -> None:
    file = tmp_path / "links.json"
    launch_ranks(links.move, 1 << 16, 3, file, ("shared_memory", "deepep"), num_ranks=2)
    here, missing = json.loads(file.read_text())["rows"]
    assert here["replicas"] >= here["busiest rank sends"] > 0
    assert here["push GB/s"] * here["push ms"] == pytest.approx(
        here["busiest rank sends"] * (1 << 16) / 1e6
    )
    assert here["pull ms"] > 0
    assert missing.keys() == {"transport", "left out"}


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_the_push_compiles_with_other_stages(tmp_path: Path) -> None:
    for numbers in min(stages.STAGES), max(stages.STAGES):
        assert stages.build(tmp_path, *numbers, "sm_90").is_file()
    with pytest.raises(subprocess.CalledProcessError):
        stages.build(tmp_path, 2, 3, "sm_90")  # more are loaded ahead than there are


def row(variant: str, wrong: int, late: int = 0) -> dict[str, Any]:
    return {"way": "direct", "variant": variant, "wrong rounds": wrong, "late": late}


def test_the_litmus_must_see_what_is_broken() -> None:
    assert litmus.problems([row("RIGHT", 0), row("BROKEN", 3)]) == []
    assert litmus.problems([row("RIGHT", 0), row("READ", 5), row("BROKEN", 0)]) == []
    assert litmus.blind_ways([row("RIGHT", 0), row("BROKEN", 3)]) == []
    assert "the test is blind" in litmus.blind_ways([row("RIGHT", 0), row("BROKEN", 0)])[0]
    assert "before its bytes" in litmus.problems([row("RIGHT", 1), row("BROKEN", 3)])[0]
    assert "did not come" in litmus.problems([row("RIGHT", 0, late=1), row("BROKEN", 3)])[0]


@pytest.mark.parametrize(("gpus", "relay"), [(1, (0, 0, 0)), (2, (0, 0, 1)), (8, (0, 4, 7))])
def test_the_litmus_goes_over_all_gpus(gpus: int, relay: tuple[int, ...]) -> None:
    made = litmus.variants(gpus, rounds=1_000_000)
    assert {each["devices"] for each in made} == {(0, -1, gpus - 1), relay}
    per_way = [each["rounds"] * litmus.PAIRS for each in made if each["way"] == "relay"]
    assert sum(per_way) >= 3 * 0.99e6  # right, read and broken
    assert {each["stores"] for each in made if each["way"] == "plain"} == {"PLAIN"}


def test_one_gpu_that_sees_nothing_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"wrong rounds": 0, "late": 0}
    monkeypatch.setattr(litmus, "run", lambda program, row: found)
    monkeypatch.setattr(litmus.subprocess, "run", lambda *args, **kwargs: None)
    for gpus, status in ((1, False), (2, True)):
        monkeypatch.setattr(sys, "argv", ["litmus", "--gpus", str(gpus)])
        with pytest.raises(SystemExit) as ended:
            litmus.main()
        assert ended.value.code is status


def test_nvcc_is_found_where_the_build_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh")
    nvcc.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.delenv("CUDACXX", raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert litmus.compile_command("sm_90")[0] == str(nvcc)


def test_it_refuses_an_nvcc_of_another_cuda(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\necho Cuda compilation tools, release 13.0, V13.0.88\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDACXX", str(nvcc))
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(first_run, "run_all", lambda *args, **options: pytest.fail("it began"))
    assert first_run.main(["--gpus", "1", "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {nvcc} is of CUDA 13.0 and torch {torch.__version__} of CUDA")
    assert said.count("\n") == 1


def test_losses_may_move_as_far_as_rounding_moves_them() -> None:
    right = {"steps of equal choices": 9, "quota": 5e-7, "rounding": 1e-7}
    assert parity.is_right(right)
    assert not parity.is_right(right | {"quota": 5e-6})
    assert not parity.is_right(right | {"steps of equal choices": 0})


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dataset.build(tmp_path_factory.mktemp("dataset"))


def test_trainings_are_valid_for_as_many_ranks(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    launch = mock.Mock(side_effect=SystemExit)
    for module in (failing_rank, abort, parity):
        monkeypatch.setattr(module, "launch", launch)
    overrides = [f"data.path={data}"]
    for ranks in (2, 4, 8):
        failing_rank.problems(ranks, overrides, tmp_path)
        with pytest.raises(SystemExit):
            abort.run(ranks, overrides, tmp_path)
    for ep, pp, dp in ((2, 1, 1), (4, 1, 1), (8, 1, 1), (2, 2, 1), (2, 2, 2)):
        with pytest.raises(SystemExit):
            parity.measure(ep, pp, 200, overrides, dp=dp)
    asked = [call.kwargs["num_ranks"] for call in launch.call_args_list]
    assert asked == [2, 2, 4, 4, 8, 8, 2, 4, 8, 4, 8]


def small(data: Path, run_dir: Path) -> list[str]:
    """Overrides of the quickstart that make it a matter of seconds."""
    return [
        one for one in dataset.overrides(data, run_dir) if not one.startswith(("run_dir", "steps"))
    ] + ["data.global_batch_size=8"]


@pytest.mark.slow
@on_a_cpu
def test_parity_holds_on_cpu_ranks(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    overrides = [*small(data, tmp_path), f"run_dir={tmp_path}/${{balance.strategy}}"]
    row = parity.measure(2, 1, 12, overrides)
    assert (row["EP"], row["steps"]) == (2, 12)
    assert parity.is_right(row), row


@pytest.mark.slow
@on_a_cpu
def test_a_step_that_is_left_can_be_repeated(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    abort.run(2, [*small(data, tmp_path), "steps=8"], tmp_path)
    out = capfd.readouterr().out
    assert all(f"left in {name}: all" in out for name in abort.LEFT_IN)


@pytest.mark.slow
@on_a_cpu
def test_a_rank_that_fails_changes_no_weight(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    overrides = [*small(data, tmp_path), "steps=8"]
    assert failing_rank.problems(2, overrides, tmp_path) == []
    assert "2 ranks ended" in capsys.readouterr().out


@pytest.mark.slow
@on_a_cpu
def test_replicas_move_beside_collectives(tmp_path: Path) -> None:
    file = tmp_path / "beside.json"
    command = ["-m", "tests.gpu.first_run.beside", "--ranks", "2", "--seconds", "1"]
    subprocess.run(
        [sys.executable, *command, "--json", str(file)], cwd=ROOT, check=True, timeout=120
    )
    (found,) = json.loads(file.read_text())["rows"]
    assert found["ranks"] == 2
    assert found["steps"] >= 10


def steps_of(tokens_per_s: float, steps: int = 30) -> list[dict[str, float]]:
    of_each = {"tokens_per_s": tokens_per_s, "imbalance_before": 1.5, "loss": 2.0, "plan_ms": 3.0}
    return [{"step": step, **of_each} for step in range(1, steps + 1)]


def test_a_recipe_says_how_much_of_ideal_it_gets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained: list[Any] = []
    speeds = {"quota": 97.0, "ideal": 100.0, "none": 80.0}
    written = tmp_path / "recipe.json"
    monkeypatch.setattr(recipe, "build_data", lambda path: None)
    monkeypatch.setattr(recipe, "train", trained.append)
    monkeypatch.setattr(recipe, "what_was_used", lambda config: {"transport": "cuda"})
    monkeypatch.setattr(
        recipe, "read_metrics", lambda folder: steps_of(speeds[folder.name], trained[-1].steps)
    )
    asked = parts_by_name(8)["recipe"].command_for(written)
    monkeypatch.setattr(sys, "argv", asked[asked.index("tests.gpu.first_run.recipe") :])
    recipe.main()
    rows = json.loads(written.read_text())["rows"]
    assert [one["balance"] for one in rows] == ["quota", "ideal", "none"]
    assert [one["of ideal"] for one in rows] == [0.97, 1.0, 0.8]
    assert (rows[0]["transport"], rows[0]["plan_ms"]) == ("cuda", 3.0)
    assert capsys.readouterr().out.splitlines()[-1] == (
        "quota trains 0.970 times as fast as ideal routing (0.970 to 0.970) and 1.212 times as "
        "fast as none, at an imbalance of 1.50"
    )
    assert [one.balance.strategy for one in trained] == ["quota", "ideal", "none"]
    assert not any(one.problems() for one in trained)
    assert {one.balance.transport for one in trained} == {"cuda"}
    assert all(one.overwrite for one in trained), "a second try of the part would be refused"


def test_a_recipe_that_is_cut_keeps_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = tmp_path / "recipe.json"

    def train(config: Any) -> None:
        if config.balance.strategy == "none":
            raise SystemExit(1)

    monkeypatch.setattr(recipe, "build_data", lambda path: None)
    monkeypatch.setattr(recipe, "train", train)
    monkeypatch.setattr(recipe, "what_was_used", lambda config: {})
    monkeypatch.setattr(recipe, "read_metrics", lambda folder: steps_of(100.0))
    monkeypatch.setattr(sys, "argv", ["recipe", "--json", str(written)])
    with pytest.raises(SystemExit):
        recipe.main()
    rows = json.loads(written.read_text())["rows"]
    assert [(one["balance"], one["of ideal"]) for one in rows] == [("quota", 1.0), ("ideal", 1.0)]


def most_bytes(rank: int, configs: list[Any]) -> list[int]:
    """Return for each training how much its busiest rank would hold, at an imbalance of 1.5."""
    enable_cpu_platform()
    from megatron_ext.trainer.model.dry_run import dry_run

    torch.distributed.destroy_process_group()
    found = []
    for config in configs:
        (stage,) = dry_run(config, num_ranks=8, vocab_size=257, imbalances=(1.5,)).stages
        found.append(stage.static + max(stage.activations.values()))
    with tempfile.TemporaryDirectory() as folder:  # which a kept rank leaves
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=0, world_size=1
        )
    return found


@on_a_cpu
def test_a_recipe_fits_without_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's local attention keeps its scores, of which the recipe has too many."""
    monkeypatch.setattr(recipe, "lacks_te", lambda: "it is not here")
    local = ["model.transformer_impl=local", "data.path=runs/data"]
    trained = recipe.config_of(recipe.RECIPE, "none", 30, local)
    as_it_stands = load_config(["balance=none", *local], config_name=recipe.RECIPE)
    (smaller, larger) = run_ranks(most_bytes, 1, [trained, as_it_stands])[0]
    assert smaller < 60e9 < 80e9 < larger
    monkeypatch.setattr(recipe, "lacks_te", lambda: "")
    with_engine = recipe.config_of(recipe.RECIPE, "none", 30, [])
    assert with_engine.data.micro_batch_size == as_it_stands.data.micro_batch_size
