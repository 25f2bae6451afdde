"""Checks of a run that need no torch, made before it is imported, which takes seconds."""

from __future__ import annotations

from collections import deque
from pathlib import Path

from megatron_ext.arguments import near_path, one_line
from megatron_ext.balance.strategies import unknown_strategy
from megatron_ext.config import ConfigError
from megatron_ext.data.manifest import Manifest
from megatron_ext.files.arrays import check_free
from megatron_ext.files.locks import LOCK_FILE, FolderInUseError, held
from megatron_ext.files.opening import check_ours, check_writes, names_in
from megatron_ext.files.run_dir import CONFIG_FILE, LAYERS_FILE, METRICS_FILE
from megatron_ext.files.whole import check_room
from megatron_ext.files.yaml_files import read_yaml
from megatron_ext.telemetry.step_lines import read_lines, step_texts
from megatron_ext.trainer.checkpoints.choice import lost_steps
from megatron_ext.trainer.config import TrainConfig
from megatron_ext.trainer.data import prefixes_of
from megatron_ext.trainer.logs.rank_logs import LOGS_FOLDER

_FIRST_FILES = 64 << 10
"""Bytes that a run needs room for, to come to its first step: settings, logs, heartbeats."""


def check_early(config: TrainConfig) -> None:
    """Raise a `ConfigError` with all problems that can be found at once, if there are some."""
    if problems := early_problems(config):
        raise ConfigError(problems)


def early_problems(config: TrainConfig, *, needs_data: bool = True) -> list[str]:
    """Return what is wrong with values, names of strategies, missing files and the run's folder.

    Without `needs_data`, the data need not be there.
    """
    problems = config.problems()
    problems += filter(None, [unknown_strategy(config.balance.strategy)])
    files = {
        "balance.placement": config.balance.placement,
        "checkpoint.load": config.checkpoint.load,
    }
    for name, path in files.items():
        if path and not Path(path).exists():
            problems.append(f"{name} ({path}): {path} does not exist{near_path(path)}")
    problems += run_dir_problems(config, begins=needs_data)
    if needs_data:
        try:
            if not prefixes_of(config.data):  # What these hold, Megatron reads.
                Manifest.load(config.data.path)
        except (FileNotFoundError, ValueError) as error:
            near = near_path(config.data.path) if isinstance(error, FileNotFoundError) else ""
            problems.append(f"data.path ({config.data.path}): {one_line(error)}{near}")
    return problems


def run_dir_problems(config: TrainConfig, *, begins: bool) -> list[str]:
    """Return whether the run's folder cannot be written, or metrics in it cannot be continued.

    A folder in which another user has a say is refused. A run that begins must not lose the steps
    of an earlier one.
    """
    run_dir = Path(config.run_dir)
    try:
        check_free(run_dir / METRICS_FILE, overwrite=True)
        if run_dir.exists():
            check_ours(run_dir)
        logs = run_dir / LOGS_FOLDER
        for path in (run_dir / LOCK_FILE, *(logs / name for name in names_in(logs))):
            check_writes(path)
        if begins:
            check_room(run_dir, _FIRST_FILES)
        for lines in read_lines(run_dir / METRICS_FILE), step_texts(run_dir / LAYERS_FILE):
            deque(lines, maxlen=0)  # None is kept.
        earlier = run_dir / CONFIG_FILE
        recipe = read_yaml(earlier).get("recipe") if earlier.is_file() else None
        lost = lost_steps(config) if begins and not config.overwrite else 0
        if lost and (run_dir / LOCK_FILE).exists():  # A refusal leaves no file behind.
            with held(run_dir):  # A run that is there now loses nothing.
                pass
    except (FolderInUseError, OSError, ValueError) as error:
        return [f"run_dir ({config.run_dir}): {one_line(error)}"]
    if recipe and config.recipe and recipe != config.recipe:
        return [
            f"run_dir ({config.run_dir}) is of a run of recipe {recipe}, not {config.recipe}: name "
            "another, or remove it"
        ]
    if lost:
        steps = f"{lost} step{'s' * (lost > 1)}"
        return [
            f"run_dir ({config.run_dir}) holds {steps} and no checkpoint to go on from: name "
            "another, or begin anew with overwrite=true, which moves its files aside"
        ]
    return []
