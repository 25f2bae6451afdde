"""A training that is struck again and again, compared with one that nothing disturbed."""

from __future__ import annotations

import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checkpoints_tools.contents import read_metadata
from megatron_ext.files.loads import read_loads
from megatron_ext.trainer.logs.run_log import read_metrics
from tests.chaos import faults
from tests.chaos.attempt import Attempt
from tests.processes import left_in_shared_memory, unused_shared_files
from tests.steps import repeatable_steps
from tests.trainer.dataset import overrides

STEPS_PER_STRIKE = 7
"""Steps of a run, by strikes: an attempt makes about as many until it is struck."""

LEFT_S = 10.0
"""Longest time after a launcher's end in which a process of its run may still live, in seconds."""

LOOPBACK = {"127.0.0.1", "::1"}


@dataclass(frozen=True)
class Shape:
    """A way to spread the model."""

    name: str
    settings: tuple[str, ...]


SHAPES = (
    Shape("EP2", ()),
    Shape("EP2 x PP2", ("parallel.pp_size=2",)),
)


class Decks:
    """Faults in random order, each of them once before any comes again."""

    def __init__(self, chooser: random.Random) -> None:
        self.endings = _dealt(faults.ENDINGS, chooser)
        self.damages = _dealt(tuple(faults.DAMAGES.items()), chooser)


