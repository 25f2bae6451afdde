"""The balancers by name: our own, one file each, and those of `methods/` if that folder is there.

    strategy.py   what a balancer is, and what it is asked for
    none.py       no balancing
    quota.py      the quota planner
    exact.py      the quota planner without slack: all ranks equal
    ideal.py      even routing forced: the upper bound
    settings.py   the strategies' own settings, as sections of `balance`
    fastest.py    objective `time`: the tolerance at which a planner's plan is fastest

A new strategy of our own is one file with a `Strategy` and one line here. A strategy of a paper is
a file in `methods/` and one line of the table there.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Iterator, Mapping

from megatron_ext.arguments import did_you_mean
from megatron_ext.balance.strategies.exact import EXACT
from megatron_ext.balance.strategies.ideal import IDEAL
from megatron_ext.balance.strategies.none import NONE
from megatron_ext.balance.strategies.quota import QUOTA
from megatron_ext.balance.strategies.strategy import Planner, Solves, Strategy
from megatron_ext.balance.strategies.strategy import PlanSettings as PlanSettings
from megatron_ext.config import OBJECTIVES

_METHODS = "megatron_ext.methods"


class _Registry(Mapping[str, Strategy]):
    """Every balancer by its name; one of `methods/` is imported when it is asked for."""

    def __init__(self, entries: Mapping[str, Strategy | str]) -> None:
        """Take strategies, or their names as `module:constant`, in the order of listing."""
        self._entries = dict(entries)

    def __getitem__(self, name: str) -> Strategy:
        entry = self._entries[name]
        if isinstance(entry, str):
            entry = self._entries[name] = pkgutil.resolve_name(entry)
        return entry

    def __contains__(self, name: object) -> bool:
        # `Mapping`'s own method would import the module.
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def _of_methods() -> Mapping[str, str]:
    """Return the modules of the strategies of `methods/`; none if the folder is absent."""
    try:
        methods = importlib.import_module(_METHODS)
    except ModuleNotFoundError as missing:
        if missing.name != _METHODS:
            raise
        return {}
    # A folder without files, such as one with nothing but caches, imports as an empty namespace.
    table: Mapping[str, str] = getattr(methods, "STRATEGIES", {})
    return table


STRATEGIES: Mapping[str, Strategy] = _Registry(
    {
        **{strategy.name: strategy for strategy in (NONE, QUOTA, EXACT)},
        **_of_methods(),
        IDEAL.name: IDEAL,
    }
)


def get_strategy(name: str) -> Strategy:
    """Return the balancer of that name.

    Raises:
        TypeError: If it is no name.
        ValueError: If there is none; the message lists the known names.
        ModuleNotFoundError: If it needs a package that is not there.
    """
    if not isinstance(name, str):
        raise TypeError(f"strategy ({name!r}) must be the name of one")
    if name not in STRATEGIES:
        if name in OBJECTIVES:
            raise ValueError(f"{name!r} is no strategy but an objective: balance.objective={name}")
        known = ", ".join(sorted(STRATEGIES))
        raise ValueError(
            f"unknown strategy {name!r}; known: {known}{did_you_mean(name, STRATEGIES)}"
        )
    strategy = STRATEGIES[name]
    if strategy.package is not None and importlib.util.find_spec(strategy.package) is None:
        raise ModuleNotFoundError(
            f"strategy {name!r} needs the package {strategy.package}: "
            f"pip install 'megatron-ext[{name}]'"
        )
    return strategy


def get_planner(name: str, *, for_time: bool = False) -> Planner:
    """Return how the balancer of that name plans.

    Args:
        name: Name of the balancer.
        for_time: Whether the planner is to plan for the objective of time.

    Raises:
        ValueError: If there is no such balancer, it makes no plans, or it has no tolerance that the
            objective could choose.
        ModuleNotFoundError: If it needs a package that is not there.
    """
    strategy = get_strategy(name)
    planner = strategy.planner
    if planner is None:
        planners = sorted(name for name, each in STRATEGIES.items() if each.planner)
        raise ValueError(f"strategy {name!r} makes no plans; planners: {', '.join(planners)}")
    if for_time and not isinstance(planner, Solves):
        raise ValueError(
            f"strategy {name!r} fills replicas placed before, without a tolerance that objective "
            "time chooses"
        )
    return planner
