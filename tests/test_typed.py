"""A user's type checker reads this package's types: without `py.typed` all of them were Any."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
from megatron_ext import BalanceConfig, balance_spec
balance_spec(None, BalanceConfig(slots="2"))
"""

SETTINGS = """
[mypy]
[mypy-torch.*,numpy.*,omegaconf.*]
follow_imports = skip
"""


@pytest.mark.slow
def test_a_user_s_script_is_checked(tmp_path: Path) -> None:
    """By mypy, which takes no types of an installed package that does not say it has them."""
    (tmp_path / "user.py").write_text(SCRIPT)
    (tmp_path / "mypy.ini").write_text(SETTINGS)
    command = [sys.executable, "-m", "mypy", "user.py"]
    checked = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert 'user.py:3: error: Argument "slots" to "BalanceConfig"' in checked.stdout
    assert "Found 1 error in 1 file" in checked.stdout
