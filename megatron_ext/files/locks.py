"""Folders that one process at a time may write."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from megatron_ext.files.opening import check_ours, open_own

logger = logging.getLogger(__name__)

LOCK_FILE = ".lock"

_POLL_S = 1.0

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""What file systems answer that have no locks."""


PATIENCE_S = 120.0
"""Longest time, in seconds, that file servers keep locks of a machine that is lost: a lease of
NFSv4 lasts 90."""


class FolderInUseError(RuntimeError):
    """Another process holds the folder; the message says which."""


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold a folder for this process, not for its children; it is made if it is not there.

    The system gives it free when the process ends, however that ends; a file server somewhat after
    the machine is lost, so a holder on another machine is waited for. Where the file system has no
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


def _is_locked(descriptor: int) -> bool:
    """Lock the file; False if another process has."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _lock(descriptor: int, folder: Path) -> None:
    deadline: float | None = None
    try:
        while not _is_locked(descriptor):
            holder = os.pread(descriptor, 1000, 0).decode(errors="replace").strip()
            in_use = f"{folder} is in use by {holder or 'another process'}"
            if not holder or f" on {socket.gethostname()} " in holder:
                raise FolderInUseError(in_use)
            if deadline is None:
                deadline = time.monotonic() + PATIENCE_S
                logger.warning(
                    "%s; waiting %.0f s, in case that machine is lost", in_use, PATIENCE_S
                )
            elif time.monotonic() > deadline:
                raise FolderInUseError(
                    f"{in_use}; if that machine is lost, delete {LOCK_FILE} in it"
                )
            time.sleep(_POLL_S)
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
