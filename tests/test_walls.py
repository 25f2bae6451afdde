"""The walls between rooms stand (`[tool.importlinter]` of pyproject.toml), and each one holds."""

from __future__ import annotations

import re
import subprocess
import sysconfig
import tomllib
from pathlib import Path

import pytest

from tests.copies import ROOT, copy_packages, run_in_copy

CONTRACTS = {
    contract["id"]: contract["name"]
    for contract in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ]
}

# What each contract must notice: a file of the package, and the import that is put into it.
BREAKS = [
    ("rooms", "balance/agreement.py", "import megatron_ext.methods.eplb.eplb"),
    ("rooms", "transport/relay.py", "def late() -> None:\n    import megatron_ext.balance.layout"),
    ("rooms", "files/tables.py", "import megatron_ext.lab.hardware"),
    ("rooms", "mcore/recompute.py", "import megatron_ext.data.corpus"),
    ("rooms", "config.py", "import megatron_ext.ops"),
    ("rooms", "attic/__init__.py", ""),
    ("megatron", "data/tokenizer.py", "import megatron.core"),
    (
        "megatron",
        "lab/shape.py",
        "def late() -> None:\n    from megatron.core import parallel_state",
    ),
    ("tensors", "balance/load.py", "def late() -> None:\n    import megatron.core"),
    ("methods", "methods/llep/llep.py", "import megatron_ext.methods.moonep.moonep"),
    ("hooks", "trainer/logs/progress.py", "import megatron_ext.methods.llep.llep"),
    ("checkpoints", "../checkpoints_tools/contents.py", "import megatron_ext.config"),
    ("files", "lab/hardware.py", "import megatron_ext.lab.simulate"),
    ("files", "balance/strategies/strategy.py", "import megatron_ext.balance.strategies"),
]
ALSO_NOTICED = {
    ("tensors", "balance/load.py"): {"megatron"},
    ("rooms", "balance/agreement.py"): {"methods"},  # what libra imports imports it
}


def broken_contracts(folder: Path) -> set[str]:
    """Run import-linter in a copy; return the ids of the contracts that do not hold."""
    run = run_in_copy(
        folder,
        "from importlinter.cli import lint_imports\n"
        "sys.exit(lint_imports(no_cache=True, no_logo=True))",
    )
    said = " ".join(run.stdout.split())
    verdicts = {
        id: verdict[1]
        for id, name in CONTRACTS.items()
        if (verdict := re.search(rf"{re.escape(name)} (KEPT|BROKEN)", said))
    }
    assert verdicts.keys() == CONTRACTS.keys(), run.stdout + run.stderr
    broken = {id for id, verdict in verdicts.items() if verdict == "BROKEN"}
    assert run.returncode == (1 if broken else 0), run.stdout + run.stderr
    return broken


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    return copy_packages(tmp_path_factory.mktemp("walls"), "tests/no_circles.py")


def test_walls_stand(copy):
    assert broken_contracts(copy) == set()


@pytest.mark.parametrize(("contract", "file", "line"), BREAKS, ids=lambda value: value[:40])
def test_break_is_noticed(copy, contract, file, line):
    path = copy / "megatron_ext" / file
    before = path.read_text() if path.exists() else None
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"{before or ''}\n{line}\n")
    try:
        assert broken_contracts(copy) == {contract} | ALSO_NOTICED.get((contract, file), set())
    finally:
        if before is None:
            path.unlink()
            path.parent.rmdir()
        else:
            path.write_text(before)


def test_walls_stand_when_asked_by_hand():
    done = subprocess.run(
        [f"{sysconfig.get_path('scripts')}/lint-imports", "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr


def test_every_contract_is_shown_to_notice():
    assert {contract for contract, *_ in BREAKS} == set(CONTRACTS)
