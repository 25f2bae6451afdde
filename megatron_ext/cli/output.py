"""Output of commands: an exit status, results on stdout, progress and errors on stderr."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

DONE, FAILED = 0, 1
INTERRUPTED = 130  # As shells report a command that Ctrl-C ended.


def show(
    arguments: argparse.Namespace,
    report: dict[str, Any],
    lines: Callable[[dict[str, Any]], Sequence[str] | Iterator[str]],
) -> int:
    """Print a result, as JSON or for people."""
    if arguments.json:
        text = json.dumps(_finite(report), indent=2, allow_nan=False)
    else:
        text = "\n".join(lines(report))
    sys.stdout.write(text + "\n")
    return DONE


def _finite(value: Any) -> Any:
    """Put null for numbers that JSON cannot write, as the loss of a run that diverged."""
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def warn(message: str | None) -> None:
    """Print a warning, if there is one, of a command that goes on."""
    if message is not None:
        sys.stderr.write(f"warning: {message}\n")


def columns(*rows: tuple[str, ...]) -> Iterator[str]:
    """Align cells: the first column left, the others right."""
    from megatron_ext.files.tables import text_table

    yield text_table(*rows)


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
