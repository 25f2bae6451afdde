"""Runs replicas beside mains of which a rank has a shard, in Transformer Engine's grouped experts.

With generalized tensor parallelism (`--expert-tensor-parallel-num-weight-shards`), ranks of a GTP
group share each main by rows. The ranks are in different EP groups, whose plans differ, so a slot
holds a whole expert. A linear asks its first weight, its leader, for all weights of a product and
for what becomes of their gradients (Transformer Engine's `DistributedWeight`). The leader here
passes that on to Megatron's leader, and adds the slots:

    push                 gathers the shards, and copies replicas from what was gathered
    experts              mains as they were gathered, and slots
    combine's backward   gathers again, for another push
    experts' backward    the mains' gradients, whole, wait for those of their replicas
    join                 the sums are added, and Megatron reduces and scatters both at once

Every rank of a GTP group gathers and scatters in the same order, whatever its plan is.

Legend: M mains per rank, S slots per rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_ext.balance.main_weights import SeparateMains


def is_sharded(weight: Any) -> bool:
    """Whether this rank has a shard of a weight by generalized tensor parallelism."""
    # Megatron-Core before 0.19 has none.
    return getattr(weight, "is_gtp_weight_remat", False)


class Whole:
    """The mains of one rank's experts in one forward, whole: for its pushes and products."""

    def __init__(self, leaders: Sequence[Any]) -> None:
        self.leaders = leaders
        """The first weight of each linear."""
        self._gathered: dict[int, list[Tensor]] = {}
        """By linear, from a push to the products."""
        self.grads: dict[int, list[Tensor]] = {}
        """By linear, from the products' backward to the join."""

    def gather_all(self, *, backward: bool) -> None:
        """Gather the mains of all linears for a push, and keep them for the products."""
        for leader in self.leaders:
            if not leader.chain_id.startswith("GTP_remat_grouped"):
                # Its gathers would follow each other in the same memory, before the products.
                raise ValueError(
                    "sharded expert weights have no chain of their own: call Megatron's "
                    "classify_gtp_remat_chains(model) before the first forward, as its programs do"
                )
        # Megatron prefetches in the order of the products.
        linears = range(len(self.leaders))
        for linear in reversed(linears) if backward else linears:
            self._gathered[linear] = self._gather(linear, backward)

    def of(self, linear: int) -> list[Tensor]:
        """Return what `gather_all` has gathered of a linear, [M] of whole shape."""
        return self._gathered[linear]

    def take(self, linear: int, *, backward: bool) -> list[Tensor]:
        """Return a linear's mains for its product; gathers them if no push has."""
        # Not kept: Megatron will gather another layer's mains into the same memory.
        gathered = self._gathered.pop(linear, None)
        return self._gather(linear, backward) if gathered is None else gathered

    @torch.no_grad()
    def _gather(self, linear: int, backward: bool) -> list[Tensor]:
        leader = self.leaders[linear]
        if backward:
            return list(leader.materialize_group_for_backward())
        return list(leader.materialize_group_for_forward())

    def scatter_all(self) -> None:
        """Let Megatron reduce and scatter the gradients, in the order of a backward."""
        for linear in reversed(range(len(self.leaders))):
            if linear in self.grads:
                self.leaders[linear].finalize_group_grads(self.grads.pop(linear))


class Leader(Tensor):
    """Stands for a linear's first weight during one forward and its backward: see above."""

    is_distributed_weight = True
    whole: Whole
    linear: int
    slots: list[Tensor]

    @staticmethod
    def of(whole: Whole, linear: int, slots: Sequence[Tensor]) -> Leader:
        """Return the leader of a linear's mains, and of slots that follow them."""
        leader = whole.leaders[linear]
        empty = torch.empty(0, dtype=leader.dtype, device=leader.device)
        made: Any = empty.as_subclass(Leader).requires_grad_(leader.requires_grad)
        made.whole, made.linear, made.slots = whole, linear, list(slots)
        for slot in made.slots:
            if hasattr(slot, "main_grad"):
                # Not a function of the slot, which would hold itself and the graph.
                slot.grad_buffer = partial(_returned, slot.main_grad)
        leads: Leader = made
        return leads

    def materialize_group_for_forward(self) -> list[Tensor]:
        """Return the weights of a forward's product, [M + S]."""
        return [*self.whole.take(self.linear, backward=False), *self.slots]

    def materialize_group_for_backward(self) -> list[Tensor]:
        """Return the weights of a backward's products, [M + S]."""
        return [*self.whole.take(self.linear, backward=True), *self.slots]

    def grad_buffer(self) -> Tensor:
        """Return memory for the first main's gradient, whole."""
        buffer: Tensor = self.whole.leaders[self.linear].grad_buffer()
        return buffer

    def finalize_group_grads(self, grads: list[Tensor]) -> list[Tensor | None]:
        """Keep the mains' gradients for the join; return those of slots that autograd takes."""
        num_mains = len(grads) - len(self.slots)
        self.whole.grads[self.linear] = grads[:num_mains]
        of_slots = zip(self.slots, grads[num_mains:], strict=True)
        taken = [None if hasattr(slot, "main_grad") else grad for slot, grad in of_slots]
        return [None] * num_mains + taken


class LedSlots(list[Any]):
    """The slots' weights of one linear in one forward, and the mains that they follow."""

    whole: Whole
    linear: int

    def leader(self) -> Leader:
        """Return the leader of mains and slots."""
        return Leader.of(self.whole, self.linear, self)


def _returned(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True, eq=False)
class ShardedMains(SeparateMains):
    """A parameter for each main's shard of one linear."""

    whole: Whole
    linear: int

    def rows(self, *, columnwise: bool) -> list[list[Tensor]]:
        """Gather the mains, of all linears with the first; all ranks of the GTP group call."""
        if self.linear == 0:
            self.whole.gather_all(backward=columnwise)
        return [self.whole.of(self.linear)]

    def take(self, values: Iterator[Any], num_slots: int) -> LedSlots:
        """Take a value for each slot."""
        taken = LedSlots(super().take(values, num_slots))
        taken.whole, taken.linear = self.whole, self.linear
        return taken

    def main_grad(self, m: int) -> Tensor | None:
        """None: nothing is added to the shard's `main_grad` here."""
        return None

    def hand_over(self, sums: dict[int, Tensor]) -> list[Tensor | None]:
        """Add the sums to the mains' gradients; with the last linear's, scatter those of all.

        All ranks of the GTP group call.
        """
        for m, total in sums.items():
            self.whole.grads[self.linear][m].add_(total)
        if self.linear == len(self.whole.leaders) - 1:
            self.whole.scatter_all()
        return [None] * len(self.mains)
