"""`megatron-ext train`: train a model."""

from __future__ import annotations

from typing import Any

from megatron_ext.cli.dry_run import dry_run
from megatron_ext.cli.output import DONE, INTERRUPTED


def add(commands: Any) -> None:
    """List the command; its words go to `run` unread."""
    commands.add_parser("train", help="train a model as a recipe and Hydra overrides say")


def run(words: list[str]) -> int:
    """Call the entry point of training, which has its own help and its own exits."""
    try:
        from megatron_ext.trainer.command import main

        main(words, dry_run=dry_run)
    except KeyboardInterrupt:  # Before there are ranks; then their launcher deals with it.
        return INTERRUPTED
    return DONE
