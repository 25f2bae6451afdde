"""A training run, from its recipe to its ranks.

Words of the command line come from `command.py`. The settings are checked before any process group
exists. Under torchrun this process is one rank; otherwise it starts the ranks on this machine
itself (`trainer/ranks/launch.py`). What a rank does is in `trainer/loop.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import math
import os
import re
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_ext.arguments import WRONG_USAGE, did_you_mean
from megatron_ext.balance.solve import idle_slots
from megatron_ext.balance.strategies import get_strategy
from megatron_ext.config import BalanceConfig, ConfigError, Section
from megatron_ext.cpu_platform import enable_cpu_platform
from megatron_ext.files.recipes import recipe_names, shipped_recipes
from megatron_ext.ops import load_library
from megatron_ext.trainer.checkpoints.choice import finished_step
from megatron_ext.trainer.config import DataConfig, TrainConfig
from megatron_ext.trainer.logs.rank_logs import keep_output
from megatron_ext.trainer.logs.run_log import hold_run_dir
from megatron_ext.trainer.ranks.launch import join_ranks, launch_ranks, quiet_megatron
from megatron_ext.trainer.ranks.shared_folder import check_shared
from megatron_ext.trainer.ranks.watchdog import watch_over
from megatron_ext.trainer.validate import expert_shards, validate

logger = logging.getLogger(__name__)

SCHEMA = "train"
"""Name under which recipes put `TrainConfig` first in their `defaults`."""

ConfigStore.instance().store(SCHEMA, TrainConfig)


def run(options: argparse.Namespace) -> None:
    """Train by the words of a command line, as `command.py` has parsed them.

    Raises:
        ConfigError: The settings are wrong; nothing was started.
        SystemExit: With status 1 if a rank failed; with 128 + its number if a signal ended the run.
    """
    config = load_config(options.overrides, options.config_dir, options.config_name)
    if options.print:
        sys.stdout.write(OmegaConf.to_yaml(OmegaConf.structured(config)))
        check(config, num_ranks=options.ranks)
        return
    train(config, num_ranks=options.ranks)


@contextmanager
def said_in_lines() -> Iterator[None]:
    """Write a line for each problem of the settings, and end with status 2."""
    quiet_megatron()
    try:
        yield
    except ConfigError as error:
        if int(os.environ.get("LOCAL_RANK", 0)) != 0:
            # torchrun ends a machine's ranks when one fails: only the one that speaks may.
            raise SystemExit(0) from None
        # A setting may be wrong on one machine only, as a path that is not mounted there.
        where = f"{socket.gethostname()}: " if int(os.environ.get("RANK", 0)) != 0 else ""
        sys.stderr.write("".join(f"error: {where}{problem}\n" for problem in error.problems))
        raise SystemExit(WRONG_USAGE) from None


def train(config: TrainConfig, *, num_ranks: int | None = None) -> None:
    """Check the settings and run: as one rank under torchrun, otherwise on ranks started here.

    By default these are as many as the model needs, or one per GPU.

    Raises:
        ConfigError: The settings are wrong; nothing was started.
        SystemExit: With status 1 if a rank failed; with 128 + its number if a signal ended the run.
    """
    is_rank = "RANK" in os.environ
    if num_ranks is None and not is_rank and not config.type_problems():
        # Those that this machine has place for, if the recipe is for more.
        here = _num_gpus() or max(2, len(os.sched_getaffinity(0)))
        num_ranks = here if config.parallel.num_ranks > here else None
    num_ranks = check(config, num_ranks=num_ranks)
    if (done := finished_step(config)) is not None:
        if int(os.environ.get("RANK", 0)) == 0:
            logger.info("%s: nothing to do: step %d of %d", config.run_dir, done, config.steps)
        return
    _check_machine(config, num_ranks=None if is_rank else num_ranks)
    # Rank 0 holds it for all ranks of torchrun.
    with hold_run_dir(config) if int(os.environ.get("RANK", 0)) == 0 else nullcontext():
        if is_rank:
            run_rank(config)
        else:
            on = f" on {num_ranks} of {gpus} GPUs" if (gpus := _num_gpus()) > num_ranks else ""
            logger.info(
                "%s: starting %d ranks%s for %d steps", config.run_dir, num_ranks, on, config.steps
            )
            launch_ranks(run_rank, config, num_ranks=num_ranks, restarts=config.restarts)


def check(config: TrainConfig, *, num_ranks: int | None = None, needs_data: bool = True) -> int:
    """Check the settings of a run, and warn of those without effect.

    Returns:
        The ranks that the run would have.

    Raises:
        ConfigError: The settings are wrong.
    """
    if not torch.cuda.is_available():
        enable_cpu_platform()
    if "RANK" in os.environ:
        num_ranks = int(os.environ["WORLD_SIZE"])
    elif num_ranks is None and not config.type_problems():
        num_ranks = _num_ranks(config)
    num_ranks = 1 if num_ranks is None else num_ranks
    validate(config, num_ranks=num_ranks, needs_data=needs_data)
    if int(os.environ.get("RANK", 0)) == 0:
        for said in filter(None, (_idle_slots(config), _no_prediction(config))):
            logger.warning("warning: balance.%s", said)
    return num_ranks


def _num_ranks(config: TrainConfig) -> int:
    """Return how many ranks a run has by default: a GPU each, or what the recipe needs.

    Not all GPUs get one if a batch cannot be divided among them. Sizes may still be wrong.
    """
    parallel, data = config.parallel, config.data
    per_model = max(1, parallel.pp_size * parallel.tp_size)
    step = max(
        1, parallel.pp_size * math.lcm(parallel.ep_size * expert_shards(config), parallel.tp_size)
    )
    needed = max(step, parallel.num_ranks)
    for num_ranks in range(_num_gpus() // step * step, needed, -step):
        of_microbatch = max(1, data.micro_batch_size * num_ranks // per_model)
        if data.global_batch_size % of_microbatch == 0:
            return num_ranks
    return needed


def _num_gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _check_machine(config: TrainConfig, *, num_ranks: int | None) -> None:
    """Check that a run can start here, and load the library, which may have to be built.

    A process that is a rank gives no number of ranks.
    """
    gpus, problem = _num_gpus(), ""
    if gpus and num_ranks is not None and num_ranks > gpus:
        problem = (
            f"the number of ranks ({num_ranks}) must be <= {gpus}, the GPUs of this machine: "
            "CUDA_VISIBLE_DEVICES= in front of the command puts ranks on CPUs"
        )
    elif config.hardware.summary and not gpus:
        problem = (
            f"hardware.summary ({config.hardware.summary}): there is no GPU here; size=tiny "
            "makes the model small enough for ranks on CPUs"
        )
    else:
        try:
            load_library()
        except RuntimeError as error:
            problem = str(error)
    if problem:
        raise ConfigError([problem])


def _no_prediction(config: TrainConfig) -> str | None:
    """Return a message if a strategy predicts and there is nothing to predict; else None."""
    chunks = config.parallel.pp_size * config.parallel.vpp_size
    if not get_strategy(config.balance.strategy).predicts or config.model.num_layers > chunks:
        return None
    return (
        f"strategy ({config.balance.strategy}) predicts nothing: a layer predicts the next one of "
        "its model chunk, and all chunks have one layer"
    )


def _idle_slots(config: TrainConfig) -> str | None:
    """Return a message if ranks of a balanced model have more slots than replicas; else None."""
    balance, ep_size = config.balance, config.parallel.ep_size
    strategy = get_strategy(balance.strategy)
    # One rank has no slots.
    if strategy.kind is not strategy.planner or ep_size == 1:
        return None
    experts = config.model.num_experts
    return idle_slots(
        strategy.num_slots(balance.slots, experts // ep_size),
        num_experts=experts,
        ep_size=ep_size,
        nvlink_domain=balance.domain_ranks,
    )


def load_without_data(
    overrides: Sequence[str],
    config_dir: str | None,
    config_name: str | None,
    *,
    num_ranks: int | None,
) -> tuple[TrainConfig, int]:
    """Compose and check a run whose data need not be there, and find everything that is wrong.

    Arguments are those of `load_config` and `check`.

    Returns:
        The run, and its ranks.

    Raises:
        ConfigError: With all problems. An override that cannot be read does not hide others.
    """

    def load(some: Sequence[str]) -> TrainConfig:
        return load_config(some, config_dir, config_name, needs_data=False)

    problems: list[str] = []
    fine = list(overrides)
    try:
        load(fine)
    except ConfigError as error:
        for override in overrides:
            try:
                load([override])
            except ConfigError as of_one:
                problems += of_one.problems
                fine.remove(override)
        if not problems or not fine:
            raise ConfigError(problems or error.problems) from None
    try:
        config = load(fine)
        num_ranks = check(config, num_ranks=num_ranks, needs_data=False)
    except ConfigError as error:
        problems += error.problems
    if problems or num_ranks is None:
        raise ConfigError(list(dict.fromkeys(problems)))
    return config, num_ranks


def load_config(
    overrides: Sequence[str] = (),
    config_dir: str | None = None,
    config_name: str | None = None,
    *,
    needs_data: bool = True,
) -> TrainConfig:
    """Compose a run's settings from a recipe and overrides.

    Args:
        overrides: Overrides in Hydra's grammar, e.g. `["steps=10", "+megatron.kv_channels=64"]`.
        config_dir: Folder of recipes and groups before those that come with the package.
        config_name: The recipe; by default the bare defaults of `TrainConfig`.
        needs_data: Whether `data.path` has to be given.

    Raises:
        ConfigError: A recipe or key does not exist, or a value has the wrong type.
    """
    if twice := _given_twice(overrides):
        raise ConfigError(twice)
    folder = Path(config_dir).absolute() if config_dir else shipped_recipes()
    if not folder.is_dir():
        raise ConfigError([f"--config-dir ({config_dir}) is not a folder"])
    config_name = config_name or SCHEMA
    if config_name != SCHEMA:
        _check_recipe(config_name, folder)
    Plugins.instance().register(_ShippedRecipes)
    try:
        with initialize_config_dir(str(folder), version_base="1.3"):
            composed = compose(config_name, list(overrides))
        _limit(composed, overrides)
        if config_name != SCHEMA and not composed.recipe:
            composed.recipe = config_name
        if unknown := _unknown_settings(composed):
            raise ConfigError(unknown)
        problems: list[str] = []
        of_balance: list[str] = []
        # What is missing, or a section `balance` that cannot be made, hides no other problem.
        defaults = OmegaConf.structured(TrainConfig(data=DataConfig(path="")))
        for name in sorted(OmegaConf.missing_keys(composed)):
            OmegaConf.update(composed, name, OmegaConf.select(defaults, name))
            if needs_data or name != "data.path":
                problems.append(f"{name} is missing: it has no default")
        try:
            OmegaConf.to_object(composed.balance)
        except ConfigError as error:
            of_balance = error.problems
            composed.balance = defaults.balance
        config = OmegaConf.to_object(composed)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError([_hydra_problem(error)]) from None
    except ConfigError:
        raise
    except ValueError as error:  # A section's, about its own values.
        raise ConfigError([str(error)]) from None
    if not isinstance(config, TrainConfig):
        raise ConfigError([f"{config_name}.yaml must have {SCHEMA} first in its defaults"])
    if problems or of_balance:
        raise ConfigError(problems + config.problems() + of_balance)
    return config


def _check_recipe(name: str, folder: Path) -> None:
    """Check that there is a recipe, in a folder or in the package; the error lists them."""
    found = {each: recipe_names(each) for each in (folder, shipped_recipes())}
    known = [each for names in found.values() for each in names]
    if name.removesuffix(".yaml") in known:
        return
    there = "; ".join(f"{each} has {', '.join(names) or 'none'}" for each, names in found.items())
    raise ConfigError(
        [f"--config-name ({name}): no such recipe: {there}{did_you_mean(name, known)}"]
    )


def _given_twice(overrides: Sequence[str]) -> list[str]:
    """Return the groups of which two overrides choose different options, a problem each."""
    chosen: dict[str, list[str]] = {}
    for each in dict.fromkeys(overrides):
        name = each.lstrip("+").split("=")[0]
        if (shipped_recipes() / name).is_dir():
            chosen.setdefault(name, []).append(each)
    return [f"{name} is given twice: {', '.join(two)}" for name, two in chosen.items() if two[1:]]


class _ShippedRecipes(SearchPathPlugin):
    """Lets Hydra look for recipes and groups in the package, after the folder of --config-dir."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """See `SearchPathPlugin`."""
        search_path.append("megatron_ext", f"file://{shipped_recipes()}")


def _limit(composed: DictConfig, overrides: Sequence[str]) -> None:
    """Take the limits of `at_most` where a recipe has more, but what the command line sets."""
    asked = {each.lstrip("+").split("=")[0] for each in overrides}
    for name, most in composed.at_most.items():
        value = OmegaConf.select(composed, name)
        if name not in asked and isinstance(value, int | float) and value > most:
            OmegaConf.update(composed, name, most)
    composed.at_most = {}


def _unknown_settings(composed: DictConfig) -> list[str]:
    """Return the settings from `+section.name=value` that no section has, with near names."""
    problems = []
    for name, kind in _sections_of(TrainConfig).items():
        known = kind.__dataclass_fields__
        section = OmegaConf.select(composed, name) if name else composed
        for key in map(str, section if isinstance(section, DictConfig) else ()):
            if key not in known:
                label = f"{name}.{key}".lstrip(".")
                near = did_you_mean(key, known)
                problems.append(f"{label}: there is no setting of this name{near}")
    return problems


def _sections_of(section: Any, name: str = "") -> dict[str, Any]:
    """Return the classes of a section and of those inside, by their names."""
    found = {name: section}
    for each in dataclasses.fields(section):
        kind: Any = each.default_factory
        if isinstance(kind, type) and issubclass(kind, Section):
            found |= _sections_of(kind, f"{name}.{each.name}".lstrip("."))
    return found


_HINTS = {
    "Ambiguous value": ": a run has one value of each setting; -m makes a run for each value",
    "Could not override 'data.weights": ": a domain is named with a plus, as in "
    "+data.weights.code=1",
    "No match in the defaults list": ": a group has options in a recipe only (--config-name)",
}
"""What to do instead, by words of Hydra's messages."""


