"""Moves experts between ranks in a Megatron checkpoint; the model computes the same as before.

Experts have no order of their own: if expert 5 becomes expert 0, and row 5 of the router row 0,
every token gets the same experts as before, under other numbers. So experts that are to be on one
rank get neighboring numbers. Weights of experts and their optimizer's state stay where they are in
the files: only the table of contents names the expert they belong to, and it is changed. The rows
of routers are written anew.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import os
import pickle
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from checkpoints_tools.contents import (
    is_of_optimizer,
    read_metadata,
    router_groups,
    sizes_of_pieces,
)
from checkpoints_tools.folder import (
    CHECKSUMS_FILE,
    TABLE_FILE,
    Checksum,
    Hasher,
    find_damage,
    making,
    newest_of,
    read_checksums,
    seal,
)
from checkpoints_tools.tensors import read_piece
from megatron_ext.files.opening import look_at, open_regular

if TYPE_CHECKING:
    import numpy as np

_THREADS = 4
_PIECE_BYTES = 16 << 20
PARTS = re.compile(
    r"(?P<before>^|.*\.)decoder\.layers\.(?:(?P<layer>\d+)\.)?mlp\."
    r"(?:router\.(?P<router>weight|bias|expert_bias|qb_beta)"
    r"|experts\.experts\.(?:(?P<expert>\d+)\.)?linear_fc\d\.(?:weight|bias))$"
)
_OF_EXPERTS = re.compile(r"(?:^|\.)decoder\.layers\.(?:\d+\.)?mlp\.(?:router|experts)\.")


class _Change(NamedTuple):
    """A stored piece that changes.

    A piece of an expert's weight belongs to another expert afterwards. A piece of a router stays,
    with its rows in another order along an axis.
    """

    index: Any
    new_index: Any
    rows: tuple[int, list[int]] | None
    """Of a router: the axis, and its rows in their new order."""
    sizes: tuple[int, ...]
    """Of the piece."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Relayout:
    """A checkpoint whose experts get other numbers; checked, and not written yet.

    Attributes:
        folder: The checkpoint that is read.
        out: The folder that `write` makes.
        num_tensors: Tensors that change, the optimizer's included; one per layer and expert or
            router.
        num_bytes: Size of the checkpoint that `write` makes, but for a few bytes a tensor.
    """

    folder: Path
    out: Path
    num_tensors: int
    num_bytes: int
    _copied: list[str]
    _table: Any
    _changes: list[_Change]

    def write(self, on_bytes: Callable[[int], object] = lambda num_bytes: None) -> None:
        """Write the checkpoint; see `making`.

        Several threads call `on_bytes`, with the bytes that were copied since the last call.

        Raises:
            OSError: The disk has no room for it, or it cannot be written; nothing is left.
            ValueError: The checkpoint was changed since it was written; nothing is left.
        """
        with making(self.out, self.num_bytes) as partial:
            self._fill(partial, on_bytes)

    def _fill(self, partial: Path, on_bytes: Callable[[int], object]) -> None:
        recorded = read_checksums(self.folder) or {}

        def copied(name: str) -> Checksum:
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            found = _copy(self.folder / name, partial / name, on_bytes)
            if recorded.get(name, found) != found:  # New checksums would hide it.
                raise ValueError(f"{self.folder}: {name} was changed: its checksum is another")
            return found

        # One file goes to the disk while the next one is copied.
        with ThreadPoolExecutor(_THREADS) as threads:
            checksums = dict(zip(self._copied, threads.map(copied, self._copied), strict=True))
        table = copy.copy(self._table)
        table.storage_data = dict(self._table.storage_data)
        # Of an earlier relayout there is one, which the table may still name.
        names = (f"routers_after_relayout{number or ''}.distcp" for number in itertools.count())
        routers = next(name for name in names if name not in checksums)
        with (partial / routers).open("wb") as file:
            for change in self._changes:
                stored = self._table.storage_data[change.index]
                if change.rows is not None:
                    stored = _write_rows(self.folder, self._table, change, file)
                table.storage_data[change.new_index] = stored
        (partial / TABLE_FILE).write_bytes(pickle.dumps(table))
        seal(partial, checksums)


def relayout(path: str | Path, expert: Mapping[int, np.ndarray], out: str | Path) -> int:
    """Write a checkpoint whose experts have other numbers; return the number of changed tensors.

    Arguments and errors are those of `prepare_relayout` and `Relayout.write`.
    """
    prepared = prepare_relayout(path, expert, out)
    prepared.write()
    return prepared.num_tensors


def prepare_relayout(
    path: str | Path, expert: Mapping[int, np.ndarray], out: str | Path
) -> Relayout:
    """Check that experts of a checkpoint can get other numbers; write nothing.

    Args:
        path: The checkpoint, or where it is.
        expert: By layer, counted from 1: which expert, int64 [E], is to become expert 0, 1, ...
            Layers without an entry stay as they are.
        out: Folder to make.

    Raises:
        FileExistsError: `out` exists.
        ValueError: The checkpoint is damaged, has other layers or experts, has routers that choose
            among groups which the order would part, or stores experts or the optimizer's state in a
            way that this function cannot take apart.
    """
    folder, out = newest_of(Path(path)), Path(out)
    if out.exists():
        raise FileExistsError(f"{out} exists already")
    if damage := find_damage(folder):
        raise ValueError(f"{folder}: {damage[0]}")
    table = read_metadata(folder)
    layouts = {number: order.tolist() for number, order in expert.items()}
    changes = list(_find_changes(folder, table, layouts))
    _check_complete(folder, table, changes, layouts)
    _check_groups(folder, router_groups(folder, table), layouts)
    copied = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
    copied = [name for name in copied if name not in (TABLE_FILE, CHECKSUMS_FILE)]
    routers = [change.index for change in changes if change.rows is not None]
    return Relayout(
        folder=folder,
        out=out,
        num_tensors=len(changes),
        num_bytes=sum(look_at(folder / name, follow=True).st_size for name in (*copied, TABLE_FILE))
        + sum(table.storage_data[index].length for index in routers),
        _copied=copied,
        _table=table,
        _changes=changes,
    )


