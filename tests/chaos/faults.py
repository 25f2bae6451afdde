"""What goes wrong with machines: ends, pauses, full disks, torn files.

A fault of a running attempt is a function of the attempt and a random generator; it returns when
the attempt has ended, and checks how. A fault of files is done to the run directory between two
attempts.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.attempt import Attempt


@dataclass(frozen=True)
class Fault:
    """A fault by name.

    Attributes:
        name: As the table shows it.
        strike: Does it, and waits for the attempt's end.
        statuses: Exit statuses of the launcher that are right.
        most_bytes: Largest file that the attempt may write; None for any.
    """

    name: str
    strike: Callable[[Attempt, random.Random], None]
    statuses: tuple[int, ...]
    most_bytes: int | None = None


def _after_some_steps(attempt: Attempt, chooser: random.Random) -> None:
    """Wait for some steps of this attempt, and then for a moment within one."""
    aim = len(attempt.lines()) + chooser.randint(1, 8)
    attempt.wait_for(lambda: len(attempt.lines()) >= aim, f"line {aim} of the metrics")
    time.sleep(chooser.uniform(0.0, 0.2))


def _in_a_save(attempt: Attempt, chooser: random.Random) -> None:
    """Wait for the beginning of a save, and then for a moment within it."""
    folder, before = attempt.run_dir / "checkpoints", time.time()

    def is_saving() -> bool:
        # An attempt before may have left a folder.
        return any(_made(each) > before for each in folder.glob(".*.unfinished"))

    attempt.wait_for(is_saving, "the beginning of a save")
    time.sleep(chooser.uniform(0.0, 0.1))


def _made(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _kill_a_rank(moment: Callable[[Attempt, random.Random], None]) -> Callable[..., None]:
    def strike(attempt: Attempt, chooser: random.Random) -> None:
        moment(attempt, chooser)
        if ranks := attempt.ranks():  # Else it ended before.
            _kill(chooser.choice(ranks), signal.SIGKILL)
        attempt.wait()

    return strike


def _tell_the_launcher(
    number: signal.Signals, moment: Callable[[Attempt, random.Random], None]
) -> Callable[..., None]:
    def strike(attempt: Attempt, chooser: random.Random) -> None:
        moment(attempt, chooser)
        if not attempt.has_ended():
            _kill(attempt.pid, number)
        attempt.wait()

    return strike


def _kill_all(attempt: Attempt, chooser: random.Random) -> None:
    _after_some_steps(attempt, chooser)
    for process in attempt.processes():
        _kill(process.pid, signal.SIGKILL)
    attempt.wait()


def _pause_all(attempt: Attempt, chooser: random.Random) -> None:
    """Stop all processes for a while: the run goes on as if nothing had been; then end it."""
    _after_some_steps(attempt, chooser)
    stopped = attempt.processes()
    for process in stopped:
        _kill(process.pid, signal.SIGSTOP)
    time.sleep(2.0)
    seen = len(attempt.lines())
    for process in reversed(stopped):
        _kill(process.pid, signal.SIGCONT)
    attempt.wait_for(lambda: len(attempt.lines()) > seen, "a step after the pause")
    _tell_the_launcher(signal.SIGTERM, lambda *_: None)(attempt, chooser)


def _fill_the_disk(attempt: Attempt, chooser: random.Random) -> None:
    """Train over a save that cannot be written; then end it."""
    said = "checkpoint"
    attempt.wait_for(lambda: said in attempt.output, "word of the checkpoint that is not saved")
    _after_some_steps(attempt, chooser)
    _tell_the_launcher(signal.SIGTERM, lambda *_: None)(attempt, chooser)


def _kill(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


# A run may have reached its last step before it was struck: then its status is 0.
ENDINGS = (
    Fault("SIGKILL a rank", _kill_a_rank(_after_some_steps), (1, 0)),
    Fault("SIGKILL a rank in a save", _kill_a_rank(_in_a_save), (1, 0)),
    Fault("SIGKILL the launcher", _tell_the_launcher(signal.SIGKILL, _after_some_steps), (-9, 0)),
    Fault(
        "SIGKILL the launcher in a save", _tell_the_launcher(signal.SIGKILL, _in_a_save), (-9, 0)
    ),
    Fault("SIGKILL all", _kill_all, (-9, 0)),
    Fault("SIGTERM", _tell_the_launcher(signal.SIGTERM, _after_some_steps), (143, 0)),
    Fault("SIGINT", _tell_the_launcher(signal.SIGINT, _in_a_save), (130, 0)),
    Fault("SIGUSR1", _tell_the_launcher(signal.SIGUSR1, _after_some_steps), (138, 0)),
    Fault("all stopped for 2 s", _pause_all, (143, 0)),
    Fault("disk full", _fill_the_disk, (143, 0), most_bytes=100 << 10),
)


def _newest_checkpoint(run_dir: Path) -> Path:
    return max((run_dir / "checkpoints").glob("step_*"))


def _shard(run_dir: Path, chooser: random.Random) -> Path:
    return chooser.choice(sorted(_newest_checkpoint(run_dir).glob("*.distcp")))


def truncate_a_shard(run_dir: Path, chooser: random.Random) -> None:
    """Cut off the newest checkpoint's shard somewhere."""
    file = _shard(run_dir, chooser)
    os.truncate(file, chooser.randrange(file.stat().st_size))


def flip_a_bit(run_dir: Path, chooser: random.Random) -> None:
    """Change one bit of the newest checkpoint's shard."""
    file = _shard(run_dir, chooser)
    content = bytearray(file.read_bytes())
    content[chooser.randrange(len(content))] ^= 1 << chooser.randrange(8)
    file.write_bytes(content)


def lose_the_table_of_contents(run_dir: Path, chooser: random.Random) -> None:
    """Remove the newest checkpoint's `.metadata`."""
    (_newest_checkpoint(run_dir) / ".metadata").unlink()


def empty_the_run_file(run_dir: Path, chooser: random.Random) -> None:
    """Leave nothing in the newest checkpoint's `run.json`."""
    (_newest_checkpoint(run_dir) / "run.json").write_bytes(b"")


def tear_the_metrics(run_dir: Path, chooser: random.Random) -> None:
    """Leave half a line at the end of the metrics."""
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9999, "lo')


def tear_the_trace(run_dir: Path, chooser: random.Random) -> None:
    """Cut off the newest file of the trace."""
    if files := sorted((run_dir / "trace").glob("step_*.npz")):
        os.truncate(files[-1], files[-1].stat().st_size // 2)


DAMAGES = {
    "shard cut off": truncate_a_shard,
    "bit flipped in a shard": flip_a_bit,
    ".metadata lost": lose_the_table_of_contents,
    "run.json empty": empty_the_run_file,
    "metrics.jsonl torn": tear_the_metrics,
    "trace torn": tear_the_trace,
}
