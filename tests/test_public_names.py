"""Every public name is there, wherever in a program it is asked for first.

`megatron_ext` imports its names when they are used, so a wrong home shows in nobody's import but
the user's. Names are resolved in fresh processes: here other tests have imported their modules.
"""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import megatron_ext

ROOT = Path(__file__).parents[1]
PACKAGES = ("megatron_ext", "checkpoints_tools")
NEEDS_MEGATRON = "megatron_ext.mcore."


def module_level(path: Path) -> list[ast.stmt]:
    return ast.parse(path.read_text()).body


def assigned(path: Path, name: str) -> object:
    """The literal that a module assigns to a name, or None."""
    for node in module_level(path):
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == name for target in node.targets
        ):
            return ast.literal_eval(node.value)
    return None


def modules() -> dict[str, Path]:
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(part for part in parts if part != "__init__")] = path
    return found


def homes() -> dict[str, str]:
    written = assigned(Path(megatron_ext.__file__), "_HOMES")
    assert isinstance(written, dict)
    return written


def run_fresh(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_homes_all_and_type_hints_name_the_same():
    """What a type checker reads, what `import *` takes, and what is imported at first use."""
    hinted = {
        name.name: node.module
        for block in module_level(Path(megatron_ext.__file__))
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for name in node.names
    }
    assert homes() == hinted
    assert megatron_ext.__all__ == sorted(hinted)


def test_each_name_can_be_asked_for_first():
    """By a program that imported nothing of ours before but, for Megatron's part, the CPU platform.

    Each program is forked from one that has imported Torch, or Megatron.
    """
    for needs_megatron in (False, True):
        programs = {
            home: f"""
from megatron_ext import {", ".join(names)}
# Where it is made, not where it happens to be imported too.
assert {{each.__module__ for each in ({", ".join(names)},)}} == {{{home!r}}}
"""
            for home in sorted(set(homes().values()))
            if home.startswith(NEEDS_MEGATRON) == needs_megatron
            and (names := [name for name, module in homes().items() if module == home])
        }
        assert programs
        run_fresh(f"""
import os, sys
import torch
if {needs_megatron}:
    if not torch.cuda.is_available():
        from megatron_ext import enable_cpu_platform
        enable_cpu_platform()
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.transformer.moe.moe_layer
for home, program in {programs}.items():
    if not (child := os.fork()):
        before = [name for name in sys.modules if name.startswith("megatron_ext.")]
        platform = {{"cpu_memory", "cpu_platform", "gloo_peers"}}
        assert not {{name.partition(".")[2] for name in before}} - platform, before
        exec(program)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status == 0, home
""")


def test_names_that_must_not_need_megatron():
    """The CPU platform has to come before Megatron, and planning does without it."""
    names = [name for name, home in homes().items() if not home.startswith(NEEDS_MEGATRON)]
    assert {"enable_cpu_platform", "solve", "BalanceConfig"} <= set(names)
    run_fresh(f"""
import sys
from megatron_ext import {", ".join(names)}
assert "megatron" not in sys.modules, "Megatron was imported"
""")


def test_the_plug_in_does_without_the_methods_of_papers():
    """As if their folder were not there: it imports, and knows its own strategies."""
    run_fresh("""
import sys
import torch
sys.modules["megatron_ext.methods"] = None  # What `import` finds absent.
if not torch.cuda.is_available():
    from megatron_ext import enable_cpu_platform
    enable_cpu_platform()
import megatron_ext.mcore.spec, megatron_ext.telemetry.recorder, megatron_ext.telemetry.routes
from megatron_ext.balance.strategies import STRATEGIES, get_strategy
assert list(STRATEGIES) == ["none", "quota", "exact", "ideal"], list(STRATEGIES)
assert [get_strategy(name).name for name in STRATEGIES] == list(STRATEGIES)
from megatron_ext.config import BalanceConfig
assert BalanceConfig().slots == 2
try:
    get_strategy("eplb")
except ValueError as error:
    known = "exact, ideal, none, quota"
    assert str(error) == f"unknown strategy 'eplb'; known: {known}", error
else:
    raise AssertionError("eplb is there")
""")


def test_methods_of_papers_are_imported_when_they_are_asked_for():
    run_fresh("""
import sys
from megatron_ext.balance.strategies import STRATEGIES, get_strategy
get_strategy("quota")
assert "eplb" in STRATEGIES
assert [name for name in sys.modules if name.startswith("megatron_ext.methods.")] == []
get_strategy("eplb")
assert "megatron_ext.methods.eplb.eplb" in sys.modules
assert "megatron_ext.methods.libra" not in sys.modules
""")


def test_other_names_are_refused():
    with pytest.raises(AttributeError, match=r"'megatron_ext' .*'solv'"):
        megatron_ext.solv  # noqa: B018


PUBLIC = [name for name, path in modules().items() if "\n__all__ = " in path.read_text()]


def test_where_public_names_are():
    """A module that makes names at first use says which, so that the test below finds them."""
    assert {"megatron_ext", "checkpoints_tools"} <= set(PUBLIC)
    lazy = {
        name
        for name, path in modules().items()
        for node in module_level(path)
        if isinstance(node, ast.FunctionDef) and node.name == "__getattr__"
    }
    assert "megatron_ext" in lazy
    assert lazy <= set(PUBLIC)


@pytest.mark.parametrize("name", [name for name in PUBLIC if name != "megatron_ext"])
def test_every_name_in_all_resolves(name):
    module = importlib.import_module(name)
    assert len(set(module.__all__)) == len(module.__all__)
    assert [public for public in module.__all__ if not hasattr(module, public)] == []
