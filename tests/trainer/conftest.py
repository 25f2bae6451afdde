from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ranks import run_ranks
from tests.trainer.dataset import build, overrides

# Not every version of Python and Megatron-Core has what they import, and they hold no tests.
collect_ignore = ["pretrain_program.py", "hugging_face/conversions.py"]


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small dataset."""
    return build(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="session")
def saved_run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 8 steps on 2 ranks with checkpoints of steps 4, 6 and 8. Not to be changed."""
    from tests.trainer.test_run import _train

    run_dir = tmp_path_factory.mktemp("saved_run")
    saving = ["checkpoint.every=2", "checkpoint.keep=3"]
    run_ranks(_train, 2, [*overrides(data, run_dir), *saving])
    return run_dir


@pytest.fixture
def stopped_run(saved_run: Path, tmp_path: Path) -> Callable[[], Path]:
    """Makes the same run as it was after step 6: with checkpoints of steps 4 and 6."""

    def make() -> Path:
        run_dir = tmp_path / "stopped"
        shutil.copytree(saved_run, run_dir)
        shutil.rmtree(run_dir / "checkpoints" / "step_00000008")
        return run_dir

    return make
