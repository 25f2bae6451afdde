"""What README and docs name exists: files, commands, options, recipes, words.

Commands of README are run as they stand there. Of the others' words, the parsers are asked, and
Hydra for their overrides.
"""

import argparse
import ast
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
import yaml

import megatron_ext
from megatron_ext import cli
from megatron_ext.cpu_platform import enable_cpu_platform
from megatron_ext.files.loads import read_loads
from megatron_ext.pretrain import read_balance
from megatron_ext.trainer.command import parser as training_parser
from megatron_ext.trainer.compose import load_config
from megatron_ext.trainer.config import TrainConfig
from megatron_ext.trainer.logs.run_log import read_metrics
from megatron_ext.trainer.sweep import combinations

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *(
        page
        for folder in ("docs", "recipes", "megatron_ext")
        for page in sorted((ROOT / folder).rglob("*.md"))
    ),
]
MAP = ROOT / "docs" / "map.md"
DECISIONS = ROOT / "docs" / "decisions"
TREE_FOLDERS = ("megatron_ext", "csrc", "checkpoints_tools", "recipes", "launch", "docs", "tests")

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"(?:[\w.-]+/)+[\w.-]*\w(?:\.(?:py|md|sh|yaml|cpp|cuh|cu|h|toml|txt))(?:::\w+)?")


def blocks(page: Path, language: str) -> list[str]:
    return [code for found, code in FENCE.findall(page.read_text()) if found == language]


def commands(page: Path) -> list[list[str]]:
    """The words of every command in the page's `sh` blocks, without comments."""
    text = "\n".join(blocks(page, "sh")).replace("\\\n", " ")
    return [words for line in text.splitlines() if (words := shlex.split(line, comments=True))]


ALL_COMMANDS = [words for page in PAGES for words in commands(page)]


def as_test_id(words: list[str]) -> str:
    return " ".join(words)


def read_tree() -> set[str]:
    """Paths in the map. A folder with nothing under it stands for all that is in it."""
    (tree,) = blocks(MAP, "text")
    paths: set[str] = set()
    above: list[tuple[int, str]] = []
    for line in tree.splitlines():
        indent, name = len(line) - len(line.lstrip()), line.split()[0]
        above = [(depth, path) for depth, path in above if depth < indent]
        path = (above[-1][1] if above else "") + name
        if name.endswith("/"):
            above.append((indent, path))
        paths.add(path)
    return paths


def real_files() -> set[str]:
    files = set()
    for folder in TREE_FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            name = path.relative_to(ROOT).as_posix()
            is_made = "__pycache__" in name or path.suffix in (".so", ".pyc")
            if path.is_file() and not is_made and not path.name.startswith("."):
                files.add(name)
    return files


def test_file_tree_is_the_real_one():
    listed = read_tree()
    whole_folders = {
        path
        for path in listed
        if path.endswith("/")
        and not any(other.startswith(path) and other != path for other in listed)
    }
    missing = {
        name
        for name in real_files() - listed
        # An `__init__.py` that says no more than its folder's line needs no line of its own.
        if not name.endswith("/__init__.py") and not name.startswith(tuple(whole_folders))
    }
    gone = {path for path in listed if not (ROOT / path).exists()}
    assert (sorted(missing), sorted(gone)) == ([], [])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_files_exist(page):
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        if page.name == "api.md" and target == "settings.md":
            continue  # The site makes both.
        if not target.startswith("https://"):
            assert (page.parent / target).exists(), target
    without_links = re.sub(r"\]\([^)]*\)", "]", FENCE.sub("", text))
    for named in FILE.findall(without_links):
        file, _, test = named.partition("::")
        # Files of a run are named as examples.
        if not file.startswith("runs/"):
            assert (ROOT / file).is_file(), file
            assert not test or f"def {test}(" in (ROOT / file).read_text(), named


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_absolute_paths(page):
    assert re.findall(r"(?<![\w.:/~-])/\w+/[\w./-]*", page.read_text()) == []


def test_there_are_commands():
    assert {"launch/quickstart.sh", "tests/run.sh"} <= {words[0] for words in ALL_COMMANDS}


def test_every_command_of_the_package_is_shown():
    shown = {words[1] for words in ALL_COMMANDS if words[0] == "megatron-ext"}
    files = {path.stem for path in (ROOT / "megatron_ext" / "cli").glob("*.py")}
    helpers = {"__init__", "options", "output", "examine", "hugging_face", "run_state", "slurm"}
    assert files - shown == helpers


