"""Writes the position of every rank of a run to a small file in the run directory.

A training program notes the work of its main thread; a note costs one assignment of Python:

    heartbeat.note("load")
    heartbeat.note("forward", step=3)
    heartbeat.note_layers(moe_layers)   # from then on the layers make notes

A thread writes the last note to `status/rank_00000.json` every few seconds. The watchdogs of the
other ranks (`trainer/ranks/watchdog.py`) and `megatron-ext doctor --run` read the files. A rank
whose process is stopped or has ended writes no more heartbeats; a rank whose main thread hangs
writes heartbeats, but its note stays the same.
"""

from __future__ import annotations

import json
import linecache
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_ext.arguments import plain
from megatron_ext.config import field_problems, limits, setting
from megatron_ext.files.json_files import read_json
from megatron_ext.files.opening import names_in
from megatron_ext.files.whole import write_whole

if TYPE_CHECKING:  # A program that only reads the files does not import torch.
    from torch import Tensor, nn

STATUS_FOLDER = "status"

RUNNING, DONE, FAILED, GAVE_UP = "running", "done", "failed", "gave up"
"""States of a rank in the rank's file. Its watchdog gives up; the reason is then its verdict."""

START = "start"
"""Stage before the first note, in which the program is imported; it has no time limit."""

BEAT_S = 2.0
"""Longest time between two heartbeats, in seconds."""

LOST_BEATS = 4
"""A rank counts as lost after so many missing heartbeats: a busy machine may delay one or two."""

_WAITING_ROOMS = ("/torch/distributed/", "/megatron_ext/transport/")
_CHECKPOINTS = "/torch/distributed/checkpoint/"
_WAITING = ".wait("
"""A main thread in code of the rooms, except of checkpoints, or at `.wait(` of a handle, waits for
other ranks."""


class Note(NamedTuple):
    """The work of the main thread."""

    stage: str = START
    step: int = 0
    """The current step, from 1 on; 0 before the first."""
    layer: int | None = None
    """1-based, as in Megatron: the MoE layer that began last in this stage."""
    microbatch: int | None = None
    """The microbatch of the step in the layer, from 0 on."""

    def is_valid(self) -> bool:
        """Whether the values, which a file gave, are of their types."""
        numbers = [self.step, *(each for each in self[2:] if each is not None)]
        return isinstance(self.stage, str) and all(type(each) is int for each in numbers)

    def __str__(self) -> str:
        """Return the note in words, such as `step 149, forward, layer 2`."""
        parts = [f"step {self.step}", self.stage] if self.step else [self.stage]
        if self.layer is not None:
            parts.append(f"layer {self.layer}")
        if self.microbatch is not None:
            parts.append(f"microbatch {self.microbatch}")
        return ", ".join(parts)


class _MainThread:
    """Holds the last note. Only the main thread writes it, each time as a new object."""

    note = Note()


def note(stage: str, step: int | None = None) -> None:
    """Note the stage that the main thread begins, such as `load`, `forward`, `optimizer`, `save`.

    Without a step, the stage belongs to the step of the last note.
    """
    _MainThread.note = Note(stage, _MainThread.note.step if step is None else step)


def last_note() -> Note:
    """Return the last note; the note is a new object if the main thread has moved."""
    return _MainThread.note


def called_in_forward(layer: Any) -> nn.Module:
    """Return the module of an MoE layer whose hooks run in every forward.

    Megatron's combined schedule of two microbatches calls the experts, and not the layer.
    """
    config = getattr(layer, "config", None)
    is_overlapped = getattr(config, "overlap_moe_expert_parallel_comm", False)
    module: nn.Module = layer.experts if is_overlapped else layer
    return module


def note_layers(layers: Sequence[Any]) -> None:
    """Let MoE layers note when their forward or backward begins.

    The stages are then `forward` and `backward`; the stage `evaluate` keeps its name.
    """
    from megatron_ext.balance.layer_report import number_of

    for layer in layers:
        notes, module = _LayerNotes(number_of(layer)), called_in_forward(layer)
        module.register_forward_pre_hook(notes.forward_begins)
        module.register_forward_hook(notes.forward_ends)


