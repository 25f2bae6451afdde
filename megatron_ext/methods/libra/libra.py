"""Libra: replicas from a predicted load, moved before the exact load is known; then topped up.

`place` chooses replicas from the predicted load. `share` splits the exact load over the replicas
that turn out useful, and adds replicas only for what the prediction missed. A replica that it does
not use is wasted: moved, but without quota.

Planning is in Python and on the CPU, one load after the other. It is integer arithmetic on equal
input, with ties by the lowest index: every rank plans alike. Legend: R ranks of the EP group, D
ranks of an NVLink domain, E logical experts, M mains per rank, S slots per rank.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_ext.balance.batches import plan_each
from megatron_ext.balance.bounds import target_load
from megatron_ext.balance.layout import ExpertLayout
from megatron_ext.balance.plan import BalancePlan
from megatron_ext.balance.strategies import quota as quota_planner
from megatron_ext.balance.strategies.strategy import FromPrediction, PlanSettings, Strategy
from megatron_ext.config import LibraSettings
from megatron_ext.transport.reach import domain_of


def place(predicted: Tensor, layout: ExpertLayout, settings: PlanSettings) -> Tensor:
    """Place replicas for a load that is only predicted; each NVLink domain by itself.

    First every rank takes the experts of other ranks that its own tokens ask for most, up to
    `locality_share` of its slots. Then replicas are placed as long as a rank is above the mean. The
    expert that the busiest rank computes most for other ranks goes to the least loaded rank with a
    free slot. This host then keeps its own assignments to the expert, and must stay within the mean
    with them. Placing ends when the busiest rank finds no such host.

    Returns:
        Logical expert in each slot, or -1: int32 [R, S].

    >>> layout = ExpertLayout(num_experts=4, ep_size=2, slots=1, nvlink_domain=2)
    >>> place(torch.tensor([[6, 1, 1, 0], [4, 2, 1, 1]]), layout, PlanSettings()).tolist()
    [[-1], [0]]

    Source: Libra, Algorithm 1. An iteration of its second loop that finds no host changes nothing,
    so no later iteration would find one either: here the loop ends.
    """
    counts = predicted.tolist()
    domain = layout.nvlink_domain
    held: list[list[int]] = []
    for first in range(0, layout.ep_size, domain):
        held += _place_domain(counts, range(first, first + domain), layout, settings)
    rows = [row + [-1] * (layout.slots - len(row)) for row in held]
    return torch.tensor(rows, dtype=torch.int32).view(layout.ep_size, layout.slots)


def _place_domain(
    counts: list[list[int]], ranks: range, layout: ExpertLayout, settings: PlanSettings
) -> list[list[int]]:
    """Return the experts in the slots of a domain's ranks."""
    mains, slots = layout.mains_per_rank, layout.slots
    experts = range(ranks.start * mains, ranks.stop * mains)
    total = [sum(row[expert] for row in counts) for expert in range(layout.num_experts)]
    most_asked = math.floor(slots * settings.section(LibraSettings).locality_share)
    held: dict[int, list[int]] = {rank: [] for rank in ranks}
    # A rank with an instance computes what its own tokens ask of it; the home rank does the rest.
    for_others = {e: total[e] - counts[e // mains][e] for e in experts}
    loads = {r: sum(total[r * mains : (r + 1) * mains]) for r in ranks}

    def hold(expert: int, rank: int) -> None:
        held[rank].append(expert)
        own = counts[rank][expert]
        for_others[expert] -= own
        loads[expert // mains] -= own
        loads[rank] += own

    for rank in ranks:
        asked = [e for e in experts if e // mains != rank and counts[rank][e] > 0]
        asked.sort(key=counts[rank].__getitem__, reverse=True)
        for expert in asked[:most_asked]:
            hold(expert, rank)
    sum_of_loads = sum(loads.values())
    while True:
        source = max(ranks, key=loads.__getitem__)
        if loads[source] * len(ranks) <= sum_of_loads:
            break
        expert = max(range(source * mains, (source + 1) * mains), key=for_others.__getitem__)
        hosts = [r for r in ranks if r != source and expert not in held[r] and len(held[r]) < slots]
        if for_others[expert] == 0 or not hosts:
            break
        host = min(hosts, key=loads.__getitem__)
        if (loads[host] + counts[host][expert]) * len(ranks) > sum_of_loads:
            break
        hold(expert, host)
    return list(held.values())


def share(
    load: Tensor, placed: Tensor, layout: ExpertLayout, settings: PlanSettings
) -> BalancePlan:
    """Split the exact load over the replicas that are there, then add what is missing.

    The goal is that of the quota planner: a busiest rank within the tolerance, or the least load
    that the quota planner finds. A replica is added where it takes most of the load above the goal,
    in a slot that is empty or whose replica has no quota. If that misses the goal, the quota
    planner's plan is returned. In either plan, a placed replica that is used stays in its slot, and
    is not moved again.

    >>> layout = ExpertLayout(num_experts=4, ep_size=2, slots=1, nvlink_domain=2)
    >>> load = torch.tensor([[6, 1, 1, 0], [4, 2, 1, 1]])
    >>> hit = share(load, torch.tensor([[-1], [0]], dtype=torch.int32), layout, PlanSettings())
    >>> hit.rank_loads().tolist(), hit.experts_in_slots.tolist()
    ([8, 8], [[-1], [0]])
    >>> missed = share(load, torch.tensor([[2], [1]], dtype=torch.int32), layout, PlanSettings())
    >>> missed.rank_loads().tolist(), missed.experts_in_slots.tolist()
    ([8, 8], [[-1], [0]])
    """
    rows = placed.tolist()
    return plan_each(load, layout, lambda one: _plan(one, rows, layout, settings))


def _plan(
    load: Tensor, placed: list[list[int]], layout: ExpertLayout, settings: PlanSettings
) -> BalancePlan:
    """Plan one load."""
    even = quota_planner.solve(load, layout, settings)
    goal = target_load(int(load.sum()), layout.ep_size, round(settings.tolerance * 1e6))
    limit = max(goal, int(even.rank_loads().max()))
    shares = _Shares(load.sum(0).tolist(), placed, layout)
    if shares.reach(limit, settings.min_quota):
        return shares.plan()
    return BalancePlan(layout, even.quota, _align(even.experts_in_slots, placed))


def _align(experts_in_slots: Tensor, placed: list[list[int]]) -> Tensor:
    """Return the plan's replicas, each that was placed on its rank in the slot it was placed in."""
    rows = []
    for row, there in zip(experts_in_slots.tolist(), placed, strict=True):
        stay = [expert if expert in row else -1 for expert in there]
        new = iter([expert for expert in row if expert not in there])
        rows.append([expert if expert >= 0 else next(new, -1) for expert in stay])
    return torch.tensor(rows, dtype=torch.int32).view(experts_in_slots.shape)


class _Shares:
    """A plan in the making: `quota[expert][rank]`, `held[rank]`, `rank_loads[rank]`.

    At first everything is at home, and the replicas that are there have no quota. NVLink domains
    do not touch each other: all instances of an expert are in one.
    """

    def __init__(self, loads: list[int], placed: list[list[int]], layout: ExpertLayout) -> None:
        self._layout = layout
        self.quota = [[0] * layout.ep_size for _ in loads]
        self.held = [list(row) for row in placed]
        self.rank_loads = [0] * layout.ep_size
        self._instances: list[set[int]] = [set() for _ in loads]
        for expert, load in enumerate(loads):
            home = layout.home_rank(expert)
            self.quota[expert][home] = load
            self.rank_loads[home] += load
            self._instances[expert].add(home)
        for rank, row in enumerate(placed):
            for expert in row:
                if expert >= 0:
                    self._instances[expert].add(rank)

    def reach(self, limit: int, min_quota: int) -> bool:
        """Bring every rank down to `limit`; return whether that was possible."""
        busiest_first = sorted(range(len(self.rank_loads)), key=lambda r: -self.rank_loads[r])
        for may_add in (False, True):
            for rank in busiest_first:
                while self.rank_loads[rank] > limit:
                    paths = self._paths(rank)
                    if not self._shift(rank, paths, limit) and not (
                        may_add and self._add(rank, paths, limit, min_quota)
                    ):
                        break
        # Replicas that have too few assignments send them home.
        for rank, row in enumerate(self.held):
            for expert in row:
                if expert >= 0 and 0 < self.quota[expert][rank] < min_quota:
                    home = self._layout.home_rank(expert)
                    self._move(expert, rank, home, self.quota[expert][rank])
        return max(self.rank_loads) <= limit

    def plan(self) -> BalancePlan:
        """Return the plan, without the replicas that have no quota."""
        slots = [
            [expert if expert >= 0 and self.quota[expert][rank] > 0 else -1 for expert in row]
            for rank, row in enumerate(self.held)
        ]
        shape = self._layout.ep_size, self._layout.slots
        experts_in_slots = torch.tensor(slots, dtype=torch.int32).view(shape)
        return BalancePlan(self._layout, torch.tensor(self.quota), experts_in_slots)

    def _paths(self, source: int) -> dict[int, tuple[int, int]]:
        """Ranks that assignments of `source` can get to, the nearest first: (from rank, expert).

        A step moves assignments to an expert from one of its instances to another instance.
        """
        paths = {source: (source, -1)}
        for rank in (queue := [source]):
            for expert in self._computed(rank):
                for to in sorted(self._instances[expert]):
                    if to not in paths:
                        paths[to] = (rank, expert)
                        queue.append(to)
        return paths

    def _computed(self, rank: int) -> list[int]:
        """Experts with assignments on a rank, the most first."""
        per_rank = self._layout.mains_per_rank
        mains = range(rank * per_rank, (rank + 1) * per_rank)
        experts = [e for e in (*mains, *self.held[rank]) if e >= 0 and self.quota[e][rank] > 0]
        return sorted(experts, key=lambda e: (-self.quota[e][rank], e))

    def _shift(self, source: int, paths: dict[int, tuple[int, int]], limit: int) -> bool:
        """Move assignments from `source` to the nearest rank with room, if there is one."""
        target = next((r for r in paths if self.rank_loads[r] < limit), None)
        if target is None:
            return False
        steps = []
        rank = target
        while rank != source:
            previous, expert = paths[rank]
            steps.append((expert, previous, rank))
            rank = previous
        amount = min(
            self.rank_loads[source] - limit,
            limit - self.rank_loads[target],
            *(self.quota[expert][previous] for expert, previous, _ in steps),
        )
        for step in steps:
            self._move(*step, amount)
        return True

    def _add(
        self, source: int, paths: dict[int, tuple[int, int]], limit: int, min_quota: int
    ) -> bool:
        """Add the replica that takes most off `source`; of equal hosts, on the tightest."""
        best = None
        domain = domain_of(source, self._layout.nvlink_domain)
        for rank in paths:
            for expert in self._computed(rank):
                for host in domain:
                    room = limit - self.rank_loads[host]
                    carried = min(self.rank_loads[source] - limit, room, self.quota[expert][rank])
                    if carried < min_quota or host in self._instances[expert]:
                        continue
                    slot = self._free_slot(host)
                    key = (-carried, room)
                    if slot is not None and (best is None or key < best[0]):
                        best = (key, expert, host, slot)
        if best is None:
            return False
        _, expert, host, slot = best
        if (unused := self.held[host][slot]) >= 0:
            self._instances[unused].remove(host)
        self.held[host][slot] = expert
        self._instances[expert].add(host)
        return True

    def _free_slot(self, rank: int) -> int | None:
        """The slot for a new replica: an empty slot, else a slot whose replica has no quota."""
        row = self.held[rank]
        unused = [s for s, e in enumerate(row) if e < 0 or self.quota[e][rank] == 0]
        return min(unused, key=lambda s: row[s] >= 0, default=None)

    def _move(self, expert: int, source: int, target: int, amount: int) -> None:
        self.quota[expert][source] -= amount
        self.quota[expert][target] += amount
        self.rank_loads[source] -= amount
        self.rank_loads[target] += amount


LIBRA = Strategy(
    name="libra",
    summary="Libra with top-up: replicas from a predicted load, then from the exact one",
    kind=FromPrediction(place, share),
)
