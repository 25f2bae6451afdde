"""Declares commands, and the options that several commands share.

Options of planners have the names, types and defaults of `BalanceConfig`, and all its settings can
be given as in recipes: `balance.name=value`.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ext.arguments import existing_path, positive
from megatron_ext.cli.output import progress, warn
from megatron_ext.config import COST_UNITS, BalanceConfig, no_setting

if TYPE_CHECKING:
    from megatron_ext.balance.costs import LayerCosts
    from megatron_ext.files.loads import Loads
    from megatron_ext.lab.planning import Asked

# (field, metavar, help): fields of `BalanceConfig` that are fields of `PlanSettings` too.
PLAN_SETTINGS = (
    ("tolerance", "T", "imbalance - 1 that is good enough"),
    ("min_quota", "N", "fewest assignments of a replica"),
)

_COSTS = ("expert_bytes", "token_bytes")
"""Fields of `LayerCosts` that are no settings of `balance`."""


def add_group(commands: Any, name: str, summary: str) -> Any:
    """Add a command that only has subcommands."""
    group = commands.add_parser(name, help=summary, description=summary.capitalize() + ".")
    return group.add_subparsers(title="commands", metavar="COMMAND", required=True)


def add_command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], summary: str, example: str
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


def add_trace(parser: argparse.ArgumentParser) -> None:
    """Add the loads to read."""
    parser.add_argument(
        "trace",
        type=loads_path,
        metavar="TRACE",
        help="a run's folder `trace` (logging.trace_steps), an .npz file of loads, or a folder of "
        "Megatron's --moe-routing-trace-path",
    )
    group = parser.add_argument_group("for a trace of Megatron's own")
    for option, metavar, text in (
        ("--ep-size", "R", "ranks of an EP group, as in that run, or another size to ask about"),
        ("--pp-size", "P", "pipeline stages of that run (1)"),
        (
            "--experts",
            "E",
            "experts of a layer (those of the model, or the highest that was chosen)",
        ),
    ):
        group.add_argument(option, type=positive, metavar=metavar, help=text)


def loads_path(text: str) -> Path:
    """Read the path of loads, for argparse: a folder, or a file that begins as those with arrays.

    So another file is refused before what reads the whole is imported.
    """
    from megatron_ext.files.arrays import check_archive, check_names, names_of

    path = existing_path(text)
    if path.is_file():
        try:
            check_archive(path)
            if names := names_of(path):
                check_names(path, names, ("load",))
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        except OSError:  # Who reads it says why.
            pass
    return path


def add_strategies(parser: argparse.ArgumentParser) -> None:
    """Add the planners to compare, and their options; `strategies` reads their names."""
    parser.add_argument(
        "--strategies",
        required=True,
        metavar="A,B,...",
        help="planners by their names in `megatron-ext plan --list`; NAME:time plans for objective "
        "time",
    )
    add_plan_settings(parser)


def strategies(arguments: argparse.Namespace) -> list[str]:
    """Return the names of `--strategies`: different ones, of strategies that there are."""
    from megatron_ext.balance.strategies import unknown_strategy

    names: list[str] = arguments.strategies.split(",")
    for name in names:
        if problem := unknown_strategy(name.partition(":")[0]):
            raise ValueError(problem)
        if names.count(name) > 1:
            raise ValueError(f"strategy {name!r} is there twice")
    return names


def read_trace(arguments: argparse.Namespace, num_experts: int | None = None) -> Loads:
    """Read what `add_trace` was given, for a model of `num_experts` if there is one."""
    from megatron_ext.files.loads import read_loads
    from megatron_ext.files.routing_trace import is_routing_trace, read_routing_trace

    path, asked = arguments.trace, arguments.experts or num_experts
    if is_routing_trace(path):
        if arguments.ep_size is None:
            raise ValueError(f"{path} is of Megatron's routing: --ep-size must say the EP group")
        pp_size = arguments.pp_size or 1
        loads = read_routing_trace(
            path, ep_size=arguments.ep_size, pp_size=pp_size, num_experts=asked
        )
        if asked is None:
            warn(f"{loads.load.shape[-1]} experts, by the highest that was chosen; or --experts E")
        return loads
    loads = read_loads(path)
    for option, given, size in (
        ("--ep-size", arguments.ep_size, loads.load.shape[1]),
        ("--experts", arguments.experts, loads.load.shape[2]),
    ):
        if given not in (None, size):
            raise ValueError(f"{option} ({given}) must be that of {path} ({size})")
    if num_experts not in (None, loads.load.shape[2]):
        from megatron_ext.lab.shape import is_recipe

        name = "model.num_experts" if is_recipe(arguments.model) else "num_experts"
        raise ValueError(
            f"the loads have {loads.load.shape[2]} experts, the model {arguments.model} has "
            f"{num_experts}: --set {name}={loads.load.shape[2]}"
        )
    return loads


def add_model(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """Add the model and the machine to compute times for, and the size of the training."""
    parser.add_argument(
        "--model",
        required=required,
        metavar="NAME|FILE",
        help="a recipe, or the beginning of its name; or a file with the sizes of a model",
    )
    parser.add_argument(
        "--hardware",
        required=required,
        metavar="NAME|FILE",
        help="a name in recipes/hardware, or a file like those",
    )
    parser.add_argument(
        "--gpus",
        type=positive,
        metavar="N",
        help="ranks of the whole training, a multiple of EP x PP; further ranks are data-parallel "
        "(EP x PP)",
    )
    parser.add_argument(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=VALUE",
        help="changes of the model: settings of its recipe, or fields of its file",
    )


def add_out(
    parser: argparse.ArgumentParser,
    metavar: str,
    text: str,
    *,
    required: bool = False,
    replaces: str = "",
) -> None:
    """Add where to write, and the option to replace what is there if there may be something."""
    parser.add_argument("--out", type=_new_path, required=required, metavar=metavar, help=text)
    if replaces:
        parser.add_argument("--overwrite", action="store_true", help=f"replace {replaces}")


def add_dry_run(parser: argparse.ArgumentParser) -> None:
    """Add the option of commands that end with `write_prepared`."""
    parser.add_argument(
        "--dry-run", action="store_true", help="check everything, and write nothing"
    )


def write_prepared(arguments: argparse.Namespace, what: str, prepared: Any) -> dict[str, Any]:
    """Write a checkpoint that was prepared, unless it is a dry run; return what the report says.

    `what` stands in front of the progress: "Copying".
    """
    from checkpoints_tools.folder import free_bytes

    if not arguments.dry_run:
        with progress(what, prepared.num_bytes, in_bytes=True) as on_bytes:
            prepared.write(on_bytes)
    return {
        "bytes": prepared.num_bytes,
        "free_bytes": free_bytes(prepared.out),
        "written": not arguments.dry_run,
    }


def room_line(report: dict[str, Any]) -> str:
    """Say whether there is room for what a dry run did not write."""
    room = "enough" if report["free_bytes"] >= report["bytes"] else "NOT enough"
    return f"needs       {report['bytes']:,} bytes, {report['free_bytes']:,} are free: {room}"


def _new_path(text: str) -> Path:
    """Read a path to write to, for argparse: a variable that is not set names no folder."""
    if not text:
        raise argparse.ArgumentTypeError("a path must not be empty")
    return Path(text)


def check_out(arguments: argparse.Namespace, *names: str) -> list[Path]:
    """Check, before the work, that `--out` can be written, or the files `names` in that folder.

    What is to be written is returned: nothing without `--out`.
    """
    from megatron_ext.files.arrays import check_free

    if arguments.out is None:
        return []
    paths = [arguments.out / name for name in names] or [arguments.out]
    for path in paths:
        check_free(path, overwrite=arguments.overwrite)
    return paths


def take_overrides(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the words into settings `balance.name=value`, returned second, and all others.

    Settings may stand between options, which argparse does not allow for positional words.
    """
    overrides = [word for word in words if re.match(r"balance\.[\w.]+=", word)]
    return [word for word in words if word not in overrides], overrides


