"""The planning stages in slow, plain Python: the specification.

The native and tensor versions must equal it bit by bit. Lists of Python integers only, so nothing
can overflow and nothing is hidden in a tensor operation. Ties always go to the lowest index.

Legend: R ranks, E logical experts, M = E / R mains per rank, N local tokens; `load[r][e]`
assignments from rank r to expert e, `quota[e][t]` assignments of expert e computed on rank t.
"""

from __future__ import annotations

from math import gcd

Matrix = list[list[int]]


def target_load(total: int, ranks: int, tolerance_ppm: int) -> int:
    """Busiest-rank load that is good enough: `(1 + tolerance) * mean`, as far as integers allow.

    Rounded down, so that meeting the target means meeting the tolerance; no plan can go below the
    mean rounded up.

    Args:
        total: Assignments of all ranks together.
        ranks: Ranks that share them.
        tolerance_ppm: Tolerance in millionths of the mean.

    >>> target_load(16, 2, 10_000), target_load(17, 2, 0), target_load(1000, 2, 10_000)
    (8, 9, 505)
    """
    mean_rounded_up = -(-total // ranks)
    return max(mean_rounded_up, total * (1_000_000 + tolerance_ppm) // (ranks * 1_000_000))


def solve_quota(
    load: Matrix, *, num_slots: int, nvlink_domain: int, tolerance_ppm: int, min_quota: int
) -> tuple[Matrix, Matrix]:
    """Choose replicas and quotas: the busiest rank within the tolerance, then few replicas.

    Every NVLink domain is planned for itself, from one threshold for all, by several greedy methods
    (`_Attempt`); `_choose` takes one of their plans.

    Args:
        load: Assignments, [R][E], >= 0.
        num_slots: Replicas a rank can hold (S).
        nvlink_domain: Ranks per NVLink domain; divides R.
        tolerance_ppm: Tolerance in millionths of the mean rank load. 0 asks for an even plan:
            busiest - idlest <= 1 where one NVLink domain spans all ranks; where more do, in the
            hottest, and the others come down to it.
        min_quota: Fewest assignments a replica may carry, >= 1.

    Returns:
        `quota` [E][R] and `slots` [R][S] (logical expert or -1, filled from slot 0).

    >>> quota, slots = solve_quota([[6, 1, 1, 0], [4, 2, 1, 1]],
    ...                            num_slots=1, nvlink_domain=2, tolerance_ppm=10_000, min_quota=1)
    >>> quota, slots
    ([[5, 5], [3, 0], [0, 2], [0, 1]], [[-1], [0]])
    """
    ranks, experts = len(load), len(load[0])
    mains = experts // ranks
    expert_load = [sum(row[e] for row in load) for e in range(experts)]
    domains = [
        _Domain(
            expert_load[first * mains : (first + nvlink_domain) * mains],
            nvlink_domain,
            num_slots,
            min_quota,
            even=tolerance_ppm == 0,
        )
        for first in range(0, ranks, nvlink_domain)
    ]
    quota = [[0] * ranks for _ in range(experts)]
    for e in range(experts):
        quota[e][e // mains] = expert_load[e]
    slots = [[-1] * num_slots for _ in range(ranks)]
    start = _start_threshold(domains, tolerance_ppm)
    plans = [_search(domain, start) for domain in domains]
    worst = max(reached for _, reached in plans)
    for idx, (domain, (plan, reached)) in enumerate(zip(domains, plans, strict=True)):
        first = idx * nvlink_domain
        if reached < worst:  # what the worst domain cannot get below, the others need not
            relaxed = _reach(domain, worst) if max(domain.home_load) > worst else []
            plan = plan if relaxed is None else relaxed
        for rank, replicas in enumerate(plan):
            for slot, (expert, amount) in enumerate(replicas):
                e = first * mains + expert
                quota[e][e // mains] -= amount
                quota[e][first + rank] = amount
                slots[first + rank][slot] = e
    return quota, slots


def lower_bound(load: Matrix, *, num_slots: int, nvlink_domain: int) -> int:
    """Assignments of the busiest rank in every legal plan; `bounds.lower_bound` has the argument.

    >>> lower_bound([[6, 1, 1, 0], [4, 2, 1, 1]], num_slots=1, nvlink_domain=2)
    8
    """
    mains = len(load[0]) // len(load)
    expert_load = [sum(column) for column in zip(*load, strict=True)]
    size = nvlink_domain * mains
    return max(
        _Domain(expert_load[first : first + size], nvlink_domain, num_slots, 1, even=True).bound()
        for first in range(0, len(expert_load), size)
    )


class _Domain:
    """One NVLink domain. Ranks and experts are counted from its first."""

    def __init__(
        self, expert_load: list[int], ranks: int, slots: int, min_quota: int, *, even: bool
    ) -> None:
        self.expert_load = expert_load
        self.ranks = ranks
        self.slots = slots
        self.min_quota = min_quota
        self.even = even
        self.mains = len(expert_load) // ranks
        self.home_load = [sum(expert_load[e] for e in self.mains_of(r)) for r in range(ranks)]
        self.busiest_first = sorted(range(ranks), key=lambda r: -self.home_load[r])

    def mains_of(self, rank: int) -> range:
        return range(rank * self.mains, (rank + 1) * self.mains)

    def bound(self) -> int:
        """What the busiest rank has at least."""
        total = sum(self.home_load)
        brought = sum(sorted(self.expert_load, reverse=True)[: self.slots])
        bound = target_load(total, self.ranks, 0)
        while sum(min(own + brought, bound) for own in self.home_load) < total:
            bound += 1
        return bound


def _start_threshold(domains: list[_Domain], tolerance_ppm: int) -> int:
    """Where the search starts: what the worst domain cannot get below, the others need not."""
    total = sum(sum(domain.home_load) for domain in domains)
    target = target_load(total, sum(domain.ranks for domain in domains), tolerance_ppm)
    return max(target, *(domain.bound() for domain in domains))


_PROBES = 4  # thresholds of a round
_METHODS = (
    "best fit",
    "pair fit",
    "rising",
    "remainder",
    "remainder rising",
    "refill",
    "roomiest",
    "fill",
)
_BASELINES = ("roomiest", "fill")

Replicas = list[list[tuple[int, int]]]
"""(expert, assignments) in each slot in use of each rank."""


def _search(domain: _Domain, start: int) -> tuple[Replicas, int]:
    """The plan for the lowest threshold found, rounds of rising probes narrowing it down."""
    best: Replicas = []  # without any replica every rank keeps its own load
    below, reached = start - 1, max(domain.home_load)
    if domain.slots == 0:
        return best, reached
    resolution = reached // 4096 + 1
    is_first = True
    while reached - below > (1 if is_first else resolution):
        if is_first:
            step = (reached - below) // _PROBES
            probes = [start, *(below + step * p if step > 1 else reached for p in range(1, 4))]
        else:
            step = max((reached - below) // (_PROBES + 1), 1)
            probes = [below + step * (p + 1) for p in range(_PROBES)]
        is_first = False
        for threshold in probes:
            if threshold >= reached:
                continue
            plan = _reach(domain, threshold)
            if plan is not None:
                best, reached = plan, threshold
                break
            below = threshold
    return best, reached


def _reach(domain: _Domain, threshold: int) -> Replicas | None:
    attempts = [_Attempt(domain, threshold, method) for method in _METHODS]
    return _choose(attempts, "fill" if domain.even else "roomiest")


def _choose(attempts: list[_Attempt], published: str) -> Replicas | None:
    """The plan that asks least of the busiest sender, then has the fewest replicas.

    Of those that need no more replicas than the published method, where that got through.
    """
    reached = [attempt for attempt in attempts if attempt.reached]
    allowed = next((a.num_replicas() for a in reached if a.method == published), None)
    plans = [a for a in reached if allowed is None or a.num_replicas() <= allowed]
    chosen = min(plans, key=lambda a: (max(a.sends), a.num_replicas()), default=None)
    return chosen.replicas() if chosen is not None else None


class _Attempt:
    """One try to bring every rank of a domain down to a threshold.

    The steps are described in `csrc/include/megatron_ext/domain_attempt.h`.
    """

    def __init__(self, domain: _Domain, threshold: int, method: str) -> None:
        self.domain = domain
        self.method = method
        self.limit = self._limits(threshold)
        order = self._order()
        for restart in range(9):
            self._reset()
            if method == "refill":
                self.reached = domain.slots == 1 and self._refill(detour=restart - 1)
                if self.reached:
                    break
                continue
            stuck = next((i for i, r in enumerate(order) if not self._relieve(r)), None)
            self.reached = stuck is None
            if stuck is None or stuck == 0 or method in _BASELINES:
                break
            order.insert(0, order.pop(stuck))
        while self.reached and self._hand_over():
            pass

    def num_replicas(self) -> int:
        return sum(len(held) for held in self.experts)

    def replicas(self) -> Replicas:
        return [
            list(zip(*held, strict=True)) for held in zip(self.experts, self.amounts, strict=True)
        ]

    def _limits(self, threshold: int) -> list[int]:
        """The threshold; for an even plan without spare assignments the coldest get one less."""
        domain = self.domain
        spare = threshold * domain.ranks - sum(domain.home_load)
        limit = [threshold] * domain.ranks
        if domain.even and 0 < spare < domain.ranks:
            for rank in domain.busiest_first[-spare:]:
                limit[rank] -= 1
        return limit

    def _order(self) -> list[int]:
        """Overloaded ranks in the method's order, then the others."""
        busiest_first = self.domain.busiest_first
        excess = [self.domain.home_load[r] - self.limit[r] for r in range(self.domain.ranks)]
        overloaded = [r for r in busiest_first if excess[r] > 0]
        most_room = max(-excess[busiest_first[-1]], 1)
        first = overloaded[:1]
        if self.method == "rising":
            overloaded = first + sorted(overloaded[1:], key=lambda r: excess[r])
        elif self.method == "remainder":
            overloaded = sorted(overloaded, key=lambda r: -(excess[r] % most_room))
        elif self.method == "remainder rising":
            overloaded = first + sorted(overloaded[1:], key=lambda r: excess[r] % most_room)
        return overloaded + [r for r in busiest_first if excess[r] <= 0]

    def _reset(self) -> None:
        domain = self.domain
        self.kept = list(domain.expert_load)
        self.load = list(domain.home_load)
        self.sends = [0] * domain.ranks
        self.experts: Matrix = [[] for _ in range(domain.ranks)]
        self.amounts: Matrix = [[] for _ in range(domain.ranks)]

    def _room(self, rank: int) -> int:
        return self.limit[rank] - self.load[rank]

    def _can_host(self, rank: int, t: int) -> bool:
        return t != rank and len(self.experts[t]) < self.domain.slots

    def _hottest(self, rank: int) -> int:
        return max(self.domain.mains_of(rank), key=lambda e: self.kept[e])

    def _main_for(self, rank: int, t: int) -> int | None:
        """The main of `rank` that keeps most and is not on rank t."""
        free = [e for e in self.domain.mains_of(rank) if e not in self.experts[t]]
        hottest = self._hottest(rank)
        if hottest in free:
            return hottest
        return max(free, key=lambda e: self.kept[e], default=None)

    def _add(self, expert: int, t: int, amount: int) -> None:
        self._place(expert, t, amount)
        self.load[expert // self.domain.mains] -= amount
        self.load[t] += amount

    def _place(self, expert: int, t: int, amount: int) -> None:
        self.experts[t].append(expert)
        self.amounts[t].append(amount)
        self.kept[expert] -= amount
        self.sends[expert // self.domain.mains] += 1

    def _relieve(self, rank: int) -> bool:
        if self.method == "fill":
            return self._fill()
        if self.method == "roomiest":
            return self._shed_to_roomiest(rank)
        return self._shed(rank)

    def _shed(self, rank: int) -> bool:
        while self._room(rank) < 0:
            whole = -self._room(rank)
            needed = max(whole, self.domain.min_quota)
            mains = self._mains_for_hosts(rank)
            fitting = [t for t, e in mains.items() if min(self._room(t), self.kept[e]) >= needed]
            if fitting:
                tightest = min(fitting, key=self._room)
                self._add(mains[tightest], tightest, needed)
                continue
            hot = self._hottest(rank)
            if self.method != "best fit" and self.kept[hot] >= whole:
                first = self._larger_of_tightest_pair(rank, hot, whole)
                if first is not None:
                    self._add(hot, first, self._room(first))
                    continue
            pieces = self._pieces(mains, whole)
            largest = max(pieces, key=lambda t: (pieces[t], -self._room(t)), default=None)
            piece = 0 if largest is None else pieces[largest]
            most_room = max(self._room(t) for t in range(self.domain.ranks))
            if piece < min(whole, most_room) and self._chain(rank, whole, at_least=piece):
                continue
            if largest is not None:
                self._add(mains[largest], largest, piece)
            elif not self._exchange(rank, whole):
                return False
        return True

    def _mains_for_hosts(self, rank: int) -> dict[int, int]:
        hosts = [t for t in range(self.domain.ranks) if self._can_host(rank, t)]
        return {t: e for t in hosts if (e := self._main_for(rank, t)) is not None}

    def _pieces(self, mains: dict[int, int], whole: int) -> dict[int, int]:
        """What new replicas of these mains can take of `whole`, by host."""
        pieces = {t: min(self.kept[e], self._room(t), whole) for t, e in mains.items()}
        return {t: piece for t, piece in pieces.items() if piece >= self.domain.min_quota}

    def _larger_of_tightest_pair(self, rank: int, hot: int, whole: int) -> int | None:
        room = {
            t: self._room(t)
            for t in range(self.domain.ranks)
            if self._can_host(rank, t)
            and self.domain.min_quota <= self._room(t) < whole
            and hot not in self.experts[t]
        }
        left_over = {}
        for a in room:
            both = [room[a] + room[b] for b in room if b != a and room[b] <= room[a]]
            if enough := [sum_ab - whole for sum_ab in both if sum_ab >= whole]:
                left_over[a] = min(enough)
        return max(left_over, key=lambda a: (-left_over[a], room[a]), default=None)

    def _exchange(self, rank: int, whole: int) -> bool:
        """Move less than `min_quota`: give so much more than is taken back in return."""
        min_quota = self.domain.min_quota
        if min_quota == 1:
            return False
        pieces = {}
        for t in range(self.domain.ranks):
            if self._room(t) <= 0 or not self._can_host(rank, t) or not self._can_host(t, rank):
                continue
            piece = min(self._room(t), whole)
            there, back = self._main_for(rank, t), self._main_for(t, rank)
            if there is None or self.kept[there] - piece < min_quota:
                continue
            if back is not None and self.kept[back] >= min_quota:
                pieces[t] = (piece, there, back)
        if not pieces:
            return False
        host = max(pieces, key=lambda t: (pieces[t][0], -self._room(t)))
        piece, there, back = pieces[host]
        self._add(there, host, min_quota + piece)
        self._add(back, rank, min_quota)
        return True

    def _chain(self, rank: int, whole: int, at_least: int) -> bool:
        """Move assignments off `rank` along the widest chain if that is more than `at_least`."""
        ranks = range(self.domain.ranks)
        hottest = [self._hottest(v) for v in ranks]
        # chains[t]: (what it carries, its steps (kind, from, to, expert)), the widest to rank t.
        chains: dict[int, tuple[int, list[tuple[str, int, int, int]]]] = {rank: (whole, [])}
        carried, found = at_least, None
        for _ in range(5):
            longer = {}
            for t in ranks:
                best: tuple[int, list[tuple[str, int, int, int]]] = (0, [])
                for v in sorted(chains):
                    width, steps = chains[v]
                    if v == t or any(t == step[1] for step in steps):
                        continue
                    for most, step in self._steps(v, t, hottest[v], width):
                        if min(most, width) > best[0]:
                            best = (min(most, width), [*steps, step])
                if best[0] > 0:
                    longer[t] = best
            chains = longer
            ends = {t: min(chain[0], self._room(t)) for t, chain in chains.items()}
            end = max(ends, key=lambda t: (ends[t], self._room(t)), default=None)
            if end is not None and ends[end] > carried:
                carried, found = ends[end], chains[end][1]
            if carried >= whole:
                break
        if found is None:
            return False
        carried = self._whole_replicas_only(found, carried)
        if carried <= at_least:
            return False
        for step in reversed(found):
            self._take(step, carried)
        self._drop_empty()
        return True

    def _steps(
        self, v: int, t: int, hottest: int, width: int
    ) -> list[tuple[int, tuple[str, int, int, int]]]:
        """What one step from rank v to rank t can carry, and the step."""
        mains, min_quota = self.domain.mains, self.domain.min_quota
        steps = [(self.kept[e], ("grow", v, t, e)) for e in self.experts[t] if e // mains == v]
        steps += [
            (amount, ("return", v, t, e))
            for e, amount in zip(self.experts[v], self.amounts[v], strict=True)
            if e // mains == t
        ]
        if self._can_host(v, t):
            new = self._main_for(v, t)
            if new is not None and min(self.kept[new], width) >= min_quota:
                steps.append((self.kept[new], ("add", v, t, new)))
        return steps

    def _whole_replicas_only(self, steps: list[tuple[str, int, int, int]], carried: int) -> int:
        """What the chain may carry so that each replica has `min_quota` assignments or none."""
        min_quota = self.domain.min_quota
        changed = min_quota > 1
        while changed and carried > 0:
            changed = False
            for kind, v, _, e in reversed(steps):
                if kind == "add" and carried < min_quota:
                    return 0
                if kind == "return":
                    amount = self.amounts[v][self.experts[v].index(e)]
                    if carried < amount and amount - carried < min_quota:
                        carried = amount - min_quota
                        changed = True
        return carried

    def _take(self, step: tuple[str, int, int, int], carried: int) -> None:
        kind, v, t, e = step
        if kind == "grow":
            self.amounts[t][self.experts[t].index(e)] += carried
            self.kept[e] -= carried
        elif kind == "return":
            self.amounts[v][self.experts[v].index(e)] -= carried
            self.kept[e] += carried
        else:
            self._place(e, t, carried)
        self.load[v] -= carried
        self.load[t] += carried

    def _drop_empty(self) -> None:
        for experts, amounts in zip(self.experts, self.amounts, strict=True):
            slot = 0
            while slot < len(experts):
                if amounts[slot] > 0:
                    slot += 1
                    continue
                self.sends[experts[slot] // self.domain.mains] -= 1
                experts[slot], amounts[slot] = experts[-1], amounts[-1]
                experts.pop()
                amounts.pop()

    def _shed_to_roomiest(self, rank: int) -> bool:
        """UltraEP, Algorithm 1."""
        domain = self.domain
        by_load = sorted(domain.mains_of(rank), key=lambda e: -domain.expert_load[e])
        for expert in by_load:
            while self._room(rank) < 0 and self.kept[expert] > 0:
                hosts = [t for t in range(domain.ranks) if self._can_host(rank, t)]
                hosts = [t for t in hosts if self._room(t) > 0]
                if not hosts:
                    break
                host = max(hosts, key=self._room)
                piece = min(-self._room(rank), self._room(host), self.kept[expert])
                if piece < domain.min_quota:
                    break
                self._add(expert, host, piece)
        return self._room(rank) >= 0

    def _fill(self) -> bool:
        """MoonEP's exact fill: the busiest rank gives the roomiest one all that it lacks."""
        ranks = range(self.domain.ranks)
        while True:
            rank = min(ranks, key=self._room)
            if self._room(rank) >= 0:
                return True
            free = [t for t in ranks if self._can_host(rank, t) and not self.experts[t]]
            free = [t for t in free if self._room(t) > 0]
            if not free:
                return False
            t = max(free, key=self._room)
            while self._room(t) > 0:
                hot = self._main_for(rank, t)
                piece = 0 if hot is None else min(self._room(t), self.kept[hot])
                if hot is None or piece < self.domain.min_quota or not self._can_host(rank, t):
                    return False
                self._add(hot, t, piece)

    def _refill(self, detour: int) -> bool:
        """For one slot: fill host after host, the roomiest first; ranks that gave are hosts too."""
        domain, ranks = self.domain, range(self.domain.ranks)
        spare = sum(self._room(r) for r in ranks)
        step = 0
        while min(self._room(r) for r in ranks) < 0:
            hosts = [t for t in ranks if not self.experts[t] and self._room(t) >= domain.min_quota]
            if not hosts:
                return False
            t = max(hosts, key=self._room)
            enough = max(self._room(t) - spare, domain.min_quota)
            mains = [
                e
                for r in ranks
                if r != t and not self.experts[r]
                for e in domain.mains_of(r)
                if self.kept[e] >= enough
            ]
            # The busiest rank's coolest.
            mains.sort(key=lambda e: (-self.load[e // domain.mains], self.kept[e]))
            place = 1 if step == detour else 0
            if len(mains) <= place:
                return False
            piece = min(self._room(t), self.kept[mains[place]])
            spare -= self._room(t) - piece
            self._add(mains[place], t, piece)
            step += 1
        return True

    def _hand_over(self) -> bool:
        """Let a host of the busiest sender fill another one in its place; no load changes."""
        sender = max(range(self.domain.ranks), key=lambda r: self.sends[r])
        if not (choices := self._hand_overs(sender)):
            return False
        # The host that sends least, then the smallest replica.
        t, slot, via, grown, main = max(
            choices, key=lambda c: (-self.sends[c[2]], -self.amounts[c[0]][c[1]])
        )
        amount = self.amounts[t][slot]
        self.kept[self.experts[t][slot]] += amount
        self.kept[self.experts[via][grown]] -= amount
        self.amounts[via][grown] += amount
        self.kept[main] -= amount
        self.experts[t][slot] = main
        self.sends[sender] -= 1
        self.sends[via] += 1
        return True

    def _hand_overs(self, sender: int) -> list[tuple[int, int, int, int, int]]:
        """Replica's rank and slot, who takes it over, the slot there that grows, the new expert."""
        found = []
        given = [
            (t, slot)
            for t, held in enumerate(self.experts)
            for slot, e in enumerate(held)
            if e in self.domain.mains_of(sender)
        ]
        for t, slot in given:
            amount, expert = self.amounts[t][slot], self.experts[t][slot]
            growing: dict[int, int] = {}
            for via, grown in given:
                e = self.experts[via][grown]
                if via != t and (e == expert or self.kept[e] >= amount):
                    growing.setdefault(via, grown)
            for via, grown in growing.items():
                main = self._main_for(via, t)
                if main is None or self.kept[main] < amount:
                    continue
                if self.sends[via] + 1 < self.sends[sender]:
                    found.append((t, slot, via, grown, main))
        return found


def solve_paper(
    load: Matrix, *, num_slots: int, nvlink_domain: int, tolerance_ppm: int, min_quota: int
) -> tuple[Matrix, Matrix]:
    """Choose replicas and quotas by UltraEP's Algorithm 1, to compare with.

    Source: UltraEP, Algorithm 1 (SolveReplication). Differs in that the search starts from the
    target instead of the mean, tests the target itself first (with enough slots that one probe is
    the whole search), and keeps replicas in the home rank's NVLink domain.

    Args:
        load: Assignments, [R][E], >= 0.
        num_slots: Replicas a rank can hold (S).
        nvlink_domain: Ranks per NVLink domain; divides R.
        tolerance_ppm: Tolerance in millionths of the mean rank load.
        min_quota: Fewest assignments a replica may carry, >= 1.

    Returns:
        `quota` [E][R] and `slots` [R][S] (logical expert or -1, filled from slot 0).

    >>> quota, slots = solve_paper([[6, 1, 1, 0], [4, 2, 1, 1]],
    ...                            num_slots=1, nvlink_domain=2, tolerance_ppm=10_000, min_quota=1)
    >>> quota, slots
    ([[5, 5], [3, 0], [0, 2], [0, 1]], [[-1], [0]])
    """
    ranks, experts = len(load), len(load[0])
    mains = experts // ranks
    expert_load = [sum(row[e] for row in load) for e in range(experts)]
    rank_load = [sum(expert_load[r * mains : (r + 1) * mains]) for r in range(ranks)]

    best: list[tuple[int, int, int]] = []  # without any transfer every rank keeps its own load
    low = target_load(sum(rank_load), ranks, tolerance_ppm)
    high = max(rank_load)
    threshold = low
    while low < high:
        transfers = _drain(
            expert_load,
            rank_load,
            threshold,
            num_slots=num_slots,
            nvlink_domain=nvlink_domain,
            min_quota=min_quota,
        )
        if transfers is None:
            low = threshold + 1
        else:
            best, high = transfers, threshold
        threshold = low + (high - low) // 2

    quota = [[0] * ranks for _ in range(experts)]
    slots: Matrix = [[] for _ in range(ranks)]
    for e in range(experts):
        quota[e][e // mains] = expert_load[e]
    for expert, target, amount in best:
        quota[expert][expert // mains] -= amount
        quota[expert][target] = amount
        slots[target].append(expert)
    return quota, [held + [-1] * (num_slots - len(held)) for held in slots]


def _drain(
    expert_load: list[int],
    rank_load: list[int],
    threshold: int,
    *,
    num_slots: int,
    nvlink_domain: int,
    min_quota: int,
) -> list[tuple[int, int, int]] | None:
    """Bring every rank down to `threshold`: transfers (expert, target, amount), None if stuck."""
    ranks = len(rank_load)
    mains = len(expert_load) // ranks
    slack = [max(threshold - own, 0) for own in rank_load]
    held: list[set[int]] = [set() for _ in range(ranks)]
    transfers: list[tuple[int, int, int]] = []
    for home in sorted(range(ranks), key=lambda r: -rank_load[r]):
        excess = max(rank_load[home] - threshold, 0)
        domain = home // nvlink_domain
        for expert in sorted(
            range(home * mains, (home + 1) * mains), key=lambda e: -expert_load[e]
        ):
            movable = expert_load[expert]
            while excess > 0 and movable > 0:
                hosts = [
                    t
                    for t in range(domain * nvlink_domain, (domain + 1) * nvlink_domain)
                    if slack[t] > 0 and len(held[t]) < num_slots and expert not in held[t]
                ]
                if not hosts:
                    break
                target = max(hosts, key=lambda t: slack[t])
                amount = min(excess, slack[target], movable)
                if amount < min_quota:
                    break
                transfers.append((expert, target, amount))
                held[target].add(expert)
                excess -= amount
                slack[target] -= amount
                movable -= amount
        if excess > 0:
            return None
    return transfers


def split_quota(load: Matrix, quota: Matrix) -> list[Matrix]:
    """Share every quota among the source ranks: exact rows and columns, own tokens first.

    Per expert, a rank that holds an instance first uses it for its own assignments. What is left of
    the sources (in rank order) and of the quotas (main's rank first, then by rank) is laid on one
    line each; the lines are equally long, and `split[r][e][t]` is how much of r's piece lies over
    t's piece.

    Source: UltraEP, Algorithm 1 (SolveReroute). Differs in that residual demand meets residual
    quota by overlapping intervals: the paper's proportional shares, once rounded, keep the sources'
    sums but not the quotas.

    Returns:
        `split` [R][E][R]: assignments from source rank r to expert e that rank t computes.

    >>> split = split_quota([[6, 1, 1, 0], [4, 2, 1, 1]], [[5, 5], [3, 0], [0, 2], [0, 1]])
    >>> split[0][0], split[1][0]
    ([5, 1], [0, 4])
    """
    ranks, experts = len(load), len(quota)
    mains = experts // ranks
    split = [[[0] * ranks for _ in range(experts)] for _ in range(ranks)]
    for e in range(experts):
        home = e // mains
        for r in range(ranks):
            split[r][e][r] = min(load[r][e], quota[e][r])
        # The two lines, one entry per assignment.
        sources = [r for r in range(ranks) for _ in range(load[r][e] - split[r][e][r])]
        order = [home, *(t for t in range(ranks) if t != home)]
        targets = [t for t in order for _ in range(quota[e][t] - split[t][e][t])]
        for r, t in zip(sources, targets, strict=True):
            split[r][e][t] += 1
    return split


def assign(routing: Matrix, source_quota: Matrix, physical_index: Matrix) -> tuple[Matrix, Matrix]:
    """Give every routed token an instance of its expert.

    The instances lie on a line, as long as their shares; the j-th token of an expert with n tokens
    goes to place `j * stride mod n`. Neighbors fall far apart: the stride is the largest number up
    to 0.618034 n (the golden section) that has no factor in common with n.

    Args:
        routing: [N][E], 1 where the token goes to the logical expert.
        source_quota: This rank's row of the split, [E][R].
        physical_index: Physical id of the instance of expert e on rank t, [E][R], or -1.

    Returns:
        For each token its experts, rising, and the instances that take them.

    >>> assign([[1, 0], [1, 0], [1, 1]], [[2, 1], [0, 1]], [[0, 3], [-1, 2]])
    ([[0], [0], [0, 1]], [[0], [0], [3, 2]])
    """
    ranks, experts = len(source_quota[0]), len(source_quota)
    lines = []
    for e in range(experts):
        home = e // (experts // ranks)
        order = [home, *(t for t in range(ranks) if t != home)]
        lines.append([physical_index[e][t] for t in order for _ in range(source_quota[e][t])])
    strides = [
        next((s for s in range(n * 618_034 // 1_000_000, 1, -1) if gcd(s, n) == 1), 1)
        for n in map(len, lines)
    ]
    seen = [0] * experts
    logical: Matrix = []
    physical: Matrix = []
    for row in routing:
        chosen = [e for e in range(experts) if row[e]]
        logical.append(chosen)
        physical.append([lines[e][seen[e] * strides[e] % len(lines[e])] for e in chosen])
        for e in chosen:
            seen[e] += 1
    return logical, physical
