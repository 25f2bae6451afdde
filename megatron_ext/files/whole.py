"""Text files that are written whole or stay as they were, also where the machine loses power."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


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
        with partial.open("x", encoding="utf-8") as file:
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
