"""The `megatron-ext` command, one file per command.

Exit status: 0 done, 1 failed, 2 wrong usage. An error about the input is one line. Results go to
stdout, progress and errors to stderr. Each command imports the heavy modules that it needs, so that
`--help` answers at once.
"""

from __future__ import annotations

import argparse
import io
import logging
import sys
import warnings
from collections.abc import Sequence

import megatron_ext
from megatron_ext.arguments import WRONG_USAGE, OneLineParser, error_line
from megatron_ext.cli import (
    checkpoint,
    dashboards,
    data,
    doctor,
    logs,
    place,
    plan,
    replay,
    report,
    simulate,
    submit,
    synth,
    train,
    whatif,
)
from megatron_ext.cli.options import take_overrides
from megatron_ext.cli.output import FAILED
from megatron_ext.trainer.command import of_extra

# In the order in which `--help` lists them.
_COMMANDS = (
    *(train, submit, logs, report, dashboards, plan, replay, place, simulate, whatif, synth),
    *(data, checkpoint, doctor),
)
# Errors that a user can repair by another command line.
_USAGE_ERRORS = (
    ValueError,
    FileNotFoundError,
    FileExistsError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
    ModuleNotFoundError,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command of these words, by default those of the process; return the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # The name of a file may be no text.
    if words[:1] == ["train"]:
        return train.run(words[1:])
    if words[:1] == ["submit"]:
        try:
            return submit.run(words[1:])
        except ModuleNotFoundError as error:
            return _complain("megatron-ext submit", error, WRONG_USAGE)
    words, overrides = take_overrides(words)
    said = parser()
    if not words:
        said.print_help(sys.stderr)
        return WRONG_USAGE
    arguments = said.parse_args(words)
    if overrides and not getattr(arguments, "takes_overrides", False):
        said.error(f"unrecognized arguments: {' '.join(overrides)}")
    arguments.overrides = overrides
    # Megatron and torch speak, when they are imported, of features that the CLI does not use.
    warnings.filterwarnings("ignore", module=r"(megatron|torch)(\.|$)")
    for name in ("megatron", "torch.utils.cpp_extension"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        return int(arguments.run(arguments))
    except _USAGE_ERRORS as error:
        return _complain(arguments.command_name, error, WRONG_USAGE)
    except (RuntimeError, OSError, MemoryError) as error:
        return _complain(arguments.command_name, error, FAILED)


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands; each sets `run` and `command_name`."""
    parser = OneLineParser(  # The parsers of all commands are then of this class, too.
        prog="megatron-ext",
        description="Balanced MoE training on stock Megatron-Core.",
        epilog="example:\n  megatron-ext doctor",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in _COMMANDS:
        command.add(commands)
    return parser


class _Version(argparse.Action):
    """Prints the version, which is looked up for nothing else."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        sys.stdout.write(f"megatron-ext {megatron_ext.__version__}\n")
        parser.exit()


def _complain(command_name: str, error: Exception, status: int) -> int:
    said = of_extra(error) if isinstance(error, ModuleNotFoundError) else error
    sys.stderr.write(error_line(command_name, said))
    return status
