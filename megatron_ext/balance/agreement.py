"""Notices plans that differ between the ranks of an EP group, at no collective of its own.

Ranks plan alone, so a broken rank, or a bit that flipped in a load, would send tokens and replicas
where nobody expects them. After each plan a rank seals it with its load: a 64-bit digest, which
travels with the counts of the next layer. There every rank compares the seals of all. On a GPU the
host waits for none of it: the device writes a difference into memory of the host, which looks
there at every call.

Legend: N local tokens, E logical experts, R ranks of the EP group.
"""

from __future__ import annotations

from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.balance.load import gather_counts
from megatron_ext.balance.plan import BalancePlan


class Agreement:
    """Seals of an EP group's plans, as one rank sees them. All layers of the group share it.

    The ranks of the group make the same calls, in the same order.

    Args:
        ep_group: The group whose ranks plan alike.
        device: Where loads and plans are.
    """

    def __init__(self, ep_group: ProcessGroup, device: torch.device) -> None:
        self._group = ep_group
        self._seal = torch.zeros(1, dtype=torch.int64, device=device)
        self._layer = 0
        self._gathered = self._seal.expand(ep_group.size(), 1).contiguous()
        self._difference = torch.zeros(
            2 + ep_group.size(), dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda"
        )
        # The same memory; a look at a tensor takes as long as a launch.
        self._found = self._difference.numpy()

    def gather_load(self, routing_map_NE: Tensor) -> Tensor:
        """As `load.gather_load`; the seal of the last plan goes along."""
        self._gathered = gather_counts(routing_map_NE, self._group, self._seal)
        return torch.narrow_copy(self._gathered, 1, 0, self._gathered.shape[1] - 1)

    def seal(self, load: Tensor, plan: BalancePlan, layer: int) -> None:
        """Compare the seals that came with this load, and seal the load with its plan.

        Args:
            load: What `gather_load` returned, int64 [R, E].
            plan: Its plan, on the same device.
            layer: The layer's number, for messages.

        Raises:
            RuntimeError: Ranks had different loads or plans in the layer before. On a GPU this
                comes when the device has noticed, which may be a few calls later.
        """
        self._seal = torch.ops.megatron_ext.seal_plan(
            load, plan.quota, plan.slots, self._gathered, self._layer, self._difference
        )
        self._layer = layer
        self._raise_difference()

    def settle(self) -> None:
        """Compare the seals of the last plan, which no other load follows; all ranks call.

        Costs a small collective and waits for the device: for the end of a run, and before a
        checkpoint.

        Raises:
            RuntimeError: Ranks had different loads or plans in some layer.
        """
        seals = self._seal.new_empty(self._group.size())
        dist.all_gather_into_tensor(seals, self._seal, group=self._group)
        found = seals.tolist()
        self._raise_difference()
        if len(set(found)) > 1:
            _raise(self._layer, found)

    def forget(self) -> None:
        """Forget an aborted step, after which ranks may have planned different layers last."""
        self._seal = torch.zeros_like(self._seal)
        self._layer = 0

    def _raise_difference(self) -> None:
        if self._found[0]:
            _, layer, *seals = self._found.tolist()
            self._difference.zero_()
            _raise(layer, seals)


def _raise(layer: int, seals: list[int]) -> None:
    counts = {seal: seals.count(seal) for seal in seals}
    # The one that most ranks have is taken for right; of equally many, that of the lowest rank.
    right = max(counts, key=lambda seal: counts[seal])
    wrong = [rank for rank, seal in enumerate(seals) if seal != right]
    raise RuntimeError(
        f"layer {layer}: EP ranks {wrong} had another load or plan than rank {seals.index(right)} "
        f"(digests {[f'{seal % 2**64:016x}' for seal in seals]}); planning must be the same "
        "integer arithmetic on the same load"
    )


_SHARED: WeakValueDictionary[tuple[ProcessGroup, torch.device], Agreement] = WeakValueDictionary()


def shared_agreement(ep_group: ProcessGroup, device: torch.device) -> Agreement:
    """Return `ep_group`'s agreement, without a last plan; all ranks of the group call.

    It is made once, and freed with the last user. When that is freed is up to each rank's garbage
    collector: so a new user must not find the last plan of an earlier one, which other ranks may
    have forgotten.
    """
    agreement = _SHARED.get((ep_group, device))
    if agreement is None:
        agreement = _SHARED[ep_group, device] = Agreement(ep_group, device)
    agreement.forget()
    return agreement
