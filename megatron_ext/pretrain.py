"""`python -m megatron_ext.pretrain SCRIPT ...`: a training program of Megatron's, with balancing.

    torchrun --nproc-per-node 8 -m megatron_ext.pretrain pretrain_gpt.py --moe-balance-slots 2 ...

The script is run as it is, with the rest of its command line. Each setting of `BalanceConfig` is an
argument here: `tolerance` is `--moe-balance-tolerance`. Without `--moe-balance-slots`, or with 0,
the layers stay Megatron's own. `--moe-balance-run-dir` writes the steps for `megatron-ext report`.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

from megatron_ext.arguments import WRONG_USAGE, OneLineParser, error_line, field_docs
from megatron_ext.config import BalanceConfig, ConfigError, Section
from megatron_ext.words import did_you_mean

PROGRAM = "python -m megatron_ext.pretrain"
PREFIX = "--moe-balance-"
_RUN_DIR = f"{PREFIX}run-dir"
_WITHOUT_SLOTS = "Without this argument the layers stay Megatron's own."


def balance_parser() -> argparse.ArgumentParser:
    """The parser of `--moe-balance-*`: one for each setting, absent where it is not given."""
    parser = OneLineParser(
        prog=PROGRAM,
        usage=f"{PROGRAM} SCRIPT {PREFIX}slots S [{PREFIX}...] [ARGUMENTS OF SCRIPT]",
        description="Run a training program of Megatron's with its MoE layers balanced.",
        argument_default=argparse.SUPPRESS,
        add_help=False,  # `--help` behind the script is the script's.
        allow_abbrev=False,
    )
    _add_settings(parser, BalanceConfig())
    parser.add_argument(
        _RUN_DIR,
        dest="run_dir",
        metavar="X",
        help="Folder for the steps, which megatron-ext report reads. Default: none",
    )
    return parser


def _add_settings(parser: argparse.ArgumentParser, section: Section) -> None:
    kind: Any = type(section)
    hints, docs = get_type_hints(kind), field_docs(kind)
    for each in fields(kind):
        value = getattr(section, each.name)
        if isinstance(value, Section):
            _add_settings(parser, value)
            continue
        name = f"{section.NAME}.{each.name}"
        default = _WITHOUT_SLOTS if name == "balance.slots" else f"Default: {value!r}"
        words = f"{docs[each.name]} {default}".replace("%", "%%").replace("`", "")
        if hints[each.name] is bool:
            how: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
        else:
            choices = each.metadata.get("choices") if hints[each.name] is str else None
            how = {"choices": choices or None, "metavar": None if choices else "X"}
        parser.add_argument(_flag(name), dest=name, help=words, **how)


def _flag(setting: str) -> str:
    """The argument of a setting: `balance.llep.alpha` is `--moe-balance-llep-alpha`."""
    return PREFIX + re.sub(r"[._]", "-", setting.removeprefix("balance."))


def read_balance(words: list[str]) -> tuple[BalanceConfig | None, str | None, list[str]]:
    """Take the settings of balancing out of a command line.

    Returns:
        The settings, or None if the layers are to stay Megatron's own; the folder for steps; and
        the other words.

    Raises:
        ValueError: A setting is unknown or out of range, or there are settings without slots.
    """
    parser = balance_parser()
    given, others = parser.parse_known_args(words)
    for word in others:
        if word.startswith(PREFIX):
            known = [option for option in parser._option_string_actions if PREFIX in option]
            flag = word.partition("=")[0]
            raise ValueError(f"unknown argument {flag}{did_you_mean(flag, known)}")
    balance = _with_values(BalanceConfig(), vars(given))
    run_dir = vars(given).get("run_dir")
    if balance.slots and "balance.slots" in vars(given):
        return balance, run_dir, others
    if run_dir is not None:
        raise ValueError(
            f"{_RUN_DIR} needs {PREFIX}slots; {PREFIX}strategy none writes the steps of a run "
            "without balancing"
        )
    if vars(given) and "balance.slots" not in vars(given):
        raise ValueError(
            f"{_flag(next(iter(vars(given))))} needs {PREFIX}slots: without slots the layers stay "
            "Megatron's own"
        )
    return None, None, others


def _with_values(section: Any, given: Mapping[str, str | bool]) -> Any:
    """Return the section with the values of a command line, by the names of their settings."""
    hints, values = get_type_hints(type(section)), {}
    for each in fields(section):
        value, name = getattr(section, each.name), f"{section.NAME}.{each.name}"
        if isinstance(value, Section):
            values[each.name] = _with_values(value, given)
        elif name in given:
            values[each.name] = _typed(given[name], hints[each.name])
    return replace(section, **values)


def _typed(value: str | bool, hint: Any) -> Any:
    """Return what is written as a number as one where the setting may be a number."""
    for kind in (int, float):
        if kind in (hint, *get_args(hint)):
            with suppress(ValueError):
                return kind(value)
    return value


def main() -> None:
    """Run the script that is named first on the command line."""
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help"):
        balance_parser().print_help()
        return
    script = Path(words[0])
    try:
        if not script.is_file():
            raise ValueError(f"SCRIPT ({words[0]}) must be a file, and come first")
        balance, run_dir, others = read_balance(words[1:])
    except ValueError as error:
        raise SystemExit(_refuse([str(error)])) from None
    # Here: it imports PyTorch.
    from megatron_ext.trainer.pretrain import run

    try:
        run(script, others, balance, run_dir)
    except ConfigError as error:  # From building the script's model.
        raise SystemExit(_refuse(error.problems)) from None


def _refuse(problems: list[str]) -> int:
    """Say what is wrong, in the words of the command line and by one rank; returns the status."""
    if os.environ.get("RANK", "0") == "0":
        for problem in problems:
            words = re.sub(r"\bbalance\.[a-z_.]*[a-z]", lambda name: _flag(name[0]), problem)
            sys.stderr.write(error_line(PROGRAM, words))
    return WRONG_USAGE


if __name__ == "__main__":
    main()
