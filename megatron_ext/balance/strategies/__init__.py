"""The balancers, one file each, and the registry by name.

Adding one is one file with a `Strategy` and one line here.
"""

from __future__ import annotations

from megatron_ext.balance.strategies.exact import EXACT
from megatron_ext.balance.strategies.ideal import IDEAL
from megatron_ext.balance.strategies.none import NONE
from megatron_ext.balance.strategies.quota import QUOTA
from megatron_ext.balance.strategies.quota_paper import QUOTA_PAPER
from megatron_ext.balance.strategies.strategy import Planner, Strategy

STRATEGIES: dict[str, Strategy] = {
    strategy.name: strategy for strategy in (NONE, QUOTA, EXACT, QUOTA_PAPER, IDEAL)
}


def get_strategy(name: str) -> Strategy:
    """Return the balancer of that name.

    Raises:
        ValueError: If there is none; the message lists the known names.
    """
    if name not in STRATEGIES:
        raise ValueError(f"unknown strategy {name!r}; known: {', '.join(sorted(STRATEGIES))}")
    return STRATEGIES[name]


def get_planner(name: str) -> Planner:
    """Return the planner of the balancer of that name.

    Raises:
        ValueError: If there is no such balancer or it makes no plans; the message lists those that
            do.
    """
    planner = get_strategy(name).solve
    if planner is None:
        planners = sorted(name for name, strategy in STRATEGIES.items() if strategy.solve)
        raise ValueError(f"strategy {name!r} makes no plans; planners: {', '.join(planners)}")
    return planner
