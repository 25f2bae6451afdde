"""`launch/setup.sh` shows its stages, and what failed; a stand-in for Python installs nothing."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

PYTHON = """#!/bin/sh
case "$*" in
    *sys.version_info*) echo 3.11 ;;
    *sys._base_executable*) echo HOME_OF_ALL ;;
    "-m venv"*) mkdir -p "$4/bin" && cp "$0" "$4/bin/python" ;;
    "-m pip"*)
        echo "a page of pip: $*"
        [ "$FAILS" = "" ] || case "$*" in *"$FAILS"*) exit 1 ;; esac ;;
esac
"""


@pytest.fixture
def set_up(tmp_path):
    clone, python = tmp_path / "clone", tmp_path / "python"
    shutil.copytree(ROOT / "launch", clone / "launch")
    for folder in ("csrc", "megatron_ext", "checkpoints_tools"):
        (clone / folder).mkdir()
    (clone / "pyproject.toml").touch()
    python.write_text(PYTHON.replace("HOME_OF_ALL", str(python)))
    python.chmod(0o755)

    def run(fails="", by="python", script="setup.sh"):
        done = subprocess.run(
            [clone / "launch" / script],
            cwd=tmp_path,
            env=os.environ | {"PYTHON": str(tmp_path / by), "VENV": ".venv", "FAILS": fails},
            capture_output=True,
            text=True,
        )
        return done.returncode, done.stdout, done.stderr

    return run


def test_stages_and_no_pages(set_up):
    status, said, errors = set_up()
    assert (status, errors) == (0, "")
    first, *stages, last = said.splitlines()
    assert "minutes" in first
    assert [line.split()[0] for line in stages] == ["1/3", "2/3", "3/3"]
    assert all(line.endswith(" s") for line in stages)
    assert last.endswith("source .venv/bin/activate")
    assert set_up() == (0, "", "")


def test_nothing_is_done_again_from_inside_the_environment(set_up):
    assert set_up()[0] == 0
    assert set_up(by="clone/.venv/bin/python") == (0, "", "")


def test_the_interpreter_of_an_environment_is_the_one_that_made_it():
    told = "import os, sys; print(os.path.realpath(sys._base_executable))"
    assert told in (ROOT / "launch" / "setup.sh").read_text()
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()).parent == Path(sys.base_prefix).resolve() / "bin"


def test_the_quickstart_says_why_it_is_silent_at_first(set_up):
    assert set_up()[0] == 0
    assert set_up(script="quickstart.sh") == (0, "", "loading PyTorch and Megatron ...\n")


def test_an_installed_package_is_not_set_up(set_up, tmp_path):
    (tmp_path / "clone" / "pyproject.toml").unlink()
    for script in ("setup.sh", "quickstart.sh"):
        status, said, errors = set_up(script=script)
        assert (status, said) == (1, "")
        assert errors.startswith("launch/setup.sh: an installed package has its environment; ")
        assert "python -m megatron_ext.trainer.quickstart" in errors


def test_pages_where_a_stage_fails(set_up):
    for fails, stage in (("torch", "2/3"), ("--editable", "3/3")):
        status, said, errors = set_up(fails)
        assert status == 1
        assert said.splitlines()[-1].startswith(stage)
        assert said.endswith("failed\n")
        page, last = errors.splitlines()
        assert page.startswith("a page of pip")
        assert fails in page
        assert last.startswith(f"launch/setup.sh: {stage}")
    assert set_up()[0] == 0  # Nothing said that it was done.


def test_an_active_environment_is_set_up_with_the_same_interpreter(tmp_path):
    """Else the stamp would be another one, and all would be set up again."""
    script = ROOT / "launch" / "find_python.sh"
    base = Path(sys._base_executable).parent
    path = f"{base}:/usr/bin:/bin"

    def found(path):
        words = ["bash", script]
        done = subprocess.run(
            words, env=os.environ | {"PATH": path}, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    outside = found(path)
    subprocess.run([outside, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    assert found(f"{tmp_path}/venv/bin:{path}") == outside
