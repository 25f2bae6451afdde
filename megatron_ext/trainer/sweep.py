"""A run for each combination of values, by Hydra's multirun, and a page that compares them.

On this machine they run one after another; `hydra/launcher=submitit_slurm` makes them jobs of Slurm
(the extra `sweeps`). All are checked before the first one starts.
"""

from __future__ import annotations

import argparse
import itertools
import logging
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

from megatron_ext.config import ConfigError
from megatron_ext.files.recipes import shipped_recipes
from megatron_ext.trainer.compose import faults_of_words, load_config, say_loading
from megatron_ext.trainer.config import SCHEMA
from megatron_ext.trainer.early import check_early
from megatron_ext.trainer.reports.read import read_runs, run_files
from megatron_ext.trainer.reports.run_page import FILE, write_run_page

logger = logging.getLogger(__name__)

_RUN_DIR = "run_dir="


@faults_of_words()
def sweep(options: argparse.Namespace) -> None:
    """Make the runs of a command line of `megatron-ext train`, and a page beside their folders.

    `run_dir` in the overrides is the folder of all runs; each has a folder in it, named after its
    values. Runs that are there go on.

    Raises:
        ConfigError: Settings are wrong, or nothing is swept; nothing was started.
        SystemExit: A run failed or was stopped; the page has those that were made until then.
    """
    name, config_dir, num_ranks = options.config_name or SCHEMA, options.config_dir, options.ranks
    words = [word for word in options.overrides if not word.startswith(_RUN_DIR)]
    folders = [word for word in options.overrides if word.startswith(_RUN_DIR)]
    given: Any = f"runs/sweeps/{name}"
    for word in OverridesParser.create().parse_overrides(folders):
        given = word.value()
        if not isinstance(given, str):
            raise ConfigError([f"{word.input_line}: the folder of all runs is one"])
    folder = Path(given).absolute()
    if find_spec("submitit") is None and any("launcher=submitit" in word for word in words):
        raise ConfigError(["hydra/launcher: submitit needs pip install 'megatron-ext[sweeps]'"])
    values, fixed = combinations([word for word in words if not word.startswith("hydra")])
    runs = {}
    for each in values:
        run = ",".join(sorted(each))
        overrides = [*fixed, *each, f"{_RUN_DIR}{_quoted(folder / run)}"]
        runs[run] = load_config(overrides, config_dir, options.config_name)
        runs[run].logging.wandb_group = runs[run].logging.wandb_group or folder.name
        check_early(runs[run])
    say_loading()
    from megatron_ext.trainer import train  # Imports torch, as does the next.
    from megatron_ext.trainer.sinks.wandb import keep_comparison

    for config in runs.values():
        train.check(config, num_ranks=num_ranks)

    def make(_: DictConfig) -> None:
        run = str(Path(HydraConfig.get().runtime.output_dir).relative_to(folder))
        logger.info("%s", run)
        train.train(runs[run], num_ranks=num_ranks, verbose=options.verbose)

    without = ",".join(word.lstrip("+").split("=")[0] for word in fixed)
    words += [
        f"hydra.sweep.dir={_quoted(folder)}",
        "hydra.sweep.subdir=${hydra.job.override_dirname}",
        f"hydra.job.config.override_dirname.exclude_keys=[{without}]",
        *("hydra.output_subdir=null", "hydra/job_logging=none", "hydra/hydra_logging=none"),
    ]
    recipes = Path(config_dir).absolute() if config_dir else shipped_recipes()
    with initialize_config_dir(str(recipes), job_name="train", version_base="1.3"):
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        try:
            hydra.multirun(name, make, words, with_log_configuration=False)
        finally:  # Also where a run failed.
            if there := [folder / each for each in runs if run_files(folder / each)]:
                _compare(folder, there)
    keep_comparison(next(iter(runs.values())), folder)


def _quoted(path: Path) -> str:
    """Write a path as Hydra reads it, with spaces and letters of any language."""
    return "'" + str(path).replace("'", r"\'") + "'"


def combinations(words: Sequence[str]) -> tuple[list[tuple[str, ...]], list[str]]:
    """Return the overrides of each run that differ between runs, and those that do not."""
    parsed = OverridesParser.create().parse_overrides(list(words))
    swept = [
        [f"{each.get_key_element()}={value}" for value in each.sweep_string_iterator()]
        for each in parsed
        if each.is_sweep_override()
    ]
    if not swept:
        raise ConfigError(["--multirun: no setting has several values, as in balance.slots=1,2"])
    fixed = [str(each.input_line) for each in parsed if not each.is_sweep_override()]
    return list(itertools.product(*swept)), fixed


def _compare(folder: Path, run_dirs: Sequence[Path]) -> None:
    file = folder / FILE
    write_run_page(read_runs(run_dirs), file)
    logger.info("compared in %s", file)