class _LayerNotes:
    """Hooks of one layer. The layer's backward begins when autograd has its output's gradient."""

    def __init__(self, layer: int) -> None:
        import torch

        self._layer = layer
        self._graph_task_id = torch._C._current_graph_task_id
        self._step = -1
        self._microbatch = 0

    def forward_begins(self, module: nn.Module, inputs: Any) -> None:
        stage, step, _, _ = _MainThread.note
        if self._graph_task_id() != -1:  # A recomputed forward is a part of backward.
            _MainThread.note = Note("backward", step, self._layer)
            return
        self._microbatch = self._microbatch + 1 if step == self._step else 0
        self._step = step
        stage = stage if stage == "evaluate" else "forward"
        _MainThread.note = Note(stage, step, self._layer, self._microbatch)

    def forward_ends(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        output = outputs[0] if isinstance(outputs, tuple) else outputs
        if output.requires_grad:
            # A hook of the tensor: hooks of a module for backward change the graph.
            output.register_hook(self._backward_begins)

    def _backward_begins(self, grad: Tensor) -> None:
        _MainThread.note = Note("backward", _MainThread.note.step, self._layer)


_NAMESPACE = "/proc/self/ns/pid"

_MOST_RANKS = 1 << 20
"""Of a run: far more than there are GPUs in one. Those without a status are named one by one."""


@dataclass(frozen=True, kw_only=True)
class Status:
    """The content of a rank's file."""

    rank: int = field(metadata=limits(least=0))
    num_ranks: int = field(metadata=limits(least=1, most=_MOST_RANKS))
    host: str
    pid: int
    started: int
    """Start of the process, in the machine's ticks; it differs for another process with this id."""
    namespace: str = ""
    """The process ids among which `pid` is one: those of a container are its own."""
    beat_s: float
    """Time between two heartbeats, in seconds."""
    limit_s: float
    """Longest time without a move, in seconds."""
    beat: int = 0
    """Heartbeats since the start."""
    time: float = 0.0
    """Time of the heartbeat, in seconds since 1970."""
    still_s: float = 0.0
    """Seconds since the main thread moved, counted by the rank."""
    moves: int = 0
    """Changes of the note in this step, as far as the thread has seen them."""
    note: Note = field(default_factory=Note)
    line: str = ""
    """The main thread's place in the program: function, file and line."""
    waits: bool = False
    """Whether the main thread waits for other ranks in `line`."""
    state: str = setting(RUNNING, choices=(RUNNING, DONE, FAILED, GAVE_UP))
    reason: str = ""
    """The reason of a failure, in one line."""

    @property
    def process(self) -> str:
        """Return the process's state: `runs`, `stopped`, `gone`; `?` where it cannot be seen."""
        if (self.host, self.namespace) != (socket.gethostname(), os.readlink(_NAMESPACE)):
            return "?"
        letter, started = _process(self.pid)
        if started != self.started or letter in "ZX":
            return "gone"
        return "stopped" if letter in "Tt" else "runs"

    @property
    def lost_s(self) -> float:
        """Return the time without a heartbeat after which the rank counts as lost, in seconds."""
        return LOST_BEATS * self.beat_s

    @property
    def silent_s(self) -> float:
        """Return the time since the last heartbeat, in seconds, by the clocks of both machines."""
        return max(time.time() - self.time, 0.0)


def own_status(*, rank: int, num_ranks: int, limit_s: float) -> Status:
    """Return the first status of this process; the fields of `Status` explain the arguments."""
    pid = os.getpid()
    return Status(
        rank=rank,
        num_ranks=num_ranks,
        host=socket.gethostname(),
        pid=pid,
        started=_process(pid)[1],
        namespace=os.readlink(_NAMESPACE),
        beat_s=min(BEAT_S, limit_s / 10),
        limit_s=limit_s,
    )


class Pulse:
    """Writes this rank's file at every call of `beat`, and counts time by these calls.

    A pause of the machine makes one long time between two calls. A time between two calls counts
    for a few heartbeats at most, so that a pause does not look like a rank that hangs.
    """

    gave_up_at: str | None = None
    """The line of a wait that has failed, for as long as the main thread does nothing more."""

    def __init__(self, folder: Path, status: Status) -> None:
        self.status = status
        self._folder = folder
        self._note = last_note()
        self._last_s = time.monotonic()
        self._write()

    def beat(self) -> Status:
        """Look at the main thread, write the file, and return the file's content."""
        now_s = time.monotonic()
        tick_s = min(now_s - self._last_s, LOST_BEATS * self.status.beat_s)
        self._last_s = now_s
        found, before = last_note(), self.status
        has_moved = found is not self._note
        self._note = found
        moves = before.moves + has_moved if found.step == before.note.step else 0
        line, waits = (self.gave_up_at, True) if self.gave_up_at else _main_thread_line()
        self.status = replace(
            before,
            beat=before.beat + 1,
            still_s=0.0 if has_moved else before.still_s + tick_s,
            moves=moves,
            note=found,
            line=line,
            waits=waits,
        )
        self._write()
        return self.status

    def end(self, state: str, reason: str = "") -> None:
        """Write the rank's final state, `DONE` or `FAILED`, and the first line of a reason."""
        first = plain(reason.strip().split("\n")[0])
        self.status = replace(self.status, note=last_note(), state=state, reason=first, waits=False)
        self._write()

    def _write(self) -> None:
        self.status = replace(self.status, time=time.time())
        path = status_path(self._folder, self.status.rank)
        # Telemetry never stops a training; to the others the rank counts as lost. A heartbeat that
        # a power failure takes is no loss.
        with suppress(OSError):
            write_whole(path, [json.dumps(asdict(self.status))], lasts=False)


def status_path(folder: Path, rank: int) -> Path:
    """Return the path of a rank's status."""
    return folder / f"rank_{rank:05d}.json"


def stacks_path(folder: Path, rank: int) -> Path:
    """Return the path of the Python stacks that a rank writes on request."""
    return folder / f"rank_{rank:05d}.stacks"


def read_statuses(folder: Path) -> list[Status]:
    """Return the statuses in a folder, by rank, without files that cannot be read."""
    statuses = []
    for name in names_in(folder):
        if not name.endswith(".json"):
            continue
        try:
            values = read_json(folder / name)
            status = Status(**values | {"note": Note(*values["note"])})
        except (OSError, ValueError, TypeError, KeyError):
            continue  # A torn file, or a file of another version.
        is_whole = not field_problems(Status, status) and status.note.is_valid()
        if is_whole and status_path(folder, status.rank).name == name:  # Else two could say one's.
            statuses.append(status)
    return statuses


def _main_thread_line() -> tuple[str, bool]:
    """Return the main thread's line of Python, and whether it waits for other ranks there."""
    frames = sys._current_frames()
    main = frames.get(threading.main_thread().ident or 0)
    if main is None:
        return "", False
    name, path, number = main.f_code.co_name, main.f_code.co_filename, main.f_lineno or 0
    return f"{name} ({path}:{number})", waits_at(path, number)


def waits_at(path: str, number: int) -> bool:
    """Whether a line of Python waits for other ranks."""
    is_in_room = any(room in path for room in _WAITING_ROOMS) and _CHECKPOINTS not in path
    return is_in_room or _WAITING in linecache.getline(path, number)


def _process(pid: int) -> tuple[str, int]:
    """Return state letter and start of a process of this machine; `X` and 0 without one."""
    try:
        # The values follow the process's name, which is in parentheses and may hold any character.
        values = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "X", 0
    return values[0], int(values[19])
