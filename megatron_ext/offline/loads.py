"""Files of loads and of plans, both `.npz`.

loads   load  int64 [B, R, E] or [R, E]      assignments from source rank to logical expert
        step, microbatch, layer  int [B]     optional: with them the loads are a trace
plans   quota int64 [B, E, R]                assignments of expert e computed on rank t
        slots int32 [B, R, S]                logical expert in each slot, or -1
        split int64 [B, R, E, R]             optional: the quota by source rank
"""

from __future__ import annotations

import os
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_ext.balance.plan import BalancePlan, split_quota

TRACE_FIELDS = ("step", "microbatch", "layer")


@dataclass(frozen=True, eq=False)
class Loads:
    """Some loads of one EP group."""

    load: Tensor
    """int64 [B, R, E]."""
    trace: dict[str, Tensor] = field(default_factory=dict)
    """Of `TRACE_FIELDS`, what is known: int64 [B] each."""

    def __len__(self) -> int:
        return self.load.shape[0]


def read_loads(path: Path) -> Loads:
    """Read and check a file of loads.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is no file of loads; the message names file, value and rule.
    """
    arrays = _read_arrays(path)
    if "load" not in arrays:
        raise ValueError(
            f"{path} has no array 'load'; it has {', '.join(sorted(arrays)) or 'none'}"
        )
    load = arrays["load"]
    if load.dtype != np.int64:
        raise ValueError(f"{path}: load must be int64, got {load.dtype}; load.astype('int64') is")
    if load.ndim == 2:
        load = load[None]
    if load.ndim != 3 or 0 in load.shape:
        raise ValueError(
            f"{path}: load must be [B, R, E] or [R, E] and not empty, got shape {load.shape}"
        )
    batch, ranks, experts = load.shape
    if experts % ranks:
        raise ValueError(f"{path}: experts ({experts}) must be a multiple of ranks ({ranks})")
    if load.size and int(load.min()) < 0:
        raise ValueError(f"{path}: load has a negative entry ({int(load.min())})")
    trace = {}
    for name in TRACE_FIELDS:
        if name not in arrays:
            continue
        values = arrays[name]
        if values.shape != (batch,) or not np.issubdtype(values.dtype, np.integer):
            raise ValueError(
                f"{path}: {name} must be integers [{batch}], got {values.dtype} {values.shape}"
            )
        trace[name] = torch.from_numpy(values.astype(np.int64))
    return Loads(torch.from_numpy(np.ascontiguousarray(load)), trace)


def write_loads(path: Path, loads: Loads, *, overwrite: bool = False) -> None:
    """Write a file of loads, whole or not at all.

    Raises:
        FileExistsError: The file exists and is not to be replaced.
    """
    _write_arrays(path, {"load": loads.load, **loads.trace}, overwrite=overwrite)


def write_plans(
    path: Path,
    load: Tensor,
    plans: list[BalancePlan],
    *,
    with_split: bool = False,
    overwrite: bool = False,
) -> None:
    """Write a file of plans, whole or not at all.

    Args:
        path: Where.
        load: What was planned for, int64 [B, R, E].
        plans: One for each load, of one layout.
        with_split: Add whose assignments fill each quota.
        overwrite: Replace an existing file.

    Raises:
        FileExistsError: The file exists and is not to be replaced.
    """
    arrays = {
        "quota": torch.stack([plan.quota for plan in plans]),
        "slots": torch.stack([plan.slots for plan in plans]),
    }
    if with_split:
        pairs = zip(load, plans, strict=True)
        arrays["split"] = torch.stack([split_quota(one, plan) for one, plan in pairs])
    _write_arrays(path, arrays, overwrite=overwrite)


def check_free(path: Path, *, overwrite: bool) -> None:
    """Raise FileExistsError if `path` exists and is not to be replaced."""
    if path.is_dir():
        raise FileExistsError(f"{path} is a folder")
    if path.exists() and not overwrite:
        raise FileExistsError(f"{path} exists already: replace it with --overwrite")


def _read_arrays(path: Path) -> dict[str, np.ndarray]:
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist" if not path.exists() else f"{path} is a folder"
        )
    try:
        archive = np.load(path, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise ValueError(f"{path} holds one array, not an archive: write it with numpy.savez")
        with archive:
            return {name: archive[name] for name in archive.files}
    except (zipfile.BadZipFile, EOFError) as error:
        raise ValueError(f"{path} is no .npz file ({error})") from error
    except ValueError as error:
        if str(path) in str(error):
            raise
        raise ValueError(f"{path} is no .npz file of plain arrays ({error})") from error


def _write_arrays(path: Path, arrays: dict[str, Tensor], *, overwrite: bool) -> None:
    check_free(path, overwrite=overwrite)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            plain: dict[str, Any] = {name: value.numpy() for name, value in arrays.items()}
            np.savez_compressed(file, **plain)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
