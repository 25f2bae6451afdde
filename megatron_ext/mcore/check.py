"""Checks, before a model is built, whether its layers can be balanced."""

from __future__ import annotations

from typing import Any

from megatron_ext.balance.strategies import STRATEGIES
from megatron_ext.balance.strategies.strategy import Planner
from megatron_ext.config import BalanceConfig, ConfigError
from megatron_ext.mcore.experts import kind_of, quantization_problem
from megatron_ext.mcore.limits import validate_for_balancing
from megatron_ext.mcore.spec import modules_of, with_balanced_layers


def check(config: Any, balance: BalanceConfig, spec: Any = None) -> None:
    """Check that layers of `config` can be balanced as `balance` says.

    Needs no process group, builds nothing and changes nothing. The balanced layer makes the same
    checks when it is built, but that is after all ranks have started.

    Args:
        config: Megatron's TransformerConfig.
        balance: The settings of balancing.
        spec: The model's layer or block spec, not yet balanced: checks the class of its experts.

    Raises:
        TypeError: `balance` is no `BalanceConfig`.
        ConfigError: A setting or the spec excludes balancing. The error is a ValueError, and its
            `problems` have one line for each setting: name, value, rule, and the flag of Megatron's
            programs that changes the setting.
    """
    problems = validate_for_balancing(config, balance)
    if spec is not None:
        strategy = STRATEGIES.get(balance.strategy)
        if strategy is not None and isinstance(strategy.kind, Planner):  # Others have no replicas.
            kinds = filter(None, map(kind_of, modules_of(spec)))
            problems += filter(None, (quantization_problem(config, kind) for kind in kinds))
        try:
            with_balanced_layers(spec, balance)
        except (ValueError, FileNotFoundError) as error:
            if str(error) not in problems:
                problems.append(str(error))
    if problems:
        raise ConfigError(problems)
