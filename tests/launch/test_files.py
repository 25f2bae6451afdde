"""Scripts, the container's steps, the example for Kubernetes, a job's script. Layer 1."""

from __future__ import annotations

import importlib.metadata
import itertools
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tests.cli.command import run
from tests.trainer.dataset import build, overrides

ROOT = Path(__file__).parents[2]
SCRIPTS = [
    *sorted((ROOT / "launch").glob("*.sh")),
    ROOT / "launch/slurm.sbatch",
    ROOT / "tests/run.sh",
    ROOT / ".ci/run",
]


@pytest.mark.parametrize(
    "script",
    [
        *("launch/setup.sh", "launch/quickstart.sh", "tests/run.sh", "tests/chaos.sh"),
        *("tests/te/run.sh", "tests/gpu/first_run.sh"),
    ],
)
def test_a_script_says_what_it_does_and_does_nothing_else(script: str, tmp_path: Path) -> None:
    copy = tmp_path / script
    copy.parent.mkdir(parents=True)
    shutil.copy(ROOT / script, copy)
    done = subprocess.run(
        [copy, "--help"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    head = itertools.takewhile(lambda line: line[:1] == "#", copy.read_text().splitlines()[1:])
    assert done.stdout.splitlines() == [line[2:] for line in head]
    assert len(done.stdout) > 100
    assert not done.stderr


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_finds_nothing() -> None:
    done = subprocess.run(
        ["shellcheck", "--external-sources", *SCRIPTS], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


def test_the_tests_shared_between_versions_are_there() -> None:
    lists = (ROOT / ".ci/run").read_text().partition("\nrun() {")[0].partition("both=")
    shown = (
        f'{lists[1]}{lists[2]}\nprintf "%s\\n" "${{both[@]}}" "${{newer[@]}}"'
        ' "${newer_te[@]}" "${waiting[@]}" "${once[@]#--*=}"'
    )
    done = subprocess.run(["bash", "-uc", shown], capture_output=True, text=True, check=True)
    files = [name.partition("::") for name in done.stdout.split()]
    assert len(files) > 20
    assert [file for file, _, _ in files if not (ROOT / file).exists()] == []
    tests = [(file, test) for file, _, test in files if test]
    assert tests
    for file, test in tests:
        assert f"\ndef {test}(" in (ROOT / file).read_text()


def test_an_image_is_made_as_the_environment_of_the_tests_is() -> None:
    text = (ROOT / "launch" / "Containerfile").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    steps = [line.split(maxsplit=1) for line in lines]
    assert [name for name, _ in steps] == [
        "ARG",
        "FROM",
        "RUN",
        "WORKDIR",
        "COPY",
        "RUN",
        "ENV",
        "CMD",
    ]
    packages, setup = [words for name, words in steps if name == "RUN"]
    assert packages.startswith("apt-get update && apt-get install -y --no-install-recommends ")
    assert f"\n{setup}\n" in (ROOT / "tests" / "run.sh").read_text()
    venv = next(words for name, words in steps if name == "ENV").partition("=")[2].split(":")[0]
    folder = next(words for name, words in steps if name == "WORKDIR")
    assert venv == f"{folder}/.venv/bin"
    assert f"launch={folder}/launch" in (ROOT / "launch" / "slurm.sbatch").read_text()
    assert ".venv*" in (ROOT / ".containerignore").read_text().splitlines()


def test_an_images_steps_are_shell_that_finds_its_files() -> None:
    """Copied, installed and started is what is there; Debian has the packages that it installs."""
    text = (ROOT / "launch" / "Containerfile").read_text()
    for step in re.findall(r"^RUN (.*)$", text, re.M):
        assert subprocess.run(["sh", "-n", "-c", step]).returncode == 0
    (command,) = re.findall(r"^CMD (.*)$", text, re.M)
    assert shutil.which(yaml.safe_load(command)[0], path=str(Path(sys.executable).parent))
    ignored = (ROOT / ".containerignore").read_text().split()
    for each in (
        "pyproject.toml",
        "csrc",
        "megatron_ext",
        "recipes",
        *re.findall(r"launch/\S+", text),
    ):
        assert (ROOT / each).exists(), each
        assert not any(fnmatch(each, pattern) for pattern in ignored), each
    assert os.access(ROOT / "launch" / "setup.sh", os.X_OK)
    if shutil.which("apt-get"):
        packages = re.findall(r"apt-get install -y --no-install-recommends (.*)$", text, re.M)
        tried = ["apt-get", "install", "--simulate", "--no-install-recommends", *packages]
        done = subprocess.run(tried, text=True, capture_output=True)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("python", ["3.11", "3.12"])  # Debian's in the image for CPUs, Ubuntu's.
def test_an_images_packages_are_those_that_are_tested(python: str) -> None:
    """Setting up names no version but the tested ones, one of each, which the package accepts."""
    setup = (ROOT / "launch" / "setup.sh").read_text()
    pips = [line for line in setup.splitlines() if " -m pip " in line]
    assert pips
    assert all("install --constraint launch/constraints.txt" in line for line in pips)
    lines = (ROOT / "launch" / "constraints.txt").read_text().splitlines()
    tested: dict[str, str] = {}
    for line in lines:
        if line and not line.startswith("#"):
            pinned = Requirement(line)
            if pinned.marker is None or pinned.marker.evaluate({"python_version": python}):
                (only,) = pinned.specifier
                assert pinned.name not in tested, line
                tested[pinned.name] = only.version
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (extras,) = re.findall(r"--editable '\.\[(.*)\]'", setup)
    wanted = [project["optional-dependencies"][extra] for extra in extras.split(",")]
    for line in itertools.chain(project["dependencies"], *wanted):
        requirement = Requirement(line)
        assert requirement.specifier.contains(tested[requirement.name], prereleases=True), line
    assert SpecifierSet(project["requires-python"]).contains(python)
    # The CUDA part is built with the base's compiler, for the CUDA of that torch.
    (cuda,) = re.findall(r"/cuda:(\d+\.\d+)\.", (ROOT / "launch" / "Containerfile").read_text())
    assert torch.version.cuda in (None, cuda)


def test_an_images_python_can_have_what_is_tested() -> None:
    """The bases have older patches of Python than a developer may have: Debian 12, Ubuntu 24.04."""
    bases = {"3.11": "3.11.2", "3.12": "3.12.3"}
    base = bases[".".join(platform.python_version_tuple()[:2])]
    lines = (ROOT / "launch" / "constraints.txt").read_text().splitlines()
    pinned = {Requirement(line).name for line in lines if line and not line.startswith("#")}
    needed = {
        found.name: found.metadata["Requires-Python"]
        for found in importlib.metadata.distributions()
        if found.name in pinned and found.metadata["Requires-Python"]
    }
    assert len(needed) > 50
    assert {
        name: versions
        for name, versions in needed.items()
        if not SpecifierSet(versions).contains(base)
    } == {}


def test_the_example_for_kubernetes_sets_what_the_script_reads() -> None:
    service, job = yaml.safe_load_all((ROOT / "launch" / "kubernetes.yaml").read_text())
    machines = job["spec"]["completions"]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    environment = {each["name"]: each.get("value") for each in container["env"]}
    script = (ROOT / container["command"][0]).read_text()
    assert set(environment) == {"NNODES", "MASTER_ADDR", "RDZV_SECRET"}
    assert all(f"${{{name}:" in script for name in environment)
    assert environment["NNODES"] == str(machines) == str(job["spec"]["parallelism"])
    name = job["metadata"]["name"]
    assert environment["MASTER_ADDR"] == f"{name}-0.{service['metadata']['name']}"
    assert service["spec"]["selector"] == {"job-name": name}
    assert service["spec"]["publishNotReadyAddresses"]


@pytest.fixture(scope="module")
def submit(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The words of a job that is right."""
    data = build(tmp_path_factory.mktemp("text"))
    tiny = overrides(data, Path("runs/x"))
    return ["submit", "--config-name", "quickstart", "--cpu-ranks", "2", *tiny]


def script_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    status, script, said = run(capsys, *words, "--dry-run")
    assert status == 0, said
    checked = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
    assert checked.returncode == 0, checked.stderr
    return script


def options_of(script: str) -> dict[str, str]:
    found = re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", script, re.M)
    assert len(dict(found)) == len(found)
    return dict(found)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("partition", "x\ntouch pwned\n#"), ("account", "a\r"), ("time", "\x1b[31m1:00")),
        *(("logs", "a\nb"), ("container", "image\n")),
    ],
)
def test_values_that_would_be_lines_of_their_own(
    option: str,
    value: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    submit: list[str],
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # Without a Slurm that knows its partitions.
    status, script, said = run(capsys, *submit, f"--{option}", value, "--dry-run")
    assert (status, script) == (2, "")
    assert said.endswith("must be without control characters\n")
    assert len(said.splitlines()) == 1


def test_a_script_is_shown_where_slurm_does_not_answer(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    submit: list[str],
) -> None:
    for name in ("sbatch", "sinfo"):
        (tmp_path / name).write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    status, script, _ = run(capsys, *submit, "--partition", "gpu", "--dry-run")
    assert (status, options_of(script)["partition"]) == (0, "gpu")


def test_a_folder_for_logs_that_cannot_be_made_is_named_in_a_line(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    submit: list[str],
) -> None:
    (tmp_path / "sbatch").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    status, _, said = run(capsys, *submit, "--logs", str(tmp_path / "sbatch"))
    assert status == 1
    assert f"error: {tmp_path / 'sbatch'}: File exists" in said.splitlines()[-1]


def test_a_jobs_script(capsys: pytest.CaptureFixture[str], submit: list[str]) -> None:
    """One task a machine, and an array of tasks a rank; words come through the shell as given."""
    submit = [*submit, "checkpoint.every=5"]
    one = script_of(capsys, *submit, "seed=3", "--nodes", "2", "--sbatch=--qos=high", "run_dir=a b")
    expected = {"nodes": "2", "ntasks-per-node": "1", "requeue": "", "qos": "high"}
    assert options_of(one).items() >= expected.items()
    assert "gpus-per-node" not in options_of(one)
    assert f"export VENV={sys.prefix}" in one.splitlines()
    (line,) = re.findall(r"^set -- (.*)$", one, re.M)
    assert shlex.split(line)[-2:] == ["seed=3", "run_dir=a b"]

    words = ["--variants", "none,quota", "--task-per-rank", "--notice", "60"]
    array = script_of(capsys, *submit, *words)
    options = options_of(array)
    assert (options["array"], options["ntasks-per-node"]) == ("0-1", "2")
    assert options["signal"] == "B:USR1@60"
    jobs = re.findall(r"^(\d)\) set -- (.*) ;;$", array, re.M)
    assert [(number, shlex.split(line)[-2:]) for number, line in jobs] == [
        ("0", ["balance=none", "run_dir=runs/x/none"]),
        ("1", ["balance=quota", "run_dir=runs/x/quota"]),
    ]


def test_a_log_is_where_it_is_looked_for_in_a_folder_of_any_name(
    capsys: pytest.CaptureFixture[str], submit: list[str], tmp_path: Path
) -> None:
    """Slurm would put the number of the job in place of `%j`."""
    script = script_of(capsys, *submit, "--logs", str(tmp_path / "50%j"))
    assert options_of(script)["output"] == f"{tmp_path}/50%%j/quickstart-%j.out"


def test_a_job_asks_for_the_gpus_of_a_server(
    capsys: pytest.CaptureFixture[str], submit: list[str]
) -> None:
    submit = [word for word in submit if word not in ("--cpu-ranks", "2")]
    assert options_of(script_of(capsys, *submit))["gpus-per-node"] == "8"
    assert options_of(script_of(capsys, *submit, "+hardware=rack_64"))["gpus-per-node"] == "4"
    script = script_of(capsys, *submit, "+hardware=rack_64", "--gpus-per-node", "h100:2")
    assert options_of(script)["gpus-per-node"] == "h100:2"
    status, _, said = run(capsys, *submit, "--gpus-per-node", "h100:two")
    assert (status, said) == (
        2,
        "megatron-ext submit: error: argument --gpus-per-node: 'two' must be a whole number >= 1\n",
    )


def test_options_of_sbatch_replace_a_jobs_own(
    capsys: pytest.CaptureFixture[str], submit: list[str]
) -> None:
    submit = [word for word in submit if word not in ("--cpu-ranks", "2")]
    given = ["--gres=gpu:8", "--oversubscribe", "--mem=64G", '--comment=a "b" \\']
    options = options_of(script_of(capsys, *submit, *(f"--sbatch={each}" for each in given)))
    assert not {"gpus-per-node", "exclusive"} & set(options)
    assert options["mem"] == "64G"
    assert options["comment"] == r'"a \"b\" \\"'
    for wrong, why in {
        "-s": "must be an option's long form, as --qos=high",
        "--output=a.log": "would hide the log: give --logs",
        "--array=0-3": "would hide the log: give --variants",
    }.items():
        status, _, said = run(capsys, *submit, f"--sbatch={wrong}")
        assert status == 2
        assert said.endswith(f"'{wrong}' {why}\n")


def test_a_job_that_saves_nothing_does_not_queue_again(
    capsys: pytest.CaptureFixture[str], submit: list[str]
) -> None:
    status, script, said = run(capsys, *submit, "--dry-run")
    assert (status, said) == (
        0,
        "megatron-ext submit: checkpoint.every is 0: the job does not queue again, having no "
        "checkpoint to go on from\n",
    )
    assert "no-requeue" in options_of(script)
    assert not {"requeue", "signal"} & set(options_of(script))
    status, _, said = run(capsys, *submit, "--notice", "60")
    assert (status, said) == (
        2,
        "megatron-ext submit: error: --notice (60) needs checkpoint.every > 0, to save then\n",
    )


def test_what_is_wrong_is_said_before_a_job(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    submit: list[str],
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    status, _, said = run(capsys, *submit)
    assert (status, said) == (
        2,
        "megatron-ext submit: error: there is no Slurm here (no sbatch in PATH); --dry-run shows "
        "the job\n",
    )
    status, _, said = run(capsys, *submit, "--variants", "quotaa")
    assert status == 2
    assert len(said.splitlines()) == 1
    assert "did you mean quota?" in said
    # Replicas of so many ranks would leave their NVLink domain, and nothing has said so.
    wide = ["submit", "--config-name", "qwen3_235b_256_gb200_bf16", "--nodes", "32", *submit[5:7]]
    wide += ["model.vocab_size=0", "data.sequence_length=16", "hardware=server_8_h100"]
    status, _, said = run(capsys, *wide)
    (line,) = [line for line in said.splitlines() if "error" in line]
    assert (status, "balance.nvlink_domain=8 keeps replicas inside" in line) == (2, True)


def test_a_job_in_a_container_gives_pyxis_its_flags(
    capsys: pytest.CaptureFixture[str], submit: list[str], tmp_path: Path
) -> None:
    """The job's script runs, among stand-ins for Slurm's commands."""
    image = ["--container", "an image", "--container-mounts", "/data:/data"]
    script = script_of(capsys, *submit, "seed=3", *image)
    assert "export VENV" not in script
    for name, body in {
        "scontrol": "echo 127.0.0.1",
        "srun": f"printf '%s\\n' \"$@\" >{tmp_path}/given",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "first",
        "SLURM_NNODES": "1",
    }
    done = subprocess.run(
        ["bash"], input=script, cwd=tmp_path, env=environment, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    *flags, words = (tmp_path / "given").read_text().partition("bash\n")[::2]
    assert flags == [
        "--export=ALL\n--wait=300\n--container-image=an image\n"
        f"--container-workdir={tmp_path}\n"
        f"--container-mounts={tmp_path}:{tmp_path},/data:/data\n"
    ]
    assert words.splitlines()[0] == "/megatron_ext/launch/train.sh"
    assert words.splitlines()[-1] == "seed=3"
