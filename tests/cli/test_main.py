"""The command as a whole: help without torch, exit status, and who gets the words."""

import argparse
import errno
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

import megatron_ext
from megatron_ext import __main__, cli
from megatron_ext.arguments import positive
from megatron_ext.cli import doctor, main, train
from tests.cli.command import run
from tests.trainer.logs.test_run_log import files_of_at_most

ROOT = Path(__file__).parents[2]


def test_as_a_process(texts):
    """Help without torch; one line for wrong input."""
    program = (
        "import sys\nfrom megatron_ext.cli import main\n"
        "for words in [], ['train'], ['data', 'build']:\n"
        "    try: main([*words, '--help'])\n"
        "    except SystemExit as stop: assert stop.code == 0\n"
        "heavy = {'torch', 'numpy', 'megatron', 'rich', 'hydra', 'omegaconf', 'asyncio'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "assert len(sys.modules) < 250, len(sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    assert "example:\n  megatron-ext data build" in result.stdout
    assert "example: megatron-ext train" in result.stdout

    result = subprocess.run(
        [sys.executable, "-m", "megatron_ext", "data", "build", "absent", "--out", texts / "out"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 2
    assert result.stdout == ""
    assert re.fullmatch("megatron-ext data build: error: absent .*\n", result.stderr)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trian"], r"megatron-ext: error: .*invalid choice: 'trian' .*; did you mean train\?\n"),
        (
            ["version"],
            r"megatron-ext: error: .*invalid choice: .version. .*; did you mean --version\?\n",
        ),
        (["data", "biuld"], r"megatron-ext data: error: .*; did you mean build\?\n"),
        (
            ["train"],
            r"megatron-ext train: error: --config-name is missing; recipes: .*quickstart.*",
        ),
        (
            ["train", "quickstart", "steps=1"],
            r".* quickstart is a recipe: --config-name quickstart\n",
        ),
        ([], r"usage: megatron-ext .*COMMAND.*\n.*train a model from a recipe.*"),
    ],
)
def test_a_word_that_is_missing_or_wrong_is_named_at_once(words, said):
    """A fresh process, which imports nothing heavy for that."""
    result = _without_torch(*words)
    assert re.fullmatch(said, result.stderr, flags=re.DOTALL), result.stderr


QUICKSTART = ["--config-name", "quickstart"]
_ON_A_RACK = ["--hardware", "rack_64", "--model"]
_NO_FOLDER = ["--out", "README.md"]
_SIMULATE = ["simulate", "recipes/traces", "--strategies", "quota", *_ON_A_RACK]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["steps=0"], "error: steps (0) must be >= 1"),
        (["balance.slots=-1"], "error: balance.slots (-1) must be >= 0"),
        (["balance.strategy=quotaa"], "; did you mean quota?"),
        (["balance.transport=nvlink"], "balance.transport ('nvlink') must be one of auto, "),
        (["--multirun"], "--multirun: no setting has several values"),
        (["--multirun", "balance.slots=-1,1"], "balance.slots (-1) must be >= 0"),
        (["megatron.moe_aux_loss_coeff=0.1"], "; here it is model.aux_loss"),
        (["data.path=recipes/trace"], "; did you mean recipes/traces?"),
        (["balance.placement=recipes/trace/a.npz"], "; did you mean recipes/traces?"),
        (["checkpoint.load=absent"], "checkpoint.load (absent): absent does not exist"),
        (["--dry-run", "steps=many"], "error: steps ('many') must be a whole number >= 1"),
    ],
)
def test_wrong_settings_are_said_before_torch_is_imported(words, said):
    result = _without_torch("train", *QUICKSTART, *words)
    assert said in result.stderr
    assert result.stderr.count("\n") == result.stderr.count("error: ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["whatif", "README.md"], "argument TRACE: README.md is no .npz file: write it with "),
        (["plan", "recipes/traces/late_ep9.npz"], "; did you mean recipes/traces/late_ep8.npz?"),
        (["place", "eplb", "recipes/trace/x", "--out", "y"], "; did you mean recipes/traces?"),
        (["report", "recipess"], "recipess does not exist; did you mean recipes?"),
        (["logs", "recipess"], "recipess does not exist; did you mean recipes?"),
        (["doctor", "--run", "recipess"], "recipess does not exist; did you mean recipes?"),
        (["data", "info", "recipess"], "recipess does not exist; did you mean recipes?"),
        (["checkpoint", "show", "recipess"], "recipess does not exist; did you mean recipes?"),
        (["replay", "recipes/traces", "--strategies", "quota,eplbb"], "; did you mean eplb?"),
        (["plan", "recipes/traces", "balance.slot=1"], "; did you mean slots?"),
        (["plan", "recipes/traces", "--strategy", "quotaa"], "; did you mean quota?"),
        (
            ["whatif", "recipes/traces", "--model", "traced", "--hardware", "rack_6"],
            "; did you mean rack_64?",
        ),
        (["whatif", "recipes/traces", *_ON_A_RACK, "trace"], "; did you mean traced?"),
        ([*_SIMULATE, "qwen3_235"], "no model 'qwen3_235': no such file, and "),
        ([*_SIMULATE, "traced", "--set", "model.layers=2"], "model.layers: there is no setting"),
        ([*_SIMULATE, "traced", *_NO_FOLDER], "/README.md is no folder"),
        (["replay", "recipes/traces", "--strategies", "none", *_NO_FOLDER], "README.md is no fold"),
        (["place", "eplb", "recipes/traces", *_NO_FOLDER], "README.md exists already: replace it"),
        (["place", "sem_moe", "recipes", "--ranks", "2", *_NO_FOLDER], "README.md exists already"),
    ],
)
def test_wrong_files_and_names_are_said_before_torch_is_imported(words, said):
    result = _without_torch(*words)
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_file_of_another_kind_is_named_before_torch_is_imported(tmp_path):
    file = tmp_path / "plans.npz"
    np.savez(file, quota=np.zeros((1, 2, 2)), slots=np.zeros((1, 2, 1)))
    result = _without_torch("whatif", str(file))
    said = f"argument TRACE: {file} holds plans, not loads\n"
    assert result.stderr.endswith(said)


