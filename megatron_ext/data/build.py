"""Text files in, Megatron indexed datasets out: one per domain, and a manifest.

The `.bin` and `.idx` files are written by Megatron-Core's own `IndexedDatasetBuilder`, so
everything that reads Megatron datasets reads them. A file is a document; documents lie in
`fair_order`, each ended by the eod.
"""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from megatron_ext.data.files import find_files, new_folder, read_text
from megatron_ext.data.indexed import new_domain
from megatron_ext.data.manifest import BYTES, MANIFEST, Domain, Manifest
from megatron_ext.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer

logger = logging.getLogger(__name__)

# Text given to the tokenizer at a time: enough to keep its threads busy, little enough to hold.
BATCH_BYTES = 8 << 20
# Megatron's index keeps a document's length as int32; no tokenizer makes more tokens than bytes.
MAX_DOCUMENT_BYTES = 2**31 - 2


def parse_sources(sources: Sequence[str]) -> dict[str, list[Path]]:
    """Return the files of each domain in the order of writing, from the words of the command line.

    A word is `NAME=PATH`, where PATH is a file, a folder or a pattern, or only a path, whose last
    part then names the domain. A name given twice collects both, with a warning; a last part may
    not name a domain twice. No file is returned twice.

    Raises:
        FileNotFoundError: A path does not exist.
        ValueError: A path has no files, or a domain's name is missing, unfit for a file name, or
            given to two paths by their last parts.
    """
    domains: dict[str, list[Path]] = {}
    named: dict[str, tuple[str, bool]] = {}
    owners: dict[Path, str] = {}
    for source in sources:
        name, has_name, where = source.partition("=")
        # A path may itself hold a `=`: it is a name only if what stands before it can be one.
        is_given = bool(has_name) and "/" not in name
        if not is_given:
            where = source
            # Resolved, since `.` has no name; a pattern has none that makes sense.
            path = Path(where).resolve()
            name = path.name if path.is_dir() else path.stem
        files = find_files(where)
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_-]*", name):
            raise ValueError(
                f"{source}: give the domain a name of letters, digits, _ and -, as in NAME={where}"
            )
        earlier, earlier_is_given = named.setdefault(name, (source, is_given))
        if name in domains:
            if not (is_given and earlier_is_given):
                raise ValueError(
                    f"{earlier} and {source} would both be domain {name}: give them names, as in "
                    "NAME=PATH, or both the same one"
                )
            logger.warning("domain %s is made of %s and %s", name, earlier, source)
        domain = domains.setdefault(name, [])
        for file in files:
            is_new = file.resolve() not in owners
            owner = owners.setdefault(file.resolve(), name)
            if owner != name:
                raise ValueError(f"{file} is in two domains, {owner} and {name}")
            if is_new:
                domain.append(file)
    return domains


def build_dataset(
    domains: Mapping[str, Sequence[Path]],
    out: Path,
    *,
    tokenizer_file: Path | None = None,
    eod_token: str | None = None,
    strict: bool = False,
    overwrite: bool = False,
    on_bytes: Callable[[int], None] = lambda num_bytes: None,
) -> tuple[Manifest, dict[Path, str]]:
    """Tokenize each domain's files into an indexed dataset in a new folder `out`.

    Args:
        domains: Files by domain name, as `parse_sources` returns them.
        out: Appears when everything is written, or not at all.
        tokenizer_file: A Hugging Face `tokenizer.json`, copied into the folder; None for bytes.
        eod_token: The token of that file that ends a document; None to take a usual one.
        strict: Fail on a file that is not text, where otherwise it is skipped.
        overwrite: Replace an earlier dataset.
        on_bytes: Called with the size of each file that is done with.

    Returns:
        What `out` holds, and the files that were skipped, each with the reason.

    Raises:
        FileExistsError: `out` exists.
        ModuleNotFoundError, FileNotFoundError, ValueError: The tokenizer cannot be used, a file is
            not text (strict), or a domain has no text at all.
    """
    tokenizer: ByteTokenizer | HuggingFaceTokenizer = (
        HuggingFaceTokenizer(tokenizer_file, eod_token) if tokenizer_file else ByteTokenizer()
    )
    skipped: dict[Path, str] = {}
    with new_folder(out, overwrite=overwrite, marker=MANIFEST) as folder:
        manifest = Manifest(
            folder=folder,
            tokenizer="tokenizer.json" if tokenizer_file else BYTES,
            vocab_size=tokenizer.vocab_size,
            eod=tokenizer.eod,
            eod_token=tokenizer.eod_token,
            domains={
                name: _write_domain(
                    folder, name, _read(files, strict, skipped, on_bytes), tokenizer
                )
                for name, files in domains.items()
            },
        )
        if tokenizer_file:
            shutil.copyfile(tokenizer_file, folder / manifest.tokenizer)
        manifest.save()
    return Manifest.load(out), skipped


def _read(
    files: Sequence[Path], strict: bool, skipped: dict[Path, str], on_bytes: Callable[[int], None]
) -> Iterator[str]:
    """Yield the text of each file that has some; note the others in `skipped`."""
    for file in files:
        num_bytes = file.stat().st_size
        if num_bytes > MAX_DOCUMENT_BYTES:
            raise ValueError(f"{file} has {num_bytes} bytes, more than a document can: split it")
        try:
            text = read_text(file)
        except ValueError as error:
            if strict:
                raise ValueError(f"{file} is not text: {error}") from error
            skipped[file] = str(error)
        else:
            if text.strip():
                yield text
            else:
                skipped[file] = "it is empty"
        on_bytes(num_bytes)


def _write_domain(
    folder: Path, name: str, texts: Iterator[str], tokenizer: ByteTokenizer | HuggingFaceTokenizer
) -> Domain:
    prefix = folder / name
    builder = new_domain(prefix, vocab_size=tokenizer.vocab_size)
    documents = tokens = text_bytes = 0
    for batch in _batched(texts):
        for ids in tokenizer.encode(batch):
            document = np.append(ids, tokenizer.eod)
            builder.add_document(document, [len(document)])
            documents += 1
            tokens += len(document)
        text_bytes += sum(len(text.encode()) for text in batch)
    builder.finalize(f"{prefix}.idx")
    if not documents:
        raise ValueError(f"domain {name} has no text: all its files are empty or not text")
    return Domain(prefix=name, documents=documents, tokens=tokens, text_bytes=text_bytes)


def _batched(texts: Iterator[str]) -> Iterator[list[str]]:
    """Collect texts into lists of at least `BATCH_BYTES` characters; the last may have fewer."""
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
