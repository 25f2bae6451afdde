"""Detects ranks whose plans differ, by digests that travel with the next layer's counts.

Each rank plans alone. A broken rank, or a bit that flipped in a load, would send tokens and
replicas where no rank expects them. So a rank seals each plan and its load by a digest of 64 bits.
The seal travels with the counts of the next layer, where every rank compares the seals of all
ranks. On a GPU the host does not wait for the comparison: the device writes a difference into
memory of the host, and the host looks there at every call.

If the dispatcher takes its sizes from the plan, ranks with different plans could not end the
exchange of tokens. Then the ranks compare the seals before that exchange, where the host waits for
the sizes anyway. Ranks that all reach each other's memory gather the seals without a collective.
Other ranks gather the seals by one collective, in place of the one by which Megatron's dispatcher
counts tokens.

Legend: N local tokens, E logical experts, R ranks of the EP group, T ranks of an expert-TP group.
"""

from __future__ import annotations

from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.balance.load import gather_counts
from megatron_ext.balance.plan import BalancePlan, Shares
from megatron_ext.transport import GathersRows, HostCopy

_CHANGED = 0x7468617765640000
"""What a rank sends in place of a seal, plus the layer's number, if it froze or thawed experts."""


class Agreement:
    """Seals of a group's plans, as one rank sees them. All layers of the group share it.

    The group has the R * T ranks that plan alike, those of an expert-TP group (of `num_shards`
    ranks) side by side. Its ranks make the same calls, in the same order.
    """

    def __init__(self, group: ProcessGroup, device: torch.device, num_shards: int = 1) -> None:
        self._group = group
        self._num_shards = num_shards
        # Written in place: the next layer of a captured graph finds it where it was.
        self._seal = torch.zeros(1, dtype=torch.int64, device=device)
        self._layer = 0
        self._gathered = self._seal.expand(group.size(), 1).contiguous()
        self._difference = torch.zeros(
            2 + group.size(), dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda"
        )
        # The same memory for NumPy: to read a tensor takes as long as a launch.
        self._found = self._difference.numpy()
        self._seals = HostCopy((group.size(),), torch.int64, device)

    def gather_counts(
        self, routing_map_NE: Tensor, rows: GathersRows | None = None, label: str = ""
    ) -> tuple[Tensor, Tensor]:
        """Gather the counts of all ranks, and with them the seals of the last plan.

        Returns the counts, int64 [R * T, E], and the marks of this rank's tokens. The arguments are
        those of `gather_counts` of load.py. The rows of the counts are not contiguous, because a
        seal stands behind each row.
        """
        self._gathered, marks = gather_counts(routing_map_NE, self._group, self._seal, rows, label)
        num_experts = self._gathered.shape[1] - 1
        return self._gathered[:, :num_experts], marks

    def share(self, counts: Tensor, load: Tensor, plan: BalancePlan, layer: int) -> Shares:
        """Return this rank's shares of a plan; compare the last seals, and seal the plan.

        The counts are those of `gather_counts`, the load is `load_of` them, and the plan is of this
        load. Messages name the layer.

        Raises:
            RuntimeError: Ranks had different loads or plans in the layer before. On a GPU a call
                raises after the device has found the difference, maybe a few calls later.
        """
        rank = self._group.rank()
        shares = torch.ops.megatron_ext.share_and_seal(
            load,
            plan.quota,
            plan.experts_in_slots,
            rank // self._num_shards,
            self._gathered,
            self._layer,
            self._difference,
            self._seal,
        )
        self._layer = layer
        self.raise_failure()
        return Shares(*shares).of_shard(rank, counts)

    def send_seal(self, rows: GathersRows | None, label: str) -> None:
        """Send the seal of this rank's last plan to all ranks; without `rows` by a collective."""
        if rows is None:
            self._seals.start(self._gather_seals())
        else:
            rows.gather(self._seal, label, self._seals.memory)
            self._seals.note_written()

    def compare_sent(self, rows: GathersRows | None) -> None:
        """Compare the seals that all ranks have sent; the host waits until they are there.

        Raises:
            RuntimeError: Ranks had different loads or plans, or a rank did not send.
        """
        seals = self._seals.wait().tolist()
        if rows is not None:
            rows.raise_failure()
        if len(set(seals)) > 1:
            self._raise(self._layer, seals)

    def check_last_plan(self) -> None:
        """Compare the seals of the last plan, which no other load follows; all ranks call.

        Called at the end of a run and before a checkpoint, because the call costs a small
        collective, and the host waits for the device.

        Raises:
            RuntimeError: Ranks had different loads or plans in some layer.
        """
        found = self._gather_seals().tolist()
        self.raise_failure()
        if len(set(found)) > 1:
            self._raise(self._layer, found)

    def forget(self) -> None:
        """Forget an aborted step, after which ranks may have planned different layers last.

        The host waits for the device, where work of that step may still write a difference.
        """
        if self._seal.is_cuda:
            torch.cuda.synchronize(self._seal.device)
        self._difference.zero_()
        self.forget_plan()

    def forget_plan(self) -> None:
        """Forget the last plan, because some ranks may not have it."""
        self._seal.zero_()
        self._layer = 0

    def say_changed(self, layer: int) -> None:
        """Send, with the next counts, that this rank has frozen or thawed experts of a layer.

        The word stands in the seal's place. So the ranks notice, and all raise, if not all say it.
        """
        self._seal.fill_(_CHANGED + layer)

    def require_agreement(self) -> None:
        """Raise the error of a difference in the last counts; the host waits for the device.

        Raises:
            RuntimeError: Ranks had different loads or plans, or not all have changed.
        """
        if self._seal.is_cuda:
            torch.cuda.synchronize(self._seal.device)
        self.raise_failure()

    def _gather_seals(self) -> Tensor:
        seals = self._seal.new_empty(self._group.size())
        dist.all_gather_into_tensor(seals, self._seal, group=self._group)
        return seals

    @property
    def failed(self) -> Tensor:
        """Return int64 [1] in memory of the host: 1 after a difference was found, else 0."""
        return self._difference[:1]

    def raise_failure(self) -> None:
        """Raise the error of a difference, if the host has not raised it yet.

        Raises:
            RuntimeError: Ranks had different loads or plans.
        """
        if self._found[0]:
            _, layer, *seals = self._found.tolist()
            self._difference.zero_()
            self._raise(layer, seals)

    def _raise(self, layer: int, seals: list[int]) -> None:
        numbers = {rank: seal - _CHANGED for rank, seal in enumerate(seals)}
        if said := {rank: number for rank, number in numbers.items() if 0 <= number < 2**16}:
            raise RuntimeError(
                f"layer {max(said.values())}: {name_ranks(list(said), self._num_shards)} have "
                "frozen or thawed experts, and the other ranks have not: do so on all ranks in the "
                "same step, or train experts of all ranks in the first step"
            )
        counts = {seal: seals.count(seal) for seal in seals}
        # The most frequent seal counts as right; of equally frequent ones, the lowest rank's.
        right = max(counts, key=lambda seal: counts[seal])
        wrong = [rank for rank, seal in enumerate(seals) if seal != right]
        raise RuntimeError(
            f"layer {layer}: {name_ranks(wrong, self._num_shards)} had another load or plan than "
            f"{name_ranks(seals.index(right), self._num_shards)} "
            f"(digests {[f'{seal % 2**64:016x}' for seal in seals]}); planning must be the same "
            "integer arithmetic on the same load"
        )


