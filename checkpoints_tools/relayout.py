"""Moves experts between ranks in a Megatron checkpoint; the model computes the same as before.

Experts have no order of their own: if expert 5 becomes expert 0, and row 5 of the router row 0,
every token gets the same experts as before, under other numbers. So experts that are to be on one
rank get neighboring numbers. Weights of experts and their optimizer's state stay where they are in
the files: only the table of contents names the expert they belong to, and it is changed. The rows
of routers are written anew.
"""

from __future__ import annotations

import copy
import pickle
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpoints_tools.contents import is_of_optimizer, read_metadata
from checkpoints_tools.folder import (
    CHECKSUMS_FILE,
    TABLE_FILE,
    hash_file,
    newest_of,
    read_checksums,
    stored_bytes,
    sync,
    write_checksums,
)
from checkpoints_tools.pickles import read_object

if TYPE_CHECKING:
    import numpy as np

_ROUTER_FILE = "routers_after_relayout.distcp"
PARTS = re.compile(
    r"(?P<before>^|.*\.)decoder\.layers\.(?:(?P<layer>\d+)\.)?mlp\."
    r"(?:router\.(?P<router>weight|bias|expert_bias)"
    r"|experts\.experts\.(?:(?P<expert>\d+)\.)?linear_fc\d\.(?:weight|bias))$"
)


def relayout(path: str | Path, expert: Mapping[int, np.ndarray], out: str | Path) -> int:
    """Write a checkpoint whose experts have other numbers.

    Args:
        path: A checkpoint, a folder of checkpoints, or a run directory. From a folder the newest
            checkpoint is taken.
        expert: By layer, counted from 1: which expert, int64 [E], is to become expert 0, 1, ...
            Layers without an entry stay as they are.
        out: Folder to make.

    Returns:
        Number of changed tensors, the optimizer's included; one per layer and expert or router.

    Raises:
        FileNotFoundError: There is no checkpoint.
        FileExistsError: `out` exists.
        ValueError: The checkpoint has other layers or experts, or stores experts or the optimizer's
            state in a way that this function cannot take apart.
    """
    folder, out = newest_of(Path(path)), Path(out)
    if out.exists():
        raise FileExistsError(f"{out} exists already")
    metadata = read_metadata(folder)
    layouts = {number: order.tolist() for number, order in expert.items()}
    changes = list(_find_changes(folder, metadata, layouts))
    _check_complete(folder, metadata, changes, layouts)

    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(folder, partial, ignore=shutil.ignore_patterns(TABLE_FILE, CHECKSUMS_FILE))
    changed = copy.copy(metadata)
    changed.storage_data = dict(metadata.storage_data)
    with (partial / _ROUTER_FILE).open("wb") as file:
        for index, new_index, rows in changes:
            stored = metadata.storage_data[index]
            if rows is not None:
                stored = _write_rows(folder, stored, rows, file)
            changed.storage_data[new_index] = stored
    (partial / TABLE_FILE).write_bytes(pickle.dumps(changed))
    _renew_checksums(folder, partial)
    partial.rename(out)
    sync(out.parent)
    return len(changes)


def _find_changes(
    folder: Path, metadata: Any, layouts: Mapping[int, list[int]]
) -> Iterator[tuple[Any, Any, tuple[int, list[int]] | None]]:
    """Return for each stored piece that changes: its index, its new index, the order of its rows.

    A piece of an expert's weight belongs to another expert afterwards. A piece of a router stays,
    with its rows in another order along an axis.
    """
    import dataclasses

    for index in metadata.storage_data:
        match = PARTS.fullmatch(index.fqn)
        if match is None:
            continue
        size = metadata.state_dict_metadata[index.fqn].size
        (piece,) = [
            chunk.sizes
            for chunk in metadata.state_dict_metadata[index.fqn].chunks
            if chunk.offsets == index.offset
        ]
        offset = list(index.offset)
        # Without a number in the name, layers are the first axis, and experts the next.
        in_name = match["layer"] is not None
        number = 1 + (int(match["layer"]) if in_name else offset[0])
        axis = 0 if in_name else 1
        if number not in layouts:
            continue
        order = layouts[number]
        num_experts = len(order) if match["expert"] is not None else size[axis]
        if num_experts != len(order):
            raise ValueError(
                f"{folder}: layer {number} has {num_experts} experts, the layout {len(order)}"
            )
        is_router = match["router"] is not None
        whole = (*(() if in_name else (1,)), *((num_experts,) if is_router else ()))
        if not is_router and match["expert"] is None:
            whole = (*whole, 1)
        if tuple(piece[: len(whole)]) != whole:
            raise ValueError(
                f"{folder}: {index.fqn} is stored in pieces of {list(piece)}: not layer by layer, "
                f"and expert by expert"
            )
        if is_router:
            yield index, index, (axis, order)
            continue
        old = int(match["expert"]) if match["expert"] is not None else offset[axis]
        new = order.index(old)
        fqn = index.fqn
        if match["expert"] is not None:
            fqn = fqn[: match.start("expert")] + str(new) + fqn[match.end("expert") :]
        else:
            offset[axis] = new
        yield index, dataclasses.replace(index, fqn=fqn, offset=type(index.offset)(offset)), None


def _renew_checksums(folder: Path, made: Path) -> None:
    """Write checksums: of copied files those they had, so that earlier damage is still noticed."""
    recorded = read_checksums(folder) or {}
    renewed = {_ROUTER_FILE, TABLE_FILE}
    files = [path for path in sorted(made.iterdir()) if path.is_file()]
    write_checksums(
        made,
        {
            path.name: recorded[path.name]
            if path.name in recorded and path.name not in renewed
            else hash_file(path)
            for path in files
        },
    )
    for path in (*files, made / CHECKSUMS_FILE, made):
        sync(path)


def _check_complete(
    folder: Path, metadata: Any, changes: list[Any], layouts: Mapping[int, list[int]]
) -> None:
    """Check that every layer's router was found, and its optimizer state if there is any."""
    routers = [index for index, _, rows in changes if rows is not None]
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


def _write_rows(folder: Path, stored: Any, rows: tuple[int, list[int]], file: Any) -> Any:
    """Append a stored tensor with its rows in another order; return its new location."""
    import dataclasses

    import torch

    if getattr(stored, "transform_descriptors", None):
        raise ValueError(f"{folder}: {stored.relative_path} is compressed")
    tensor = read_object(stored_bytes(folder, stored))
    axis, order = rows
    start = file.tell()
    torch.save(tensor.index_select(axis, torch.tensor(order)), file)
    return dataclasses.replace(
        stored, relative_path=_ROUTER_FILE, offset=start, length=file.tell() - start
    )
