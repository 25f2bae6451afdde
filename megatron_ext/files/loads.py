"""Files of loads and of plans, both `.npz`.

loads   load  int64 [B, R, E] or [R, E]      assignments from source rank to logical expert
        step, microbatch, layer  int [B]     optional: with them the loads are a trace; layers are
                                             counted from 1, as Megatron does
        predicted  int64 [B, R, E]           optional: what was predicted of each load before it
                                             was known; all of a load's entries -1 where nothing was
plans   quota int64 [B, E, R]                assignments of expert e computed on rank t
        slots int32 [B, R, S]                logical expert in each slot, or -1
        split int64 [B, R, E, R]             optional: the quota by source rank
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megatron_ext.balance.batches import split_quota
from megatron_ext.balance.plan import BalancePlan, check_counts
from megatron_ext.files.arrays import find_arrays, write_arrays
from megatron_ext.files.schema import Array, Schema

TRACE_FIELDS = ("step", "microbatch", "layer")

_LOADS = Schema(
    arrays={
        "load": Array(dtype=np.int64, axes="B? R E"),
        **{
            name: Array(dtype=np.integer, axes="B", required=False, least=0)
            for name in TRACE_FIELDS
        },
        "predicted": Array(dtype=np.int64, axes="B? R E", required=False, least=-1),
    },
    multiple=("E", "R"),
)


@dataclass(frozen=True, eq=False)
class Loads:
    """Some loads of one EP group."""

    load: Tensor
    """int64 [B, R, E]."""
    trace: dict[str, Tensor] = field(default_factory=dict)
    """Those of `TRACE_FIELDS` that are known: int64 [B] each."""
    predicted: Tensor | None = None
    """What was predicted of each load before it was known, or -1: int64 [B, R, E]."""

    def __len__(self) -> int:
        return self.load.shape[0]

    def prediction(self, index: int) -> Tensor | None:
        """The prediction of one load, int64 [R, E]; None if there is none."""
        if self.predicted is None or int(self.predicted[index].min()) < 0:
            return None
        return self.predicted[index]

    def layers(self) -> list[int]:
        """The layer of each load; 0 for all loads if layers are not known."""
        if "layer" not in self.trace:
            return [0] * len(self)
        return [int(layer) for layer in self.trace["layer"]]


def read_loads(path: Path) -> Loads:
    """Read and check a file of loads, or a folder of traces such as a run's `trace/`.

    The loads of a folder, whose files belong together, are put into the order of step, microbatch
    and layer. Errors are those of `find_arrays` and `Schema.read`.
    """
    return _read_folder(path) if path.is_dir() else _read_file(path)


def _read_folder(path: Path) -> Loads:
    files = find_arrays(path)
    parts = [_read_file(file) for file in files]
    for file, part in zip(files, parts, strict=True):
        if part.load.shape[1:] != parts[0].load.shape[1:]:
            raise ValueError(
                f"{file}: load is {list(part.load.shape)}, but {list(parts[0].load.shape)} in "
                f"{files[0]}: ranks and experts of a trace must be equal"
            )
        if missing := [name for name in TRACE_FIELDS if name not in part.trace]:
            raise ValueError(f"{file} has no {', '.join(missing)}: it is no part of a trace")
    trace = {name: torch.cat([part.trace[name] for part in parts]) for name in TRACE_FIELDS}
    order = torch.from_numpy(np.lexsort([trace[name].numpy() for name in reversed(TRACE_FIELDS)]))
    keys = torch.stack([values[order] for values in trace.values()], 1)
    if (same := (keys[1:] == keys[:-1]).all(1)).any():
        step, microbatch, layer = keys[:-1][same][0].tolist()
        raise ValueError(
            f"{path}: step {step}, microbatch {microbatch}, layer {layer} is there more than once"
        )
    load = torch.cat([part.load for part in parts])[order]
    predicted = None
    if any(part.predicted is not None for part in parts):
        predicted = torch.cat(
            [
                torch.full_like(part.load, -1) if part.predicted is None else part.predicted
                for part in parts
            ]
        )[order]
    return Loads(load, {name: values[order] for name, values in trace.items()}, predicted)


def _read_file(path: Path) -> Loads:
    arrays = _LOADS.read(path)
    load = arrays["load"]
    try:
        check_counts(torch.from_numpy(load))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    predicted = None
    if "predicted" in arrays:
        predicted = torch.from_numpy(np.ascontiguousarray(arrays["predicted"]))
        is_nothing = (predicted == -1).flatten(1)
        if (mixed := is_nothing.any(1) & ~is_nothing.all(1)).any():
            raise ValueError(
                f"{path}: predicted of load {int(mixed.int().argmax())} has entries of -1 beside "
                "counts; where nothing was predicted, all of a load's are -1"
            )
    return Loads(
        torch.from_numpy(np.ascontiguousarray(load)),
        {
            name: torch.from_numpy(arrays[name].astype(np.int64))
            for name in TRACE_FIELDS
            if name in arrays
        },
        predicted,
    )


def write_loads(path: Path, loads: Loads, *, overwrite: bool = False) -> None:
    """Write a file of loads: see `write_arrays`."""
    arrays = {"load": loads.load, **loads.trace}
    if loads.predicted is not None:
        arrays["predicted"] = loads.predicted
    write_arrays(path, arrays, overwrite=overwrite)


def write_plans(
    path: Path,
    load: Tensor,
    plans: list[BalancePlan],
    *,
    with_split: bool = False,
    overwrite: bool = False,
) -> None:
    """Write the plans of loads, int64 [B, R, E], all of one layout: see `write_arrays`.

    `with_split` adds each quota by source rank.
    """
    arrays = {
        "quota": torch.stack([plan.quota for plan in plans]),
        "slots": torch.stack([plan.experts_in_slots for plan in plans]),
    }
    if with_split:
        pairs = zip(load, plans, strict=True)
        arrays["split"] = torch.stack([split_quota(one, plan) for one, plan in pairs])
    write_arrays(path, arrays, overwrite=overwrite)