def test_steps_that_would_be_lost_are_said_before_torch_is_imported(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    result = _without_torch("train", *QUICKSTART, f"run_dir={tmp_path}")
    assert f"error: run_dir ({tmp_path}) holds 1 step and no checkpoint" in result.stderr


def _without_torch(*words):
    """Run a command that ends with status 2 in a fresh process, which must not import torch."""
    program = (
        "import sys\nfrom megatron_ext.cli import main\n"
        "try: status = main(sys.argv[1:])\n"
        "except SystemExit as stop: status = stop.code\n"
        "assert 'torch' not in sys.modules\n"
        "sys.exit(status)"
    )
    command = [sys.executable, "-c", program, *map(str, words)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (2, ""), result.stderr
    return result


def test_the_version_is_said(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"megatron-ext {megatron_ext.__version__}\n"


def test_public_names_complete():
    assert dir(megatron_ext) == sorted(megatron_ext.__all__)


@pytest.mark.parametrize(
    ("program", "module", "words"),
    [
        ("megatron-ext train", "hydra", ["steps=1"]),
        ("megatron-ext train", "omegaconf", ["--dry-run"]),
        ("megatron-ext submit", "hydra", ["steps=1"]),
        ("megatron-ext plan", "omegaconf", ["recipes/traces"]),
        ("megatron-ext replay", "prettytable", ["recipes/traces/early.npz", "--strategies=none"]),
        ("megatron-ext checkpoint show", "xxhash", ["recipes"]),
    ],
)
def test_what_the_plug_in_does_without_is_named_with_its_extra(program, module, words):
    """A fresh process, where `import` finds the module absent."""
    main = f"import sys\nsys.modules[{module!r}] = None\nfrom megatron_ext.cli import main"
    words = [*program.split()[1:], *words]
    result = subprocess.run(
        [sys.executable, "-c", f"{main}\nsys.exit(main({words!r}))"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 2, result.stderr
    said = result.stderr.removeprefix("loading PyTorch and Megatron ...\n")
    assert said == (
        f"{program}: error: the package {module} is not installed: "
        "pip install 'megatron-ext[train]'\n"
    )


def test_doctor_examines_the_plug_in_alone():
    absent = ("hydra", "omegaconf", "prettytable", "psutil", "rich", "tokenizers", "xxhash")
    program = (
        f"import sys\nsys.modules |= dict.fromkeys({absent})\nfrom megatron_ext.cli import main"
    )
    result = subprocess.run(
        [sys.executable, "-c", f"{program}\nsys.exit(main(['doctor']))"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "NVIDIA Apex" in result.stdout, result.stderr
    assert result.stderr == ""


@pytest.mark.parametrize(
    "words",
    [
        ["data", "build"],
        ["data", "corpus"],
        ["data", "info"],
        ["checkpoint", "show"],
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


def test_every_option_says_what_it_is():
    from argparse import _SubParsersAction

    from megatron_ext.cli import parser, submit
    from megatron_ext.trainer.command import parser as training_parser

    def silent(parser):
        for action in parser._actions:
            if isinstance(action, _SubParsersAction):
                for below in action.choices.values():
                    yield from silent(below)
            elif not action.help or re.match("(of|that|there|before) ", action.help):
                yield f"{parser.prog} {action.dest}"

    for each in (parser(), submit.parser(), training_parser()):
        assert list(silent(each)) == []


@pytest.mark.parametrize(
    "words",
    [
        ["data"],
        ["plant"],
        ["replay", "loads.npz"],
        ["data", "build"],
        ["data", "corpus", "--out", "x", "--limit-mb", "0"],
        ["replay", "recipes/traces/late.npz", "--strategies", "none", "--out", ""],
        ["plan", "loads.npz", "--slot\nter", "3"],
        ["train", "--seed", "3"],
        ["train", "--ranks"],
    ],
)
def test_wrong_usage(capsys, words):
    status, out, err = run(capsys, *words)
    assert (status, out) == (2, "")
    assert err.startswith("megatron-ext")
    assert ": error: " in err
    assert err.count("\n") == 1


def _typed_options():
    """Every option of every command that does not take any word, with a word that it refuses."""
    from megatron_ext.cli import parser as commands
    from megatron_ext.trainer.command import parser as train_parser

    def below(parser):
        found = [parser]
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                found += [one for each in action.choices.values() for one in below(each)]
        return found

    for parser in [*below(commands()), train_parser()]:
        for action in parser._actions:
            option = action.option_strings[:1]
            if not option or isinstance(action, argparse._SubParsersAction):
                continue
            if action.choices is not None or action.type in (int, float, positive):
                yield [*parser.prog.split()[1:], *option, "much"]


def test_every_wrong_value_is_named_in_one_line(capsys):
    cases = list(_typed_options())
    commands = {tuple(words[:-2]) for words in cases}
    assert {("train",), ("plan",), ("replay",), ("simulate",), ("synth",)} <= commands
    for words in cases:
        status, out, err = run(capsys, *words)
        assert (status, out) == (2, ""), words
        assert err.startswith(f"megatron-ext {' '.join(words[:-2])}: error: argument {words[-2]}")
        assert re.search("'much' must be a (whole )?number|'much' [(]choose from", err), err
        assert err.count("\n") == 1, err


@pytest.mark.parametrize("ranks", ["0", "four", "1.5"])
def test_what_is_no_number_from_1_on(capsys, ranks):
    status, _, err = run(capsys, "synth", "zipf", "--ranks", ranks, "--experts", 8, "--out", "x")
    assert status == 2
    assert err.endswith(f"argument --ranks: '{ranks}' must be a whole number >= 1\n")


def test_train_lists_all_settings_without_a_recipe(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "70")
    status, out, err = run(capsys, "train", "--settings")
    assert (status, err) == (0, "")
    assert "\n  balance.slots=2  (a whole number >= 0)\n      Replicas" in out
    assert "\n  data.path (has no default)" in out
    assert "\n  optimizer.decay=cosine  (one of constant, linear, cosine)\n" in out
    of_meanings = [line for line in out.splitlines() if line.startswith("      ")]
    assert max(map(len, of_meanings)) <= 70


def test_train_gets_every_word(monkeypatch, capsys):
    seen = []
    monkeypatch.setattr("megatron_ext.cli.train.main", lambda words, **_: seen.append(words))
    words = ["--config-name", "quickstart", "balance.slots=1", "+megatron.x=[1,2]", "--help"]
    assert main(["train", *words]) == 0
    assert seen == [words]


def test_out_is_checked_before_any_work(loads, capsys, monkeypatch):
    """Below a file, and where the user may not write. To root everything is permitted."""
    trace = ["recipes/traces/late.npz", "--strategies", "none"]
    commands = (
        ["plan", loads],
        ["replay", loads, "--strategies", "none"],
        ["place", "craft", loads],
        ["simulate", *trace, "--model", "traced", "--hardware", "rack_64"],
        ["synth", "zipf", "--ranks", 2, "--experts", 4],
        ["report", loads.parent],
    )
    folder = loads.parent
    for words in commands:
        status, stdout, stderr = run(capsys, *words, "--out", loads / "below" / "out")
        assert (status, stdout) == (2, "")
        assert stderr.endswith(f" {loads} is no folder\n")
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != folder)
    for words in commands:
        status, stdout, stderr = run(capsys, *words, "--out", folder / "new" / "out")
        assert (status, stdout) == (2, "")
        assert stderr.endswith(f" no permission to write in {folder}\n")
        assert stderr.count("\n") == 1
    assert sorted(path.name for path in folder.iterdir()) == [loads.name]


def test_no_permission_to_read(loads, capsys, monkeypatch):
    opened = os.open

    def refused(path, *given):
        if path == loads:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(path, *given)

    monkeypatch.setattr(os, "open", refused)
    status, stdout, stderr = run(capsys, "plan", loads)
    assert (status, stdout) == (2, "")
    assert stderr == f"megatron-ext plan: error: {loads}: Permission denied\n"


@pytest.mark.parametrize(
    "words",
    [
        ["synth", "zipf", "--ranks", "8", "--experts", "64", "--imbalance", "2"],
        ["data", "build", "code=launch"],
        ["whatif", "recipes/traces/late_ep8.npz"],
    ],
    ids=lambda words: words[0],
)
def test_a_full_disk_is_named(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    out = tmp_path / "out"
    with files_of_at_most(100):
        status, _, stderr = run(capsys, *words, "--out", out)
    assert (status, stderr.splitlines()) == (1, [stderr.strip()])
    assert stderr.endswith(f": error: {out}: {os.strerror(errno.EFBIG)}\n")
    assert list(tmp_path.iterdir()) == []


def test_interrupt(monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    for command, module, function in (
        ("doctor", doctor, "run"),
        ("train", train, "run"),
        ("doctor", cli, "parser"),  # Which takes a tenth of a second, too.
    ):
        with monkeypatch.context() as patched:
            patched.setattr(module, function, interrupted)
            patched.setattr(sys, "argv", ["megatron-ext", command])
            assert __main__.main() == 130
            assert capsys.readouterr() == ("", "")


IMPORTING = """
import os, signal, sys
from importlib.metadata import EntryPoint
from runpy import run_module

class CtrlC:
    def find_spec(name, path=None, target=None):
        if name == "megatron_ext.cli.doctor":
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # It may be ignored in the background.
sys.meta_path.insert(0, CtrlC)
sys.argv = ["megatron-ext", "doctor"]
"""


@pytest.mark.parametrize("way", ["the installed command", "python -m"])
def test_an_interrupt_while_it_imports(way):
    script = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    installed = f"EntryPoint('', {script['megatron-ext']!r}, '').load()"
    start = "run_module('megatron_ext', run_name='__main__')"
    run_it = start if way == "python -m" else f"sys.exit({installed}())"
    result = subprocess.run(
        [sys.executable, "-c", IMPORTING + run_it], cwd=ROOT, capture_output=True, timeout=60
    )
    assert (result.returncode, result.stdout, result.stderr) == (130, b"", b"")


def test_little_is_imported_before_an_interrupt_is_caught():
    program = "import sys; sys.path[:0] = ['']; import megatron_ext.__main__; print(*sys.modules)"
    result = subprocess.run(  # Without `site`, which imports what an environment wants.
        [sys.executable, "-S", "-c", program], cwd=ROOT, capture_output=True, timeout=60, check=True
    )
    assert not {"enum", "functools", "re", "typing"} & {*result.stdout.decode().split()}


def test_an_error_of_our_own_keeps_its_traceback(monkeypatch):
    def broken(arguments):
        raise TypeError("a bug")

    monkeypatch.setattr(doctor, "run", broken)
    with pytest.raises(TypeError, match="a bug"):
        main(["doctor"])
