"""The balancers by name: our own, one file each, and those of `methods/` if that folder is there.

A new strategy of our own is one file with a `Strategy` and one line here. A strategy of a paper is
a file in `methods/` and one line of the table there.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

from megatron_ext.balance.strategies.strategy import Planner, Solves, Strategy
from megatron_ext.balance.strategies.strategy import PlanSettings as PlanSettings
from megatron_ext.config import OBJECTIVES, BalanceConfig
from megatron_ext.words import did_you_mean

_METHODS = "megatron_ext.methods"


class _Registry(Mapping[str, Strategy]):
    """Every balancer by its name, in the order of listing.

    A balancer is given as `module:constant`, and imported when it is asked for. The table of
    `methods/` is imported when a name is asked for that is not our own.
    """

    def __init__(self, *own: tuple[str, str]) -> None:
        self._own = dict(own)

    @cached_property
    def _all(self) -> dict[str, str]:
        *plans, (even, forced) = self._own.items()
        return {**dict(plans), **table_of_methods("STRATEGIES"), even: forced}

    def _table_with(self, name: object) -> dict[str, str]:
        return self._own if name in self._own else self._all

    def __getitem__(self, name: str) -> Strategy:
        return pkgutil.resolve_name(self._table_with(name)[name])

    def __contains__(self, name: object) -> bool:
        # `Mapping`'s own method would import the module.
        return name in self._table_with(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)


def table_of_methods(name: str) -> Mapping[str, str]:
    """Return a table of `methods/`, such as `STRATEGIES`; an empty one if the folder is absent."""
    try:
        methods = importlib.import_module(_METHODS)
    except ModuleNotFoundError as missing:
        if missing.name != _METHODS:
            raise
        return {}
    # A folder without files, such as one with nothing but caches, imports as an empty namespace.
    return getattr(methods, name, {})


def of_methods(table: str, balance: BalanceConfig) -> dict[str, Any]:
    """Return what a table of `methods/` has for these settings, by the setting that asks for it.

    An entry's name is that of a strategy, or of a setting of `balance` that is true.
    """
    return {
        f"balance.strategy={name}" if name == balance.strategy else f"balance.{name}": (
            pkgutil.resolve_name(entry)
        )
        for name, entry in table_of_methods(table).items()
        if name == balance.strategy or getattr(balance, name, None) is True
    }


STRATEGIES: Mapping[str, Strategy] = _Registry(
    ("none", f"{__name__}.none:NONE"),
    ("quota", f"{__name__}.quota:QUOTA"),
    ("exact", f"{__name__}.exact:EXACT"),
    ("ideal", f"{__name__}.ideal:IDEAL"),
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
    if problem := unknown_strategy(name):
        raise ValueError(problem)
    strategy = STRATEGIES[name]
    if strategy.package is not None and importlib.util.find_spec(strategy.package) is None:
        raise ModuleNotFoundError(
            f"strategy {name!r} needs the package {strategy.package}: "
            f"pip install 'megatron-ext[{name}]'"
        )
    return strategy


def unknown_strategy(name: str) -> str | None:
    """Return what to say if there is no balancer of that name; else None. Imports none."""
    if name in STRATEGIES:
        return None
    if name in OBJECTIVES:
        return f"{name!r} is no strategy but an objective: balance.objective={name}"
    known = ", ".join(sorted(STRATEGIES))
    return f"unknown strategy {name!r}; known: {known}{did_you_mean(name, STRATEGIES)}"


def get_planner(name: str, *, for_time: bool = False) -> Planner:
    """Return the planner of the balancer of that name, with `for_time` for objective `time`.

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
