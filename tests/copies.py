"""A copy of the package, to be changed, and programs that import the copy.

What is installed in the environment, the compiled library too, is there as for the original.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
_IGNORED = shutil.ignore_patterns("__pycache__")
# An editable installation leads imports to the original, wherever a program runs.
_HERE_FIRST = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if not type(f).__module__.startswith("_editable")]
sys.path.insert(0, {folder!r})
"""


def copy_packages(folder: Path, *others: str) -> Path:
    """Copy both packages, the project's settings and `others`, by path from the root."""
    for name in ("megatron_ext", "checkpoints_tools", "pyproject.toml", *others):
        there = folder / name
        there.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, there, ignore=_IGNORED)
        else:
            shutil.copyfile(ROOT / name, there)
    return folder


def run_in_copy(folder: Path, program: str) -> subprocess.CompletedProcess[str]:
    """Run a Python program whose imports come from a copy."""
    file = folder / "program.py"
    # Processes that it starts read it too, so they find the copy as well.
    file.write_text(_HERE_FIRST.format(folder=str(folder)) + program)
    return subprocess.run(
        [sys.executable, str(file)],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
