"""A run's routes: the choices of the model, token by token; whole files, nothing there twice.

Layers 1 and 2. What is recorded is compared with the loads of the same run, which are counted by
other means, and with the tokens of the dataset.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from megatron_ext import cli
from megatron_ext.config import ConfigError
from megatron_ext.data.manifest import Manifest
from megatron_ext.data.mixing import microbatches
from megatron_ext.files.loads import read_loads
from megatron_ext.files.routes import Routes, read_routes, write_routes
from megatron_ext.telemetry import step_files
from megatron_ext.telemetry.routes import RouteRecorder
from megatron_ext.trainer.compose import load_config
from megatron_ext.trainer.validate import validate
from tests.ranks import run_ranks
from tests.trainer.dataset import overrides
from tests.trainer.test_run import _train

SEQUENCE = 16
GLOBAL_BATCH = 8
EVERY_SAMPLE = GLOBAL_BATCH // 2  # of one of two ranks
RECORDED = ["steps=4", "logging.trace_steps=2"]


def tokens_of_rank_0(arguments: list[str], steps: int) -> np.ndarray:
    """Token ids [samples, tokens] that data-parallel rank 0 of two is given."""
    from megatron_ext.trainer.model.build import dataset

    config = load_config(arguments)
    data = dataset(config, Manifest.load(config.data.path), "train")
    batches = microbatches(data, consumed_samples=0, data_parallel_rank=0, data_parallel_size=2)
    per_step = GLOBAL_BATCH // (2 * config.data.micro_batch_size)
    return torch.cat([next(batches)["tokens"] for _ in range(steps * per_step)]).numpy()


@pytest.mark.parametrize(
    "settings",
    [
        ["balance.strategy=quota"],
        ["balance.strategy=none"],
        ["balance.strategy=libra", "parallel.recompute=full", "eval_every=1", "eval_steps=1"],
    ],
    ids=lambda settings: settings[0],
)
def test_routes_are_the_loads_of_their_rank(data, tmp_path, settings):
    """Every choice of rank 0's tokens, counted by expert, is rank 0's row of the load."""
    arguments = [*overrides(data, tmp_path), *RECORDED, *settings]
    arguments += [f"logging.route_samples={EVERY_SAMPLE}"]
    run_ranks(_train, 2, arguments)
    assert sorted(path.name for path in (tmp_path / "routes").iterdir()) == [
        "step_00000002_stage_0.npz",
        "step_00000004_stage_0.npz",
    ]
    routes, loads = read_routes(tmp_path / "routes"), read_loads(tmp_path / "trace")
    assert (routes.layers, routes.num_experts) == ((1, 2), 4)
    np.testing.assert_array_equal(
        routes.token.reshape(-1, SEQUENCE), tokens_of_rank_0(arguments, steps=4)
    )
    # A microbatch is two samples: its choices are one load's row.
    of_microbatch = loads.load[:, 0].reshape(-1, 2, 4)
    for place in range(2):
        counts = routes.counts(place, routes.sample // 2, routes.num_samples // 2)
        np.testing.assert_array_equal(counts, of_microbatch[:, place].numpy())


@pytest.mark.slow
def test_stages_record_their_layers_of_the_same_tokens(data, tmp_path):
    """The second of two pipeline stages has other layers; a file it lacks makes no difference."""
    arguments = [*overrides(data, tmp_path), *RECORDED, "model.num_layers=4", "parallel.pp_size=2"]
    run_ranks(_train, 4, [*arguments, "logging.route_samples=3"])
    routes, loads = read_routes(tmp_path / "routes"), read_loads(tmp_path / "trace")
    assert routes.layers == (1, 2, 3, 4)
    tokens = tokens_of_rank_0(arguments, steps=4).reshape(4, EVERY_SAMPLE, SEQUENCE)
    assert routes.num_samples == 4 * 3
    np.testing.assert_array_equal(routes.token.reshape(4, 3, SEQUENCE), tokens[:, :3])
    first = (loads.trace["microbatch"] == 0) & (loads.trace["layer"] == 4)
    of_first = routes.counts(3, np.where(routes.sample % 3 < 2, routes.sample // 3, 4), 5)[:4]
    np.testing.assert_array_equal(of_first, loads.load[first][:, 0].numpy())

    (tmp_path / "routes" / "step_00000004_stage_1.npz").unlink()
    half = read_routes(tmp_path / "routes")
    assert half.num_samples == 2 * 3
    np.testing.assert_array_equal(half.choice, routes.choice[:, : 6 * SEQUENCE])


@pytest.mark.slow
def test_a_continued_run_has_no_sample_twice(data, tmp_path):
    """Stopped after step 3, continued from step 2: what reaches beyond is recorded anew."""
    settings = [*overrides(data, tmp_path), "logging.trace_steps=2", "checkpoint.every=2"]
    settings += [f"logging.route_samples={EVERY_SAMPLE}"]
    run_ranks(_train, 2, [*settings, "steps=3"])
    (tmp_path / "routes" / ".step_00000004_stage_0.npz.1.partial").write_bytes(b"cut")
    run_ranks(_train, 2, [*settings, "steps=4"])
    routes = read_routes(tmp_path / "routes")
    np.testing.assert_array_equal(
        routes.token.reshape(-1, SEQUENCE), tokens_of_rank_0(settings, steps=4)
    )
    assert not list((tmp_path / "routes").glob(".*"))


class FakeRouter(nn.Module):
    """Two of three experts for each token of [s, b], as a test says."""

    topk = 2

    def __init__(self, gives_ids: bool) -> None:
        super().__init__()
        self.gives_ids = gives_ids

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        probs = hidden.flatten(0, 1)
        if not self.gives_ids:
            return probs, probs > 0
        ids = probs.topk(self.topk).indices.sort().values
        return probs.gather(1, ids), ids


def fake_recorder(
    folder, samples: int, bytes_per_token: int = 1, start_step: int = 0, gives_ids: bool = False
):
    """A recorder of one layer, and what runs a microbatch: tokens [b, s], chances [b, s, E]."""
    chunk, router = nn.Identity(), FakeRouter(gives_ids)
    router.layer_number = 7
    layer = SimpleNamespace(router=router, config=SimpleNamespace(num_moe_experts=3))
    recorder = RouteRecorder(
        step_files.StepFiles(folder, steps_per_file=100, pp_rank=0, pp_size=1),
        chunks=[chunk],
        layers=[layer],
        samples=samples,
        start_step=start_step,
        vocab_size=10,
        bytes_per_token=bytes_per_token,
    )

    def run_microbatch(tokens: list, probs: list) -> None:
        chunk(torch.tensor(tokens))
        router(torch.tensor(probs).transpose(0, 1))

    return recorder, run_microbatch


FIRST = [[5, 6], [7, 8]], [[[0.1, 0.9, 0], [0.8, 0, 0.2]], [[0, 0.6, 0.4], [0.3, 0.7, 0]]]
SECOND = [[1, 2], [3, 4]], [[[0.9, 0.1, 0], [0, 0.2, 0.8]], [[1, 1, 0], [1, 1, 0]]]


@pytest.mark.parametrize("gives_ids", [False, True], ids=["map", "ids"])
def test_choices_by_hand(tmp_path, gives_ids):
    """Sample by sample, the most probable first; the fourth sample is not asked for."""
    recorder, run_microbatch = fake_recorder(tmp_path, samples=3, gives_ids=gives_ids)
    run_microbatch(*FIRST)
    with torch.no_grad():
        run_microbatch(*SECOND)
    run_microbatch(*SECOND)
    recorder.write(1)
    recorder.close()
    routes = read_routes(tmp_path)
    assert routes.layers == (7,)
    assert routes.token.tolist() == [5, 6, 7, 8, 1, 2]
    assert routes.sample.tolist() == [0, 0, 1, 1, 2, 2]
    assert routes.choice[0].tolist() == [[1, 0], [0, 2], [1, 2], [1, 0], [0, 1], [2, 1]]


def test_memory_is_bounded(tmp_path, monkeypatch):
    """A file is written before its time when what is kept takes more than it may."""
    monkeypatch.setattr(step_files, "_MOST_BYTES", 2 * 4 * 10)
    recorder, run_microbatch = fake_recorder(tmp_path, samples=2, bytes_per_token=10)
    for step in range(1, 6):
        run_microbatch(*FIRST)
        recorder.write(step)
    recorder.close()
    names = [path.name for path in sorted(tmp_path.iterdir())]
    assert names == ["step_00000003_stage_0.npz", "step_00000005_stage_0.npz"]
    assert read_routes(tmp_path).num_samples == 5 * 2


def test_a_damaged_file_is_moved_aside(tmp_path, caplog):
    """Of three files one is empty, one goes beyond the checkpoint, one is whole."""
    recorder, run_microbatch = fake_recorder(tmp_path, samples=2)
    for step in (1, 2, 3):
        run_microbatch(*FIRST)
        recorder.write(step)
        recorder.flush()
    recorder.close()
    names = [path.name for path in sorted(tmp_path.iterdir())]
    (tmp_path / names[0]).write_bytes(b"")
    recorder, run_microbatch = fake_recorder(tmp_path, samples=2, start_step=2)
    assert [path.name for path in sorted(tmp_path.iterdir())] == [f"{names[0]}.damaged", names[1]]
    (record,) = caplog.records
    assert record.getMessage().startswith(
        f"warning: {tmp_path / names[0]}, now {names[0]}.damaged: "
    )
    run_microbatch(*FIRST)
    recorder.write(3)
    recorder.close()
    assert read_routes(tmp_path).num_samples == 2 * 2


def test_nothing_is_recorded_unless_asked_for(data, tmp_path):
    run_ranks(_train, 2, [*overrides(data, tmp_path), *RECORDED])
    assert (tmp_path / "trace").exists()
    assert not (tmp_path / "routes").exists()


def test_routes_need_steps_per_file(data, tmp_path):
    config = load_config([*overrides(data, tmp_path), "logging.route_samples=1"])
    with pytest.raises(ConfigError, match=r"route_samples \(1\) needs logging.trace_steps > 0"):
        validate(config, num_ranks=2)


def test_sem_moe_learns_from_a_run(data, tmp_path, capsys):
    arguments = [*overrides(data, tmp_path), *RECORDED]
    run_ranks(_train, 2, [*arguments, f"logging.route_samples={EVERY_SAMPLE}"])
    out = tmp_path / "semantics.npz"
    words = ["place", "sem_moe", tmp_path / "routes", "--ranks", "2", "--out", out, "--json"]
    assert cli.main([str(word) for word in words]) == 0
    assert '"samples": 16' in capsys.readouterr().out
    assert out.exists()


def part(first_expert: int, layer: int = 1, token: int = 0) -> Routes:
    choice = np.full((1, 2, 1), first_expert, dtype=np.int16)
    return Routes(np.array([token, 1]), np.array([0, 1]), (layer,), choice, 5, 4)


def test_steps_with_another_number_of_stages_come_together(tmp_path):
    for layer in (1, 2):
        write_routes(tmp_path / f"step_1_stage_{layer - 1}.npz", part(0, layer))
    both = part(0)
    choice = np.concatenate([both.choice, both.choice])
    write_routes(tmp_path / "step_2_stage_0.npz", replace(both, layers=(1, 2), choice=choice))
    write_routes(tmp_path / "step_3_stage_1.npz", part(0, 2))  # Its first stage was killed.
    routes = read_routes(tmp_path)
    assert (routes.layers, routes.num_samples) == ((1, 2), 4)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "is a folder without .npz files"),
        ({"step_1_stage_0": part(0), "step_2_stage_0": part(0, layer=2)}, "must be those of"),
        ({"step_1_stage_0": part(0), "step_1_stage_1": part(0)}, "must differ"),
        ({"step_1_stage_0": part(0), "step_1_stage_1": part(0, 2, token=3)}, "must be those of"),
    ],
)
def test_folders_that_are_no_routes(tmp_path, files, message):
    for name, routes in files.items():
        write_routes(tmp_path / f"{name}.npz", routes)
    with pytest.raises((FileNotFoundError, ValueError), match=message):
        read_routes(tmp_path)
