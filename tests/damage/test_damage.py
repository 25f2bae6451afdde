"""Commands with damaged files: refused in one line, or taken where the damage changes nothing.

`python -m tests.damage` does the same with any number of files.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.damage.tries import tries


def test_damaged_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = list(tries(tmp_path, 400, seed=0, limit_s=60))
    assert [str(one) for one in found if one.is_fault] == []
    assert Counter(one.verdict for one in found)["refused"] > 200
