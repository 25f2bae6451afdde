"""Scripts, the container's steps, the example for Kubernetes, a job's script. Layer 1."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.cli.command import run
from tests.trainer.dataset import build, overrides

ROOT = Path(__file__).parents[2]
SCRIPTS = [
    *sorted((ROOT / "launch").glob("*.sh")),
    ROOT / "launch/slurm.sbatch",
    ROOT / "tests/run.sh",
]


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_finds_nothing() -> None:
    done = subprocess.run(
        ["shellcheck", "--external-sources", *SCRIPTS], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


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


def test_a_jobs_script(capsys: pytest.CaptureFixture[str], submit: list[str]) -> None:
    """One task a machine, and an array of tasks a rank; words come through the shell as given."""
    one = script_of(capsys, *submit, "seed=3", "--nodes", "2", "--sbatch=--qos=high", "run_dir=a b")
    options = re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", one, re.M)
    assert {("nodes", "2"), ("ntasks-per-node", "1"), ("requeue", ""), ("qos", "high")} <= {
        *options
    }
    assert "gpus-per-node" not in dict(options)
    (line,) = re.findall(r"^set -- (.*)$", one, re.M)
    assert shlex.split(line)[-2:] == ["seed=3", "run_dir=a b"]

    words = ["--variants", "none,quota", "--task-per-rank", "--notice", "60"]
    array = script_of(capsys, *submit, *words)
    options = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", array, re.M))
    assert (options["array"], options["ntasks-per-node"]) == ("0-1", "2")
    assert options["signal"] == "B:USR1@60"
    jobs = re.findall(r"^(\d)\) set -- (.*) ;;$", array, re.M)
    assert [(number, shlex.split(line)[-2:]) for number, line in jobs] == [
        ("0", ["balance=none", "run_dir=runs/x/none"]),
        ("1", ["balance=quota", "run_dir=runs/x/quota"]),
    ]


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
