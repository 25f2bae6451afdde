"""Text files that are written whole or stay as they were, also where the machine loses power."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


def write_whole(path: Path, lines: Iterable[str]) -> None:
    """Write a text file beside the one of that name, bring it to the disk, and rename it.

    Args:
        path: The file, in a folder that exists.
        lines: What it will hold, with its line ends.

    Raises:
        OSError: It cannot be written; the file of that name is as it was.
    """
    partial = path.with_name(f".{path.name}.partial")
    # What somebody left under that name may be a link to elsewhere.
    partial.unlink(missing_ok=True)
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    # The name is on the disk when the folder is.
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
