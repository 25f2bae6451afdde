"""Runs replicas beside mains of which a rank has a shard, in Transformer Engine's grouped experts.

With generalized tensor parallelism (`--expert-tensor-parallel-num-weight-shards`), ranks of a GTP
group share each main by rows. The ranks are in different EP groups, whose plans differ, so a slot
holds a whole expert. A linear asks its first weight, its leader, for all weights of a product, and
what becomes of their gradients (Transformer Engine's `DistributedWeight`). The leader here asks
Megatron's leader for the mains, and adds the slots:

    push                 gathers the shards, and copies replicas from what was gathered
    experts              mains as they were gathered, and slots
    combine's backward   gathers again, for another push
    experts' backward    the mains' gradients, whole, wait for those of their replicas
    join                 the sums are in them, and Megatron reduces and scatters both at once

Every rank of a GTP group gathers and scatters in the same order, whatever its plan is.

Legend: M mains per rank, S slots per rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_ext.balance.main_weights import SeparateMains, TakesSums


@dataclass(eq=False)
class Whole:
    """The mains of one linear in one forward and its backward, whole."""

    leader: Any
    """Megatron's: the first main's shard."""
    gathered: list[Tensor] | None = None
    """From a push to the products."""
    grads: list[Tensor] = field(default_factory=list)
    """From the products' backward to the join."""

    @torch.no_grad()
    def gather(self, *, backward: bool) -> list[Tensor]:
        """Gather the M mains; all ranks of the GTP group call.

        Raises:
            ValueError: Megatron would gather what comes next into the same memory.
        """
        if not self.leader.chain_id.startswith("GTP_remat_grouped"):
            raise ValueError(
                "sharded expert weights have no chain of their own: call Megatron's "
                "classify_gtp_remat_chains(model) before the first forward, as its programs do"
            )
        if backward:
            return list(self.leader.materialize_group_for_backward())
        return list(self.leader.materialize_group_for_forward())

    def take(self, *, backward: bool) -> list[Tensor]:
        """Return the mains for a product; gathers them if no push has."""
        # Not kept: Megatron will gather another layer's mains into the same memory.
        gathered, self.gathered = self.gathered, None
        return self.gather(backward=backward) if gathered is None else gathered


class LedSlots(list[Any]):
    """The slots' weights of one linear in one forward, and the mains that they follow."""

    whole: Whole


class Leader(Tensor):
    """Stands for a linear's first weight during one forward and its backward: see above."""

    is_distributed_weight = True
    slots: LedSlots

    def materialize_group_for_forward(self) -> list[Tensor]:
        """Return the weights of a forward's product, [M + S]."""
        return [*self.slots.whole.take(backward=False), *self.slots]

    def materialize_group_for_backward(self) -> list[Tensor]:
        """Return the weights of a backward's products, [M + S]."""
        return [*self.slots.whole.take(backward=True), *self.slots]

    def grad_buffer(self) -> Tensor:
        """Return memory for the first main's gradient, whole."""
        return self.slots.whole.leader.grad_buffer()

    def finalize_group_grads(self, grads: list[Tensor]) -> list[Tensor | None]:
        """Keep the mains' gradients for the join; return those of slots that autograd takes."""
        num_mains = len(grads) - len(self.slots)
        self.slots.whole.grads = grads[:num_mains]
        of_slots = zip(self.slots, grads[num_mains:], strict=True)
        taken = [None if hasattr(slot, "main_grad") else grad for slot, grad in of_slots]
        return [None] * num_mains + taken


def leader_of(slots: LedSlots) -> Leader:
    """Return the leader of a linear's mains, and of the slots that follow them."""
    like = slots.whole.leader
    empty = torch.empty(0, dtype=like.dtype, device=like.device)
    leader: Any = empty.as_subclass(Leader).requires_grad_(like.requires_grad)
    leader.slots = slots
    for slot in slots:
        if hasattr(slot, "main_grad"):
            # Not a function of the slot, which would hold itself and the graph.
            slot.grad_buffer = lambda grad=slot.main_grad: grad
    return leader


@dataclass(frozen=True, eq=False)
class ShardedMains(SeparateMains):
    """A parameter for each main's shard of one linear."""

    whole: Whole

    def rows(self, *, columnwise: bool) -> list[list[Tensor]]:
        """Gather the mains; all ranks of the GTP group call."""
        self.whole.gathered = self.whole.gather(backward=columnwise)
        return [self.whole.gathered]

    def take(self, values: Iterator[Any], num_slots: int) -> LedSlots:
        """Take a value for each slot."""
        taken = LedSlots(super().take(values, num_slots))
        taken.whole = self.whole
        return taken

    def main_grads(self) -> list[Tensor | None]:
        """None: nothing is added to the shards' `main_grad` here."""
        return [None for _ in self.mains]

    def totals(self, dtype: torch.dtype, takes_sums: TakesSums) -> list[Tensor]:
        """Return the mains' own gradients of this backward, whole."""
        return self.whole.grads

    def hand_over(self, totals: list[Tensor], takes_sums: TakesSums) -> list[Tensor | None]:
        """Let Megatron scatter the totals; all ranks of the GTP group call."""
        self.whole.grads = []
        self.whole.leader.finalize_group_grads(totals)
        return [None for _ in self.mains]
