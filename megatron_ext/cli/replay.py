"""`megatron-ext replay`: several strategies on the same trace."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from megatron_ext.cli import options
from megatron_ext.cli.output import progress, show

# What `lab/replay.py` writes into `--out`; here, because that module takes seconds to import.
FILES = ("replay.json", "replay.md", "replay.html")


def add(commands: Any) -> None:
    """Add the command."""
    replay = options.add_command(
        commands,
        "replay",
        run,
        "plan a trace with several strategies, and compare them",
        "megatron-ext replay runs/train/trace --strategies quota,eplb --slots 2 --out comparison",
    )
    options.add_trace(replay)
    options.add_strategies(replay)
    options.add_costs(replay, "NAME:time; --expert-bytes also alone, to see the bytes that move")
    options.add_out(
        replay,
        "DIR",
        "folder for replay.html, replay.md and replay.json",
        replaces="these files in DIR",
    )


def run(arguments: argparse.Namespace) -> int:
    """Plan the trace with every strategy, and show their numbers side by side."""
    strategies = options.strategies(arguments)
    balance = options.balance_config(arguments)
    written = options.check_out(arguments, *FILES)
    from megatron_ext.lab.planning import read_name
    from megatron_ext.lab.replay import make_report, replay, write_report

    costs = options.layer_costs(
        arguments,
        balance,
        for_time=any(read_name(name)[1] for name in strategies),
        switch="NAME:time among --strategies",
        alone=("expert_bytes",),
    )
    asked = options.asked(balance, costs)
    loads = options.read_trace(arguments)
    options.warn_of_empty_slots(loads, asked, strategies)
    with progress("Replaying", len(loads) * len(strategies)) as on_load:
        replayed = replay(loads, strategies, asked, on_load=on_load)
    report = make_report(loads, replayed, asked, expert_bytes=arguments.expert_bytes)
    if arguments.out is not None:
        write_report(arguments.out, report)
    return show(arguments, report, _lines, written)


def _lines(report: dict[str, Any]) -> Iterator[str]:
    from megatron_ext.files.tables import markdown_table
    from megatron_ext.lab.replay import BY_LAYER, never_acted, tables

    yield report["title"]
    for title, cells in tables(report).items():
        if title != BY_LAYER:
            yield ""
            yield markdown_table(*cells)
    yield from never_acted(report)
