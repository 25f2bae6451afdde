"""`megatron-ext simulate`: a trace on other hardware."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from megatron_ext.cli.options import (
    add_command,
    add_out,
    add_overwrite,
    add_plan_settings,
    add_trace,
    balance_config,
    empty_slots,
    plan_settings,
    positive,
    read_trace,
)
from megatron_ext.cli.output import progress, show, warn


def add(commands: Any) -> None:
    """Add the command."""
    simulate = add_command(
        commands,
        "simulate",
        run,
        "predict what strategies would make of a trace on other hardware",
        "megatron-ext simulate loads.npz --model qwen3_235b --hardware rack_64 --gpus 256 \\\n"
        "    --strategies quota,eplb --set num_microbatches=4\n\n"
        "Without balancing and with ideal routing are always there to compare with.",
    )
    add_trace(simulate)
    simulate.add_argument(
        "--model",
        required=True,
        metavar="NAME|FILE",
        help="a recipe, or the beginning of its name; or a file with the sizes of a model",
    )
    simulate.add_argument(
        "--hardware",
        required=True,
        metavar="NAME|FILE",
        help="a name in recipes/hardware, or a file like those; balance.link_bandwidth=X and "
        "balance.assignment_time=X replace its rates by what a run measured",
    )
    simulate.add_argument(
        "--strategies",
        required=True,
        metavar="A,B,...",
        help="the planners to simulate; NAME:time plans for objective time",
    )
    simulate.add_argument(
        "--gpus",
        type=positive,
        metavar="N",
        help="ranks of the whole training, a multiple of EP x PP; what exceeds that is data "
        "parallelism (EP x PP)",
    )
    simulate.add_argument(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=VALUE",
        help="other sizes of the model: of a recipe its settings, else the fields of such a file",
    )
    add_plan_settings(simulate)
    add_out(simulate, "DIR", "folder for simulate.md and simulate.json", required=False)
    add_overwrite(simulate, "these files in DIR")


def run(arguments: argparse.Namespace) -> int:
    """Simulate the trace with every strategy, and show what a step would take."""
    from megatron_ext.lab.hardware import read_hardware
    from megatron_ext.lab.planning import missing_history
    from megatron_ext.lab.shape import read_shape
    from megatron_ext.lab.simulate import (
        IDEAL,
        NONE,
        Setting,
        as_measured,
        check_out,
        simulate,
        write_report,
    )

    strategies = arguments.strategies.split(",")
    balance = balance_config(arguments)
    settings = plan_settings(balance)
    if arguments.out is not None:
        check_out(arguments.out, overwrite=arguments.overwrite)
    shape = read_shape(arguments.model, arguments.set)
    hardware = as_measured(read_hardware(arguments.hardware), shape, balance)
    setting = Setting(
        shape=shape,
        hardware=hardware,
        num_gpus=arguments.gpus,
        planning=settings,
        slots=balance.slots,
        nvlink_domain=balance.domain_ranks,
    )
    loads = read_trace(arguments, shape.num_experts)
    warn(empty_slots(loads, balance))
    warn(missing_history(loads, strategies, settings))
    with progress("Simulating", len(loads) * len({NONE, IDEAL, *strategies})) as on_load:
        report = simulate(loads, strategies, setting, on_load=on_load)
    if arguments.out is not None:
        write_report(arguments.out, report)
    return show(arguments, report, _lines)


def _lines(report: dict[str, Any]) -> Iterator[str]:
    from megatron_ext.lab.simulate import LEGEND, layer_table, overall_table

    yield report["title"]
    yield ""
    yield overall_table(report)
    yield ""
    yield LEGEND
    yield ""
    yield "A MoE layer, ms:"
    yield ""
    yield layer_table(report)
    yield ""
    yield f"Constants of {report['hardware']['name']} and their sources: --json, or --out DIR."
    yield "Left out: " + "; ".join(report["left_out"]) + "."