def test_the_version_is_written_once():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert megatron_ext.__version__ == version
    newest, *_ = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert newest == version
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation.keys() >= {"cff-version", "message", "title", "authors", "preferred-citation"}
    assert "version" not in citation  # It would be the second place.


def test_decisions_are_listed():
    """Every decision by its number, its title and its file, in order."""
    listed = re.findall(
        r"^\| \[(\d{3}) (.+?)\]\((.+?)\) \|", (DECISIONS / "README.md").read_text(), re.M
    )
    titles = {
        path: path.read_text().splitlines()[0] for path in sorted(DECISIONS.glob("[0-9]*.md"))
    }
    assert [(f"# {number} {title}", name) for number, title, name in listed] == [
        (title, path.name) for path, title in titles.items()
    ]


def test_guides_are_linked_from_the_readme():
    linked = set(re.findall(r"\]\(docs/guides/([\w-]+\.md)\)", (ROOT / "README.md").read_text()))
    assert linked == {path.name for path in (ROOT / "docs" / "guides").iterdir()}


@pytest.mark.parametrize("words", ALL_COMMANDS, ids=as_test_id)
def test_command_is_understood(words, capsys):
    while "=" in words[0]:  # a variable for the command
        words = words[1:]
    if "megatron_ext.train" in words:
        check_training(words[words.index("megatron_ext.train") + 1 :])
    elif words[:2] == ["megatron-ext", "train"]:
        check_training(words[2:])
    elif "megatron_ext.pretrain" in words:
        balance, _, rest = read_balance(words[words.index("megatron_ext.pretrain") + 1 :])
        assert balance is not None
        if rest[1:] != ["..."]:  # A whole line is the one that tests run Megatron's programs with.
            from tests.trainer.test_pretrain import COMMAND_LINE

            assert rest == ["pretrain_gpt.py", "--mock-data", *COMMAND_LINE.split()]
    elif words[0] == "launch/train.sh":
        check_training(words[1:])
    elif words[0] == "megatron-ext":
        check_options(words[1:], capsys)
    elif words[0] == "python" and words[1].startswith("tests/"):
        for option in options_of(words):
            assert option in (ROOT / words[1]).read_text(), option
    elif words[:2] == ["python", "-m"] and words[2].startswith("tests."):
        assert (ROOT / words[2].replace(".", "/") / "__main__.py").is_file()
    elif (ROOT / words[0]).is_file():
        assert os.access(ROOT / words[0], os.X_OK), words[0]
        for option in options_of(words):
            assert option in (ROOT / words[0]).read_text(), option
    else:
        assert words[0] in ("pip", "make", "ruff", "mkdocs", "mypy", "pytest", "source"), words


# Why a command of README is not run here, and what runs it instead.
NOT_RUN = {
    "launch/setup.sh": "tests/run.sh begins with it; tests/test_setup.py",
    "pip install .": "it needs a network; tests/ops/test_build.py",
    "pip install '.[train]'": "the same",
    "pip install --no-build-isolation '.[train,te]'": "the same, and a GPU",
    "launch/quickstart.sh": "minutes; tests/trainer/reports/test_report.py with fewer steps",
    "tests/run.sh": "it runs this",
    "torchrun --nproc-per-node 8 -m megatron_ext.pretrain pretrain_gpt.py"
    " --moe-balance-slots 2 ...": "a program of Megatron-LM's; tests/trainer/test_pretrain.py",
}


@pytest.mark.slow
def test_commands_of_the_readme_run_as_written(tmp_path):
    """In a folder that looks like a clone, so that what they write is not in this one."""
    lines = [
        line.split(" #")[0].strip()
        for code in blocks(ROOT / "README.md", "sh")
        for line in code.splitlines()
    ]
    assert NOT_RUN.keys() <= set(lines)
    for path in ROOT.iterdir():
        if path.name not in ("runs", ".venv", ".git"):
            (tmp_path / path.name).symlink_to(path)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    script = "\n".join(["set -eux", *(line for line in lines if line not in NOT_RUN)])
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr + done.stdout

    said = done.stderr.split("+ megatron-ext train")[1].splitlines()
    assert said[1] == "loading PyTorch and Megatron ..."  # Before anything that takes seconds.
    assert "runs/first: starting 2 ranks for 4 steps" in said
    (first,) = [line for line in said if line.startswith("step 1/4  loss ")]
    assert first.endswith(" left")
    assert len(read_metrics(tmp_path / "runs" / "first")) == 4


