"""A checkpoint with experts moved, loaded by Megatron (one gloo rank), against what was saved."""

import argparse
import dataclasses
import multiprocessing
import os
import pickle
import shutil
import signal

import numpy as np
import pytest
import torch
from megatron.core.transformer import TransformerConfig

from checkpoints_tools import compare, find_problems, prepare_relayout, read_contents, relayout
from checkpoints_tools.contents import read_metadata
from checkpoints_tools.folder import hash_file, verify
from tests.ranks import run_ranks

ORDER = {1: np.array([4, 0, 5, 2, 1, 3]), 2: np.array([1, 0, 2, 3, 5, 4])}
STYLES = ("together", "each expert")
BIASES = {
    "expert_bias": dict(
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_load_balancing_type="none",
    )
}
"""Routers that choose by a bias of each expert, by its name."""
if hasattr(TransformerConfig, "moe_router_quantile_balancing_ema"):  # From megatron-core 0.19 on.
    BIASES["qb_beta"] = dict(
        moe_router_load_balancing_type="quantile_balancing", micro_batch_size=3
    )


def _save(rank: int, folder: str, bias: str = "") -> list[list[float]]:
    """Save a model in each style; return what it computes."""
    from megatron.core import dist_checkpointing

    from tests.gpt import build_gpt

    gpt = build_gpt(num_layers=2, experts=6, **BIASES.get(bias, {}))
    gpt.train_step(0)
    for module in gpt.chunks[0].modules():
        if bias and (biases := dict(module.named_buffers(recurse=False)).get(bias)) is not None:
            biases.copy_(torch.tensor([0.5, -0.5, 0.3, -0.3, 0.1, -0.1]))
    for style in STYLES:
        os.makedirs(f"{folder}/{style}")
        state = gpt.chunks[0].module.sharded_state_dict(
            metadata={"singleton_local_shards": style == "each expert"}
        )
        dist_checkpointing.save({"model": state}, f"{folder}/{style}")
    return _outputs(gpt)


def _load(
    rank: int, folder: str, bias: str = ""
) -> tuple[list[list[float]], dict[str, list[float]]]:
    """Load one into a model of other weights; return what it computes, and some of its weights."""
    from megatron.core import dist_checkpointing

    from tests.gpt import build_gpt

    gpt = build_gpt(num_layers=2, experts=6, seed=1, **BIASES.get(bias, {}))
    before = _outputs(gpt)
    module = gpt.chunks[0].module
    state = module.sharded_state_dict(
        metadata={"singleton_local_shards": folder.endswith("each expert")}
    )
    module.load_state_dict(dist_checkpointing.load({"model": state}, folder)["model"])
    after = _outputs(gpt)
    assert not np.allclose(before, after)
    weights = {name: value for name, value in gpt.parameters().items() if "mlp" in name}
    return after, {name: value.flatten()[:5].tolist() for name, value in weights.items()}


def _outputs(gpt) -> list[list[float]]:
    gpt.seed = 7  # Of the tokens.
    with torch.no_grad():
        (report,) = gpt.forward_backward(forward_only=True)
    return report["logits"].flatten(0, 1).tolist()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    (outputs,) = run_ranks(_save, 1, str(folder))
    return folder, outputs


@pytest.mark.parametrize("style", STYLES)
def test_the_model_computes_the_same(saved, style, tmp_path):
    folder, outputs = saved
    moved = tmp_path / style
    assert relayout(folder / style, ORDER, moved) == 2 * (1 + 2 * 6)
    assert find_problems(read_contents(moved)) == []
    assert read_contents(moved).num_parameters == read_contents(folder / style).num_parameters
    ((found, weights),) = run_ranks(_load, 1, str(moved))
    np.testing.assert_allclose(found, outputs, rtol=1e-5, atol=1e-6)
    ((again, before),) = run_ranks(_load, 1, str(folder / style))
    assert again == outputs
    for layer in (0, 1):
        for place, expert in enumerate(ORDER[layer + 1].tolist()):
            name = f"decoder.layers.{layer}.mlp.experts.{{}}.linear_fc1.weight".format
            assert weights[name(place)] == before[name(expert)]
    router = "decoder.layers.0.mlp.router.weight"
    assert weights[router] != before[router]


@pytest.mark.parametrize("bias", BIASES)
def test_biases_move_with_their_experts(bias, tmp_path):
    (outputs,) = run_ranks(_save, 1, str(tmp_path), bias)
    relayout(tmp_path / "together", ORDER, tmp_path / "moved")
    ((found, _),) = run_ranks(_load, 1, str(tmp_path / "moved"), bias)
    np.testing.assert_allclose(found, outputs, rtol=1e-5, atol=1e-6)


def test_groups_that_a_router_chooses_among_stay_together(saved, tmp_path):
    shutil.copytree(saved[0] / "together", tmp_path / "grouped")
    arguments = argparse.Namespace(moe_router_num_groups=2, moe_router_group_topk=1)
    torch.save({"args": arguments}, tmp_path / "grouped" / "common.pt")
    with pytest.raises(ValueError, match="layer 1: its router chooses among 2 groups of neighbor"):
        relayout(tmp_path / "grouped", ORDER, tmp_path / "parted")
    relayout(tmp_path / "grouped", {2: np.array([5, 3, 4, 1, 0, 2])}, tmp_path / "moved")
    arguments.moe_router_group_topk = None
    torch.save({"args": arguments}, tmp_path / "grouped" / "common.pt")
    relayout(tmp_path / "grouped", ORDER, tmp_path / "free")


