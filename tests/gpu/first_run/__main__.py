"""Runs the parts one after another, and writes what they showed after each of them."""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_ext.cli.examine import cuda_mismatch
from megatron_ext.files.tables import markdown_table
from tests.gpu.first_run import mps
from tests.gpu.first_run.environment import ROOT
from tests.gpu.first_run.parts import Part, parts

PASSED, FAILED, TOO_LONG, LEFT_OUT = "passed", "failed", "took too long", "left out"
NO_TIME = "no time was left"

LEAST_S = 20.0
"""With less time left, no part begins."""

_LAST_LINES = 30
"""Of a part's output, kept with its result."""


@dataclass(frozen=True)
class Outcome:
    """What became of a part."""

    name: str
    status: str
    seconds: float = 0.0
    why: str = ""
    """Of a part that did not pass."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    """What it measured."""
    output: list[str] = field(default_factory=list)
    """The last lines that it said."""

    @property
    def last_line(self) -> str:
        """The last line that is not empty: what the part has found, or why it failed."""
        return next((line for line in reversed(self.output) if line.strip()), "")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; see tests/gpu/first_run.sh.

    Returns:
        0 if all that ran passed, 1 if a part did not, 2 if nothing could run.
    """
    options = _parser().parse_args(arguments)
    gpus = num_gpus() if options.gpus is None else options.gpus
    all_parts = parts(gpus)
    unknown = {*options.only, *options.skip} - {part.name for part in all_parts}
    if unknown:
        names = ", ".join(part.name for part in all_parts)
        sys.stderr.write(f"error: there is no part {', '.join(sorted(unknown))}; parts: {names}\n")
        return 2
    chosen = [
        part
        for part in all_parts
        if (not options.only or part.name in options.only) and part.name not in options.skip
    ]
    if options.dry_run or gpus == 0:
        if gpus == 0:
            sys.stdout.write("There is no GPU here. On a machine with GPUs this would run:\n\n")
        sys.stdout.write(f"{plan_text(chosen, gpus)}\n")
        return 0
    if mismatch := cuda_mismatch():
        sys.stderr.write(f"error: {mismatch}\n")
        return 2
    earlier = outcomes_of(options.out) if options.go_on else []
    before = [outcome for outcome in earlier if outcome.status == PASSED]
    tried = {one.name: one for one in earlier if one.status != PASSED and one.seconds}
    done = {outcome.name for outcome in before}
    chosen = [part for part in chosen if part.name not in done]
    # Else what hangs would take the time of all that is behind it, in every command.
    chosen.sort(key=lambda part: part.name in tried)
    outcomes: list[Outcome] = []
    for outcome in run_all(chosen, gpus, options.out, limit_s=60 * options.minutes):
        if outcome.why == NO_TIME and not outcome.seconds:
            outcome = tried.get(outcome.name, outcome)
        outcomes.append(outcome)
        write_results([*before, *outcomes], gpus, options.out)
        sys.stdout.write(f"{outcome.name}: {outcome.status} {outcome.why}".rstrip() + "\n")
        if outcome.last_line:
            sys.stdout.write(f"    {outcome.last_line}\n")
        sys.stdout.flush()
    sys.stdout.write(f"Written: {options.out / 'first_run.json'}, {options.out / 'first_run.md'}\n")
    return int(any(outcome.status in (FAILED, TOO_LONG) for outcome in outcomes))


