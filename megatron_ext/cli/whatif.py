"""`megatron-ext whatif`: what balancing would bring to a run that was traced."""

from __future__ import annotations

import argparse
from typing import Any

from megatron_ext.cli import options
from megatron_ext.cli.output import progress, show
from megatron_ext.files.whole import write_whole


def add(commands: Any) -> None:
    """Add the command."""
    whatif = options.add_command(
        commands,
        "whatif",
        run,
        "estimate from a routing trace what balancing would gain",
        "megatron-ext whatif routing --ep-size 8 --model qwen3_30b --hardware server_8_h100 \\\n"
        "    --out whatif.html\n\n"
        "Without a model and a machine, the answer has imbalances but no times.",
    )
    options.add_trace(whatif)
    options.add_model(whatif, required=False)
    options.add_balance(whatif, *options.PLAN_SETTINGS)
    options.add_nvlink_domain(whatif)
    options.add_out(whatif, "PAGE.html", "page with the answer", replaces="PAGE.html")


def run(arguments: argparse.Namespace) -> int:
    """Try numbers of slots on the trace, and show what they would bring."""
    from megatron_ext.lab.hardware import read_hardware
    from megatron_ext.lab.shape import read_shape

    if (arguments.model is None) != (arguments.hardware is None):
        raise ValueError("--model and --hardware are given together, or neither")
    written = options.check_out(arguments)
    balance = options.balance_config(arguments)
    shape = None
    if arguments.hardware is not None:
        hardware = read_hardware(arguments.hardware)
        shape = read_shape(arguments.model, arguments.set)
    from megatron_ext.lab import whatif
    from megatron_ext.lab.simulate import Setting

    asked = options.asked(balance)
    num_experts = None if shape is None else shape.num_experts
    loads = whatif.sample(options.read_trace(arguments, num_experts))
    if shape is not None:
        asked = Setting.of(asked, loads, shape=shape, hardware=hardware, num_gpus=arguments.gpus)
    with progress("Planning", whatif.count_plans(loads)) as on_load:
        report = whatif.what_if(loads, asked, on_load=on_load)
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(arguments.out, [whatif.page(report)])
    return show(arguments, report, whatif.text, written)