def test_unknown_tensors_of_experts_are_refused(saved, tmp_path):
    shutil.copytree(saved[0] / "together", tmp_path / "adapted")
    table = read_metadata(tmp_path / "adapted")
    known = "decoder.layers.mlp.experts.experts.linear_fc2.weight"
    adapter = known.replace("linear_fc2", "linear_fc2.adapter")
    table.state_dict_metadata[adapter] = table.state_dict_metadata[known]
    for index, stored in [*table.storage_data.items()]:
        if index.fqn == known:
            table.storage_data[dataclasses.replace(index, fqn=adapter)] = stored
    (tmp_path / "adapted" / ".metadata").write_bytes(pickle.dumps(table))
    with pytest.raises(ValueError, match=r"it is not known what of .*adapter\.weight is each exp"):
        relayout(tmp_path / "adapted", ORDER, tmp_path / "moved")


def test_layers_that_are_not_named_stay(saved, tmp_path):
    folder, outputs = saved
    assert relayout(folder / "together", {2: ORDER[2]}, tmp_path / "together") == 1 + 2 * 6
    ((found, _),) = run_ranks(_load, 1, str(tmp_path / "together"))
    np.testing.assert_allclose(found, outputs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ({1: np.arange(8)}, "layer 1 has 6 experts, the layout 8"),
        ({3: np.arange(6)}, "has routers in 0 of the 1 layers 3"),
    ],
)
def test_layouts_that_do_not_fit(saved, tmp_path, order, message):
    with pytest.raises(ValueError, match=message):
        relayout(saved[0] / "together", order, tmp_path / "moved")
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_replaced(saved, tmp_path):
    with pytest.raises(FileExistsError, match=f"{tmp_path} exists already"):
        relayout(saved[0] / "together", ORDER, tmp_path)
    shutil.rmtree(tmp_path)
    with pytest.raises(FileNotFoundError, match="absent is not a folder"):
        relayout(saved[0] / "absent", ORDER, tmp_path)


def _files(folder):
    return {path.name: hash_file(path) for path in folder.iterdir()}


def _write_and_die(prepared, place):
    """Write, and be killed at a place: after so many pieces of copied bytes, or syncs."""
    places = iter(range(1000))

    def die_here(*_):
        if next(places) == place:
            os.kill(os.getpid(), signal.SIGKILL)

    os.fsync = die_here
    prepared.write(die_here)


def test_a_killed_relayout_leaves_no_result_and_the_source_as_it_was(saved, tmp_path):
    source, out = tmp_path / "source", tmp_path / "moved"
    shutil.copytree(saved[0] / "together", source)
    before = _files(source)
    fork = multiprocessing.get_context("fork")
    died = 0
    while not out.exists():  # The last one dies behind the rename.
        prepared = prepare_relayout(source, ORDER, out)
        killed = fork.Process(target=_write_and_die, args=(prepared, died))
        killed.start()
        killed.join()
        assert killed.exitcode == -signal.SIGKILL
        assert _files(source) == before
        died += 1
    assert died > 2 * len(before)
    assert verify(out).problems == []
    relayout(source, ORDER, tmp_path / "whole")
    assert compare(out, tmp_path / "whole").moved_layers == []
    shutil.rmtree(out)
    assert relayout(source, ORDER, out) == 2 * (1 + 2 * 6)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["moved", "source", "whole"]
    assert verify(out).problems == []


def test_a_full_disk_is_said_before_anything_is_written(saved, tmp_path, monkeypatch):
    prepared = prepare_relayout(saved[0] / "together", ORDER, tmp_path / "deep" / "moved")
    size = sum(path.stat().st_size for path in (saved[0] / "together").iterdir())
    assert size <= prepared.num_bytes < 1.5 * size
    free = shutil.disk_usage(tmp_path)._replace(free=prepared.num_bytes - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    with pytest.raises(OSError, match=rf"moved cannot be written: {free.free:,} bytes free, .*"):
        prepared.write()
    assert list(tmp_path.iterdir()) == []


def test_a_failed_copy_leaves_nothing(saved, tmp_path):
    def fail(num_bytes):
        raise OSError("no more room")

    with pytest.raises(OSError, match="no more room"):
        prepare_relayout(saved[0] / "together", ORDER, tmp_path / "moved").write(fail)
    assert list(tmp_path.iterdir()) == []


def test_two_cannot_write_the_same_folder_at_once(saved, tmp_path):
    first, second = (
        prepare_relayout(saved[0] / "together", ORDER, tmp_path / "moved") for _ in range(2)
    )

    def write_the_second(num_bytes):
        with pytest.raises(FileExistsError, match=r"another process writes in .*\.moved\.partial"):
            second.write()

    first.write(write_the_second)
    assert verify(tmp_path / "moved").problems == []
    assert [path.name for path in tmp_path.iterdir()] == ["moved"]


def test_all_bytes_are_counted(saved, tmp_path):
    prepared, copied = prepare_relayout(saved[0] / "together", ORDER, tmp_path / "moved"), []
    assert list(tmp_path.iterdir()) == []
    prepared.write(copied.append)
    assert 0.5 * prepared.num_bytes < sum(copied) <= prepared.num_bytes


def test_layers_of_an_earlier_relayout_stay_as_they_are(saved, tmp_path):
    """Their routers are in that one's file."""
    relayout(saved[0] / "together", ORDER, tmp_path / "once")
    relayout(tmp_path / "once", {2: ORDER[2]}, tmp_path / "twice")
    assert verify(tmp_path / "twice").problems == []
    found = compare(tmp_path / "once", tmp_path / "twice")
    assert (found.differences, found.moved_layers) == ([], [2])
