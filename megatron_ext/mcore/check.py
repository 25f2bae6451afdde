"""Whether a model can be balanced: everything that speaks against it, before it is built."""

from __future__ import annotations

from typing import Any

from megatron_ext.config import BalanceConfig, ConfigError
from megatron_ext.mcore.limits import validate_for_balancing
from megatron_ext.mcore.spec import with_balanced_layers


def check(config: Any, balance: BalanceConfig, spec: Any = None) -> None:
    """Check that layers of `config` can be balanced as `balance` says.

    Needs no process group, builds nothing and changes nothing. The balanced layer makes the same
    checks when it is built, but that is after all ranks have started.

    Args:
        config: Megatron's TransformerConfig.
        balance: What the balancer may do.
        spec: The model's layer or block spec, to check the class of its experts, too.

    Raises:
        TypeError: `balance` is no `BalanceConfig`.
        ConfigError: Something excludes balancing. Its `problems` hold one line for each setting:
            the setting, its value, the rule, and the flag of Megatron's programs that changes it.
            It is a ValueError.
    """
    problems = validate_for_balancing(config, balance)
    if spec is not None:
        try:
            with_balanced_layers(spec, balance)
        except (ValueError, FileNotFoundError) as error:
            if str(error) not in problems:
                problems.append(str(error))
    if problems:
        raise ConfigError(problems)
