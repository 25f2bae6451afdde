"""Megatron's indexed dataset, a `.bin` of tokens and an `.idx` of documents: made and opened.

The only file of this room that imports Megatron, since the format is Megatron's. The import takes
seconds, and neither `--help` nor reading a manifest must wait for it, so it comes at first use.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ext.data.manifest import Manifest


def new_domain(prefix: Path, *, vocab_size: int) -> Any:
    """Return an `IndexedDatasetBuilder` of Megatron that writes `PREFIX.bin`.

    Args:
        prefix: Path of the domain's files, without the suffix.
        vocab_size: Number of token ids; it decides the type in which tokens are kept.
    """
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    return IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(vocab_size))


def open_domain(manifest: Manifest, name: str) -> Any:
    """Return a domain's `IndexedDataset` of Megatron, after checking that it is all there.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: The `.idx` is cut off, or manifest, `.idx` and `.bin` disagree about the number
            of tokens.
    """
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    prefix = manifest.prefix(name)
    if not IndexedDataset.exists(prefix):
        raise FileNotFoundError(f"domain {name}: {prefix}.bin or .idx does not exist")
    _check_index(Path(f"{prefix}.idx"), name)
    dataset = IndexedDataset(prefix)
    by_manifest = manifest.domains[name].tokens
    by_index = int(dataset.sequence_lengths.sum(dtype=np.int64))
    on_disk = Path(f"{prefix}.bin").stat().st_size // np.dtype(dataset.index.dtype).itemsize
    if not by_manifest == by_index == on_disk:
        raise ValueError(
            f"domain {name}: {prefix} was changed or cut off: tokens by the manifest "
            f"{by_manifest}, by the .idx {by_index}, in the .bin {on_disk}"
        )
    return dataset


_INDEX_HEADER = struct.Struct("<9sQBQQ")
"""Of an `.idx`: magic, version, type of the tokens, number of sequences, number of documents."""


def _check_index(path: Path, domain: str) -> None:
    """Check that an index is as long as its header says; Megatron only says that a buffer ends."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header = file.read(_INDEX_HEADER.size)
    expected = _INDEX_HEADER.size
    if size >= expected:
        *_, sequences, documents = _INDEX_HEADER.unpack(header)
        # Each sequence has a length (int32) and a place (int64), each document a first sequence.
        expected += 12 * sequences + 8 * documents
    if size < expected:
        raise ValueError(f"domain {domain}: {path} is cut off: {size} bytes of {expected}")