def num_gpus() -> int:
    """Return how many GPUs the driver knows and this process may use; 0 without a driver."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    count = sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
    # With more ranks than GPUs, trainings would share them and go on (`one_gpu.py`).
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return count if visible is None else min(count, len(list(filter(None, visible.split(",")))))


def plan_text(chosen: Sequence[Part], gpus: int) -> str:
    """Return what would run, as a table, with the longest time that it can take."""
    rows = [
        (
            part.name,
            part.left_out(gpus or part.gpus) or f"{part.limit_s} s",
            part.shows,
            shlex.join(part.command_for(Path(f"{part.name}.json"))[1:]),
        )
        for part in chosen
    ]
    longest = sum(part.limit_s for part in chosen if not part.left_out(gpus or part.gpus))
    table = markdown_table(("part", "at most", "shows", "python ..."), rows)
    return f"{table}\n\nAt most {longest / 60:.0f} minutes."


def run_all(
    chosen: Sequence[Part], gpus: int, out: Path, *, limit_s: float = math.inf
) -> Iterator[Outcome]:
    """Run parts in their order, whatever becomes of each, and yield their outcomes.

    After `limit_s` seconds nothing runs any more. A part that is ended by that counts as left out.
    """
    out.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + limit_s
    shared: tuple[Mapping[str, str], str] | None = None
    with ExitStack() as held:
        for part in chosen:
            left_s = ends - time.monotonic()
            if why := part.left_out(gpus):
                yield Outcome(part.name, LEFT_OUT, why=why)
                continue
            if left_s < LEAST_S:
                yield Outcome(part.name, LEFT_OUT, why=NO_TIME)
                continue
            extra: Mapping[str, str] = {}
            if part.shares_gpu:
                shared = shared or held.enter_context(mps.service())
                extra, line = shared
                sys.stdout.write(f"{part.name}: {line}\n")
                left_s = ends - time.monotonic()
            limited = replace(
                part, limit_s=min(part.limit_s, left_s), environment={**part.environment, **extra}
            )
            outcome = run_part(limited, out)
            if outcome.status == TOO_LONG and left_s < part.limit_s:
                outcome = replace(outcome, status=LEFT_OUT, why=NO_TIME)
            yield outcome


def outcomes_of(out: Path) -> list[Outcome]:
    """Return what became of parts in an earlier run with the same results."""
    file = out / "first_run.json"
    if not file.is_file():
        return []
    return [Outcome(**one) for one in json.loads(file.read_text())["parts"]]


def run_part(part: Part, out: Path) -> Outcome:
    """Run one part to its end or its limit; its processes are gone afterwards."""
    file, log = out / f"{part.name}.json", out / f"{part.name}.log"
    file.unlink(missing_ok=True)
    started = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            part.command_for(file),
            cwd=ROOT,
            # Else NCCL says only that something failed.
            env={"NCCL_DEBUG": "WARN", **os.environ, **part.environment},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(part.limit_s)
            ended = PASSED if status == 0 else FAILED
            why = "" if status == 0 else f"status {status}"
        except subprocess.TimeoutExpired:
            ended, why = TOO_LONG, f"{part.limit_s:.0f} s"
        finally:
            # Also what a part that ended left behind.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    seconds = round(time.monotonic() - started, 1)
    lines = log.read_text(errors="replace").splitlines()[-_LAST_LINES:]
    try:
        rows = _read_rows(file)
    except ValueError as error:
        ended, why, rows = FAILED, f"{file.name}: {error}", []
    return Outcome(part.name, ended, seconds, why, rows, lines)


def write_results(outcomes: Sequence[Outcome], gpus: int, out: Path) -> None:
    """Write `first_run.json` and `first_run.md`."""
    results = {"gpus": gpus, "parts": [asdict(outcome) for outcome in outcomes]}
    # Renamed into place: a machine may be taken away meanwhile, and `--go-on` reads the file.
    written = out / "first_run.json.partial"
    written.write_text(json.dumps(results, indent=1) + "\n")
    written.replace(out / "first_run.json")
    overview = [
        (
            outcome.name,
            f"{outcome.status} {outcome.why}".rstrip(),
            f"{outcome.seconds:.0f}",
            outcome.last_line,
        )
        for outcome in outcomes
    ]
    pieces = [markdown_table(("part", "outcome", "s", "its last line"), overview)]
    for outcome in outcomes:
        if outcome.rows:
            columns = list(dict.fromkeys(key for row in outcome.rows for key in row))
            cells = [[_cell(row.get(column)) for column in columns] for row in outcome.rows]
            pieces += [f"### {outcome.name}", markdown_table(columns, cells)]
    (out / "first_run.md").write_text("\n\n".join(pieces) + "\n")


def _read_rows(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a part, none if it wrote no file.

    Raises:
        ValueError: The file holds something else.
    """
    if not file.is_file():
        return []
    content = json.loads(file.read_text())
    rows = content.get("rows") if isinstance(content, dict) else content
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError("has no list of rows")
    return rows


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tests/gpu/first_run.sh", description=__doc__)
    parser.add_argument("--gpus", type=int, metavar="N", help="use so many (default: all)")
    parser.add_argument("--dry-run", action="store_true", help="say what would run")
    parser.add_argument("--only", nargs="+", default=[], metavar="PART", help="run these only")
    parser.add_argument("--skip", nargs="+", default=[], metavar="PART", help="leave these out")
    parser.add_argument(
        "--minutes", type=float, default=math.inf, metavar="N", help="end after so many"
    )
    parser.add_argument(
        "--go-on",
        action="store_true",
        help="by the results in --out: leave out what has passed, and begin with what has not run",
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "runs" / "first_run", help="(default: runs/first_run)"
    )
    return parser


if __name__ == "__main__":
    # What ends this program, such as `timeout`, ends what it has started.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(main())
