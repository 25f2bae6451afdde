"""A checkpoint that somebody else wrote runs nothing, wherever it is read.

Each place of a checkpoint that is a pickle gets one that makes a file when it is loaded; with
checksums that fit, as whoever made the checkpoint could write them.
"""

from __future__ import annotations

import io
import os
import pickle
import re
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from checkpoints_tools.folder import CHECKSUMS_FILE, hash_file, write_checksums
from checkpoints_tools.pickles import ForeignClassError, read_object, read_table
from megatron_ext.config import ConfigError
from megatron_ext.files.relayout import write_layout
from megatron_ext.trainer.compose import load_config
from megatron_ext.trainer.ranks.launch import NO_RESTART
from megatron_ext.trainer.validate import validate
from tests.cli.command import run as run_command
from tests.damage.good import write_checkpoint
from tests.ranks import run_ranks
from tests.trainer.checkpoints.test_checkpoint import NEWEST, OLDER, _train_and_listen
from tests.trainer.dataset import overrides


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self._trace = trace

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.mkdir, (str(self._trace),)


def _into_table(folder: Path, payload: Payload) -> None:
    table = read_table(folder / ".metadata")
    table.planner_data = payload
    (folder / ".metadata").write_bytes(pickle.dumps(table))


def _into_common(folder: Path, payload: Payload) -> None:
    torch.save({"payload": payload}, folder / "common.pt")


def _into_object(folder: Path, payload: Payload) -> None:
    """Put it in the place of the random generators of rank 0, at the end of a shard."""
    table = read_table(folder / ".metadata")
    (index,) = (one for one in table.storage_data if one.fqn == "generators/shard_0_2")
    stored = table.storage_data[index]
    content = io.BytesIO()
    torch.save([payload], content)
    with (folder / stored.relative_path).open("ab") as file:
        table.storage_data[index] = replace(
            stored, offset=file.tell(), length=len(content.getvalue())
        )
        file.write(content.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(table))


