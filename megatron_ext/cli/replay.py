"""`megatron-ext replay`: several strategies on the same trace."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from megatron_ext.cli.options import (
    add_command,
    add_costs,
    add_out,
    add_overwrite,
    add_plan_settings,
    add_trace,
    balance_config,
    empty_slots,
    layer_costs,
    plan_settings,
    read_trace,
)
from megatron_ext.cli.output import progress, show, warn


def add(commands: Any) -> None:
    """Add the command."""
    replay = add_command(
        commands,
        "replay",
        run,
        "plan a trace with several strategies, and compare them",
        "megatron-ext replay runs/train/trace --strategies quota,eplb --slots 2 --out comparison",
    )
    add_trace(replay)
    replay.add_argument(
        "--strategies",
        required=True,
        metavar="A,B,...",
        help="the planners, of `megatron-ext plan --list`; NAME:time plans for objective time",
    )
    add_plan_settings(replay)
    add_costs(replay, "NAME:time; --expert-bytes also alone, to see the bytes that move")
    add_out(replay, "DIR", "folder for replay.html, replay.md and replay.json", required=False)
    add_overwrite(replay, "these files in DIR")


def run(arguments: argparse.Namespace) -> int:
    """Plan the trace with every strategy, and show their numbers side by side."""
    from megatron_ext.lab.planning import missing_history, read_name
    from megatron_ext.lab.replay import check_out, make_report, replay, write_report

    strategies = arguments.strategies.split(",")
    balance = balance_config(arguments)
    costs = layer_costs(
        arguments,
        balance,
        for_time=any(read_name(name)[1] for name in strategies),
        switch="NAME:time among --strategies",
        alone=("expert_bytes",),
    )
    settings = plan_settings(balance, costs)
    if arguments.out is not None:
        check_out(arguments.out, overwrite=arguments.overwrite)
    loads = read_trace(arguments)
    warn(empty_slots(loads, balance))
    warn(missing_history(loads, strategies, settings))
    room: dict[str, Any] = {"slots": balance.slots, "nvlink_domain": balance.domain_ranks}
    with progress("Replaying", len(loads) * len(strategies)) as on_load:
        replayed = replay(loads, strategies, settings, **room, on_load=on_load)
    report = make_report(
        loads, replayed, settings, slots=balance.slots, expert_bytes=arguments.expert_bytes
    )
    if arguments.out is not None:
        write_report(arguments.out, report)
    return show(arguments, report, _lines)


def _lines(report: dict[str, Any]) -> Iterator[str]:
    from megatron_ext.lab.replay import bytes_table, overall_table, prediction_table

    yield report["title"]
    for table in (overall_table, bytes_table, prediction_table):
        if text := table(report):
            yield ""
            yield text
