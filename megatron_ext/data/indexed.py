"""Megatron's indexed dataset, a `.bin` of tokens and an `.idx` of documents: made and opened.

Only this file of the room imports Megatron, because the format is Megatron's. The import takes
seconds, and neither `--help` nor reading a manifest must wait for it: it comes at first use.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_ext.arguments import one_line
from megatron_ext.data.manifest import Domain, Manifest

_FIRST_TOKENS = 1 << 16
"""Tokens of a domain that are looked at before a run starts, in less than a millisecond: a dataset
of another tokenizer shows there."""


def new_domain(prefix: Path, *, vocab_size: int) -> Any:
    """Return an `IndexedDatasetBuilder` of Megatron that writes `PREFIX.bin`.

    The number of token ids decides the type of the tokens in the file.
    """
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    return IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(vocab_size))


def open_domain(manifest: Manifest, name: str) -> Any:
    """Return a domain's `IndexedDataset` of Megatron, after checking that it is all there.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: The `.idx` cannot be read; manifest, `.idx` and `.bin` disagree about the number
            of tokens; or among the first tokens is one that the vocabulary does not have.
    """
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    prefix = manifest.prefix(name)
    if not IndexedDataset.exists(prefix):
        raise FileNotFoundError(f"domain {name}: {prefix}.bin or .idx does not exist")
    num_bytes = Path(f"{prefix}.bin").stat().st_size
    if not num_bytes:
        raise ValueError(f"domain {name}: {prefix}.bin is empty")
    # The index by itself first: a dataset that fails over its index fails again in `__del__`.
    _open_index(prefix, name)
    with _faults_of(prefix, name):
        dataset = IndexedDataset(prefix)
    documents = len(dataset.index.document_indices) - 1
    if documents != manifest.domains[name].documents:
        raise ValueError(
            f"domain {name}: {prefix} was changed: documents by the manifest "
            f"{manifest.domains[name].documents}, by the .idx {documents}"
        )
    by_manifest = manifest.domains[name].tokens
    by_index = _num_tokens(dataset.index)
    on_disk = num_bytes // np.dtype(dataset.index.dtype).itemsize
    if not by_manifest == by_index == on_disk:
        of_manifest = f"by the manifest {by_manifest}, " if by_manifest != by_index else ""
        raise ValueError(
            f"domain {name}: {prefix} was changed or cut off: tokens {of_manifest}"
            f"by the .idx {by_index}, in the .bin {on_disk}"
        )
    read_tokens(dataset, 0, min(on_disk, _FIRST_TOKENS), manifest.vocab_size)
    return dataset


def manifest_of(prefixes: Sequence[str], *, tokenizer: str, vocab_size: int) -> Manifest:
    """Describe Megatron datasets that were made elsewhere, each a domain named by its files.

    `prefixes` are paths without `.bin` and `.idx`, as Megatron's `--data-path` has them. They have
    `vocab_size` token ids, and `tokenizer` is the path of their `tokenizer.json`, or empty.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: A prefix is given twice, or its `.idx` cannot be read.
    """
    for prefix in prefixes:
        if list(prefixes).count(prefix) > 1:
            raise ValueError(f"{prefix} is given twice")
        for ending in (".idx", ".bin"):
            if not Path(prefix + ending).is_file():
                raise FileNotFoundError(f"{prefix}{ending} does not exist")
    names = [Path(prefix).name for prefix in prefixes]
    if len(set(names)) < len(names):
        names = list(prefixes)
    domains = {}
    for name, prefix in zip(names, prefixes, strict=True):
        index = _open_index(prefix, name)
        domains[name] = Domain(
            prefix=str(Path(prefix).absolute()),
            documents=len(index.document_indices) - 1,
            tokens=_num_tokens(index),
            text_bytes=None,
        )
    return Manifest(
        folder=Path(),
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        eod=None,
        eod_token=None,
        domains=domains,
    )


def _num_tokens(index: Any) -> int:
    return int(index.sequence_lengths.sum(dtype=np.int64))


def _open_index(prefix: str, name: str) -> Any:
    from megatron.core.datasets.indexed_dataset import _IndexReader

    with _faults_of(prefix, name):
        return _IndexReader(f"{prefix}.idx", False)


@contextmanager
def _faults_of(prefix: str, name: str) -> Iterator[None]:
    try:
        yield
    except (AssertionError, IndexError, OverflowError, ValueError, struct.error) as error:
        said = one_line(error) if str(error) else "its counts differ"
        raise ValueError(
            f"domain {name}: {prefix}.idx is cut off, damaged or no index ({said})"
        ) from None


def read_tokens(dataset: Any, start: int, count: int, vocab_size: int) -> NDArray[np.int64]:
    """Return tokens from a position of the `.bin` on, int64 [count], over document boundaries.

    Raises:
        ValueError: A token is not in the vocabulary; the message names file and position.
    """
    dtype = np.dtype(dataset.index.dtype)
    # Documents lie back to back in the .bin: a stretch over several is still one stretch of it.
    stretch = dataset.bin_reader.read(dtype=dtype, count=count, offset=start * dtype.itemsize)
    # A copy always: what was read is a view that dies with the dataset.
    tokens: NDArray[np.int64] = stretch.astype(np.int64)
    # A negative number is a large one without its sign.
    is_foreign = tokens.view(np.uint64) >= vocab_size
    if is_foreign.any():
        place = int(np.argmax(is_foreign))
        raise ValueError(
            f"{dataset.path_prefix}.bin: token {tokens[place]} at position {start + place} must be "
            f"from 0 to {vocab_size - 1}, the vocabulary of the data"
        )
    return tokens