def options_of(words: list[str]) -> list[str]:
    return [word.split("=")[0] for word in words if word.startswith("-")]


def check_options(words: list[str], capsys) -> None:
    """Ask the subcommand for its help, and look for the options there."""
    # `data build` is two words, `doctor` one; what follows may be a file that is not here.
    subcommand = words[: 2 if words[0] in ("checkpoint", "data", "place") else 1]
    with pytest.raises(SystemExit) as stop:
        cli.main([*subcommand, "--help"])
    output = capsys.readouterr().out
    assert stop.value.code == 0
    assert "example:" in output, f"{subcommand} is no command"
    for option in options_of(words):
        assert option in output, option


def check_training(words: list[str]) -> None:
    """Compose the settings, of a sweep those of each run."""
    options = training_parser().parse_intermixed_args(words)
    runs: list[list[str]] = [options.overrides]
    if options.multirun:
        swept, fixed = combinations(options.overrides)
        runs = [[*fixed, *each] for each in swept]
    for run in runs:
        load_config(run, options.config_dir, options.config_name, needs_data=not options.dry_run)


def test_the_lines_that_balance_a_script():
    """They run as written, on a spec of Megatron's."""
    if not torch.cuda.is_available():
        enable_cpu_platform()
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    (code,) = [code for code in blocks(ROOT / "README.md", "python") if "balance_spec" in code]
    assert len([line for line in code.splitlines() if line.strip()]) == 3
    names = {
        "GPTModel": lambda config, spec, *rest: spec,
        "config": None,
        "spec": get_gpt_layer_local_spec(num_experts=4, moe_grouped_gemm=False),
    }
    exec(code, names)
    assert "BalancedMoELayer" in repr(names["model"])


def test_the_function_that_gives_slime_a_spec(monkeypatch):
    if not torch.cuda.is_available():
        enable_cpu_platform()
    from megatron.core import parallel_state
    from megatron.core.transformer import TransformerConfig

    monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_rank", lambda: 0)
    page = ROOT / "docs" / "guides" / "reinforcement-learning.md"
    (code,) = blocks(page, "python")
    exec(code, names := {})
    config = TransformerConfig(
        num_layers=2, hidden_size=8, num_attention_heads=1, num_moe_experts=4, moe_router_topk=2
    )
    spec = names["balanced"](argparse.Namespace(transformer_impl="local"), config)
    assert repr(spec).count("BalancedMoELayer") == 2


def test_the_lines_that_make_loads(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (code,) = blocks(ROOT / "recipes" / "traces" / "README.md", "python")
    exec(code, {})
    loads = read_loads(tmp_path / "loads.npz")
    assert loads.load.shape == (30, 8, 64)
    assert loads.load.sum((1, 2)).tolist() == [8 * 512 * 4] * 30
    assert loads.layers()[:4] == [1, 2, 3, 1]


def test_python_blocks_parse_and_import_what_exists():
    for page in PAGES:
        for code in blocks(page, "python"):
            if ">>>" in code:
                continue  # the walkthrough is run by its own test
            for node in ast.walk(ast.parse(code)):
                if isinstance(node, ast.ImportFrom) and node.module == "megatron_ext":
                    assert {alias.name for alias in node.names} <= set(megatron_ext.__all__)


def test_settings_exist():
    """`section.field` in back quotes is a field of the run's settings."""
    sections = {
        name: value for name, value in vars_of(TrainConfig()).items() if hasattr(value, "__slots__")
    }
    for page in PAGES:
        for section, field in re.findall(r"`(\w+)\.(\w+)(?:=[^`]*)?`", page.read_text()):
            if section in sections:
                assert hasattr(sections[section], field), f"{page.name}: {section}.{field}"


def vars_of(config: object) -> dict[str, object]:
    return {name: getattr(config, name) for name in config.__slots__}


def test_glossary_names_what_is_in_the_code():
    source = "\n".join(path.read_text() for path in (ROOT / "megatron_ext").rglob("*.py"))
    (words, *_) = (ROOT / "docs" / "glossary.md").read_text().split("## Letters")
    rows = [line.split("|")[3] for line in words.splitlines() if line.startswith("| ")]
    named = {name for row in rows for name in re.findall(r"`([\w.]+)`", row)}
    assert len(named) > 20
    for name in named:
        assert re.search(rf"\b{name.split('.')[-1]}\b", source), name
