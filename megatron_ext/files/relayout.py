"""Files of arrangements of experts: `.npz` of layer int64 [L] and expert int64 [L, E].

Entry p of a layer's `expert` is the logical expert that is to become expert p. `megatron-ext place`
makes such files, `megatron-ext checkpoint relayout` moves experts by them. A file of semantics
(`methods/sem_moe/semantics.py`) begins with the same two arrays and is read here as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from megatron_ext.files.arrays import write_arrays
from megatron_ext.files.schema import Array, Schema

_SCHEMA = Schema(
    arrays={
        "expert": Array(dtype=np.int64, axes="L E"),
        "layer": Array(dtype=np.int64, axes="L", all_differ=True, least=0),
    }
)


def read_layout(path: Path) -> dict[int, np.ndarray]:
    """Read an arrangement: by each layer's number, the logical expert at each position, int64 [E].

    Errors are those of `Schema.read`.
    """
    arrays = _SCHEMA.read(path)
    layer, expert = arrays["layer"], arrays["expert"]
    check_layout(path, layer, expert)
    return dict(zip(layer.tolist(), expert, strict=True))


def write_layout(path: Path, layout: Mapping[int, np.ndarray], *, overwrite: bool = False) -> None:
    """Write an arrangement of experts, as `read_layout` returns it: see `write_arrays`."""
    arrays = {"layer": np.array(list(layout)), "expert": np.stack(list(layout.values()))}
    write_arrays(path, arrays, overwrite=overwrite)


def check_layout(path: Path, layer: np.ndarray, expert: np.ndarray) -> None:
    """Check that the arrays of a file, as above, have every expert of every layer once.

    Raises:
        ValueError: An expert is missing or there twice; the message names file, layer and rule.
    """
    num_experts = expert.shape[1]
    for number, of_layer in zip(layer.tolist(), expert, strict=True):
        if not np.array_equal(np.sort(of_layer), np.arange(num_experts)):
            raise ValueError(
                f"{path}: expert of layer {number} must be every number from 0 to "
                f"{num_experts - 1} once, got {of_layer.tolist()}"
            )
