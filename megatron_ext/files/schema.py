"""Declares what an `.npz` file of a format holds (types, axes, ranges), and checks files by it.

Axes are letters, the same letter the same size in all arrays of a file:

    "L R S"     three axes
    "B? R E"    the first may be left out, and is then added with size 1
    "L-2 R R"   an axis that is shorter by 2 (but not below 0)
    "2"         of this size

Only S, slots of a rank, may be 0. The module of a format checks the rules that cannot be declared
here (an expert that is there twice).
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ext.files.arrays import open_arrays, outline, values_of

_MAY_BE_NONE = "S"
_WORDS = {"E": "experts", "R": "ranks"}

MOST_EXPERTS = 2**16
"""Far more than any layer has; a crafted number shall not take memory and time."""
_MOST = {"E": MOST_EXPERTS, "R": 2**13}


@dataclass(frozen=True, kw_only=True)
class Array:
    """One array of a format."""

    dtype: Any
    """`np.integer` is any type of integers."""
    axes: str
    """Letters, in order."""
    required: bool = True
    least: int | None = None
    """Entries are at least this; floating-point ones are finite too."""
    limit: str | None = None
    """Entries are below the size of this letter."""
    all_differ: bool = False
    """Whether all entries must differ."""
    entries: str = ""
    """Letters whose sizes the entries of this array are: "V E"."""


@dataclass(frozen=True, kw_only=True)
class Schema:
    """A format. Arrays that give letters their sizes stand before those that use them."""

    arrays: Mapping[str, Array]
    """By name."""
    multiple: tuple[str, str] | None = None
    """Two letters: the first size is a multiple of the second."""

    def read(self, path: Path) -> dict[str, np.ndarray]:
        """Read the arrays of a file and check them; missing optional arrays are not in the result.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: The file breaks a rule; the message names file, array, value and rule.
        """
        # Short ones first: of a file of another kind, the array named as missing is the simplest.
        names = sorted(self.arrays, key=lambda name: self.arrays[name].axes.count(" "))
        required = [name for name in names if self.arrays[name].required]
        with open_arrays(path, required) as archive:
            present = {name: array for name, array in self.arrays.items() if name in archive.files}
            outlines = {name: outline(path, archive, name) for name in present}
            sizes = self._check_outlines(path, outlines)
            arrays = {name: values_of(path, archive, name) for name in present}
        for name, array in present.items():
            if _lacks_first(arrays[name], array):
                arrays[name] = arrays[name][None]
            for letter, size in zip(array.entries.split(), arrays[name].tolist(), strict=False):
                sizes[letter] = size
        for name, array in present.items():
            _check_values(path, name, arrays[name], array, sizes)
        if self.multiple is not None:
            larger, smaller = self.multiple
            if sizes[larger] % sizes[smaller]:
                raise ValueError(
                    f"{path}: {_WORDS[larger]} ({sizes[larger]}) must be a multiple of "
                    f"{_WORDS[smaller]} ({sizes[smaller]})"
                )
        return arrays

    def _check_outlines(self, path: Path, arrays: Mapping[str, np.ndarray]) -> dict[str, int]:
        """Check types and shapes; return the sizes of the letters."""
        present = {name: array for name, array in self.arrays.items() if name in arrays}
        for name, array in present.items():
            _check_dtype(path, name, arrays[name], array.dtype)
        sizes: dict[str, int] = {}
        beside = ""
        for name, array in present.items():
            outline = arrays[name][None] if _lacks_first(arrays[name], array) else arrays[name]
            _check_shape(path, name, outline, array.axes, sizes, beside)
            beside = beside or f" beside {name} of {list(outline.shape)}"
        for letter, most in _MOST.items():
            if (size := sizes.get(letter, 0)) > most:
                raise ValueError(f"{path}: {_WORDS[letter]} ({size}) must be <= {most}")
        return sizes


def _lacks_first(values: np.ndarray, array: Array) -> bool:
    """Whether an array is without its first axis, which may be left out."""
    return array.axes.partition(" ")[0].endswith("?") and values.ndim == array.axes.count(" ")


def _check_dtype(path: Path, name: str, values: np.ndarray, dtype: Any) -> None:
    """Raise ValueError, with the way out, if an array is of another type."""
    if np.issubdtype(values.dtype, dtype):
        return
    if dtype is np.integer:
        raise ValueError(f"{path}: {name} must be integers, got {values.dtype}")
    wanted = np.dtype(dtype)
    is_count = np.issubdtype(dtype, np.integer) and values.dtype.kind == "f"
    if_so = ", if its entries are whole numbers" if is_count else ""
    raise ValueError(
        f"{path}: {name} must be {wanted}, got {values.dtype}: "
        f"convert it with {name}.astype('{wanted}'){if_so}"
    )


def _check_shape(
    path: Path, name: str, values: np.ndarray, axes: str, sizes: dict[str, int], beside: str
) -> None:
    """Check the axes of an array, and add the sizes of its new letters."""
    letters = axes.replace("?", "").split()
    wanted = [_size(letter, sizes) for letter in letters]
    fits = values.ndim == len(wanted) and all(
        (size > 0 or letter == _MAY_BE_NONE) if want is None else size == want
        for letter, want, size in zip(letters, wanted, values.shape, strict=True)
    )
    if not fits:
        shown = [
            letter if size is None else str(size)
            for letter, size in zip(letters, wanted, strict=True)
        ]
        forms = [shown, shown[1:]] if "?" in axes and wanted[0] in (None, 1) else [shown]
        rule = " or ".join(f"[{', '.join(form)}]" for form in forms)
        if None in wanted and _MAY_BE_NONE not in letters:
            rule += " and not empty"
        raise ValueError(f"{path}: {name} must be {rule}{beside}, got shape {list(values.shape)}")
    sizes.update(
        (letter, size)
        for letter, want, size in zip(letters, wanted, values.shape, strict=True)
        if want is None
    )


def _size(letter: str, sizes: Mapping[str, int]) -> int | None:
    """Return the size that an axis must have; None where it is still open."""
    if letter.isdigit():
        return int(letter)
    name, _, shorter = letter.partition("-")
    return max(sizes[name] - int(shorter or 0), 0) if name in sizes else None


def _check_values(
    path: Path, name: str, values: np.ndarray, array: Array, sizes: Mapping[str, int]
) -> None:
    if array.all_differ and len(np.unique(values)) < values.size:
        raise ValueError(f"{path}: {name}s must differ, got {reprlib.repr(values.tolist())}")
    if array.least is None or not values.size:
        return
    if values.dtype.kind == "f":
        if not (np.isfinite(values) & (values >= array.least)).all():
            raise ValueError(f"{path}: {name} must be finite and >= {array.least}")
        return
    least, most = int(values.min()), int(values.max())
    limit: Any = None if array.limit is None else sizes[array.limit]
    if most > np.iinfo(np.int64).max:
        raise ValueError(f"{path}: {name} has an entry of {most}, which is beyond int64")
    if least < array.least or (limit is not None and most >= limit):
        rule = f">= {array.least}" if limit is None else f"from {array.least} to {limit - 1}"
        raise ValueError(f"{path}: {name} must be {rule}, is from {least} to {most}")
