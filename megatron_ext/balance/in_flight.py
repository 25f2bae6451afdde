"""Keeps plans from a microbatch's forward to its backward.

A pipeline schedule runs several forwards of one layer before the first backward comes back, so one
layer has several plans in flight. Each is kept under a *virtual layer id*: (MoE layer on this rank,
entry of its ring). Autograd carries a `PlanHandle`, which names the id and the
generation of what is stored there; asking with an old generation is an error, never another
microbatch's plan. Plans are released by id, in any order.

In backward the host must know the slots of a plan. For a plan on a GPU, the launch that seals the
plan writes them to the host, which does not wait for the device. They are there long before the
backward needs them.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_ext.balance.layout import ExpertLayout
from megatron_ext.balance.plan import BalancePlan
from megatron_ext.balance.reroute import RoutingMaps
from megatron_ext.transport import HostCopy


@dataclass(eq=False)
class Moves:
    """How often the replicas of a kept plan have moved; outlives the plan, for telemetry."""

    pushes: int = 0
    """Times that weights were pushed: forward, backward, and a recomputed forward."""


@dataclass(eq=False)
class PlanHandle:
    """Names a stored plan. Made by `InFlightPlans.keep`, held by the autograd graph of one forward.

    When the graph is dropped without a backward (an aborted step), the plan's entry becomes free
    again.
    """

    virtual_layer_id: int
    generation: int
    layer_number: int
    """1-based, as in Megatron."""
    microbatch_idx: int
    """Plans that this layer had kept before."""
    moves: Moves = field(default_factory=Moves)


class InFlightPlans:
    """The plans of one MoE layer between forward and backward: a ring of entries.

    Args:
        layout: Experts and slots of the EP group.
        ring_size: Most plans in flight at a time.
        layer_number: 1-based, as in Megatron; for messages.
        first_virtual_layer_id: Ids are this and the following `ring_size - 1`.
        device: Where the plans are.
    """

    def __init__(
        self,
        layout: ExpertLayout,
        *,
        ring_size: int,
        layer_number: int,
        first_virtual_layer_id: int,
        device: torch.device,
    ) -> None:
        self.layout = layout
        self.ring_size = ring_size
        self.layer_number = layer_number
        self.first_virtual_layer_id = first_virtual_layer_id
        self._plans: list[BalancePlan | None] = [None] * ring_size
        self._on_host = [
            HostCopy((layout.ep_size, layout.slots), torch.int32, device) for _ in range(ring_size)
        ]
        self._maps = [RoutingMaps() for _ in range(ring_size)]
        self._generation = [0] * ring_size
        self._microbatch_idx = [-1] * ring_size
        self._free = list(range(ring_size))
        self._num_kept = 0

    @property
    def num_in_flight(self) -> int:
        """Plans kept and not yet released."""
        return self.ring_size - len(self._free)

    def keep(self, plan: BalancePlan) -> PlanHandle:
        """Keep `plan` in a free entry and return its handle. Nobody writes to a plan.

        The caller has its slots written to `slots_on_host`.

        Raises:
            RuntimeError: Every entry holds a plan whose backward has not run.
        """
        microbatch_idx = self._num_kept
        if not self._free:
            waiting = sorted(self._microbatch_idx)
            raise RuntimeError(
                f"layer {self.layer_number}: no entry for the plan of microbatch {microbatch_idx}: "
                f"all {self.ring_size} entries hold plans that wait for their backward "
                f"(microbatches {waiting}); set balance.max_in_flight to {self.ring_size + 1} "
                f"or more (ring size now {self.ring_size})"
            )
        entry = min(self._free)
        self._free.remove(entry)
        self._num_kept += 1
        self._generation[entry] += 1
        self._microbatch_idx[entry] = microbatch_idx
        self._plans[entry] = plan
        handle = PlanHandle(
            self.first_virtual_layer_id + entry,
            self._generation[entry],
            self.layer_number,
            microbatch_idx,
        )
        weakref.finalize(handle, self._free_entry, entry, handle.generation)
        return handle

    def recall(self, handle: PlanHandle) -> BalancePlan:
        """Return the plan that `handle` names.

        Raises:
            RuntimeError: The entry was released since, or holds another microbatch's plan.
        """
        plan = self._plans[self._entry_of(handle)]
        assert plan is not None, "an entry that is taken has a plan"
        return plan

    def slots_on_host(self, handle: PlanHandle) -> HostCopy:
        """Return where the slots of the plan that `handle` names are to be on the host."""
        return self._on_host[self._entry_of(handle)]

    def recall_slots(self, handle: PlanHandle) -> Tensor:
        """Return the slots of the plan that `handle` names, on the host, until it is released.

        Raises:
            RuntimeError: The entry was released since, or holds another microbatch's plan.
        """
        return self._on_host[self._entry_of(handle)].wait()

    def routing_maps(self, handle: PlanHandle) -> RoutingMaps:
        """Return the memory that lives as long as the plan that `handle` names."""
        return self._maps[handle.virtual_layer_id - self.first_virtual_layer_id]

    def release(self, handle: PlanHandle) -> None:
        """Free the entry of `handle`. Releasing twice does nothing."""
        entry = handle.virtual_layer_id - self.first_virtual_layer_id
        self._free_entry(entry, handle.generation)

    def clear(self) -> None:
        """Release every plan: no backward will come any more."""
        self._free = list(range(self.ring_size))
        self._plans = [None] * self.ring_size

    def _entry_of(self, handle: PlanHandle) -> int:
        entry = handle.virtual_layer_id - self.first_virtual_layer_id
        if entry in self._free or self._generation[entry] != handle.generation:
            raise RuntimeError(
                f"layer {handle.layer_number}: the plan of microbatch {handle.microbatch_idx} "
                f"(virtual layer id {handle.virtual_layer_id}, generation {handle.generation}) is "
                f"gone: that entry is at generation {self._generation[entry]} and "
                f"{'free' if entry in self._free else 'taken'}; one forward has one backward "
                f"(ring size {self.ring_size}, set by balance.max_in_flight)"
            )
        return entry

    def _free_entry(self, entry: int, generation: int) -> None:
        if self._generation[entry] == generation and entry not in self._free:
            self._free.append(entry)
            self._plans[entry] = None
