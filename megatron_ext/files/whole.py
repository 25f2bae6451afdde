"""Text files that are written whole or stay as they were, also where the machine loses power."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterable
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


def write_whole(path: Path, lines: Iterable[str], *, sync: bool = True) -> None:
    """Write a text file beside the one of that name, bring it to the disk, and rename it.

    Args:
        path: The file, in a folder that exists. A link of that name is replaced.
        lines: What it will hold, with its line ends.
        sync: Whether it shall outlast a loss of power.

    Raises:
        OSError: It cannot be written; the file of that name is as it was.
    """
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    try:
        # A new file: what somebody puts there under that name may be a link to elsewhere.
        with named(path), partial.open("x", encoding="utf-8") as file:
            file.writelines(lines)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    if not sync:
        return
    # The name is on the disk when the folder is.
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
