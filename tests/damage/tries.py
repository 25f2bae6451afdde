"""Damages files and calls commands with them, in this process; judges what they say."""

from __future__ import annotations

import io
import random
import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ext.cli import main
from tests.cli.command import COSTS
from tests.damage.good import make_good
from tests.damage.kinds import (
    ALWAYS_WRONG,
    EXECUTED,
    Kind,
    arrays,
    index,
    lines,
    objects,
    pickles,
    raw,
    settings,
)

_MADE = ("out", "built", "made.npz", "run1/report.html")
"""What commands write, and is removed before the next one."""

_TIMES = re.compile(r'"(solve_us\w*|moved_s|beat_s|free_bytes)": (\{[^}]*\}|.*)')
"""What differs from call to call."""

_MODEL = "--model model.yaml --hardware server_8_h100"
_TRAIN = "train --config-dir recipes --config-name my --print"
_CHECKPOINT = (
    "checkpoint verify step_00000008",
    "checkpoint show step_00000008",
    "checkpoint relayout step_00000008 layout.npz --out out",
)
_REPORT = ("report run1 --json", "report run1 run2 --out out --overwrite")

Files = dict[str, tuple[list[Kind], tuple[str, ...]]]

FILES: Files = {
    "loads.npz": (
        [arrays, arrays, raw],
        (
            "plan loads.npz --slots 2 --out made.npz --split --json",
            "replay loads.npz --strategies quota,eplb,lplb,llep,moonep --json",
            f"simulate loads.npz {_MODEL} --strategies quota,eplb",
            f"whatif loads.npz {_MODEL}",
            "place craft loads.npz --out made.npz",
            "plan loads.npz --strategy moonep --json",
            f"plan loads.npz --json balance.objective=time {COSTS}",
        ),
    ),
    "trace/step_00000003_stage_0.npz": (
        [arrays, arrays, raw],
        (
            "plan trace --json",
            "replay trace --strategies quota,eplb,libra --out out --json",
            "place craft trace --out made.npz",
            "place eplb trace --out made.npz",
        ),
    ),
    "megatron_trace/router_trace_rank0.jsonl": (
        [lines, lines, raw],
        (
            "whatif megatron_trace --ep-size 2",
            "replay megatron_trace --ep-size 2 --strategies quota",
            "place eplb megatron_trace --ep-size 2 --out made.npz",
        ),
    ),
    "placement.npz": (
        [arrays, arrays, raw],
        (
            "plan trace --strategy craft --json balance.placement=placement.npz",
            "replay trace --strategies quota,craft --json balance.placement=placement.npz",
        ),
    ),
    "routes.npz": ([arrays, arrays, raw], ("place sem_moe routes.npz --ranks 2 --out made.npz",)),
    "layout.npz": ([arrays, arrays, raw], _CHECKPOINT[2:]),
    "semantics.npz": (
        [arrays, arrays, raw],
        ("checkpoint relayout step_00000008 semantics.npz --out out",),
    ),
    "run1/metrics.jsonl": ([lines, lines, raw], _REPORT),
    "run1/layers.jsonl": ([lines, lines, raw], _REPORT),
    "run1/about.json": ([objects, objects, raw], _REPORT),
    "run1/config.yaml": ([settings, settings, raw], _REPORT),
    "run1/status/rank_00000.json": (
        [objects, objects, raw],
        ("doctor --run run1", "doctor --run run1 --json"),
    ),
    "run1/logs/rank_00001.log": ([raw], ("logs run1", "logs run1 --json", "logs run1 --rank 1")),
    "text/manifest.json": ([objects, objects, raw], ("data info text", _TRAIN)),
    "text/few.idx": ([index, index, raw], ("data info text", _TRAIN)),
    "text/few.bin": ([raw], ("data info text", _TRAIN)),
    "tokenizer.json": (
        [objects, objects, raw],
        ("data build few --tokenizer tokenizer.json --eod <eod> --out built",),
    ),
    "few/a.py": ([raw], ("data build few --out built", "data build few --out built --strict")),
    **{
        f"step_00000008/{name}": ([damage, raw], _CHECKPOINT)
        for name, damage in {
            ".metadata": pickles,
            "common.pt": pickles,
            "metadata.json": objects,
            "run.json": objects,
            "checksums.json": objects,
            "__0_0.distcp": raw,
        }.items()
    },
    "hardware.yaml": (
        [settings, settings, raw],
        (
            "simulate loads.npz --model model.yaml --hardware hardware.yaml --strategies quota",
            "whatif loads.npz --model model.yaml --hardware hardware.yaml",
        ),
    ),
    "model.yaml": (
        [settings, settings, raw],
        (f"simulate loads.npz {_MODEL} --strategies quota", f"whatif loads.npz {_MODEL}"),
    ),
    "recipes/my.yaml": (
        [settings, settings, settings, raw],
        (
            _TRAIN,
            "submit --config-dir recipes --config-name my --cpu-ranks 2 --dry-run",
            _TRAIN.replace("--print", "--dry-run"),
        ),
    ),
}
"""What is damaged, how, and the commands that read it."""


class _TooLong(BaseException):
    pass


