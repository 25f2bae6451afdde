"""The command as a whole: help without torch, exit status, and who gets the words."""

import subprocess
import sys
import types

import pytest

from megatron_ext.cli import doctor, main
from tests.cli.command import run


def test_as_a_process(texts):
    """Help without torch; one line for wrong input."""
    program = (
        "import sys\nfrom megatron_ext.cli import main\n"
        "try: main(['data', 'build', '--help'])\n"
        "except SystemExit as stop: assert stop.code == 0\n"
        "heavy = {'torch', 'numpy', 'megatron', 'rich', 'hydra'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    assert "example:\n  megatron-ext data build" in result.stdout

    result = subprocess.run(
        [sys.executable, "-m", "megatron_ext", "data", "build", "absent", "--out", texts / "out"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr == "megatron-ext data build: error: absent does not exist\n"


@pytest.mark.parametrize(
    "words",
    [
        ["data", "build"],
        ["data", "corpus"],
        ["data", "info"],
        ["checkpoint", "inspect"],
        ["checkpoint", "relayout"],
        ["doctor"],
        ["place", "craft"],
        ["place", "eplb"],
        ["place", "sem_moe"],
        ["plan"],
        ["replay"],
        ["report"],
        ["simulate"],
        ["synth"],
    ],
)
def test_help_has_an_example(capsys, words):
    status, out, _ = run(capsys, *words, "--help")
    assert status == 0
    assert f"example:\n  megatron-ext {' '.join(words)}" in out
    assert "--json" in out


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["data"],
        ["plant"],
        ["replay", "loads.npz"],
        ["data", "build"],
        ["data", "corpus", "--out", "x", "--limit-mb", "0"],
    ],
)
def test_wrong_usage(capsys, words):
    status, out, err = run(capsys, *words)
    assert (status, out) == (2, "")
    assert "usage: megatron-ext" in err


def test_train_gets_every_word(monkeypatch, capsys):
    seen = []
    fake = types.ModuleType("megatron_ext.train")
    fake.main = seen.append
    monkeypatch.setitem(sys.modules, "megatron_ext.train", fake)
    words = ["--config-name", "quickstart", "balance.slots=1", "+megatron.x=[1,2]", "--help"]
    assert main(["train", *words]) == 0
    assert seen == [words]


def test_interrupt(monkeypatch, capsys):
    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "run", interrupted)
    assert run(capsys, "doctor") == (130, "", "")


def test_an_error_of_our_own_keeps_its_traceback(monkeypatch):
    def broken(arguments):
        raise TypeError("a bug")

    monkeypatch.setattr(doctor, "run", broken)
    with pytest.raises(TypeError, match="a bug"):
        main(["doctor"])