@dataclass
class Campaign:
    """One shape's disturbed run.

    Attributes:
        shape: How the model is spread.
        data: Folder of the dataset.
        folder: Where everything is written.
        kills: How often to strike.
        outcomes: How often each fault had each outcome.
        problems: What is wrong, a line each.
        shared_files: What shared memory held before that nobody used.
        torn_trace: Whether files of the trace were damaged.
    """

    shape: Shape
    data: Path
    folder: Path
    kills: int
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    shared_files: frozenset[str] = field(default_factory=unused_shared_files)
    torn_trace: bool = False

    def run(self, chooser: random.Random, decks: Decks) -> None:
        """Strike so often; then let the run end, and compare."""
        whole = self._attempt("whole")
        whole.wait_for(whole.lines, "the first step")
        listening = whole.listening()
        self._expect(listening <= LOOPBACK, f"listens on {sorted(listening)}", whole)
        self._expect(whole.wait() == 0, "the undisturbed run", whole)
        for number in range(self.kills):
            self._strike(next(decks.endings), chooser)
            if number % 2:
                self._damage(*next(decks.damages), chooser)
        last = self._attempt("struck")
        self._expect(last.wait() == 0, "the last attempt", last)
        self._check_nothing_left(last, "the last attempt")
        try:
            self.problems += compare(
                self.folder / "whole", self.folder / "struck", torn_trace=self.torn_trace
            )
        except (OSError, ValueError) as error:
            self.problems.append(f"{self.shape.name}: {error}")

    def _strike(self, fault: faults.Fault, chooser: random.Random) -> None:
        before = self._steps_done()
        started = time.monotonic()
        attempt = self._attempt("struck", most_bytes=fault.most_bytes)
        try:
            fault.strike(attempt, chooser)
            right = attempt.status in fault.statuses
            self._expect(right, f"{fault.name}: status {attempt.status}", attempt)
            # Ranks that lost another may show where; who was asked to stop has nothing to show.
            has_traceback = "Traceback" in attempt.output and 1 not in fault.statuses
            self._expect(not has_traceback, f"{fault.name}: a traceback", attempt)
            self._check_nothing_left(attempt, fault.name)
        except TimeoutError as error:
            self.problems.append(f"{fault.name}: {error}")
            right = False
        finally:
            attempt.end()
        outcome = f"status {attempt.status}" if right else "WRONG"
        self.outcomes[fault.name, outcome] += 1
        print(
            f"{self.shape.name}: {fault.name}: {outcome}, step {before} -> {self._steps_done()}, "
            f"{time.monotonic() - started:.0f} s",
            flush=True,
        )

    def _damage(self, name: str, damage: Any, chooser: random.Random) -> None:
        """Damage a file, if the run can then still go on from something."""
        if len(list((self.folder / "struck" / "checkpoints").glob("step_*"))) < 2:
            return
        damage(self.folder / "struck", chooser)
        self.torn_trace |= damage is faults.tear_the_trace
        self.outcomes[name, "went on"] += 1
        print(f"{self.shape.name}: {name}", flush=True)

    def _attempt(self, name: str, most_bytes: int | None = None) -> Attempt:
        run_dir = self.folder / name
        settings = [
            *overrides(self.data, run_dir),
            f"steps={STEPS_PER_STRIKE * self.kills}",
            *("checkpoint.every=4", "eval_every=6", "eval_steps=1", "logging.trace_steps=5"),
            "overwrite=true",  # Before the first checkpoint a struck run can only begin anew.
            *self.shape.settings,
        ]
        return Attempt(run_dir, settings, self.folder / f"{name}_output", most_bytes=most_bytes)

    def _steps_done(self) -> int:
        return len(read_metrics(self.folder / "struck"))

    def _check_nothing_left(self, attempt: Attempt, name: str) -> None:
        deadline = time.monotonic() + LEFT_S
        while (left := attempt.processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        self._expect(not left, f"{name}: left {left}", attempt)
        files = [str(file) for file in attempt.temporary.iterdir()]
        self._expect(not files, f"{name}: left {files}", attempt)
        shared = left_in_shared_memory(self.shared_files, patience_s=LEFT_S)
        self._expect(not shared, f"{name}: left {shared}", attempt)

    def _expect(self, holds: bool, what: str, attempt: Attempt) -> None:
        if not holds:
            last = "\n    ".join(attempt.output.splitlines()[-12:])
            self.problems.append(f"{self.shape.name}: {what}\n    {last}")


def _dealt(cards: tuple[Any, ...], chooser: random.Random) -> Iterator[Any]:
    """Deal all cards in a random order, then all again."""
    while True:
        yield from chooser.sample(cards, len(cards))


def compare(whole: Path, struck: Path, *, torn_trace: bool) -> list[str]:
    """Return how the files of two runs differ: metrics, newest checkpoint, trace.

    Args:
        whole: Directory of the run that nothing disturbed.
        struck: Directory of the other run.
        torn_trace: Whether files of the trace were damaged: then steps of it may be missing.
    """
    problems = []
    for one, other in itertools.zip_longest(_metrics(whole), _metrics(struck)):
        if one != other:
            problems.append(f"metrics differ: {one} and {other}")
            break
    if problem := _difference(_pieces(whole), _pieces(struck)):
        problems.append(f"checkpoints differ: {problem}")
    one, other = _trace(whole), _trace(struck)
    if torn_trace:
        one = {key: load for key, load in one.items() if key in other}
    if problem := _difference(one, other):
        problems.append(f"traces differ: {problem}")
    return problems


def _difference(one: dict[Any, bytes], other: dict[Any, bytes]) -> str | None:
    if one.keys() != other.keys():
        return f"only in one of them: {sorted(one.keys() ^ other.keys(), key=str)}"
    different = [key for key in one if one[key] != other[key]]
    return f"{len(different)} of {len(one)}, such as {different[0]}" if different else None


def _metrics(run_dir: Path) -> list[str]:
    return [json.dumps(line) for line in repeatable_steps(run_dir)]


def _pieces(run_dir: Path) -> dict[str, bytes]:
    """The bytes of every tensor and object in the newest checkpoint, as stored."""
    folder = max((run_dir / "checkpoints").glob("step_*"))
    pieces = {}
    for index, stored in read_metadata(folder).storage_data.items():
        with (folder / stored.relative_path).open("rb") as file:
            file.seek(stored.offset)
            pieces[f"{index.fqn} {index.offset}"] = file.read(stored.length)
    return pieces


def _trace(run_dir: Path) -> dict[tuple[int, ...], bytes]:
    """Loads by step, microbatch and layer.

    Raises:
        ValueError: One was written twice.
    """
    loads: dict[tuple[int, ...], bytes] = {}
    for file in sorted((run_dir / "trace").glob("step_*.npz")):
        read = read_loads(file)
        fields = zip(*(values.tolist() for values in read.trace.values()), strict=True)
        for key, load in zip(fields, read.load, strict=True):
            if key in loads:
                raise ValueError(f"{run_dir}: the load {key} is in the trace twice")
            loads[key] = load.numpy().tobytes()
    return loads
