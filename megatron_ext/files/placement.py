"""Files of replicas that were placed before the run.

They are `.npz` and hold the fields of `Placement`:

    layer        int64 [L]         number of each layer, counted from 1; 0 where it was not known
    slots        int32 [L, R, S]   logical expert in each slot of each rank, or -1
    expert_load  int64 [L, E]      assignments of each expert in the trace it was made from

Legend: L layers, R ranks of the EP group, E logical experts, S slots per rank.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from megatron_ext.balance.placement import Placement
from megatron_ext.files.arrays import write_arrays
from megatron_ext.files.schema import Array, Schema

_SCHEMA = Schema(
    arrays={
        "slots": Array(dtype=np.int32, axes="L R S"),
        "layer": Array(dtype=np.int64, axes="L", all_differ=True, least=0),
        "expert_load": Array(dtype=np.int64, axes="L E", least=0),
    },
    multiple=("E", "R"),
)


def read_placement(path: Path) -> Placement:
    """Read and check a file of a placement; errors are those of `Schema.read`."""
    arrays = _SCHEMA.read(path)
    layer, experts_in_slots, expert_load = arrays["layer"], arrays["slots"], arrays["expert_load"]
    num_layers, ranks, _ = experts_in_slots.shape
    mains = expert_load.shape[1] // ranks
    for index, rank in np.ndindex(num_layers, ranks):
        row = experts_in_slots[index, rank]
        held = row[row != -1].tolist()
        where = f"{path}: layer {layer[index]}, rank {rank}"
        for expert in held:
            if not 0 <= expert < expert_load.shape[1]:
                raise ValueError(f"{where}: no expert {expert}; there are {expert_load.shape[1]}")
            if expert // mains == rank or held.count(expert) > 1:
                raise ValueError(f"{where}: expert {expert} is there twice")
    tensors = torch.from_numpy(experts_in_slots), torch.from_numpy(expert_load)
    return Placement(tuple(layer.tolist()), *tensors)


def write_placement(path: Path, placement: Placement, *, overwrite: bool = False) -> None:
    """Write a file of a placement: see `write_arrays`."""
    arrays = {
        "layer": torch.tensor(placement.layers),
        "slots": placement.experts_in_slots,
        "expert_load": placement.expert_load,
    }
    write_arrays(path, arrays, overwrite=overwrite)
