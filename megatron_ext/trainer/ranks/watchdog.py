"""Ends a run in which a rank hangs, and names the rank and the place.

Every rank has a thread that writes its heartbeat (`telemetry/heartbeat.py`) and judges: if its own
main thread has not moved for the time limit, it reads the files of all ranks, names the rank that
the others wait for, and ends its process. The launcher then ends the run. A rank that ends with an
error because others are gone names them, too. Before its first note a rank is not judged.

    rank 1 (host a, process 4711) hangs in step 149, forward, layer 2: its process does not run

Who hangs: a rank that ended, else one that does not beat, else one whose main thread does not wait
for others, else the one that is least far.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from megatron_ext.arguments import one_line
from megatron_ext.config import ConfigError
from megatron_ext.telemetry.heartbeat import (
    DONE,
    FAILED,
    GAVE_UP,
    LOST_BEATS,
    RUNNING,
    START,
    STATUS_FOLDER,
    Pulse,
    Status,
    own_status,
    read_statuses,
    stacks_path,
    status_path,
    waits_at,
)
from megatron_ext.trainer.config import TrainConfig
from megatron_ext.trainer.logs.rank_logs import LOG_ONLY, rank_log
from megatron_ext.trainer.ranks.signals import Stopped

logger = logging.getLogger(__name__)

HANGING = 75
"""Exit status of a rank that ends because it or another hangs: `EX_TEMPFAIL`, try again."""

STACKS_SIGNAL = signal.SIGUSR2
"""Asks a rank for the Python stacks of its threads."""

_PROCESSES = {
    "stopped": "does not run (it is stopped)",
    "runs": "runs, but cannot write (is the disk of the run directory full?)",
}
"""What is known of a process of this machine that writes no heartbeats."""

_SETTLING_S = 0.2
"""Seconds after which a rank that ends sees the others that end with it."""

_MOST_NAMED = 4
"""Ranks that a verdict names: of a machine that dies, a line need not name all ranks."""


@contextmanager
def watch_over(config: TrainConfig) -> Iterator[None]:
    """Watch over this rank while the block runs: around all that a rank of a launch does."""
    watchdog = Watchdog(
        Path(config.run_dir) / STATUS_FOLDER,
        own_status(
            rank=int(os.environ["RANK"]),
            num_ranks=int(os.environ["WORLD_SIZE"]),
            limit_s=config.timeout_s,
        ),
    )
    try:
        yield
    except BaseException as error:
        # It watches on: the end of this process may hang, too.
        if isinstance(error, Stopped) or (isinstance(error, SystemExit) and not error.code):
            watchdog.end()
        else:
            watchdog.fail(error)
        raise
    watchdog.end()


class Watchdog:
    """Heartbeat and judge of this rank, from its construction until `end`."""

    def __init__(self, folder: Path, status: Status) -> None:
        self._folder = folder
        self._rank = status.rank
        folder.mkdir(parents=True, exist_ok=True)
        stacks_path(folder, self._rank).unlink(missing_ok=True)
        self._stacks = stacks_path(folder, self._rank).open("x")  # Never through a link.
        # Before there is a status, whose readers may send the signal: by itself it ends a process.
        faulthandler.register(STACKS_SIGNAL, file=self._stacks, all_threads=True)
        if self._rank == 0:
            for old in read_statuses(folder):
                if old.rank >= status.num_ranks:  # Only an earlier part of the run had it.
                    status_path(folder, old.rank).unlink(missing_ok=True)
                    stacks_path(folder, old.rank).unlink(missing_ok=True)
        self._pulse = Pulse(folder, status)
        self._ended = threading.Event()
        self._waited_in_vain = False
        self._speaking = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop; the rank is done."""
        self._ended.set()
        with self._speaking:
            self._pulse.end(DONE)

    def fail(self, error: BaseException) -> None:
        """Note why this rank ends, and name another rank that is to blame.

        Does not return if this rank has waited long for another: to see for which takes a few
        heartbeats, and then the process ends.
        """
        # An error of its own, which `join_ranks` has logged; else the rank ends as all agreed.
        cause = error.__cause__ if isinstance(error, SystemExit) else error
        with self._speaking:
            statuses = read_statuses(self._folder)
            verdict = told(statuses) or ended(statuses, besides=self._rank)
            # Other errors are this rank's own, if no other has ended.
            self._waited_in_vain = (
                not verdict
                and _comes_of_waiting(cause)
                and self._pulse.status.still_s >= self._pulse.status.lost_s
            )
            if self._waited_in_vain:
                self._pulse.gave_up_at = self._pulse.status.line
            elif verdict:
                self._pulse.end(GAVE_UP, verdict)
                self._say(f"rank {self._rank}: {verdict}")
            else:
                reason = cause or error.__context__ or error
                self._pulse.end(FAILED, f"{type(reason).__name__}: {reason}")
                if isinstance(cause, ConfigError):
                    problems = map(one_line, cause.problems)
                    self._say("\n".join(f"error: {problem}" for problem in problems))
                elif cause is not None:
                    last = self._pulse.status
                    log = rank_log(self._folder.parent, self._rank)
                    self._say(f"rank {last.rank} failed in {last.note}: {last.reason} (see {log})")
        if self._waited_in_vain:
            self._thread.join()

    def _watch(self) -> None:
        before: list[Status] = []
        looked_at = 0
        while not self._ended.wait(self._pulse.status.beat_s):
            with self._speaking:
                if self._pulse.status.state != RUNNING:
                    return
                status = self._pulse.beat()
                is_late = status.still_s >= status.limit_s - status.lost_s
                if not (self._waited_in_vain or (is_late and status.note.stage != START)):
                    before = []  # It is not yet time to look at who beats.
                elif not before:
                    before, looked_at = read_statuses(self._folder), status.beat
                # Counted in beats: those of others may need as many after a pause of the machine.
                elif status.beat - looked_at >= LOST_BEATS - 1 and (
                    self._waited_in_vain or status.still_s >= status.limit_s
                ):
                    self._give_up(before)

    def _give_up(self, before: list[Status]) -> None:
        statuses = read_statuses(self._folder)
        verdict = told(statuses) or judge(before, statuses)
        self._pulse.end(GAVE_UP, verdict)
        faulthandler.dump_traceback(self._stacks, all_threads=True)
        self._say(f"rank {self._rank}: {verdict} (own stacks: {self._stacks.name})")
        # Not by an exception: the main thread that hangs would not raise it, and the end of process
        # groups with hanging ranks takes for ever.
        os._exit(HANGING)

    def _say(self, words: str) -> None:
        """Log why this rank ends; on the terminal one rank speaks, the one that failed first."""
        time.sleep(_SETTLING_S)

        def order(status: Status) -> tuple[bool, float, int]:
            return status.state != FAILED, status.time, status.rank

        own = self._pulse.status
        others = [each for each in read_statuses(self._folder) if each.rank != own.rank]
        ends = [each for each in others if each.state in (FAILED, GAVE_UP)]
        is_first = all(order(own) < order(each) for each in ends)
        logger.error("%s", words, extra=None if is_first else LOG_ONLY)


