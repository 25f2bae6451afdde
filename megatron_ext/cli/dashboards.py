"""`megatron-ext dashboards`: what W&B shows of a project's runs, made there."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from typing import Any

from megatron_ext.cli import options
from megatron_ext.cli.output import show


def add(commands: Any) -> None:
    """Add the command."""
    dashboards = options.add_command(
        commands,
        "dashboards",
        run,
        'make a workspace and the report "Is balancing worth it?" in a W&B project',
        "megatron-ext dashboards --project megatron_ext --dry-run",
    )
    option = dashboards.add_argument
    project = "W&B project of the runs (logging.wandb_project)"
    option("--project", required=True, metavar="P", help=project)
    option("--entity", metavar="E", help="user or team of the project; by default the login's own")
    option("--dry-run", action="store_true", help="show what would be made, without a login")


def run(arguments: argparse.Namespace) -> int:
    """Make both, or show what they would be."""
    if find_spec("wandb_workspaces") is None:
        raise ModuleNotFoundError(
            "dashboards needs the package wandb-workspaces: pip install 'megatron-ext[dashboards]'"
        )
    from megatron_ext.trainer.sinks import dashboards

    if arguments.dry_run:
        made = dashboards.serialised(arguments.entity or "", arguments.project)
        return show(arguments, made, dashboards.outline)
    saved = dashboards.save(arguments.entity, arguments.project)
    lines = [f"{name}: {address}" for name, address in saved.items()]
    return show(arguments, saved, lambda _: lines)
