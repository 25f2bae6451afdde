"""Files and folders that may be a stranger's, opened only as what they seem to be.

A name in a folder can be a link to any file of this user, a pipe that never ends, a device, a file
without end. So no such name is followed, waited for or written through:

    read_regular(run_dir / "about.json")        # no link; a bounded number of bytes
    open_regular(checkpoint / ".metadata", follow=True)     # a link, too, if it is harmless
    open_own(run_dir / ".lock")                 # to write; made if it is not there
    check_ours(run_dir)                         # before a program writes there by itself
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path

MOST_BYTES = 64 << 20
"""Of a file that is read whole, and of a line: many times those of any run."""

_KINDS = {
    stat.S_IFLNK: "not a file but a link, which is not followed",
    stat.S_IFDIR: "not a file but a folder",
    stat.S_IFIFO: "not a file but a pipe",
    stat.S_IFSOCK: "not a file but a socket",
    stat.S_IFCHR: "not a file but a device",
    stat.S_IFBLK: "not a file but a device",
}


class NotRegularError(OSError, ValueError):
    """A name leads to something other than a file to read or write; the message says to what."""

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(errno.EINVAL, what, str(path))

    def __str__(self) -> str:
        """Return path and reason, without a number."""
        return f"{self.filename}: {self.strerror}"


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Name what is read or written in the system's errors that name nothing: a disk is full."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def look_at(path: Path, *, follow: bool = False) -> os.stat_result:
    """Return what is known of a regular file, without opening it: that can act on a device.

    With `follow` it may be a link: one of this user or root, or of another user to a file of that
    user's own. Caches of models and data consist of links.

    Raises:
        NotRegularError: It is something else.
        OSError: It is not there, or out of reach.
    """
    found = link = os.lstat(path)
    if follow and stat.S_ISLNK(link.st_mode):
        found = os.stat(path)
        if link.st_uid not in (0, os.geteuid(), found.st_uid):
            raise NotRegularError(path, f"a link of another user ({link.st_uid}) to elsewhere")
    if not stat.S_ISREG(found.st_mode):
        raise NotRegularError(path, _KINDS.get(stat.S_IFMT(found.st_mode), "not a file"))
    return found


def is_regular(path: Path) -> bool:
    """Whether a path is a regular file, and no link."""
    try:
        look_at(path)
    except OSError:
        return False
    return True


def open_regular(path: Path, *, follow: bool = False) -> BufferedReader:
    """Open a regular file to read; arguments and errors are those of `look_at`."""
    found = look_at(path, follow=follow)
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    file = os.fdopen(os.open(path, flags), "rb")
    if not os.path.samestat(found, os.fstat(file.fileno())):
        file.close()
        raise NotRegularError(path, "another file since it was looked at")
    return file


def read_regular(path: Path, *, follow: bool = False, most_bytes: int = MOST_BYTES) -> bytes:
    """Return the content of a regular file; arguments and errors are those of `look_at`.

    Raises:
        NotRegularError: It has more than `most_bytes` bytes, too.
    """
    with open_regular(path, follow=follow) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise NotRegularError(path, f"more than {most_bytes:,} bytes")
    return content


def whole_lines(
    path: Path, start: int = 0, *, follow: bool = False, most_bytes: int = MOST_BYTES
) -> Iterator[bytes]:
    """Yield the lines of a regular file behind its first `start` bytes, without a torn last one.

    Raises:
        NotRegularError: See `look_at`; or a line has more than `most_bytes` bytes.
    """
    with open_regular(path, follow=follow) as file:
        file.seek(start)
        while (line := file.readline(most_bytes + 1)).endswith(b"\n"):
            yield line
    if len(line) > most_bytes:
        raise NotRegularError(path, f"a line of more than {most_bytes:,} bytes")


def names_in(folder: Path) -> list[str]:
    """Return the names in a folder, sorted; none if it is not there. A link is not followed.

    Raises:
        NotRegularError: It is no folder.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return []
    except OSError as error:
        if error.errno not in (errno.ENOTDIR, errno.ELOOP):
            raise
        raise NotRegularError(folder, "not a folder, or a link, which is not followed") from None
    try:
        return sorted(os.listdir(descriptor))
    finally:
        os.close(descriptor)


def open_own(path: Path, flags: int = 0) -> int:
    """Open a regular file to read and write, and return its descriptor; make it if it is not there.

    The file has no other name, which would be written, too. `flags` are more flags of `os.open`.

    Raises:
        NotRegularError: It is something else, or has another name.
    """
    check_writes(path)
    flags |= os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
    descriptor = os.open(path, flags, 0o666)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        os.close(descriptor)
        raise NotRegularError(path, "another file since it was looked at")
    return descriptor


def check_writes(path: Path) -> None:
    """Check that `open_own` would open this file, or make it; else raise its `NotRegularError`."""
    try:
        found = look_at(path)
    except FileNotFoundError:
        return
    if found.st_nlink > 1:
        raise NotRegularError(path, "its other name, a hard link, would be written, too")


def is_ours(folder: Path) -> bool:
    """Whether a folder belongs to this user, under whatever number its file system has for it."""
    owner = folder.stat().st_uid
    if owner == os.geteuid():
        return True
    made = _made_in(folder)
    return made is not None and made.st_uid == owner


def check_ours(folder: Path) -> None:
    """Check that no other user says where the names in a folder lead, before files are made there.

    The folder's own path may be a link. Folders in it are real, and belong to this user or to root.
    Members of the folder's group are trusted.

    Raises:
        PermissionError: It is not so; the message is one line.
    """
    found = folder.stat()
    known = {0, os.geteuid()}
    others_write = found.st_mode & stat.S_IWOTH
    if (found.st_uid not in known or others_write) and (made := _made_in(folder)):
        # Some file systems give all files to one user, or have no modes.
        known.add(made.st_uid)
        others_write &= ~made.st_mode
    if found.st_uid not in known:
        raise PermissionError(
            f"{folder} belongs to another user ({found.st_uid}): name a folder of your own"
        )
    if others_write:
        raise PermissionError(
            f"every user may write in {folder}: name a folder in it, or chmod o-w {folder}"
        )
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_symlink():
                raise PermissionError(
                    f"{entry.path} is a link: only the path of the whole folder may be one"
                )
            if entry.is_dir() and (owner := entry.stat().st_uid) not in known:
                raise PermissionError(f"{entry.path} belongs to another user ({owner})")


def _made_in(folder: Path) -> os.stat_result | None:
    """Return what is known of a private file that is made in a folder; None if none can be."""
    try:
        with tempfile.TemporaryFile(dir=folder) as made:
            return os.fstat(made.fileno())
    except OSError:
        return None
