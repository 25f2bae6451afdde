"""Hook of MkDocs: the pages of all settings and of all commands, made from the code."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

from markdown.extensions.toc import slugify
from mkdocs.structure.files import File

from megatron_ext import cli, pretrain
from megatron_ext.cli import submit
from megatron_ext.trainer import command
from megatron_ext.trainer.settings_list import about, sections

WIDTH = 79
"""Characters that a line of code has room for on a page."""

SETTINGS = """\
# Settings

These are all settings of `megatron-ext train`, from the code. On the command line and in recipes
they are `section.name=value`; `megatron-ext train --settings` lists them on a terminal. The
settings of the section `balance` are the fields of [`BalanceConfig`](api.md#settings) in Python,
and arguments `--moe-balance-...` of
[Megatron's programs](guides/balance-your-script.md#a-program-of-megatron-lm).
[Recipes](guides/train-from-recipes.md) set what differs from these defaults.
"""

COMMANDS = """\
# Commands

These are all commands, with the words of their `--help`. The exit status is 0 for success, 1 for a
failure, and 2 for a wrong command line.

| command | what it does |
|---|---|
"""


def on_files(files: Any, config: Any) -> Any:
    """Add both pages."""
    for name, page in (("settings", settings_page()), ("commands", commands_page())):
        files.append(File.generated(config, f"{name}.md", content=page))
    return files


def settings_page() -> str:
    """Return the page of all settings."""
    parts = [SETTINGS]
    for kind, own in sections():
        parts.append(f"## {kind.NAME or 'The run'}\n\n{about(kind)}\n")
        parts.append("| setting and default | values | meaning |\n|---|---|---|")
        for setting in own:
            default = f"<br>`{setting.default}`" if setting.default else "<br>(no default)"
            parts.append(f"| `{setting.name}`{default} | {setting.allowed} | {setting.meaning} |")
        parts.append("")
    return "\n".join(parts)


def commands_page() -> str:
    """Return the page of all commands."""
    parsers = dict(_commands(cli.parser()))
    # These read their own words.
    for parser in (command.parser(), submit.parser(), pretrain.balance_parser()):
        parsers[parser.prog] = parser
    parts = [COMMANDS.rstrip("\n")]
    with mock.patch.dict(os.environ, COLUMNS=str(WIDTH)):
        for name, parser in parsers.items():
            line = (parser.description or "").split(". ")[0].rstrip(".").replace("|", "\\|")
            parts.append(f"| [`{name}`](#{slugify(name, '-')}) | {line} |")
        for name, parser in parsers.items():
            parts.append(f"\n## {name}\n\n```text\n{parser.format_help().rstrip()}\n```")
    return "\n".join(parts) + "\n"


def _commands(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Walk the commands below a parser that do something; groups are left out."""
    inside = [
        action for action in parser._actions if isinstance(action, argparse._SubParsersAction)
    ]
    if not inside:
        yield parser.prog, parser
    for action in inside:
        for below in action.choices.values():
            yield from _commands(below)