def add_balance(parser: argparse.ArgumentParser, *options: tuple[str, str, str]) -> None:
    """Add options that are fields of `BalanceConfig`: field, metavar, help.

    The command then takes any setting of the section as `balance.name=value`, too;
    `balance_config` reads all of them.
    """
    defaults = BalanceConfig()
    for field, metavar, text in options:
        default = getattr(defaults, field)
        parser.add_argument(
            _option(field), type=type(default), metavar=metavar, help=f"{text} ({default})"
        )
    parser.set_defaults(takes_overrides=True)


def balance_config(arguments: argparse.Namespace) -> BalanceConfig:
    """Return the settings given by options and by words `balance.name=value`.

    Raises:
        ValueError: There is no such setting, it is given twice, or it is out of range.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

    from megatron_ext.balance.strategies import unknown_strategy

    options = {
        name: value
        for name in (field.name for field in fields(BalanceConfig))
        if (value := getattr(arguments, name, None)) is not None
    }
    words = [word.removeprefix("balance.") for word in arguments.overrides]
    names = [*options, *(word.split("=")[0] for word in words)]
    if "strategy" in names and hasattr(arguments, "strategies"):
        raise ValueError("balance.strategy: --strategies says which are compared")
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise ValueError(f"balance.{twice[0]} is given twice")
    try:
        merged = OmegaConf.merge(
            OmegaConf.structured(BalanceConfig), OmegaConf.from_dotlist(words), options
        )
        balance = OmegaConf.to_object(merged)
    except ConfigKeyError as error:
        raise ValueError(no_setting(error.object_type, str(error.key))) from None
    except OmegaConfBaseException as error:
        said = f"balance.{error.full_key or ''}: {str(error).splitlines()[0]}"
        raise ValueError(said.replace("balance.:", "balance:")) from None
    assert isinstance(balance, BalanceConfig)
    if problem := unknown_strategy(balance.strategy):
        raise ValueError(problem)
    return balance


def warn_of_empty_slots(loads: Loads, asked: Asked, strategies: Sequence[str] = ()) -> None:
    """Warn where a rank has more slots than replicas to hold, or strategies lack a history."""
    from megatron_ext.balance.solve import idle_slots
    from megatron_ext.lab.planning import missing_history

    _, ranks, experts = loads.load.shape
    domain = asked.nvlink_domain
    warn(idle_slots(asked.slots, num_experts=experts, ep_size=ranks, nvlink_domain=domain))
    warn(missing_history(loads, strategies, asked.planning))


def add_nvlink_domain(parser: argparse.ArgumentParser) -> None:
    """Add the domain in which replicas stay."""
    parser.add_argument(
        "--nvlink-domain",
        type=int,
        metavar="D",
        help="ranks per NVLink domain (all ranks; with --hardware as many as reach each other)",
    )


def add_plan_settings(parser: argparse.ArgumentParser) -> None:
    """Add the options of planners; `balance_config` reads them."""
    add_balance(parser, ("slots", "S", "replicas that a rank can hold"), *PLAN_SETTINGS)
    add_nvlink_domain(parser)
    parser.epilog = f"{parser.epilog}\n\nOther settings of `balance`: balance.NAME=VALUE."


def asked(balance: BalanceConfig, costs: LayerCosts | None = None) -> Asked:
    """Return what a command asks planners for."""
    from megatron_ext.balance.strategies import PlanSettings
    from megatron_ext.files.placement import read_placement
    from megatron_ext.lab.planning import Asked

    placement = read_placement(Path(balance.placement)) if balance.placement else None
    return Asked(
        planning=PlanSettings.of(balance, costs, placement),
        slots=balance.slots,
        nvlink_domain=balance.domain_ranks,
    )


def add_costs(parser: argparse.ArgumentParser, for_what: str) -> None:
    """Add the costs for planning for time; `layer_costs` reads them."""
    settings = " and ".join(f"balance.{name}=X" for name in COST_UNITS)
    add = parser.add_argument_group(f"for {for_what}", f"With {settings}.").add_argument
    add("--expert-bytes", type=positive, metavar="N", help="bytes of one expert's weights")
    tokens = "bytes of a hidden state (0: tokens cost nothing)"
    add("--token-bytes", type=int, metavar="N", help=tokens)


def layer_costs(
    arguments: argparse.Namespace,
    balance: BalanceConfig,
    *,
    for_time: bool,
    switch: str,
    alone: Collection[str] = (),
) -> LayerCosts | None:
    """Return the costs given by the options of `add_costs` if planning is `for_time`, else None.

    `switch` are the words that ask for it, for messages; the command also has another use for the
    costs `alone`.

    Raises:
        ValueError: A cost is missing, or given without the `switch` that asks to plan for time.
    """
    from megatron_ext.balance.costs import LayerCosts

    given = {name: value for name in _COSTS if (value := getattr(arguments, name)) is not None}
    if not for_time:
        if stray := [field for field in given if field not in alone]:
            raise ValueError(f"{_option(stray[0])} is for {switch}")
        return None
    settings = {name: getattr(balance, name) for name in COST_UNITS}
    missing = [f"balance.{name}" for name, value in settings.items() if value == "auto"]
    if "expert_bytes" not in given:
        missing.insert(0, _option("expert_bytes"))
    if missing:
        raise ValueError(
            f"{switch} needs {', '.join(missing)}: only a training has the ranks to measure on"
        )
    return LayerCosts(**given, **settings)


def _option(field: str) -> str:
    return "--" + field.replace("_", "-")
