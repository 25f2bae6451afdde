"""Output of commands: an exit status, results on stdout, progress and errors on stderr."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_ext.arguments import one_line, plain
from megatron_ext.files.json_files import json_text

DONE, FAILED = 0, 1


def show(
    arguments: argparse.Namespace,
    report: dict[str, Any],
    lines: Callable[[dict[str, Any]], Sequence[str] | Iterator[str]],
    written: Sequence[Path] = (),
) -> int:
    """Print a result, as JSON or for people, whom a last line tells what was written."""
    if arguments.json:
        text = json_text(report, indent=2)
    else:
        last = [f"Written: {', '.join(map(str, written))}"] * bool(written)
        text = plain("\n".join([*lines(report), *last]))
    sys.stdout.write(text + "\n")
    return DONE


def warn(message: str | None) -> None:
    """Print a warning, if there is one, of a command that goes on."""
    if message is not None:
        sys.stderr.write(f"warning: {one_line(message)}\n")


def mib(num_bytes: int) -> str:
    """Write a size in MiB."""
    return f"{num_bytes / 2**20:,.1f}"


@contextmanager
def progress(what: str, total: int, *, in_bytes: bool = False) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on stderr; yield the function that advances it."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
    )

    console = Console(stderr=True)
    parts = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn() if in_bytes else MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    # Into a log file a bar would only put blank lines.
    with Progress(*parts, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda steps: bar.advance(task, steps)
