"""Strategy `sem_moe`: Megatron's own layers, and a run that says where samples or tokens go."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron_ext.config import BalanceConfig, ConfigError
from megatron_ext.methods.sem_moe.semantics import Semantics, write_semantics
from megatron_ext.trainer.compose import load_config
from megatron_ext.trainer.validate import validate
from tests.trainer.dataset import build, overrides


def problems(folder: Path, *settings: str) -> list[str]:
    config = load_config([*overrides(folder / "text" / "data", folder / "run"), *settings])
    try:
        validate(config, num_ranks=2)
    except ConfigError as error:
        return error.problems
    return []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "text").mkdir()
    build(tmp_path / "text")
    semantics = Semantics(
        (1, 2),
        np.tile(np.arange(4), (2, 1)),
        np.full((2**16, 2), 0.5, np.float32),
        np.zeros((2, 2**16), np.int16),
        np.full((2, 2**16), 0.5, np.float32),
        np.empty((0, 2, 2, 2), np.float32),
    )
    write_semantics(tmp_path / "semantics.npz", semantics)
    return tmp_path


def test_a_run_needs_a_file_of_semantics(folder: Path) -> None:
    semantics = folder / "semantics.npz"
    (problem,) = problems(folder, "balance.strategy=sem_moe")
    assert problem.startswith("data.affinity or data.rebatch must name a file with balance.strat")
    assert problems(folder, "balance.strategy=sem_moe", f"data.affinity={semantics}") == []
    dealt = [f"data.rebatch={semantics}", "parallel.tp_size=2"]
    assert problems(folder, "balance.strategy=sem_moe", *dealt) == []
    # What excludes replicas does not exclude this.
    legacy = "+megatron.moe_use_legacy_grouped_gemm=true"
    assert problems(folder, "balance.strategy=quota", legacy) != []
    assert problems(folder, "balance.strategy=sem_moe", f"data.affinity={semantics}", legacy) == []


def test_layers_stay_megatrons_own() -> None:
    from megatron_ext.mcore.spec import balance_spec

    spec = object()
    assert balance_spec(spec, BalanceConfig(strategy="sem_moe")) is spec
