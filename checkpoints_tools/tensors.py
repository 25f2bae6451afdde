"""The tensors of a checkpoint, read one by one, whole or in part. Nothing in it is run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpoints_tools.contents import read_metadata, sizes_of_pieces
from checkpoints_tools.folder import stored_bytes
from checkpoints_tools.pickles import read_object

if TYPE_CHECKING:
    import torch


class Tensors:
    """The tensors of the checkpoint in a folder.

    Attributes:
        folder: Where it lies.
        keys: The names of all its tensors, the optimizer's included.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._table = read_metadata(folder)
        entries = self._table.state_dict_metadata.items()
        self._entries = {key: entry for key, entry in entries if hasattr(entry, "chunks")}
        lengths = sizes_of_pieces(self._table)
        self._pieces: dict[str, dict[tuple[int, ...], tuple[tuple[int, ...], Any]]] = {}
        for index in self._table.storage_data:
            if index.fqn in self._entries:
                offset = tuple(index.offset or (0,) * len(self._entries[index.fqn].size))
                if (sizes := lengths.get((index.fqn, offset))) is not None:
                    self._pieces.setdefault(index.fqn, {})[offset] = sizes, index
        self.keys = set(self._entries)

    def shape(self, key: str) -> list[int]:
        """Return the shape of the whole tensor."""
        return list(self._entries[key].size)

    def dtype(self, key: str) -> str:
        """Return the name of its dtype, such as `float32`."""
        return str(self._entries[key].properties.dtype).removeprefix("torch.")

    def read(
        self, key: str, start: Sequence[int] | None = None, sizes: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Return a tensor, or the part of these sizes that begins at `start`.

        Raises:
            ValueError: The checkpoint does not hold all of it.
        """
        import torch

        entry = self._entries[key]
        start = [0] * len(entry.size) if start is None else start
        sizes = entry.size if sizes is None else sizes
        part = torch.empty(tuple(sizes), dtype=entry.properties.dtype)
        missing = part.numel()
        for offset, piece in self._overlapping(key, start, sizes):
            here, there = [], []
            for begins, size, first, length in zip(start, sizes, offset, piece.shape, strict=True):
                low, high = max(begins, first), min(begins + size, first + length)
                here.append(slice(low - begins, high - begins))
                there.append(slice(low - first, high - first))
            missing -= part[tuple(here)].numel()
            part[tuple(here)] = piece[tuple(there)]
        if missing:
            raise ValueError(f"{self.folder}: {key} is not stored whole")
        return part

    def _overlapping(
        self, key: str, start: Sequence[int], sizes: Sequence[int]
    ) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
        """Yield the pieces that have something of the part, and where they begin."""
        pieces = self._pieces.get(key, {})
        # Of thousands of experts' pieces, mostly one is asked for.
        exact = pieces.get(tuple(start))
        found = {tuple(start): exact} if exact and exact[0] == tuple(sizes) else pieces
        for offset, (lengths, index) in found.items():
            if all(
                first < begins + size and begins < first + length
                for first, length, begins, size in zip(offset, lengths, start, sizes, strict=True)
            ):
                yield offset, read_piece(self.folder, self._table, index, lengths)


def read_piece(folder: Path, table: Any, index: Any, sizes: Sequence[int]) -> torch.Tensor:
    """Read a piece of a tensor, by its place in the table's `storage_data`.

    Raises:
        ForeignClassError, ValueError: As of `read_object`; or it is of other sizes or another dtype
            than the table says, or no tensor.
    """
    import torch

    read = read_object(stored_bytes(folder, table.storage_data[index]))
    dtype = table.state_dict_metadata[index.fqn].properties.dtype
    is_plain = isinstance(read, torch.Tensor) and read.layout == torch.strided and not read.is_meta
    # A number that is there many times by its strides would be written out.
    is_plain = is_plain and read.nbytes <= read.untyped_storage().nbytes()
    if not is_plain or tuple(read.shape) != tuple(sizes) or read.dtype != dtype:
        raise ValueError(
            f"{folder}: {index.fqn} is not stored as {list(sizes)} of {dtype}, as its table says"
        )
    tensor: torch.Tensor = read
    return tensor