def _comes_of_waiting(error: BaseException | None) -> bool:
    """Whether an error was raised where ranks wait for each other."""
    places = traceback.extract_tb(error.__traceback__, limit=-1) if error is not None else ()
    return any(waits_at(each.filename, each.lineno or 0) for each in places)


def told(statuses: Sequence[Status]) -> str:
    """Return the verdict of a rank that gave up before; empty if none has."""
    return next((status.reason for status in statuses if status.state == GAVE_UP), "")


def ended(statuses: Sequence[Status], *, besides: int | None = None) -> str:
    """Name the rank, besides one, that ended without being done; empty if there is none."""
    others = [status for status in statuses if status.rank != besides]
    if failed := [status for status in others if status.state == FAILED]:
        first = min(failed, key=lambda status: status.time)
        return f"{_name(first)} failed in {first.note}: {first.reason}"
    gone = [each for each in others if each.state == RUNNING and each.process == "gone"]
    return _named(f"{_name(each)} died in {each.note}" for each in gone)


def judge(before: Sequence[Status], statuses: Sequence[Status]) -> str:
    """Name the rank that the others wait for, and its place, by its status a few beats before."""
    if verdict := ended(statuses) or missing(statuses):
        return verdict
    running = [status for status in statuses if status.state == RUNNING]
    beats = {status.rank: (status.pid, status.beat) for status in before}
    silent = [each for each in running if beats.get(each.rank) == (each.pid, each.beat)]
    if silent:
        return lost(silent)
    late = least_far(running or statuses)
    where = f", in {late.line}" if late.line else ""
    return f"{_hangs(late)}: its main thread has not moved for {late.still_s:.0f} s{where}"


def least_far(statuses: Sequence[Status]) -> Status:
    """Return the rank that the others most probably wait for."""
    return min(statuses, key=lambda each: (each.waits, each.note.step, each.moves, each.rank))


def missing(statuses: Sequence[Status]) -> str:
    """Name the ranks that have no file that can be read; empty if all have one."""
    ranks = sorted(set(range(statuses[0].num_ranks)) - {status.rank for status in statuses})
    return f"no sign of ranks {ranks}: they have no status, or a damaged one" if ranks else ""


def lost(silent: Sequence[Status]) -> str:
    """Name ranks that do not beat, and their places at their last heartbeat."""
    return _named(
        f"{_hangs(each)}: its process {_PROCESSES.get(each.process, 'does not run')}, last "
        f"heartbeat {each.silent_s:.0f} s ago"
        for each in silent
    )


def _hangs(status: Status) -> str:
    return f"{_name(status)} hangs in {status.note}"


def _name(status: Status) -> str:
    return f"rank {status.rank} (host {status.host}, process {status.pid})"


def _named(sentences: Iterator[str]) -> str:
    said = list(sentences)
    rest = f"; and {len(said) - _MOST_NAMED} ranks more" if len(said) > _MOST_NAMED else ""
    return "; ".join(said[:_MOST_NAMED]) + rest
