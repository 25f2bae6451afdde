"""How commands and the options that several of them share are declared.

Options of planners have the names, types and defaults of `BalanceConfig`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ext.config import BalanceConfig

if TYPE_CHECKING:
    from megatron_ext.balance.costs import LayerCosts
    from megatron_ext.balance.strategies import PlanSettings

# (field, metavar, help): fields of `BalanceConfig` that are fields of `PlanSettings` too.
_PLAN_SETTINGS = (
    ("tolerance", "T", "imbalance - 1 that is good enough"),
    ("min_quota", "N", "fewest assignments of a replica"),
    ("interval", "N", "microbatches between placements from history"),
    ("alpha", "X", "capacity of a rank / mean, for llep"),
    ("locality_share", "X", "part of the slots for a rank's own tokens, for libra"),
    ("min_tokens_per_gemm", "N", "fewest assignments in a piece, for llep"),
)


def add_group(commands: Any, name: str, summary: str) -> Any:
    """Add a command that only has commands below it."""
    group = commands.add_parser(name, help=summary, description=summary.capitalize() + ".")
    return group.add_subparsers(title="commands", metavar="COMMAND", required=True)


def add_command(
    commands: Any,
    name: str,
    run: Callable[[argparse.Namespace], int],
    summary: str,
    example: str,
) -> argparse.ArgumentParser:
    """Add a command. `run` gets its options and returns the exit status."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run, command_name=parser.prog)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def positive(text: str) -> int:
    """Read a whole number from 1 on, for argparse."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number >= 1")
    return number


# (field of `LayerCosts`, type, metavar, help).
_COSTS = (
    ("expert_bytes", positive, "N", "bytes of one expert's weights"),
    ("link_bandwidth", float, "X", "bytes per second that a rank sends"),
    ("assignment_time", float, "X", "seconds of expert computation per assignment"),
    ("token_bytes", int, "N", "bytes of a hidden state (0: tokens cost nothing)"),
)
_OPTIONAL_COSTS = ("token_bytes",)


def add_trace(parser: argparse.ArgumentParser) -> None:
    """Add the loads to read."""
    parser.add_argument(
        "trace",
        type=Path,
        metavar="TRACE",
        help="a run's folder `trace` (logging.trace_steps), or an .npz file of loads",
    )


def add_out(parser: argparse.ArgumentParser, metavar: str, text: str, *, required: bool) -> None:
    """Add where to write."""
    parser.add_argument("--out", type=_new_path, required=required, metavar=metavar, help=text)


def _new_path(text: str) -> Path:
    """Read a path to write to, for argparse: a variable that is not set names no folder."""
    if not text:
        raise argparse.ArgumentTypeError("a path must not be empty")
    return Path(text)


def add_overwrite(parser: argparse.ArgumentParser, what: str) -> None:
    """Add the leave to replace what is at `--out`."""
    parser.add_argument("--overwrite", action="store_true", help=f"replace {what}")


def add_balance(parser: argparse.ArgumentParser, *options: tuple[str, str, str]) -> None:
    """Add options that are fields of `BalanceConfig`: field, metavar, help."""
    defaults = BalanceConfig()
    for field, metavar, text in options:
        default = getattr(defaults, field)
        parser.add_argument(
            _option(field),
            type=type(default),
            default=default,
            metavar=metavar,
            help=f"{text} (%(default)s)",
        )


def add_nvlink_domain(parser: argparse.ArgumentParser) -> None:
    """Add the domain in which replicas stay."""
    parser.add_argument(
        "--nvlink-domain", type=int, metavar="D", help="ranks per NVLink domain (all ranks)"
    )


def add_plan_settings(parser: argparse.ArgumentParser) -> None:
    """Add what planners are asked for; `plan_settings` reads it."""
    add_balance(parser, ("slots", "S", "replicas that a rank can hold"), *_PLAN_SETTINGS)
    add_nvlink_domain(parser)
    parser.add_argument(
        "--placement",
        type=Path,
        metavar="FILE",
        help="of `megatron-ext place craft`: replicas of craft, and slots of the other planners",
    )


def plan_settings(arguments: argparse.Namespace, costs: LayerCosts | None = None) -> PlanSettings:
    """Return what the options of `add_plan_settings` ask planners for."""
    from megatron_ext.balance.strategies import PlanSettings
    from megatron_ext.files.placement import read_placement

    return PlanSettings(
        **{field: getattr(arguments, field) for field, *_ in _PLAN_SETTINGS},
        costs=costs,
        placement=None if arguments.placement is None else read_placement(arguments.placement),
    )


def add_costs(parser: argparse.ArgumentParser, for_what: str) -> None:
    """Add what planning for time needs to know; `layer_costs` reads it."""
    group = parser.add_argument_group(f"for {for_what}")
    for field, kind, metavar, text in _COSTS:
        group.add_argument(_option(field), type=kind, metavar=metavar, help=text)


def layer_costs(
    arguments: argparse.Namespace, *, for_time: bool, switch: str, alone: Collection[str] = ()
) -> LayerCosts | None:
    """Return what the options of `add_costs` say, if planning is `for_time`, else None.

    Args:
        arguments: The command's.
        for_time: Whether planning is for time.
        switch: What asks for that, for messages.
        alone: Fields that the command also has another use for.

    Raises:
        ValueError: If one is missing, or given without the `switch` that asks to plan for time.
    """
    from megatron_ext.balance.costs import LayerCosts

    fields = [field for field, *_ in _COSTS]
    given = {field: value for field in fields if (value := getattr(arguments, field)) is not None}
    if not for_time:
        if stray := [field for field in given if field not in alone]:
            raise ValueError(f"{_option(stray[0])} is for {switch}")
        return None
    missing = [_option(field) for field in fields if field not in {*given, *_OPTIONAL_COSTS}]
    if missing:
        raise ValueError(
            f"{switch} needs {', '.join(missing)}: only a training has the ranks to measure on"
        )
    return LayerCosts(**given)


def _option(field: str) -> str:
    return "--" + field.replace("_", "-")
