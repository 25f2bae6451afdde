"""`megatron-ext simulate`: a trace on other hardware."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from megatron_ext.cli import options
from megatron_ext.cli.output import progress, show

# What `lab/simulate.py` writes into `--out`; here, because that module takes seconds to import.
FILES = ("simulate.json", "simulate.md")


def add(commands: Any) -> None:
    """Add the command."""
    simulate = options.add_command(
        commands,
        "simulate",
        run,
        "predict the step times of strategies for a trace, on other hardware",
        "megatron-ext simulate loads.npz --model qwen3_235b --hardware rack_64 --gpus 256 \\\n"
        "    --strategies quota,eplb --set data.global_batch_size=2048\n\n"
        "The command always adds two rows to compare with: without balancing, and with ideal\n"
        "routing. balance.link_bandwidth=X and balance.assignment_time=X replace rates of the\n"
        "hardware by rates that a run measured.",
    )
    options.add_trace(simulate)
    options.add_model(simulate, required=True)
    options.add_strategies(simulate)
    options.add_out(
        simulate, "DIR", "folder for simulate.md and simulate.json", replaces="these files in DIR"
    )


def run(arguments: argparse.Namespace) -> int:
    """Simulate the trace with every strategy, and show what a step would take."""
    from megatron_ext.lab.hardware import read_hardware
    from megatron_ext.lab.shape import read_shape

    strategies = options.strategies(arguments)
    balance = options.balance_config(arguments)
    written = options.check_out(arguments, *FILES)
    machine = read_hardware(arguments.hardware)
    shape = read_shape(arguments.model, arguments.set)
    from megatron_ext.lab import simulate as lab

    asked = options.asked(balance)
    hardware = lab.as_measured(machine, shape, balance)
    loads = options.read_trace(arguments, shape.num_experts)
    setting = lab.Setting.of(asked, loads, shape=shape, hardware=hardware, num_gpus=arguments.gpus)
    options.warn_of_empty_slots(loads, setting, strategies)
    with progress("Simulating", len(loads) * len({lab.NONE, lab.IDEAL, *strategies})) as on_load:
        report = lab.simulate(loads, strategies, setting, on_load=on_load)
    if arguments.out is not None:
        lab.write_report(arguments.out, report)
    return show(arguments, report, _lines, written)


def _lines(report: dict[str, Any]) -> Iterator[str]:
    from megatron_ext.lab.simulate import LEGEND, layer_table, overall_table

    yield report["title"]
    yield ""
    yield overall_table(report)
    yield ""
    yield LEGEND
    yield ""
    yield "An MoE layer, ms:"
    yield ""
    yield layer_table(report)
    yield ""
    yield f"Constants of {report['hardware']['name']} and their sources: --json, or --out DIR."
    yield "Left out:"
    yield from (f"- {what}" for what in report["left_out"])
