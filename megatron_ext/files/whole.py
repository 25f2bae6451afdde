"""Files that are written whole or stay as they were, also where the machine loses power."""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_ext.files.opening import named

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
"""What the system answers where a disk, or a user's part of it, is full."""


def check_room(folder: Path, num_bytes: int) -> None:
    """Check that a folder, which need not be there, has room for so many bytes more.

    Raises:
        OSError: It has not, or cannot be written.
    """
    there = next(each for each in (folder, *folder.absolute().parents) if each.is_dir())
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        raise OSError(
            error.errno, f"{error.strerror}: there must be room for {num_bytes:,} bytes", str(there)
        ) from None


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Keep other callers out of a folder until this one, or its process, ends; not on NFS.

    The folder is there, and may be renamed meanwhile.

    Raises:
        FileExistsError: Another caller is in it.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FileExistsError(f"another process writes in {folder}") from None
        except OSError:  # Not every file system locks folders.
            pass
        yield
    finally:
        os.close(descriptor)


@contextmanager
def written_whole(path: Path, ending: str = "partial") -> Iterator[Path]:
    """Yield the name of a file beside `path`, which replaces `path` when the block ends.

    The block makes the file anew (mode "x"): what somebody puts there may be a link to elsewhere.
    If the block raises, the file of that name is as it was.
    """
    partial = path.with_name(f".{path.name}.{ending}")
    partial.unlink(missing_ok=True)
    try:
        with named(path):
            yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_whole(path: Path, lines: Iterable[str], *, lasts: bool = True) -> None:
    """Write a text file, in a folder that exists, whole or not at all.

    `lines` have their line ends. A file that `lasts` outlasts a loss of power.
    """
    with written_whole(path) as partial:
        with partial.open("x", encoding="utf-8") as file:
            file.writelines(lines)
        if lasts:
            sync(partial)
    if lasts:
        sync(path.parent)


def sync(path: Path) -> None:
    """Have a file, or a folder's names, written to the disk itself."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
