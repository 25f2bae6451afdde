"""Replicas that were placed before the run, layer by layer; `megatron-ext place` makes them.

Files of placements, `.npz`, hold what `Placement` does:

    layer        int64 [L]         number of each layer, counted from 1; 0 where it was not known
    slots        int32 [L, R, S]   logical expert in each slot of each rank, or -1
    expert_load  int64 [L, E]      assignments of each expert in the trace it was made from

Legend: L layers, R ranks of the EP group, E logical experts, S slots per rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megatron_ext.balance.layout import ExpertLayout
from megatron_ext.files.arrays import check_dtype, read_arrays, write_arrays


@dataclass(frozen=True, eq=False)
class Placement:
    """Which replicas each layer has. Made offline from a trace, equal on all ranks, never changed.

    Strategy `craft` uses the replicas. Other planners keep to the slots that a layer has in it.
    """

    layers: tuple[int, ...]
    """Number of each layer, counted from 1 as in Megatron; 0 alone where it is not known."""

    slots: Tensor
    """Logical expert in each slot, or -1: int32 [L, R, S]."""

    expert_load: Tensor
    """Assignments of each expert in the trace it was made from: int64 [L, E]."""

    def replicas(self, layer: int, layout: ExpertLayout) -> Tensor:
        """Return the replicas of a layer in the slots of a layout: int32 [R, S].

        Raises:
            ValueError: The placement was made for other experts, ranks or NVLink domains, does not
                know the layer, or needs more slots.
        """
        held = self.slots[self._index(layer)]
        experts, ranks = self.expert_load.shape[1], held.shape[0]
        if (experts, ranks) != (layout.num_experts, layout.ep_size):
            raise ValueError(
                f"the placement is for {experts} experts on {ranks} ranks, the layer has "
                f"{layout.num_experts} on {layout.ep_size}"
            )
        needed = self.slot_limit(layer)
        if needed > layout.slots:
            raise ValueError(
                f"the placement needs {needed} slots in layer {layer}, there are {layout.slots}"
            )
        for rank, expert in (
            (rank, int(e)) for rank, row in enumerate(held) for e in row if e >= 0
        ):
            home = layout.home_rank(expert)
            if layout.domain(rank) != layout.domain(home):
                raise ValueError(
                    f"the placement has a replica of expert {expert} on rank {rank}, outside the "
                    f"NVLink domain of its home rank {home}"
                )
        slots = torch.full((ranks, layout.slots), -1, dtype=torch.int32)
        for rank, row in enumerate(held):
            kept = row[row >= 0]
            slots[rank, : len(kept)] = kept
        return slots

    def slot_limit(self, layer: int) -> int:
        """Slots that the layer uses on the rank where it uses most: what it is worth to use.

        Raises:
            ValueError: The placement does not know the layer.
        """
        return int((self.slots[self._index(layer)] >= 0).sum(-1).max()) if self.slots.numel() else 0

    def num_replicas(self) -> dict[str, int]:
        """Replicas of each layer, by its number."""
        counts = (self.slots >= 0).sum((1, 2)).tolist()
        return {str(layer): count for layer, count in zip(self.layers, counts, strict=True)}

    def _index(self, layer: int) -> int:
        if layer not in self.layers:
            known = ", ".join(map(str, self.layers))
            raise ValueError(f"the placement has no layer {layer}; it has {known}")
        return self.layers.index(layer)


def read_placement(path: Path) -> Placement:
    """Read and check a file of a placement.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It holds no placement; the message names file, value and rule.
    """
    arrays = read_arrays(path, required=("layer", "slots", "expert_load"), optional=())
    layer, slots, expert_load = arrays["layer"], arrays["slots"], arrays["expert_load"]
    check_dtype(path, "layer", layer, np.int64)
    check_dtype(path, "slots", slots, np.int32)
    check_dtype(path, "expert_load", expert_load, np.int64)
    if slots.ndim != 3 or 0 in slots.shape[:2]:
        raise ValueError(f"{path}: slots must be [L, R, S], got shape {slots.shape}")
    num_layers, ranks, _ = slots.shape
    if layer.shape != (num_layers,) or expert_load.shape[:1] != (num_layers,):
        raise ValueError(
            f"{path}: layer and expert_load must begin with {num_layers} as slots does, got shapes "
            f"{layer.shape} and {expert_load.shape}"
        )
    if len(set(layer.tolist())) != num_layers:
        raise ValueError(f"{path}: layers must differ, got {layer.tolist()}")
    if expert_load.ndim != 2 or expert_load.shape[1] == 0 or expert_load.shape[1] % ranks:
        raise ValueError(
            f"{path}: expert_load must be [L, E] with E a multiple of {ranks} ranks, got shape "
            f"{expert_load.shape}"
        )
    mains = expert_load.shape[1] // ranks
    for index, rank in np.ndindex(num_layers, ranks):
        held = slots[index, rank][slots[index, rank] != -1].tolist()
        where = f"{path}: layer {layer[index]}, rank {rank}"
        for expert in held:
            if not 0 <= expert < expert_load.shape[1]:
                raise ValueError(f"{where}: no expert {expert}; there are {expert_load.shape[1]}")
            if expert // mains == rank or held.count(expert) > 1:
                raise ValueError(f"{where}: expert {expert} is there twice")
    return Placement(tuple(layer.tolist()), torch.from_numpy(slots), torch.from_numpy(expert_load))


def write_placement(path: Path, placement: Placement, *, overwrite: bool = False) -> None:
    """Write a file of a placement, whole or not at all.

    Raises:
        FileExistsError: The file exists and is not to be replaced.
    """
    arrays = {
        "layer": torch.tensor(placement.layers),
        "slots": placement.slots,
        "expert_load": placement.expert_load,
    }
    write_arrays(path, arrays, overwrite=overwrite)
