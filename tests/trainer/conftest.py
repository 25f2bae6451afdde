from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer.dataset import build


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small dataset."""
    return build(tmp_path_factory.mktemp("text"))