def _copy(source: Path, target: Path, on_bytes: Callable[[int], object]) -> Checksum:
    hasher, buffer = Hasher(), memoryview(bytearray(_PIECE_BYTES))
    with (
        open_regular(source, follow=True) as read,
        open_regular(source, follow=True) as read_again,
        target.open("wb", buffering=0) as written,
    ):
        while length := _copy_piece(read.fileno(), written.fileno()):
            while length > 0 and (hashed := read_again.readinto(buffer[:length])):
                hasher.add(buffer[:hashed])
                length -= hashed
                on_bytes(hashed)
        os.fsync(written.fileno())
    return hasher.checksum()


def _copy_piece(source: int, target: int) -> int:
    """Copy the next bytes inside the system, and return their number; 0 at the end."""
    try:
        return os.copy_file_range(source, target, _PIECE_BYTES)
    except OSError:  # Not every pair of file systems can; what else is wrong, this says again.
        return os.sendfile(target, source, None, _PIECE_BYTES)


def _find_changes(
    folder: Path, metadata: Any, layouts: Mapping[int, list[int]]
) -> Iterator[_Change]:
    pieces = sizes_of_pieces(metadata)
    for index in metadata.storage_data:
        match = PARTS.fullmatch(index.fqn)
        if match is None:
            is_tensor = hasattr(metadata.state_dict_metadata.get(index.fqn), "chunks")
            if is_tensor and _OF_EXPERTS.search(index.fqn):
                raise ValueError(f"{folder}: it is not known what of {index.fqn} is each expert's")
            continue
        # Without a number in the name, layers are the first axis, and experts the next.
        in_name = match["layer"] is not None
        axis = 0 if in_name else 1
        piece = pieces.get((index.fqn, tuple(index.offset or ())), ())
        if len(piece) <= axis:
            raise ValueError(f"{folder}: the table of contents has no place for {index.fqn}")
        size = metadata.state_dict_metadata[index.fqn].size
        offset = list(index.offset)
        number = 1 + (int(match["layer"]) if in_name else offset[0])
        if number not in layouts:
            continue
        order, fqn = layouts[number], index.fqn
        is_named = match["expert"] is not None
        if not is_named and size[axis] != len(order):
            raise ValueError(
                f"{folder}: layer {number} has {size[axis]} experts, the layout {len(order)}"
            )
        is_router = match["router"] is not None
        of_piece = [1] * axis + [len(order) if is_router else 1] * (not is_named)
        if list(piece[: len(of_piece)]) != of_piece:
            raise ValueError(
                f"{folder}: {fqn} is stored in pieces of {list(piece)}: not layer by layer, "
                f"and expert by expert"
            )
        if is_router:
            yield _Change(index, index, (axis, order), piece)
            continue
        if is_named:
            new = order.index(int(match["expert"]))
            fqn = fqn[: match.start("expert")] + str(new) + fqn[match.end("expert") :]
        else:
            offset[axis] = order.index(offset[axis])
        new_index = dataclasses.replace(index, fqn=fqn, offset=type(index.offset)(offset))
        yield _Change(index, new_index, None, piece)


def _check_complete(
    folder: Path, metadata: Any, changes: list[_Change], layouts: Mapping[int, list[int]]
) -> None:
    """Check that every layer's router was found, and its optimizer state if there is any."""
    routers = [change.index for change in changes if change.rows is not None]
    weights = [index for index in routers if index.fqn.endswith("router.weight")]
    of_model = [index for index in weights if not is_of_optimizer(index.fqn)]
    if len(of_model) != len(layouts):
        raise ValueError(
            f"{folder} has routers in {len(of_model)} of the {len(layouts)} layers "
            f"{', '.join(map(str, sorted(layouts)))}"
        )
    has_optimizer = any(
        is_of_optimizer(key) and hasattr(entry, "chunks")
        for key, entry in metadata.state_dict_metadata.items()
    )
    if has_optimizer and len(weights) == len(of_model):
        raise ValueError(
            f"{folder}: the optimizer's state is not stored parameter by parameter; save it so, or "
            "without the optimizer"
        )


def _check_groups(folder: Path, num_groups: int, layouts: Mapping[int, list[int]]) -> None:
    """Check that neighboring experts, of which a router chooses groups, stay neighbors."""
    for number, order in layouts.items():
        size = max(1, len(order) // num_groups)
        groups = [expert // size for expert in order]
        if any(len({*groups[first:][:size]}) > 1 for first in range(0, len(order), size)):
            raise ValueError(
                f"{folder}: layer {number}: its router chooses among {num_groups} groups of "
                "neighboring experts, and the layout parts them; `place eplb` with as many "
                "--groups and --nodes does not"
            )


def _write_rows(folder: Path, metadata: Any, change: _Change, file: Any) -> Any:
    """Append a router's stored tensor with its rows in another order; return its new location."""
    import torch

    assert change.rows is not None, "of a router"
    stored = metadata.storage_data[change.index]
    if getattr(stored, "transform_descriptors", None):
        raise ValueError(f"{folder}: {stored.relative_path} is compressed")
    tensor = read_piece(folder, metadata, change.index, change.sizes)
    axis, order = change.rows
    start = file.tell()
    torch.save(tensor.index_select(axis, torch.tensor(order)), file)
    return dataclasses.replace(
        stored, relative_path=Path(file.name).name, offset=start, length=file.tell() - start
    )
