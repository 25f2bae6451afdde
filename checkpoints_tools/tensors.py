"""The tensors of a checkpoint, read one by one, whole or in part. Nothing in it is run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpoints_tools.contents import read_metadata, sizes_of_pieces
from checkpoints_tools.folder import stored_bytes
from checkpoints_tools.pickles import read_tensor

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
        metadata = read_metadata(folder)
        entries = metadata.state_dict_metadata.items()
        self._entries = {key: entry for key, entry in entries if hasattr(entry, "chunks")}
        lengths = sizes_of_pieces(metadata)
        self._pieces: dict[str, dict[tuple[int, ...], tuple[tuple[int, ...], Any]]] = {}
        for index, stored in metadata.storage_data.items():
            if index.fqn in self._entries:
                offset = tuple(index.offset or (0,) * len(self._entries[index.fqn].size))
                if (sizes := lengths.get((index.fqn, offset))) is not None:
                    self._pieces.setdefault(index.fqn, {})[offset] = sizes, stored
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
        for offset, (lengths, stored) in found.items():
            if all(
                first < begins + size and begins < first + length
                for first, length, begins, size in zip(offset, lengths, start, sizes, strict=True)
            ):
                where, dtype = f"{self.folder}: {key}", self._entries[key].properties.dtype
                piece = stored_bytes(self.folder, stored)
                yield offset, read_tensor(piece, where, lengths, dtype)