def _hydra_problem(error: Exception) -> str:
    """Return Hydra's message and its cause on one line, with a hint where there is one."""
    parts = [str(part).split("\n")[0].rstrip(".") for part in (error, error.__cause__) if part]
    problem = ": ".join(dict.fromkeys(parts))
    if (override := getattr(error, "override", None)) and override not in problem:
        problem = f"{override}: {problem}"
    if options := getattr(error, "options", None):
        asked = re.search(r"Could not find '(?:.*/)?(\w+)'", problem)
        near = did_you_mean(asked[1], options) if asked else ""
        problem += f"; there are {', '.join(options)}{near}"
    for found, hint in _HINTS.items():
        if found in problem:
            return problem + hint
    if key := re.search(r"Key '(\w+)' not in '(\w+)'", problem):
        sections = {kind.__name__: kind for kind in _sections_of(TrainConfig).values()}
        if key[2] in sections:
            problem += did_you_mean(key[1], sections[key[2]].__dataclass_fields__)
        if key[2] == "TrainConfig" and key[1] in BalanceConfig.__dataclass_fields__:
            problem += f": it is balance.{key[1]}"
    return problem


def run_rank(config: TrainConfig) -> None:
    """Train as one rank of a launch; the settings were checked."""
    quiet_megatron()
    keep_output(Path(config.run_dir))
    with watch_over(config), join_ranks(config.group_timeout):
        check_shared(config)
        from megatron_ext.trainer.loop import Training

        Training(config).run()