def name_ranks(ranks: int | list[int], num_shards: int) -> str:
    """Name one or several of the ranks that plan alike, for messages.

    >>> name_ranks([1, 2], num_shards=1), name_ranks(0, num_shards=1)
    ('EP ranks [1, 2]', 'rank 0')
    >>> name_ranks([1, 2], num_shards=2)
    'ranks [(0, 1), (1, 0)] (EP rank, expert-TP rank)'
    """
    if isinstance(ranks, int):
        return f"rank {ranks if num_shards == 1 else divmod(ranks, num_shards)}"
    if num_shards == 1:
        return f"EP ranks {ranks}"
    pairs = [divmod(rank, num_shards) for rank in ranks]
    return f"ranks {pairs} (EP rank, expert-TP rank)"


_SHARED: WeakValueDictionary[tuple[ProcessGroup, torch.device], Agreement] = WeakValueDictionary()


def agreements_in_use() -> list[Agreement]:
    """Return all agreements that `shared_agreement` made and that live."""
    return list(_SHARED.values())


def shared_agreement(group: ProcessGroup, device: torch.device, num_shards: int = 1) -> Agreement:
    """Return `group`'s agreement, without a last plan; all ranks of the group call.

    All layers of the group share one agreement, which lives as long as one of them. Each rank's
    garbage collector decides when a layer is freed. So a new layer may find an old agreement on
    some ranks only, and all ranks forget its last plan.
    """
    agreement = _SHARED.get((group, device))
    if agreement is None:
        agreement = _SHARED[group, device] = Agreement(group, device, num_shards)
    agreement.forget_plan()
    return agreement
