"""What is said about a checkpoint is compared with what was saved (one gloo rank)."""

import dataclasses
import json
import os
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from checkpoints_tools import (
    CheckpointContents,
    Entry,
    expert_norms,
    find_problems,
    read_contents,
)
from checkpoints_tools.folder import list_checkpoints, newest_of
from tests.damage.good import write_checkpoint
from tests.ranks import run_ranks


def _save(rank: int, folders: list[str]) -> dict[str, tuple[int, float]]:
    """Save a model in each style; return size and squared norm of each parameter."""
    from megatron.core import dist_checkpointing

    from tests.gpt import build_gpt

    gpt = build_gpt(num_layers=2, experts=6)
    gpt.train_step(0)
    # Megatron can store an expert's tensors together or each under a key of its own.
    for folder, singleton in zip(folders, (False, True), strict=True):
        model = gpt.chunks[0].module.sharded_state_dict(
            metadata={"singleton_local_shards": singleton}
        )
        state = {"model": model, "iteration": 12}
        if not singleton:
            state["optimizer"] = gpt.optimizer.sharded_state_dict(model)
        os.makedirs(folder)
        dist_checkpointing.save(state, folder)
    return {name: (p.numel(), float(p.square().sum())) for name, p in gpt.named_parameters()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with two checkpoints of one model, and what `_save` says of its parameters."""
    folder = tmp_path_factory.mktemp("checkpoints")
    folders = [str(folder / "step_9"), str(folder / "step_12")]
    (parameters,) = run_ranks(_save, 1, folders)
    return folder, parameters


@pytest.mark.parametrize("content", [b"", b"x", b"\x80\x04ctorch\nSize\nK\x01R."])
def test_a_damaged_table_of_contents(tmp_path, content):
    (tmp_path / "metadata.json").write_text("{}")
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(ValueError, match=r"\.metadata is cut off or damaged"):
        read_contents(tmp_path)


@pytest.mark.parametrize(("offset", "length"), [(0, None), (-1, 4), (0, "4")])
def test_places_of_another_type(tmp_path, offset, length):
    """As a flipped bit of a table makes them."""
    table = Metadata({}, storage_data={MetadataIndex("a"): _StorageInfo("x", offset, length)})
    (tmp_path / ".metadata").write_bytes(pickle.dumps(table))
    with pytest.raises(ValueError, match=r"\.metadata is cut off or damaged"):
        read_contents(tmp_path)


def test_tensors_have_the_axes_that_their_names_say(tmp_path):
    (tmp_path / "metadata.json").write_text("{}")
    layers, properties = "decoder.layers", TensorProperties(dtype=torch.float32)
    for key, sizes in {
        "embedding.word_embeddings.weight": (),
        f"{layers}.final.weight": (),
        f"{layers}.mlp.router.weight": (4, 8),
        f"{layers}.0.mlp.router.weight": (4,),
        f"{layers}.0.mlp.router.expert_bias": (),
        f"{layers}.mlp.experts.experts.linear_fc1.weight": (2, 4, 8),
        f"optimizer.state.exp_avg.{layers}.mlp.experts.experts.linear_fc1.bias": (2,),
        f"{layers}.0.mlp.experts.experts.3.linear_fc2.weight": (),
    }.items():
        entry = TensorStorageMetadata(properties, sizes, [])
        (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata({key: entry}, storage_data={})))
        with pytest.raises(ValueError, match=rf"{tmp_path}: {key} is of \[.*\], too few axes"):
            read_contents(tmp_path)


@pytest.mark.parametrize("name", ["step_9", "step_12"])
def test_a_checkpoint_of_megatron(saved, name):
    folder, parameters = saved
    contents = read_contents(folder / name)
    assert contents.folder == folder / name
    assert contents.step == 12
    assert contents.num_experts == 6
    assert contents.num_parameters == sum(size for size, _ in parameters.values())
    assert find_problems(contents) == []


def test_entries(saved):
    folder, _ = saved
    entries = {entry.key: entry for entry in read_contents(folder / "step_9").entries}
    weight = "decoder.layers.mlp.experts.experts.linear_fc1.weight"
    expected = Entry(key=weight, shape=(2, 6, 32, 16), dtype="float32", num_shards=12)
    assert entries[weight] == expected
    moment = next(key for key in entries if key.endswith(f"exp_avg.{weight}"))
    assert dataclasses.replace(expected, key=moment) == entries[moment]
    extra = entries["decoder.layers.mlp.experts.experts.linear_fc1._extra_state"]
    assert (extra.shape, extra.dtype) == (None, None)
    assert list(entries) == sorted(entries)


@pytest.mark.parametrize("name", ["step_9", "step_12"])
def test_shape_of_the_model(saved, name):
    contents = read_contents(saved[0] / name)
    shape = contents.model_shape()
    assert shape.pop("vocab_size") > 1
    assert shape == {
        "num_layers": 2,
        "num_moe_layers": 2,
        "hidden_size": 16,
        "expert_hidden_size": 32,
    }
    assert contents.dtypes() == ["float32"]
    assert contents.has_optimizer() == (name == "step_9")


def test_norms_of_experts(saved):
    """Of both ways to store experts, against the weights themselves."""
    folder, parameters = saved
    expected = {1: [0.0] * 6, 2: [0.0] * 6}
    for name, (_, square) in parameters.items():
        if match := re.search(r"layers\.(\d)\.mlp\.experts\.(\d)\.linear", name):
            expected[int(match[1]) + 1][int(match[2])] += square
    for style in ("step_9", "step_12"):
        norms = expert_norms(folder / style)
        assert norms.keys() == expected.keys()
        for layer, of_layer in norms.items():
            assert of_layer == pytest.approx(np.sqrt(expected[layer]), rel=1e-5)
            assert min(of_layer) > 0


def test_layers_without_number_are_not_counted():
    key, shape = "decoder.layers.mlp.router.weight", (2**40, 2, 4)
    entry = Entry(key=key, shape=shape, dtype="float32", num_shards=1)
    contents = CheckpointContents(
        folder=Path("c"), step=1, num_experts=2, num_parameters=1, entries=[entry]
    )
    with pytest.raises(ValueError, match=f"^c: {re.escape(key)} is of {2**40} layers$"):
        contents.model_shape()


def test_what_no_checksum_covers_has_no_norms(tmp_path):
    write_checkpoint(tmp_path / "step_1")
    assert expert_norms(tmp_path / "step_1").keys() == {1, 2}
    file = tmp_path / "step_1" / "checksums.json"
    content = json.loads(file.read_text())
    del content["files"]["__0_0.distcp"]
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"step_1: __0_0\.distcp is not covered: "):
        expert_norms(tmp_path / "step_1")


def test_the_newest_of_a_folder(saved, tmp_path):
    folder, _ = saved
    assert read_contents(folder).folder.name == "step_12"
    # A run directory, of which a run died while saving.
    (tmp_path / "checkpoints").symlink_to(folder)
    assert read_contents(tmp_path).folder.name == "step_12"


def test_a_copy_of_a_checkpoint_is_no_checkpoint_of_the_run(tmp_path):
    """A run would go on from the copy, and delete it."""
    folders = tmp_path / "checkpoints"
    for name in ("step_00000012", "step_00000009", "step_00000009_copy", "before_2026"):
        (folders / name).mkdir(parents=True)
        (folders / name / "metadata.json").touch()
    assert [each.name for each in list_checkpoints(tmp_path)] == ["step_00000009", "step_00000012"]
    assert newest_of(tmp_path).name == "step_00000012"


def test_step_of_our_own_runs(saved, tmp_path):
    folder, _ = saved
    own = tmp_path / "step_34"
    own.mkdir()
    for file in (folder / "step_9").iterdir():
        (own / file.name).symlink_to(file)
    (own / "run.json").write_text(json.dumps({"step": 34}))
    assert read_contents(own).step == 34


def test_no_checkpoint(tmp_path):
    with pytest.raises(FileNotFoundError, match="absent is not a folder"):
        read_contents(tmp_path / "absent")
    with pytest.raises(FileNotFoundError, match=f"no Megatron checkpoint in {tmp_path}"):
        read_contents(tmp_path)
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    with pytest.raises(ValueError, match="not written to the end"):
        read_contents(tmp_path)


def contents_of(**shapes: tuple[int, ...]) -> CheckpointContents:
    """A checkpoint of a model with four experts and the given keys (`__` stands for a dot)."""
    entries = [
        Entry(key=key.replace("__", "."), shape=shape, dtype="float32", num_shards=1)
        for key, shape in shapes.items()
    ]
    return CheckpointContents(
        folder=Path("x"), step=1, num_experts=4, num_parameters=0, entries=entries
    )


class TestProblems:
    def test_slots_saved_as_experts(self):
        contents = contents_of(
            decoder__layers__mlp__experts__experts__linear_fc1__weight=(2, 6, 8, 4),
            decoder__layers__mlp__experts__experts__linear_fc2__weight=(2, 4, 4, 8),
        )
        assert find_problems(contents) == [
            "key decoder.layers.mlp.experts.experts.linear_fc1.weight holds 6 experts, the router 4"
        ]

    def test_single_experts(self):
        prefix = "optimizer__exp_avg__decoder__layers__0__mlp__experts__experts"
        keys = {f"{prefix}__{expert}__linear_fc1__weight": (8, 4) for expert in (0, 1, 2, 3)}
        assert find_problems(contents_of(**keys)) == []
        keys |= {f"{prefix}__{expert}__linear_fc1__weight": (8, 4) for expert in (4, 5, 7)}
        assert find_problems(contents_of(**keys)) == [
            "key optimizer.exp_avg.decoder.layers.0.mlp.experts.experts.linear_fc1.weight is there "
            "for experts 0-5, 7, the router has 4"
        ]

    @pytest.mark.parametrize(
        "key", ["mlp__experts__slot_weights", "slots__grad", "mlp__replica__weight", "Replicas"]
    )
    def test_names(self, key):
        (problem,) = find_problems(contents_of(**{key: (1,)}))
        assert problem.startswith(f"key {key.replace('__', '.')} names something")

    def test_harmless_names(self):
        assert find_problems(contents_of(slotted=(1,), my_replication=(1,))) == []
