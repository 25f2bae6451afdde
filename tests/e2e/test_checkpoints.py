"""Checkpoints hold logical experts only, so balancing may change from run to run.

Layer 2 (2 and 4 gloo ranks). A run that continues from another setting's checkpoint is compared
with the run that wrote it: losses equal but for float32 rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from checkpoints_tools.contents import find_problems, read_contents
from checkpoints_tools.relayout import relayout
from megatron_ext.files.loads import read_loads
from megatron_ext.methods.sem_moe.semantics import Semantics, write_semantics
from megatron_ext.trainer.logs.run_log import read_metrics
from tests.ranks import run_ranks
from tests.trainer.dataset import build, overrides
from tests.trainer.test_run import _train

pytestmark = pytest.mark.slow

# A large epsilon keeps Adam from turning the rounding of a tiny gradient into a step of its own.
SETTINGS = ["steps=4", "optimizer.eps=1e-3"]

QUOTA = ["balance.strategy=quota", "balance.tolerance=0.0"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small dataset."""
    return build(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def saved_by(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[list[str]], Path]:
    """The folder of a run with these settings, which has a checkpoint of step 2."""
    folders: dict[tuple[str, ...], Path] = {}

    def train(settings: list[str]) -> Path:
        folder = folders.get(tuple(settings))
        if folder is None:
            folder = folders[tuple(settings)] = tmp_path_factory.mktemp("saved")
            run_ranks(_train, 2, [*overrides(data, folder), *settings, "checkpoint.every=2"])
        return folder

    return train


def losses(run_dir: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(run_dir)]


@pytest.mark.option("checkpoints")
@pytest.mark.parametrize(
    ("saved", "loaded", "num_ranks"),
    [
        (QUOTA, ["balance.strategy=none"], 2),
        (["balance.strategy=none"], QUOTA, 2),
        (QUOTA, [*QUOTA, "balance.slots=1"], 2),
        ([*QUOTA, "balance.slots=1"], [*QUOTA, "balance.slots=3"], 2),
        (QUOTA, [*QUOTA, "parallel.ep_size=4"], 4),
        ([*QUOTA, "parallel.ep_size=1"], QUOTA, 2),
    ],
)
def test_training_goes_on_under_other_balancing(
    saved: list[str],
    loaded: list[str],
    num_ranks: int,
    data: Path,
    saved_by: Callable[[list[str]], Path],
    tmp_path: Path,
) -> None:
    first, second = saved_by([*SETTINGS, *saved]), tmp_path / "second"
    checkpoint = first / "checkpoints" / "step_00000002"
    start = f"checkpoint.load={checkpoint}"
    run_ranks(_train, num_ranks, [*overrides(data, second), *SETTINGS, *loaded, start])
    assert losses(second) == pytest.approx(losses(first)[2:], rel=1e-5)
    balanced = first if saved is QUOTA else second
    assert sum(line["replicas"] for line in read_metrics(balanced)) > 0

    contents = read_contents(checkpoint)
    assert find_problems(contents) == []
    names = [entry.key for entry in contents.entries]
    assert any("experts" in name for name in names)
    assert not [name for name in names if "slot" in name or "replica" in name]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_training_goes_on_with_experts_moved(
    num_ranks: int, data: Path, saved_by: Callable[[list[str]], Path], tmp_path: Path
) -> None:
    """Weights, moments and routers under other numbers: the same steps, on one rank or two."""
    settings = [*SETTINGS, "model.topk=2", *QUOTA]
    first, second = saved_by(settings), tmp_path / "second"
    moved = tmp_path / "moved" / "step_00000002"
    moved.parent.mkdir()
    order = {1: np.array([2, 0, 3, 1]), 2: np.array([3, 1, 0, 2])}
    # Of two layers a router and two weights of four experts; the optimizer has each three times.
    assert relayout(first / "checkpoints" / "step_00000002", order, moved) == 2 * (1 + 2 * 4) * 4
    assert find_problems(read_contents(moved)) == []
    start = [f"checkpoint.load={moved}", f"parallel.ep_size={num_ranks}", "checkpoint.every=2"]
    run_ranks(_train, num_ranks, [*overrides(data, second), *settings, *start])
    assert losses(second) == pytest.approx(losses(first)[2:], rel=1e-5)
    # Losses would be the same if nothing had moved.
    for moment in ("exp_avg", "exp_avg_sq"):
        for part in ("router.weight", "experts.experts.linear_fc2.weight"):
            key = f"optimizer.state.{moment}.decoder.layers.mlp.{part}"
            expected, found = (
                read_tensor(run / "checkpoints" / "step_00000004", key) for run in (first, second)
            )
            for layer, of_layer in order.items():
                moved_there = expected[layer - 1][of_layer]
                distance = (found[layer - 1] - moved_there).norm() / moved_there.norm()
                assert distance < 1e-3, (key, layer)


def read_tensor(folder: Path, key: str) -> torch.Tensor:
    """Read one whole tensor of a checkpoint."""
    size = next(entry.shape for entry in read_contents(folder).entries if entry.key == key)
    state = {key: torch.full(size, torch.nan)}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state[key]


def test_samples_by_affinity_are_the_same_steps(data: Path, tmp_path: Path) -> None:
    """Losses and gradient norms are sums over a step's samples, whoever computes which."""
    first, second = tmp_path / "first", tmp_path / "second"
    affinity = np.random.default_rng(0).random((2**16, 2), dtype=np.float32)
    expert = np.tile(np.arange(4), (2, 1))
    tables = (
        np.zeros((2, len(affinity)), np.int16),
        np.ones((2, len(affinity)), np.float32),
        np.zeros((0, 2, 2, 2), np.float32),
    )
    semantics = Semantics((1, 2), expert, affinity, *tables)
    write_semantics(tmp_path / "semantics.npz", semantics)
    settings = ["data.global_batch_size=16", "logging.trace_steps=4", *SETTINGS, *QUOTA]
    run_ranks(_train, 2, [*overrides(data, first), *settings])
    by_affinity = f"data.affinity={tmp_path / 'semantics.npz'}"
    run_ranks(_train, 2, [*overrides(data, second), *settings, by_affinity])
    assert losses(second) == pytest.approx(losses(first), rel=1e-5)
    norms = [[line["grad_norm"] for line in read_metrics(run)] for run in (first, second)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)
    loads = [read_loads(run / "trace").load for run in (first, second)]
    assert not torch.equal(*loads)


def test_a_checkpoint_of_another_model_is_refused(
    data: Path, saved_by: Callable[[list[str]], Path], tmp_path: Path
) -> None:
    from megatron_ext.config import ConfigError
    from megatron_ext.trainer.compose import load_config
    from megatron_ext.trainer.validate import validate

    start = f"checkpoint.load={saved_by([*SETTINGS, *QUOTA])}/checkpoints/step_00000002"
    other = [*overrides(data, tmp_path / "second"), start, "model.expert_hidden_size=48"]
    with pytest.raises(ConfigError) as raised:
        validate(load_config(other), num_ranks=2)
    assert len(raised.value.problems) == 1
    assert "model.expert_hidden_size (48) must be 32" in raised.value.problems[0]
