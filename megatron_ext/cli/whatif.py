"""`megatron-ext whatif`: what balancing would bring to a run that was traced."""

from __future__ import annotations

import argparse
from typing import Any

from megatron_ext.cli.options import (
    add_balance,
    add_command,
    add_nvlink_domain,
    add_out,
    add_overwrite,
    add_trace,
    balance_config,
    plan_settings,
    positive,
    read_trace,
)
from megatron_ext.cli.output import progress, show


def add(commands: Any) -> None:
    """Add the command."""
    whatif = add_command(
        commands,
        "whatif",
        run,
        "say from a trace what balancing would bring, before anything is installed for it",
        "megatron-ext whatif routing --ep-size 8 --model qwen3_30b --hardware server_8_h100 \\\n"
        "    --out whatif.html\n\n"
        "Without a model and a machine it says how even ranks would be, and no times.",
    )
    add_trace(whatif)
    whatif.add_argument(
        "--model", metavar="NAME|FILE", help="as for `megatron-ext simulate`, with --hardware"
    )
    whatif.add_argument(
        "--hardware", metavar="NAME|FILE", help="as for `megatron-ext simulate`, with --model"
    )
    whatif.add_argument(
        "--gpus", type=positive, metavar="N", help="ranks of the whole training (EP x PP)"
    )
    whatif.add_argument(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=VALUE",
        help="other sizes of the model, as for `megatron-ext simulate`",
    )
    add_balance(
        whatif,
        ("tolerance", "T", "imbalance - 1 that is good enough"),
        ("min_quota", "N", "fewest assignments of a replica"),
    )
    add_nvlink_domain(whatif)
    add_out(whatif, "PAGE.html", "page with the answer", required=False)
    add_overwrite(whatif, "PAGE.html")


def run(arguments: argparse.Namespace) -> int:
    """Try numbers of slots on the trace, and show what they would bring."""
    from megatron_ext.files.arrays import check_free
    from megatron_ext.lab import whatif
    from megatron_ext.lab.hardware import read_hardware
    from megatron_ext.lab.shape import read_shape

    if (arguments.model is None) != (arguments.hardware is None):
        raise ValueError("--model and --hardware are given together, or neither")
    if arguments.out is not None:
        check_free(arguments.out, overwrite=arguments.overwrite)
    balance = balance_config(arguments)
    settings = plan_settings(balance)
    shape = hardware = None
    if arguments.model is not None:
        hardware = read_hardware(arguments.hardware)
        shape = read_shape(arguments.model, arguments.set)
    loads = whatif.sample(read_trace(arguments, shape.num_experts if shape else None))
    domain = balance.domain_ranks
    if domain is None and hardware is not None:
        domain = min(hardware.domain_ranks, loads.load.shape[1])
    question = whatif.Question(
        planning=settings,
        nvlink_domain=domain,
        shape=shape,
        hardware=hardware,
        num_gpus=arguments.gpus,
    )
    with progress("Planning", whatif.count_plans(loads)) as on_load:
        report = whatif.what_if(loads, question, on_load=on_load)
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(whatif.page(report), encoding="utf-8")
    return show(arguments, report, whatif.text)
