"""`megatron-ext report`: one run, or several compared."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_ext.cli.options import add_command, add_out, add_overwrite
from megatron_ext.cli.output import show

FILE = "report.html"


def add(commands: Any) -> None:
    """Add the command."""
    report = add_command(
        commands,
        "report",
        run,
        "compare runs: imbalance, throughput, losses",
        "megatron-ext report runs/quickstart/none runs/quickstart/quota --out comparison.html",
    )
    report.add_argument(
        "runs",
        type=Path,
        nargs="+",
        metavar="RUN",
        help="run directories; throughput is compared to the first one's",
    )
    add_out(
        report,
        "PAGE.html",
        f"page with the numbers and curves (one run has it in its directory, as {FILE})",
        required=False,
    )
    add_overwrite(report, "PAGE.html")


def run(arguments: argparse.Namespace) -> int:
    """Show the runs' numbers side by side, and write the page."""
    from megatron_ext.files.arrays import check_free
    from megatron_ext.trainer.report import differing_settings, page, read_runs, summarize

    out: Path | None = arguments.out
    if out is not None:
        check_free(out, overwrite=arguments.overwrite)
    elif len(arguments.runs) == 1:
        out = arguments.runs[0] / FILE
    runs = read_runs(arguments.runs)
    against = list(runs)[:1] if len(runs) > 1 else []
    if out is not None:
        settings = differing_settings(dict(zip(runs, arguments.runs, strict=True)))
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(page(runs, settings, against))
    report = {
        "runs": {name: summarize(metrics) for name, metrics in runs.items()},
        "against": against,
        "page": None if out is None else str(out),
    }
    return show(arguments, report, _lines)


def _lines(report: dict[str, Any]) -> Iterator[str]:
    from megatron_ext.trainer.report import steps_line, table

    yield table(report["runs"], report["against"])
    yield steps_line({name: len(run["losses"]) for name, run in report["runs"].items()})
    if report["page"] is not None:
        yield f"Written: {report['page']}"
