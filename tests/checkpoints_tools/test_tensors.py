"""`Tensors` reads a tensor whole or in part, whatever pieces a checkpoint stores it in."""

from __future__ import annotations

import pickle
from pathlib import Path

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

from checkpoints_tools.tensors import Tensors

WHOLE = torch.arange(6 * 4.0).reshape(6, 4)
PIECES = {(0, 0): (2, 4), (2, 0): (4, 1), (2, 1): (4, 3)}


def _write(folder: Path, pieces: dict[tuple[int, int], tuple[int, int]]) -> Tensors:
    chunks, places = [], {}
    with (folder / "data").open("wb") as file:
        for (row, column), (rows, columns) in pieces.items():
            offset = torch.Size((row, column))
            chunks.append(ChunkStorageMetadata(offset, torch.Size((rows, columns))))
            begin = file.tell()
            torch.save(WHOLE[row : row + rows, column : column + columns].clone(), file)
            places[MetadataIndex("x", offset)] = _StorageInfo("data", begin, file.tell() - begin)
    entry = TensorStorageMetadata(TensorProperties(torch.float32), WHOLE.shape, chunks)
    table = Metadata({"x": entry}, storage_data=places)
    (folder / ".metadata").write_bytes(pickle.dumps(table))
    return Tensors(folder)


@pytest.mark.parametrize(
    ("start", "sizes"), [((0, 0), (6, 4)), ((2, 1), (4, 3)), ((1, 0), (3, 2)), ((5, 3), (1, 1))]
)
def test_a_part_is_put_together_from_its_pieces(
    start: tuple[int, int], sizes: tuple[int, int], tmp_path: Path
) -> None:
    tensors = _write(tmp_path, PIECES)
    (row, column), (rows, columns) = start, sizes
    expected = WHOLE[row : row + rows, column : column + columns]
    assert torch.equal(tensors.read("x", start, sizes), expected)
    assert torch.equal(tensors.read("x"), WHOLE)
    assert (tensors.keys, tensors.shape("x"), tensors.dtype("x")) == ({"x"}, [6, 4], "float32")


def test_what_is_not_there_is_no_part(tmp_path: Path) -> None:
    tensors = _write(tmp_path, {place: PIECES[place] for place in ((0, 0), (2, 0))})
    assert torch.equal(tensors.read("x", (0, 0), (3, 1)), WHOLE[:3, :1])
    for part in ((), ((2, 0), (1, 2)), ((5, 0), (2, 1))):
        with pytest.raises(ValueError, match=f"{tmp_path}: x is not stored whole"):
            tensors.read("x", *part)
