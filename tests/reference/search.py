"""Around the tries of stage 2: thresholds and methods, the work they may take, the plan taken.

Every domain is planned for itself, first for the threshold that is asked for, where several methods
compete. If that is not reached, UltraEP's search follows, then one over rising thresholds.
"""

from __future__ import annotations

from megatron_ext.balance.bounds import target_load
from tests.reference.attempt import NO_LIMIT, Method, Verdict, attempt
from tests.reference.bound import domain_bound
from tests.reference.domain import Domain, Matrix, Replicas, as_plan, domains_of, rounds_of

RESTARTS = 8  # of the first tries
PROBES = 8  # thresholds of a round
COMPETITORS = (Method.PAIR_FIT, Method.RISING, Method.REMAINDER, Method.REMAINDER_RISING)


def solve_quota(
    load: Matrix, *, num_slots: int, nvlink_domain: int, tolerance_ppm: int, min_quota: int
) -> tuple[Matrix, Matrix]:
    """Choose replicas and quotas: the busiest rank within the tolerance, then few replicas.

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
    domains = domains_of(
        load,
        num_slots=num_slots,
        nvlink_domain=nvlink_domain,
        min_quota=min_quota,
        even=tolerance_ppm == 0,
    )
    target = target_load(sum(map(sum, load)), len(load), tolerance_ppm)
    # What the worst domain cannot get below, the others need not.
    start = max(target, *(domain_bound(domain) for domain in domains))
    searches = [_Search(domain, start, target, tolerance_ppm) for domain in domains]
    worst = max(search.reached for search in searches)
    return as_plan(domains, [search.plan_for(worst) for search in searches])


class _Search:
    """The search for the lowest threshold of a domain, and its plan.

    `reached` is what the plan comes down to. Without a plan every rank keeps its own load.
    """

    def __init__(self, domain: Domain, start: int, target: int, tolerance_ppm: int) -> None:
        self.domain = domain
        self.plan: Replicas = []
        self.reached = domain.before()
        if self.reached <= start or domain.slots == 0:
            return
        budget = _Budget(domain)
        if (plan := _plan_at_start(budget, start)) is not None:
            self._keep(plan, start)
            return
        self._search_as_published(start, target)
        self._search_from(start, tolerance_ppm, budget)

    def plan_for(self, worst: int) -> Replicas:
        """The plan where the worst domain reached `worst`: balance below that buys nothing."""
        if self.reached == worst:
            return self.plan
        if self.domain.before() <= worst:
            return []
        relaxed = _plan_at_start(_Budget(self.domain), worst)
        return self.plan if relaxed is None else relaxed

    def _search_as_published(self, start: int, target: int) -> None:
        """The thresholds of UltraEP's Algorithm 1, a binary search from the target.

        Nothing is to be had below the start, so those count as not reached.
        """
        low, threshold = target, target
        while low < self.reached:
            if threshold >= start and (plan := self._published_plan(threshold)) is not None:
                self._keep(plan, threshold)
            else:
                low = threshold + 1
            threshold = low + (self.reached - low) // 2

    def _published_plan(self, threshold: int) -> Replicas | None:
        """UltraEP's; it ends by itself, so its work is not counted."""
        verdict = attempt(self.domain, threshold, Method.ROOMIEST, work_limit=NO_LIMIT)
        return verdict.plan if verdict.reached else None

    def _search_from(self, start: int, tolerance_ppm: int, budget: _Budget) -> None:
        """Rounds of rising thresholds; the first that is reached ends a round."""
        below = start
        finest = min(start * tolerance_ppm // 5_000_000 + 1, start)
        resolution = max(finest, start // 512 + 1)
        is_first = True
        while self.reached - below > finest and budget.rounds > 0:
            for threshold in _probes(below, self.reached, resolution, is_first=is_first):
                # Refilling is less work.
                verdict = budget.attempt(threshold, Method.REFILL)
                verdict = verdict or budget.attempt(threshold, Method.BEST_FIT)
                if verdict is not None:
                    self._keep(verdict.plan, threshold)
                    break
                below = threshold
            is_first = False
            while self.reached - below <= resolution and resolution > finest:
                resolution = max(finest, resolution // 8)

    def _keep(self, plan: Replicas, threshold: int) -> None:
        self.plan, self.reached = plan, threshold


def _probes(below: int, reached: int, resolution: int, *, is_first: bool) -> list[int]:
    """The thresholds of a round, rising, between what was not reached and what was.

    The first round quadruples its distance from what is asked for, the others divide what is left.
    """
    gap = reached - below
    if is_first:
        steps = [resolution * 4**p for p in range(PROBES) if gap // 4**p > resolution]
    else:
        step = max(gap // (PROBES + 1), resolution)
        steps = [step * p for p in range(1, PROBES + 1) if step * p < gap]
    return [below + step for step in steps]


def _work_budget(domain: Domain) -> int:
    """Rounds that the tries of a domain may take all together, but for UltraEP's search."""
    ranks, mains = domain.ranks, domain.mains
    return 8192 + 64 * ranks * rounds_of(ranks) + 32 * ranks * mains


def _work_to_compete(domain: Domain) -> int:
    """The same for each of those that compete with one that reached the threshold."""
    return 512 + 24 * domain.ranks * rounds_of(domain.ranks)


class _Budget:
    """What is left of a domain's work, as its tries come one after the other."""

    def __init__(self, domain: Domain) -> None:
        self.domain = domain
        self.rounds = _work_budget(domain)

    def attempt(
        self, threshold: int, method: Method, *, most: int = NO_LIMIT, restarts: int = 0
    ) -> Verdict | None:
        """A try that may take what is left, or `most`; None if it does not reach the threshold."""
        limit = min(self.rounds, most)
        verdict = attempt(self.domain, threshold, method, work_limit=limit, restarts=restarts)
        left = self.rounds - verdict.work
        self.rounds = max(left, 0)
        return verdict if verdict.reached and left > 0 else None


def _plan_at_start(budget: _Budget, threshold: int) -> Replicas | None:
    """The plan for just this threshold that asks least of the busiest sender, if one is found.

    Of those with equally many sends the one with the fewest replicas, of equals the first. None
    with more replicas than UltraEP's plan for the threshold, where there is one. An even plan is
    MoonEP's, where there is one.
    """
    domain = budget.domain
    if domain.even and (filled := budget.attempt(threshold, Method.FILL)) is not None:
        return filled.plan
    first = budget.attempt(threshold, Method.BEST_FIT, restarts=RESTARTS)
    first = first or budget.attempt(threshold, Method.REFILL, restarts=RESTARTS)
    if first is None:
        return None
    published, *others = (
        budget.attempt(threshold, method, most=_work_to_compete(domain))
        for method in (Method.ROOMIEST, *COMPETITORS)
    )
    verdicts = [verdict for verdict in (first, published, *others) if verdict is not None]
    if published is not None:
        allowed = published.num_replicas()
        verdicts = [verdict for verdict in verdicts if verdict.num_replicas() <= allowed]
    return min(verdicts, key=lambda verdict: (verdict.sends, verdict.num_replicas())).plan