@dataclass(frozen=True)
class Try:
    """A command called with one damaged file."""

    file: str
    kind: str
    words: str
    status: int | None
    """None if it ended with an exception, or not in time."""
    said: str
    """What it wrote to stderr, or the exception."""
    verdict: str
    """`refused` and `accepted` are well; all others are faults."""
    seconds: float

    @property
    def is_fault(self) -> bool:
        """Whether the command did not answer as it should."""
        return self.verdict not in ("refused", "accepted")

    def __str__(self) -> str:
        """Return it in one line."""
        return f"{self.verdict}: {self.words} | {self.file}: {self.kind} | {self.said[-300:]!r}"


Answer = tuple[int | None, str, str, float]
"""Status (None if there is none), stdout, stderr, and the seconds that a command took."""


def call_command(words: str, limit_s: float) -> Answer:
    """Return status, stdout and stderr of a command, and the seconds that it took."""
    for name in _MADE:
        path = Path(name)
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
    out, said = io.StringIO(), io.StringIO()
    status: int | None
    began = time.monotonic()
    try:
        with redirect_stdout(out), redirect_stderr(said), _within(limit_s):
            status = main(words.split())
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    except _TooLong:
        return None, "", f"no end: after {limit_s:.0f} s", time.monotonic() - began
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        said = io.StringIO(f"traceback: {type(error).__name__}: {error} ({_place(error)})")
        status = None
    return status, _TIMES.sub("", out.getvalue()), said.getvalue(), time.monotonic() - began


def _place(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace else "nowhere"


@contextmanager
def _within(limit_s: float) -> Iterator[None]:
    """Raise `_TooLong` in the block after some time."""

    def stop(*_: Any) -> None:
        raise _TooLong

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def tries(
    folder: Path,
    count: int,
    seed: int,
    *,
    limit_s: float,
    files: Files = FILES,
    make: Callable[[Path], object] = make_good,
    call: Callable[[str, float], Answer] = call_command,
) -> Iterator[Try]:
    """Yield `count` tries, each file and each of its commands in turn, in an empty folder.

    Args:
        folder: The empty folder.
        count: How many files to damage.
        seed: Of what is damaged how.
        limit_s: Longest time of a command in seconds.
        files: What is damaged, how, and the commands that read it.
        make: Makes the good files in a folder.
        call: Calls a command.
    """
    with chdir(folder):
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            make(folder)
        good = {file: Path(file).read_bytes() for file in files}
        results: dict[str, str] = {}
        for file, (_, commands) in files.items():
            for words in commands:
                if words not in results:
                    status, results[words], said, _ = call(words, 10 * limit_s)
                    assert status == 0, (file, words, said)
        for number in range(count):
            file = list(files)[number % len(files)]
            damages, commands = files[file]
            chooser = random.Random(f"{seed}-{number}")
            words = commands[number // len(files) % len(commands)]
            damage = chooser.choice(damages)
            kind, bad = damage(good[file], chooser)
            Path(file).write_bytes(bad)
            status, out, said, seconds = call(words, limit_s)
            verdict = _verdict(status, said)
            # Blanks around JSON mean nothing.
            is_damaged = bad.strip() != good[file].strip() and _is_wrong(file, damage, kind)
            # What is compared is all that `verify` says of a good file.
            is_same = out == results[words] and not words.startswith("checkpoint verify")
            if verdict == "accepted" and is_damaged and not is_same:
                verdict = "silently wrong"
            if EXECUTED.exists():
                EXECUTED.unlink()
                verdict = "executed"
            Path(file).write_bytes(good[file])
            yield Try(file, kind, words, status, said, verdict, seconds)


def _is_wrong(file: str, damage: Kind, kind: str) -> bool:
    if kind.startswith("added"):  # More than a reader looks for.
        return False
    if damage is raw or file.startswith("step_"):
        return file.startswith("step_") or file.endswith(".npz")  # Its parts have checksums.
    return kind.partition(" in ")[0] in ALWAYS_WRONG[damage]


def _verdict(status: int | None, said: str) -> str:
    if status is None:
        return said.partition(":")[0]
    if "Traceback (most recent call last)" in said:
        return "traceback"
    if status == 0:
        return "accepted"
    return "refused" if status in (1, 2) and len(said.splitlines()) <= 1 else "many lines"


def table(found: list[Try]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return header and rows: how tries ended, by command."""
    counts: dict[str, Counter[str]] = {}
    for one in found:
        words = one.words.split()
        group = words[0] in ("place", "checkpoint", "data")
        counts.setdefault(" ".join(words[: 1 + group]), Counter())[one.verdict] += 1
    verdicts = sorted({one.verdict for one in found})
    header = ("command", "tries", *verdicts)
    rows = [
        (name, str(of_one.total()), *(str(of_one[verdict]) for verdict in verdicts))
        for name, of_one in sorted(counts.items())
    ]
    all_of_them = Counter(one.verdict for one in found)
    rows.append(("all", str(len(found)), *(str(all_of_them[verdict]) for verdict in verdicts)))
    return header, rows


def peak_bytes() -> int:
    """Return the most memory that this process has had."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
