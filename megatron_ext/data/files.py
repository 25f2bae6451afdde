"""Finds input files and makes output folders, for `build.py` and `corpus.py`.

Inputs are found in an order that does not depend on the file system. An output folder appears
complete or not at all.
"""

from __future__ import annotations

import glob
import hashlib
import os
import shutil
from collections.abc import Iterator, Set
from contextlib import contextmanager
from pathlib import Path

from megatron_ext.files.arrays import check_folders
from megatron_ext.files.opening import named


def fair_order(name: str) -> bytes:
    """Return a sort key of a relative path with `/`: scattered evenly, equal on every machine.

    Sorted by the key, any head or tail of a list of files is a fair sample of the whole. So a limit
    of size does not keep only the names with `a`, and a validation split at the end is not one
    folder.
    """
    return hashlib.sha256(name.encode(errors="surrogateescape")).digest()


def walk(root: Path, skip: Set[str] = frozenset()) -> Iterator[str]:
    """Yield the files below `root`, in any order, without hidden ones and byte code.

    Each as `folder/name`, a text: a machine has 100,000 files, and paths of all would take seconds.
    """
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [
            s for s in subfolders if not s.startswith(".") and s != "__pycache__" and s not in skip
        ]
        below = "" if folder == str(root) else f"{os.path.relpath(folder, root)}/"
        yield from (below + name for name in names if not name.startswith("."))


def find_files(where: str) -> list[Path]:
    """Return the files of a path or of a pattern with `*`, `?`, `[...]` and `**`, in `fair_order`.

    A folder stands for everything below it except hidden files.

    Raises:
        FileNotFoundError: The path does not exist.
        ValueError: A folder holds, or a pattern meets, no file.
    """
    path = Path(where)
    if path.is_file():
        return [path]
    if path.is_dir():
        # Not every entry is a file: reading a pipe would wait for ever.
        root, found = path, [path / name for name in walk(path) if (path / name).is_file()]
    elif glob.has_magic(where):
        # The part before the first wildcard, so that the order is the same in every copy.
        first_wildcard = min(where.find(c) for c in "*?[" if c in where)
        root = Path(os.path.dirname(where[:first_wildcard]))
        found = [Path(name) for name in glob.iglob(where, recursive=True) if Path(name).is_file()]
    else:
        raise FileNotFoundError(f"{where} does not exist")
    if not found:
        raise ValueError(f"{where} has no files")
    return sorted(found, key=lambda file: fair_order(os.path.relpath(file, root)))


def read_text(path: Path) -> str:
    """Return a file's text, line ends as they are.

    Raises:
        ValueError: The file is not text: not UTF-8, or with NUL bytes, as in pictures and programs.
    """
    with named(path):
        content = path.read_bytes()
    if b"\0" in content:
        raise ValueError("it holds NUL bytes")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8") from error


@contextmanager
def new_folder(out: Path, *, overwrite: bool, marker: str) -> Iterator[Path]:
    """Yield a new folder, which becomes `out` when the block ends and is deleted when it raises.

    The yielded folder is hidden, beside `out` and on the same file system. `marker` is a file that
    every complete folder of this kind has: `overwrite` never replaces a folder without this file,
    which is a user's own folder rather than an earlier output.

    Raises:
        FileExistsError: `out` exists and is not to be, or must not be, replaced.
    """
    out = out.absolute()
    is_empty_folder = out.is_dir() and not any(out.iterdir())
    if out.exists() and not is_empty_folder:
        if not overwrite:
            raise FileExistsError(f"{out} exists already: replace it with --overwrite")
        if not (out / marker).is_file():
            raise FileExistsError(
                f"{out} exists and has no {marker}: not an earlier output, not replaced"
            )
    check_folders(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    replaced = out.with_name(f".{out.name}.{os.getpid()}.replaced")
    partial.mkdir()
    try:
        with named(out):
            yield partial
        # Without `overwrite` another process may have made it meanwhile: then this rename fails.
        if overwrite and out.exists():
            out.rename(replaced)
        partial.rename(out)
    finally:
        if replaced.exists() and not out.exists():
            replaced.rename(out)
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(replaced, ignore_errors=True)
