"""`megatron-ext report`: one run, or several compared."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_ext.arguments import existing_path
from megatron_ext.cli import options
from megatron_ext.cli.output import show


def add(commands: Any) -> None:
    """Add the command."""
    report = options.add_command(
        commands,
        "report",
        run,
        "compare runs: imbalance, throughput, losses",
        "megatron-ext report runs/quickstart/none runs/quickstart/quota --out comparison.html",
    )
    report.add_argument(
        "runs",
        type=existing_path,
        nargs="+",
        metavar="RUN",
        help="run directories; all are compared to the first",
    )
    options.add_out(
        report,
        "PAGE.html",
        "page to look at in a browser (a run of your own has it in its directory, as report.html)",
        replaces="PAGE.html",
    )


def run(arguments: argparse.Namespace) -> int:
    """Show the runs' numbers side by side, and write the page."""
    from megatron_ext.files.opening import is_ours
    from megatron_ext.trainer.reports.read import read_runs
    from megatron_ext.trainer.reports.run_page import FILE, write_run_page
    from megatron_ext.trainer.reports.verdict import compare

    out: Path | None = arguments.out
    options.check_out(arguments)
    runs = read_runs(arguments.runs)
    # A folder of another user is only read.
    if out is None and len(arguments.runs) == 1 and is_ours(arguments.runs[0]):
        out = arguments.runs[0] / FILE
    compared = compare(runs)
    if out is not None:
        write_run_page(runs, out, compared)
    report = {
        "runs": compared.summaries,
        "against": list(runs)[:1] if len(runs) > 1 else [],
        "verdict": compared.said,
        "unknown": compared.unknown,
        "page": None if out is None else str(out),
    }
    return show(arguments, report, _lines, [] if out is None else [out])


def _lines(report: dict[str, Any]) -> Iterator[str]:
    from megatron_ext.trainer.reports.summary import notes, table

    yield from report["verdict"]
    yield table(report["runs"])
    yield from notes(report["runs"])
    yield from report["unknown"]
    if report["page"] is None and len(report["runs"]) == 1:
        yield "No page, as the run is another user's: --out PAGE.html writes one"
