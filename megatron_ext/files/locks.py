"""Folders that one process at a time may write."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from megatron_ext.files.opening import check_ours, open_own

logger = logging.getLogger(__name__)

LOCK_FILE = ".lock"

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""What file systems answer that have no locks."""


class FolderInUseError(RuntimeError):
    """Another process holds the folder; the message says which."""


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold a folder for this process, not for its children; it is made if it is not there.

    The system gives it free when the process ends, however that ends. Where the file system has no
    locks, a warning is all that comes of it.

    Raises:
        FolderInUseError: Another process holds it.
        OSError: The folder or the file `.lock` in it cannot be written, or another user has a say
            in it (`check_ours`).
    """
    folder.mkdir(parents=True, exist_ok=True)
    check_ours(folder)
    descriptor = open_own(folder / LOCK_FILE)
    _held.add(descriptor)
    try:
        _lock(descriptor, folder)
        yield
    finally:
        _held.discard(descriptor)
        os.close(descriptor)


def _lock(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, 1000, 0).decode(errors="replace").strip()
        raise FolderInUseError(f"{folder} is in use by {holder or 'another process'}") from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        logger.warning(
            "warning: %s cannot be locked (%s): start no second run there", folder, error.strerror
        )
        return
    now = datetime.now(UTC).isoformat(" ", "seconds")
    holder = f"process {os.getpid()} on {socket.gethostname()} since {now}\n"
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, holder.encode(), 0)


_held: set[int] = set()


def _leave_to_parent() -> None:
    """Close this process's copies of its parent's locks: it may live longer than the parent."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_leave_to_parent)
