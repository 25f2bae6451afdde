"""`BalanceConfig` with a section for each strategy that has settings of its own.

A strategy declares its section in its own file and names it in its `Strategy`. This module gathers
the sections, so that `balance.llep.alpha` is a setting like any other in recipes, on the command
line and in comparisons between ranks.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from megatron_ext import config
from megatron_ext.balance.strategies import STRATEGIES
from megatron_ext.config import Section


def sections() -> dict[str, type[Section]]:
    """Return the class of each section, by its name below `balance`."""
    classes = [strategy.settings for strategy in STRATEGIES.values() if strategy.settings]
    return {each.NAME.removeprefix("balance."): each for each in classes}


def _extended(base: type[Any], **section: type[Any]) -> type[Any]:
    """Return a dataclass of the same name with further sections, or other classes of sections.

    The class must be found in this module under that name, because ranks get it pickled.
    """
    return dataclasses.make_dataclass(
        base.__name__,
        [(name, each, dataclasses.field(default_factory=each)) for name, each in section.items()],
        bases=(base,),
        namespace={"__module__": __name__, "__doc__": base.__doc__},
        kw_only=True,
    )


if TYPE_CHECKING:
    from megatron_ext.config import BalanceConfig as BalanceConfig
    from megatron_ext.config import TrainConfig as TrainConfig
else:
    BalanceConfig = _extended(config.BalanceConfig, **sections())
    TrainConfig = _extended(config.TrainConfig, balance=BalanceConfig)
