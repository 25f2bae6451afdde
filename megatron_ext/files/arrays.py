"""Arrays by name in `.npz` files: read and checked, written whole or not at all.

Every file of numbers is such a file: loads, plans, placements, routes, semantics. The module of
each format says what its arrays mean.
"""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_ext.arguments import near_path
from megatron_ext.files.opening import open_regular
from megatron_ext.files.whole import written_whole

if TYPE_CHECKING:
    from torch import Tensor

_MOST_BYTES = 1 << 32
"""Of an array in memory: a file of a thousandth of it can hold so many zeros."""

_KINDS = {
    "load": "loads",
    "quota": "plans",
    "expert_load": "replicas placed by `place craft`",
    "affinity": "semantics of `place sem_moe`",
    "choice": "routes (logging.route_samples)",
    "expert": "an arrangement of experts by `place eplb` or `place sem_moe`",
}
"""What a file holds, by an array that no kind below it has."""

# How files begin: archives (.npz), single arrays (.npy).
_ARCHIVE, _ARRAY = b"PK", b"\x93NUMPY"


def check_free(path: Path, *, overwrite: bool) -> None:
    """Check that a file can be written, before the work whose result it will hold.

    Raises:
        FileExistsError: The path is a folder, or exists and is not to be replaced.
        NotADirectoryError: The path would be below something that is no folder.
        PermissionError: The file, or the folder that would get a new entry, may not be written.
        FileNotFoundError: A folder would be made in the root folder.
    """
    if path.is_dir():
        raise FileExistsError(f"{path} is a folder")
    if path.exists() and not overwrite:
        raise FileExistsError(f"{path} exists already: replace it with --overwrite")
    check_folders(path)


def check_folders(path: Path) -> None:
    """Check that a path may get a new entry, and that the folders above it are there or to be made.

    A missing folder of the root is a slip or a disk that is not mounted, so none is made there.
    Errors are those of `check_free`.
    """
    parents = path.absolute().parents
    folder = next(above for above in parents if above.exists())
    if len(parents) > 1 and folder == parents[-1]:
        raise FileNotFoundError(
            f"{path} cannot be written: there is no {parents[-2]}; make it first"
        )
    if not folder.is_dir():
        raise NotADirectoryError(f"{path} cannot be written: {folder} is no folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(f"{path} cannot be written: no permission to write in {folder}")


def find_arrays(folder: Path) -> list[Path]:
    """Return the .npz files of a folder, sorted.

    Raises:
        FileNotFoundError: There are no such files; the message names folders in it that have some.
    """
    files = sorted(folder.glob("*.npz"))
    if not files:
        below = sorted({str(file.parent) for file in folder.glob("*/*.npz")})
        hint = f"; there are some in {', '.join(below)}" if below else ""
        raise FileNotFoundError(f"{folder} is a folder without .npz files{hint}")
    return files


@contextmanager
def open_arrays(path: Path, required: Collection[str]) -> Iterator[Any]:
    """Open an .npz file that has the required arrays; `outline` and `values_of` read from it.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is no .npz file, is damaged, or lacks a required array.
    """
    check_archive(path)
    with open_regular(path, follow=True) as file:
        try:
            archive = np.load(file, allow_pickle=False)
        except Exception as error:  # Damage can have NumPy and zipfile raise anything.
            raise ValueError(f"{path} is cut off or damaged ({error})") from error
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise ValueError(f"{path} holds one array, not an archive: write it with numpy.savez")
        check_names(path, archive.files, required)
        yield archive


def names_of(path: Path) -> list[str]:
    """Return the names of a file's arrays without NumPy; none if it is no archive, or damaged."""
    try:
        with open_regular(path, follow=True) as file, zipfile.ZipFile(file) as archive:
            return [name.removesuffix(".npy") for name in archive.namelist()]
    except Exception:  # As above.
        return []


def check_names(path: Path, names: Collection[str], required: Collection[str]) -> None:
    """Check that a file has the required arrays.

    Raises:
        ValueError: It lacks one; the message says what the file holds if that is another kind.
    """
    missing = next((name for name in required if name not in names), None)
    if missing is None:
        return
    holds, wanted = (
        next((_KINDS[name] for name in _KINDS if name in those), None)
        for those in (names, required)
    )
    if holds and wanted and holds != wanted:
        raise ValueError(f"{path} holds {holds}, not {wanted}")
    has = ", ".join(sorted(names)) or "none"
    raise ValueError(f"{path} has no array {missing!r}; it has {has}")


def check_archive(path: Path) -> None:
    """Check that a file is there and begins as .npz files do.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It begins in another way.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist{near_path(path)}")
    if not path.is_file():
        raise FileNotFoundError(f"{path} is {'a folder' if path.is_dir() else 'no file'}")
    with open_regular(path, follow=True) as file:
        try:
            head = file.read(len(_ARRAY))
        except OSError as error:  # Of a disk that fails.
            raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    # NumPy would take anything else for pickled objects, and advise to load them.
    if not head.startswith((_ARCHIVE, _ARRAY)):
        raise ValueError(f"{path} is no .npz file: write it with numpy.savez")


def outline(path: Path, archive: Any, name: str) -> np.ndarray:
    """Return zeros, which take no memory, of the type and shape that an array's header says."""
    with _member(path, archive, name) as member:
        version = np.lib.format.read_magic(member)
        read = getattr(np.lib.format, f"read_array_header_{version[0]}_0")
        shape, _, dtype = read(member)
        if math.prod(shape) * dtype.itemsize > _MOST_BYTES:
            raise ValueError(f"{list(shape)} of {dtype} are more than {_MOST_BYTES} bytes")
        return np.broadcast_to(np.zeros((), dtype), shape)


def values_of(path: Path, archive: Any, name: str) -> np.ndarray:
    """Return an array with its values."""
    with _member(path, archive, name) as member:
        values: np.ndarray = np.lib.format.read_array(member, allow_pickle=False)
        return values


@contextmanager
def _member(path: Path, archive: Any, name: str) -> Iterator[Any]:
    """Open the file of an array in an archive, always the same: another may have the bare name."""
    try:
        with archive.zip.open(f"{name}.npy") as member:
            yield member
    except Exception as error:  # Damage can have NumPy and zipfile raise anything.
        raise ValueError(f"{path}: {name} cannot be read ({error})") from error


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray | Tensor], *, overwrite: bool) -> None:
    """Write arrays by name into an .npz file, whole or not at all; errors are of `check_free`."""
    check_free(path, overwrite=overwrite)
    path.parent.mkdir(parents=True, exist_ok=True)
    with (
        written_whole(path, f"{os.getpid()}.partial") as partial,
        # As `numpy.savez_compressed`, which has no say in how hard it tries: level 1 is several
        # times as fast, for files that are a little larger.
        zipfile.ZipFile(partial, "x", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
    ):
        for name, value in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asarray(value), allow_pickle=False)
