"""`megatron-ext report`: one run, or several compared."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ext.cli.options import add_command, add_out, add_overwrite
from megatron_ext.cli.output import DONE, show, warn

if TYPE_CHECKING:
    from megatron_ext.trainer.reports.read import Run


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
        help="run directories; all are compared to the first",
    )
    add_out(
        report,
        "PAGE.html",
        "page to look at in a browser (one run has it in its directory, as report.html)",
        required=False,
    )
    add_overwrite(report, "PAGE.html")
    report.add_argument(
        "--watch", action="store_true", help="serve the page while the runs go on, till Ctrl-C"
    )
    report.add_argument(
        "--address", default="127.0.0.1", metavar="IP", help="to serve at (%(default)s)"
    )
    report.add_argument(
        "--port", type=int, default=8420, metavar="N", help="to serve at (%(default)s; 0: any)"
    )
    report.add_argument(
        "--token", metavar="WORD", help="asked of who opens the page; an address but this needs it"
    )


def run(arguments: argparse.Namespace) -> int:
    """Show the runs' numbers side by side, and write or serve the page."""
    from megatron_ext.files.arrays import check_free
    from megatron_ext.trainer.reports.read import read_runs
    from megatron_ext.trainer.reports.run_page import FILE, write_run_page
    from megatron_ext.trainer.reports.summary import summarize
    from megatron_ext.trainer.reports.verdict import verdict

    out: Path | None = arguments.out
    if out is not None:
        check_free(out, overwrite=arguments.overwrite)
    elif len(arguments.runs) == 1:
        out = arguments.runs[0] / FILE
    runs = read_runs(arguments.runs)
    if arguments.watch:
        return _watch(arguments)
    if out is not None:
        write_run_page(runs, out, _what_if(runs, arguments.runs))
    summaries = {name: summarize(run.metrics) for name, run in runs.items()}
    said, unknown = verdict(runs, summaries)
    report = {
        "runs": summaries,
        "against": list(runs)[:1] if len(runs) > 1 else [],
        "verdict": said,
        "unknown": unknown,
        "page": None if out is None else str(out),
    }
    return show(arguments, report, _lines)


def _what_if(runs: Mapping[str, Run], folders: Sequence[Path]) -> dict[str, Any] | None:
    """What other settings would have brought to the last run with a trace; None if none has."""
    from megatron_ext.files.run_dir import TRACE_FOLDER

    for (name, of), folder in reversed(list(zip(runs.items(), folders, strict=True))):
        if any((folder / TRACE_FOLDER).glob("*.npz")):
            from megatron_ext.lab.alternatives import alternatives

            try:
                return alternatives(name, of, folder)
            except (ValueError, OSError) as error:
                warn(f"no other settings are tried: {error}")
    return None


def _watch(arguments: argparse.Namespace) -> int:
    from megatron_ext.trainer.reports.live import LivePage, make_server

    page = LivePage(arguments.runs)
    with make_server(page, arguments.address, arguments.port, arguments.token) as server:
        query = f"?token={arguments.token}" if arguments.token else ""
        sys.stdout.write(f"http://{arguments.address}:{server.server_port}/{query} till Ctrl-C\n")
        sys.stdout.flush()
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return DONE
    return DONE


def _lines(report: dict[str, Any]) -> Iterator[str]:
    from megatron_ext.trainer.reports.summary import steps_line, table

    yield from report["verdict"]
    yield table(report["runs"], report["against"])
    yield steps_line({name: len(run["losses"]) for name, run in report["runs"].items()})
    yield from report["unknown"]
    if report["page"] is not None:
        yield f"Written: {report['page']}"
