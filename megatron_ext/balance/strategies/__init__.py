"""The balancers, one file each, and the registry by name.

Adding one is one file with a `Strategy` and one line here.
"""

from __future__ import annotations

import importlib.util

from megatron_ext.balance.strategies.exact import EXACT
from megatron_ext.balance.strategies.fastest import TIME
from megatron_ext.balance.strategies.ideal import IDEAL
from megatron_ext.balance.strategies.none import NONE
from megatron_ext.balance.strategies.quota import QUOTA
from megatron_ext.balance.strategies.strategy import PlanSettings as PlanSettings
from megatron_ext.balance.strategies.strategy import Strategy
from megatron_ext.methods.craft.craft import CRAFT
from megatron_ext.methods.eplb.eplb import EPLB
from megatron_ext.methods.eplb.eplb_exact import EPLB_EXACT
from megatron_ext.methods.libra.libra import LIBRA
from megatron_ext.methods.libra.libra_paper import LIBRA_PAPER
from megatron_ext.methods.llep.llep import LLEP
from megatron_ext.methods.lplb.lplb import LPLB
from megatron_ext.methods.moonep.moonep import MOONEP
from megatron_ext.methods.sem_moe.sem_moe import SEM_MOE
from megatron_ext.methods.ultraep_paper.quota_paper import QUOTA_PAPER

STRATEGIES: dict[str, Strategy] = {
    strategy.name: strategy
    for strategy in (
        NONE,
        QUOTA,
        TIME,
        EXACT,
        QUOTA_PAPER,
        EPLB,
        EPLB_EXACT,
        LPLB,
        LLEP,
        MOONEP,
        CRAFT,
        LIBRA,
        LIBRA_PAPER,
        SEM_MOE,
        IDEAL,
    )
}


def get_strategy(name: str) -> Strategy:
    """Return the balancer of that name.

    Raises:
        ValueError: If there is none; the message lists the known names.
        ModuleNotFoundError: If it needs a package that is not there.
    """
    if name not in STRATEGIES:
        raise ValueError(f"unknown strategy {name!r}; known: {', '.join(sorted(STRATEGIES))}")
    strategy = STRATEGIES[name]
    if strategy.package is not None and importlib.util.find_spec(strategy.package) is None:
        raise ModuleNotFoundError(
            f"strategy {name!r} needs the package {strategy.package}: "
            f"pip install 'megatron-ext[{name}]'"
        )
    return strategy


def get_planner(name: str, *, for_time: bool = False) -> Strategy:
    """Return the balancer of that name, which makes plans.

    Args:
        name: Of the balancer.
        for_time: Whether it is to plan for the objective of time.

    Raises:
        ValueError: If there is no such balancer, it makes no plans, or it has no tolerance that the
            objective could choose.
        ModuleNotFoundError: If it needs a package that is not there.
    """
    strategy = get_strategy(name)
    if not strategy.makes_plans:
        planners = sorted(name for name, strategy in STRATEGIES.items() if strategy.makes_plans)
        raise ValueError(f"strategy {name!r} makes no plans; planners: {', '.join(planners)}")
    if for_time and strategy.solve is None:
        raise ValueError(
            f"strategy {name!r} fills replicas placed before, without a tolerance that objective "
            "time chooses"
        )
    return strategy
