"""Holds replicas that `megatron-ext place` placed before the run, layer by layer.

`files/placement.py` reads and writes the file.

Legend: L layers, R ranks of the EP group, E logical experts, S slots per rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ext.balance.layout import ExpertLayout


@dataclass(frozen=True, eq=False)
class Placement:
    """The replicas of each layer, made offline from a trace; equal on all ranks, never changed.

    Strategy `craft` uses the replicas. Other planners use at most `slot_limit` slots in a layer.
    """

    layers: tuple[int, ...]
    """Number of each layer, counted from 1 as in Megatron; 0 alone for a file without numbers."""
    experts_in_slots: Tensor
    """Logical expert in each slot, or -1: int32 [L, R, S]."""
    expert_load: Tensor
    """Assignments of each expert in the placement's trace: int64 [L, E]."""

    def replicas(self, layer: int, layout: ExpertLayout) -> Tensor:
        """Return the replicas of a layer in the slots of a layout: int32 [R, S].

        Raises:
            ValueError: The placement was made for other experts, ranks or NVLink domains, does not
                know the layer, or needs more slots.
        """
        held = self.experts_in_slots[self._index(layer)]
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
        experts_in_slots = torch.full((ranks, layout.slots), -1, dtype=torch.int32)
        for rank, row in enumerate(held):
            kept = row[row >= 0]
            for expert in kept.tolist():
                home = layout.home_rank(expert)
                if layout.domain(rank) != layout.domain(home):
                    raise ValueError(
                        f"the placement has a replica of expert {expert} on rank {rank}, outside "
                        f"the NVLink domain of its home rank {home}"
                    )
            experts_in_slots[rank, : len(kept)] = kept
        return experts_in_slots

    def slot_limit(self, layer: int) -> int:
        """Return the largest number of slots that the layer uses on one rank.

        Raises:
            ValueError: The placement does not know the layer.
        """
        held = self.experts_in_slots[self._index(layer)]
        return int((held >= 0).sum(-1).max()) if held.numel() else 0

    def num_replicas(self) -> dict[str, int]:
        """Return the number of replicas of each layer, by the layer's number."""
        counts = (self.experts_in_slots >= 0).sum((1, 2)).tolist()
        return {str(layer): count for layer, count in zip(self.layers, counts, strict=True)}

    def _index(self, layer: int) -> int:
        if layer not in self.layers:
            known = ", ".join(map(str, self.layers))
            raise ValueError(f"the placement has no layer {layer}; it has {known}")
        return self.layers.index(layer)
