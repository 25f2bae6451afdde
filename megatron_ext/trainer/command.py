"""The command line of a training run: `megatron-ext train`, or `torchrun -m megatron_ext.train`.

Arguments are Hydra's: `--config-name NAME` and overrides such as `balance.slots=1`. Nothing that
takes long is imported before the words are understood.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_ext.arguments import OneLineParser, positive
from megatron_ext.files.recipes import recipe_names, shipped_recipes

IMBALANCE = 1.5
"""Busiest rank / mean at which a dry run looks at a run, where nothing else is asked for."""


def main(
    arguments: Sequence[str] | None = None,
    *,
    dry_run: Callable[[argparse.Namespace], None] | None = None,
) -> None:
    """Train by the words of a command line, by default the arguments of the process.

    Without a function `dry_run`, the option `--dry-run` is an error.

    Raises:
        SystemExit: With status 2 if the words or the settings are wrong; with 1 if a rank failed;
            with 128 + its number if a signal ended the run.
    """
    said = parser()
    options = said.parse_intermixed_args(arguments)
    if options.dry_run and dry_run is None:
        said.error("--dry-run is one process's: megatron-ext train --dry-run, without torchrun")
    if not options.dry_run and (options.json or options.imbalance is not None):
        said.error("--json and --imbalance are for --dry-run")
    if options.multirun and (options.dry_run or options.print):
        said.error("--multirun makes runs; --dry-run and --print are about one")
    if options.settings:
        from megatron_ext.trainer.settings_list import settings_text

        sys.stdout.write(settings_text(shutil.get_terminal_size().columns))
        return
    if options.config_name is None:
        _find_recipe(said, options)
    try:
        from megatron_ext.trainer.compose import load_config, said_in_lines, say_loading
        from megatron_ext.trainer.early import check_early

        with said_in_lines():
            if options.dry_run and dry_run is not None:
                dry_run(options)
                return
            if options.multirun:
                from megatron_ext.trainer.sweep import sweep

                sweep(options)
                return
            config = load_config(options.overrides, options.config_dir, options.config_name)
            if not options.print:
                check_early(config)
            say_loading()
            from megatron_ext.trainer.train import check, train

            if options.print:
                from omegaconf import OmegaConf

                sys.stdout.write(OmegaConf.to_yaml(OmegaConf.structured(config)))
                check(config, num_ranks=options.ranks)
            else:
                train(config, num_ranks=options.ranks, verbose=options.verbose)
    except ModuleNotFoundError as missing:
        said.error(of_extra(missing))


def _find_recipe(said: OneLineParser, options: argparse.Namespace) -> None:
    """End with status 2 where a recipe is asked for without its option, or nothing is."""
    folder = Path(options.config_dir) if options.config_dir else shipped_recipes()
    names = recipe_names(folder)
    for word in options.overrides:
        if word in names:
            said.error(f"{word} is a recipe: --config-name {word}")
    if not options.overrides and not options.dry_run:
        said.error(f"--config-name is missing; recipes: {', '.join(names)}")


def of_extra(missing: ModuleNotFoundError) -> str:
    """Return what to install where a package is absent that the plug-in alone does without."""
    module = (missing.name or "").partition(".")[0]
    if module in ("", "megatron_ext"):  # Its own words help more, or it is a fault.
        return str(missing)
    return f"the package {module} is not installed: pip install 'megatron-ext[train]'"


def parser() -> OneLineParser:
    """Return the parser of the command line."""
    parser = OneLineParser(
        prog="megatron-ext train",
        description="Train an MoE model with Megatron-Core, with or without balancing.",
        epilog="example: megatron-ext train --config-name quickstart balance.slots=1 steps=20",
    )
    add = parser.add_argument
    add(
        "--config-dir",
        "-cd",
        help="folder of your own recipes; the recipes of the package are found, too",
        metavar="DIR",
    )
    add("--config-name", "-cn", help="the recipe to start from", metavar="NAME")
    add(
        "--ranks",
        type=positive,
        metavar="N",
        help="ranks to start here; by default as many as the model needs, or one per GPU",
    )
    for flag, text in (
        ("--settings", "list all settings with their types, defaults and meanings, and stop"),
        ("--print", "print the composed settings, check them and stop"),
        (
            "--dry-run",
            "print all problems of the settings, and what the run would need and take; works "
            "without data (--print shows the settings)",
        ),
        ("--verbose", "print tracebacks of ranks, too; else they are in RUN_DIR/logs only"),
        ("--json", "with --dry-run: print one JSON object"),
    ):
        add(flag, action="store_true", help=text)
    add(
        "--imbalance",
        type=float,
        metavar="X",
        help=f"with --dry-run: busiest rank / mean without balancing ({IMBALANCE})",
    )
    add(
        "-m",
        "--multirun",
        action="store_true",
        help="make a run for each combination of values such as balance.slots=1,2, and a page of "
        "all runs",
    )
    add("overrides", nargs="*", help="settings, as section.name=value")
    return parser
