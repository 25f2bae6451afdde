"""`megatron-ext logs`: what the ranks of a run have said, in the order of time."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from megatron_ext.arguments import existing_path, plain
from megatron_ext.cli import options
from megatron_ext.cli.output import DONE, show
from megatron_ext.files.opening import names_in, whole_lines
from megatron_ext.words import counted

_POLL_S = 1.0

_NAME = re.compile(r"rank_\d+\.log")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z ")


def add(commands: Any) -> None:
    """Add the command."""
    logs = options.add_command(
        commands,
        "logs",
        run,
        "show the output of all ranks of a run, in the order of time",
        "megatron-ext logs runs/train --follow",
    )
    logs.add_argument("run_dir", type=existing_path, metavar="RUN", help="the run directory")
    logs.add_argument("--rank", type=int, metavar="N", help="only this rank")
    logs.add_argument(
        "--follow", action="store_true", help="show new lines as they come, until Ctrl-C"
    )


def run(arguments: argparse.Namespace) -> int:
    """Show the lines that are there, and then maybe those that come."""
    if arguments.follow and arguments.json:
        raise ValueError("--follow has no end, and --json is one result")
    read: dict[Path, int] = {}
    lines = _new_lines(_files(arguments.run_dir, arguments.rank), read)
    show(arguments, {"lines": list(lines)}, lambda report: report["lines"])
    while arguments.follow:
        sys.stdout.flush()
        time.sleep(_POLL_S)
        for line in _new_lines(_files(arguments.run_dir, arguments.rank), read):
            sys.stdout.write(plain(f"{line}\n"))
    return DONE


def _files(run_dir: Path, rank: int | None) -> list[Path]:
    from megatron_ext.trainer.logs.rank_logs import LOGS_FOLDER, rank_log

    folder = run_dir / LOGS_FOLDER
    files = [folder / name for name in names_in(folder) if _NAME.fullmatch(name)]
    if not files:
        raise FileNotFoundError(f"{folder} has no log of a rank")
    if rank is None:
        return files
    if (file := rank_log(run_dir, rank)) not in files:
        raise ValueError(f"--rank ({rank}): {run_dir} has logs of {counted(len(files), 'rank')}")
    return [file]


def _new_lines(files: list[Path], read: dict[Path, int]) -> Iterator[str]:
    """Yield the whole lines after the bytes that were read of each file, each behind its rank."""
    # One file after the other: a process may not have the files of all ranks open.
    for _, rank, line in sorted(chain.from_iterable(_of_file(file, read) for file in files)):
        yield f"[rank {rank}] {line}"


def _of_file(file: Path, read: dict[Path, int]) -> Iterator[tuple[tuple[str, int], int, str]]:
    """Yield place in the order, rank and text of each new line of a file."""
    rank, when, number = int(file.stem.removeprefix("rank_")), "", 0
    for whole in whole_lines(file, read.get(file, 0)):
        read[file] = read.get(file, 0) + len(whole)
        for line in whole[:-1].decode(errors="replace").splitlines() or [""]:
            if found := _TIME.match(line):
                when = max(when, found[0])  # A clock may be set back: a file keeps its order.
            number += 1
            yield (when, number), rank, line
