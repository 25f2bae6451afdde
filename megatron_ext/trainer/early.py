"""Checks of a run that need no torch, made before it is imported, which takes seconds."""

from __future__ import annotations

from pathlib import Path

from megatron_ext.arguments import near_path
from megatron_ext.balance.strategies import unknown_strategy
from megatron_ext.config import ConfigError
from megatron_ext.data.manifest import Manifest
from megatron_ext.trainer.config import TrainConfig


def check_early(config: TrainConfig) -> None:
    """Check what can be checked at once.

    Raises:
        ConfigError: With all problems.
    """
    if problems := early_problems(config):
        raise ConfigError(problems)


def early_problems(config: TrainConfig, *, needs_data: bool = True) -> list[str]:
    """Return what is wrong with values, names of strategies and files that are not there.

    Without `needs_data`, the data need not be there.
    """
    problems = config.problems()
    if isinstance(config.balance.strategy, str):
        problems += filter(None, [unknown_strategy(config.balance.strategy)])
    files = {
        "balance.placement": config.balance.placement,
        "checkpoint.load": config.checkpoint.load,
    }
    for name, path in files.items():
        if path and isinstance(path, str) and not Path(path).exists():
            problems.append(f"{name} ({path}): {path} does not exist{near_path(path)}")
    if needs_data and isinstance(config.data.path, str):
        try:
            Manifest.load(config.data.path)
        except (FileNotFoundError, ValueError) as error:
            near = near_path(config.data.path) if isinstance(error, FileNotFoundError) else ""
            problems.append(f"data.path ({config.data.path}): {' '.join(str(error).split())}{near}")
    return problems