PLACES = {
    "table": (_into_table, r"\.metadata names posix\.mkdir, which no checkpoint needs"),
    "common state": (_into_common, r"common\.pt names posix\.mkdir, which no checkpoint needs"),
    "object": (
        _into_object,
        r"__0_\d\.distcp: generators/shard_0_2 names posix\.mkdir, which no checkpoint needs",
    ),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_crafted_checkpoint_runs_nothing(
    place: str,
    data: Path,
    stopped_run: Callable[[], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    insert, said = PLACES[place]
    run_dir, trace = stopped_run(), tmp_path / "trace"
    folder = run_dir / "checkpoints" / NEWEST
    insert(folder, Payload(trace))
    files = [path for path in folder.iterdir() if path.name != CHECKSUMS_FILE]
    write_checksums(folder, {path.name: hash_file(path) for path in files})

    run_command(capsys, "checkpoint", "show", folder)
    status, found, _ = run_command(capsys, "checkpoint", "verify", folder)
    assert (status, found.count("\n")) == (1, 1)
    assert re.fullmatch(f"{folder}: {said}\n", found)
    write_layout(tmp_path / "layout.npz", {1: np.arange(4)})
    words = [folder, tmp_path / "layout.npz", "--out", tmp_path / "moved"]
    run_command(capsys, "checkpoint", "relayout", *words)

    # As the run's own newest, and as where another run starts from.
    other = [*overrides(data, tmp_path / "other"), f"checkpoint.load={folder}"]
    refusal = (
        f"checkpoint {folder}: {said}; loading it may run code that is in it, and needs "
        r"checkpoint\.trust=true"
    )
    for settings in (overrides(data, run_dir), other):
        if place == "table":
            with pytest.raises(ConfigError) as refused:
                validate(load_config(settings), num_ranks=2)
            assert re.fullmatch(refusal, str(refused.value))
        ((lines, status), others) = run_ranks(_train_and_listen, 2, settings)
        assert (status, others) == (NO_RESTART, ([], NO_RESTART))
        assert re.fullmatch(f"error: {refusal}", *lines)
    assert not trace.exists()

    # It would have run.
    run_ranks(_load_as_torch_does, 1, str(folder), place)
    assert trace.is_dir()


def _load_as_torch_does(rank: int, folder: str, place: str) -> None:
    if place == "table":
        with Path(folder, ".metadata").open("rb") as file:
            pickle.load(file)
        return
    if place == "common state":
        torch.load(f"{folder}/common.pt", weights_only=False)
        return
    from torch.distributed.checkpoint import load

    load({"generators/shard_0_2": io.BytesIO()}, checkpoint_id=folder, no_dist=True)


def test_trust_is_needed_for_files_of_another_user(
    data: Path, stopped_run: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = stopped_run()
    folder = run_dir / "checkpoints" / NEWEST
    if os.geteuid() == 0:
        os.chown(folder / "__0_0.distcp", 12345, -1)
        owner, what = 12345, r"__0_0\.distcp"
    else:
        owner, what = os.geteuid(), NEWEST
        monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    config = load_config(overrides(data, run_dir))
    with pytest.raises(ConfigError, match=rf"{what} .*another user \({owner}\).*checkpoint\.trust"):
        validate(config, num_ranks=2)
    config.checkpoint.trust = True
    validate(config, num_ranks=2)


@pytest.mark.parametrize(
    "craft",
    [
        lambda: b"cos\nsystem\n(S'true'\ntR.",
        lambda: pickle.dumps(Payload(Path("/nowhere")), protocol=2),
        lambda: b"\x80\x04\x8c\x05torch\x8c\x08hub.load\x93.",  # By a path through a module.
        lambda: b"\x80\x04\x8c\x05torch\x8c\x04load\x93.",
        lambda: b"cbuiltins\neval\n(S'1'\ntR.",
        lambda: b"(S'1'\nibuiltins\neval\n.",
    ],
)
def test_a_table_names_only_its_own_classes(craft: Callable[[], bytes], tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(craft())
    with pytest.raises(ForeignClassError, match=r"^\.metadata names [\w.]+, "):
        read_table(tmp_path / ".metadata")


@pytest.mark.parametrize(
    "craft",
    [
        lambda: b"\x80\x04Nr\xff\xff\xff\x07.",
        lambda: b"Np2147483647\n.",
        lambda: b"Np-5\n.",
        lambda: b"X\x03\x00\x00\x00rrrNr\xff\xff\xff\x07.",
        lambda: b"\x80\x04\x95\x02" + b"\x00" * 7 + b"NK\x01r\xff\xff\xff\x07.",
        lambda: (
            b"\x80\x04\x95\x04" + b"\x00" * 7 + b"NX\x04\x00\x04\x00\x00\x00aaaar\xff\xff\xff\x07."
        ),
    ],
)
def test_a_table_takes_no_more_memory_than_it_is_long(
    craft: Callable[[], bytes], tmp_path: Path
) -> None:
    (tmp_path / ".metadata").write_bytes(craft())
    why = "it names place .* of its memo|an opcode does not end in its frame"
    with pytest.raises(ValueError, match=rf"^\.metadata is cut off or damaged \(({why})\)$"):
        read_table(tmp_path / ".metadata")


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_tables_of_all_protocols_are_read(protocol: int, tmp_path: Path) -> None:
    places = {MetadataIndex(f"r{i}" * 40): _StorageInfo("f", i, 1) for i in range(3000)}
    table = Metadata({}, storage_data=places)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(table, protocol=protocol))
    assert read_table(tmp_path / ".metadata") == table


@pytest.mark.parametrize("name", ["../secret", "..", "/dev/zero", "a/b", ""])
def test_a_table_names_files_of_its_own_folder(name: object, tmp_path: Path) -> None:
    places = {MetadataIndex("a"): _StorageInfo(name, 0, 1)}  # type: ignore[arg-type]
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata({}, storage_data=places)))
    with pytest.raises(ValueError, match=rf"^\.metadata .*outside .*: {re.escape(repr(name))}$"):
        read_table(tmp_path / ".metadata")


def test_experts_of_a_changed_checkpoint_are_not_moved(
    stopped_run: Callable[[], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """New checksums would hide what was damaged before."""
    folders = stopped_run() / "checkpoints"
    write_layout(tmp_path / "layout.npz", {1: np.array([1, 0, 3, 2])})
    words = ["checkpoint", "relayout", folders / OLDER, tmp_path / "layout.npz", "--out"]
    assert run_command(capsys, *words, tmp_path / "whole")[0] == 0
    assert run_command(capsys, "checkpoint", "verify", tmp_path / "whole")[0] == 0
    for name in ("__1_0.distcp", ".metadata"):
        file = folders / OLDER / name
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
        status, out, err = run_command(capsys, *words, tmp_path / "out")
        assert (status, out) == (2, "")
        assert f"{folders / OLDER}: {name} was changed: its checksum is another" in err
    assert not list(tmp_path.glob(".out*")) + list(tmp_path.glob("out"))


def test_an_object_is_not_larger_than_its_file(tmp_path: Path) -> None:
    stored = io.BytesIO()
    torch.save({"x": torch.zeros(10**6)}, stored)
    assert read_object(stored)["x"].numel() == 10**6
    packed = io.BytesIO()
    with zipfile.ZipFile(stored) as old, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    with pytest.raises(ValueError, match=r"it has \d{4} bytes, and 4\d{6} when it is unp"):
        read_object(packed)


ROUTER = "decoder.layers.0.mlp.router.weight"


@pytest.mark.parametrize(
    ("stored", "problem"),
    [
        (torch.zeros(2, 2), "is not stored as"),
        (torch.zeros(8, 4, dtype=torch.int64), "is not stored as"),
        (torch.eye(8)[:, :4].to_sparse(), "is not stored as"),
        (torch.zeros(8, 4, device="meta"), "is not stored as"),
        (torch.zeros(1).expand(8, 4), "is not stored as"),
        ({"a": 1}, "is not stored as"),
        (MetadataIndex(ROUTER, torch.Size([1, 0])), "has no place for|is not stored whole"),
    ],
    ids=["smaller", "whole numbers", "sparse", "meta", "one number", "no tensor", "elsewhere"],
)
def test_tensors_are_stored_as_the_table_says(
    stored: Any, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    for folder in (good, bad):
        write_checkpoint(folder)
    table = read_table(bad / ".metadata")
    (index,) = (each for each in table.storage_data if each.fqn == ROUTER)
    place = table.storage_data.pop(index)
    if isinstance(stored, MetadataIndex):
        index = stored
    else:
        with (bad / place.relative_path).open("ab") as file:
            start = file.tell()
            torch.save(stored, file)
            place = replace(place, offset=start, length=file.tell() - start)
    table.storage_data[index] = place
    (bad / ".metadata").write_bytes(pickle.dumps(table))
    (bad / CHECKSUMS_FILE).unlink()
    write_checksums(bad, {each.name: hash_file(each) for each in bad.iterdir()})
    write_layout(tmp_path / "layout.npz", {1: np.arange(8)[::-1]})
    words = ["relayout", bad, tmp_path / "layout.npz", "--out", tmp_path / "out"]
    for call in (words, ["verify", good, bad]):
        status, _, err = run_command(capsys, "checkpoint", *call)
        assert status == 2
        assert re.search(problem, err), err
        assert ROUTER in err
    assert not (tmp_path / "out").exists()


ENDLESS: Any = ["x"] * 9
for _ in range(9):
    ENDLESS = [ENDLESS] * 9
"""Few lists that name each other: written out, they have 9 ** 10 values."""


def _table(
    name: Any = "a", file: Any = "f", place: Any = 0, size: Any = (4,), dtype: Any = torch.float32
) -> Metadata:
    properties = TensorProperties(dtype=dtype)
    entry = TensorStorageMetadata(properties, size, [ChunkStorageMetadata((0,), size)])
    places = {MetadataIndex(name): _StorageInfo(file, place, 1)}
    return Metadata({"a": entry}, storage_data=places)


@pytest.mark.parametrize(
    "craft",
    [
        lambda: _table(name="x" * 10**6),
        lambda: _table(file=ENDLESS),
        lambda: _table(file=None),
        lambda: _table(place=ENDLESS),
        lambda: _table(place=2**62),
        lambda: _table(size=ENDLESS),
        lambda: _table(size=(2**62, 2**62)),
        lambda: _table(size=(10,) * 10**6),
        lambda: _table(dtype=ENDLESS),
    ],
)
def test_a_table_has_names_places_and_sizes_of_a_checkpoint(
    craft: Callable[[], Metadata], tmp_path: Path
) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(_table()))
    assert read_table(tmp_path / ".metadata").state_dict_metadata.keys() == {"a"}
    (tmp_path / ".metadata").write_bytes(pickle.dumps(craft()))
    with pytest.raises(ValueError, match=r"^\.metadata is cut off or damaged \(.*") as error:
        read_table(tmp_path / ".metadata")
    assert len(str(error.value)) < 200
