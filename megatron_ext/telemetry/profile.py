"""Records some steps of a training as one trace of all ranks, for Perfetto or chrome://tracing.

Each rank records with torch's profiler: operators, the stages of balanced layers (named in
`balance/ranges.py`), kernels. Rank 0 merges the ranks' files: a process of the trace is a rank, and
a thread of the trace is a stream of the rank's GPU or a thread of the rank's host. The run's
metrics of these steps are counter tracks of rank 0.

The clocks of several machines place their ranks in time.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.profiler import profile, record_function, supported_activities

from megatron_ext.files.whole import written_whole
from megatron_ext.telemetry.step_files import write_or_warn

PROFILE_FILE = "profile.json.gz"

Counters = Mapping[int, Mapping[str, Mapping[str, float]]]
"""By step and name of the track: the values of its series."""

_HOST_THREADS = 1000
"""Threads of the host are numbered from here on, above all streams."""


class StepProfile:
    """Records steps of this rank, `first` counted from 1; all ranks make the same calls.

    All ranks have the same folder for the trace. Without `ranks`, all ranks record.
    """

    def __init__(self, folder: Path, *, first: int, steps: int, ranks: Collection[int]) -> None:
        self._folder = folder
        self._steps = range(first, first + steps)
        recording = sorted(ranks) or range(dist.get_world_size())
        self._parts = {rank: folder / f".profile_rank_{rank:05d}.json" for rank in recording}
        self._has_begun = False
        self._profile: profile | None = None

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Record the block if it is one of the steps."""
        if number not in self._steps:
            yield
            return
        self._has_begun = True
        if self._profile is None and dist.get_rank() in self._parts:
            # Else the profiler writes lines of its own; 6 is above all levels.
            os.environ.setdefault("KINETO_LOG_LEVEL", "6")
            self._profile = profile(activities=supported_activities())
            self._profile.start()
        with record_function(f"step {number}"):
            yield

    def is_due(self, step: int, *, is_last: bool) -> bool:
        """Return whether `write` is due: after the last recorded step, or the run's last step."""
        return self._has_begun and (is_last or step == self._steps[-1])

    def write(self, counters: Counters) -> Path | None:
        """Write the trace of the recorded steps; all ranks call, after a step.

        Rank 0 returns the trace's path, if steps were recorded since the last call; others None. A
        trace that cannot be written is left out, with a warning.
        """
        if not self._has_begun:
            return None
        self._has_begun = False
        if self._profile is not None:
            write_or_warn(self._parts[dist.get_rank()], self._export)
        dist.barrier()
        if dist.get_rank() != 0:
            return None
        merged = self._folder / PROFILE_FILE
        is_written = write_or_warn(merged, partial(merge_traces, self._parts, counters))
        for part in self._parts.values():
            with suppress(OSError):
                part.unlink()
        return merged if is_written else None

    def _export(self, part: Path) -> None:
        assert self._profile is not None
        recorded, self._profile = self._profile, None
        recorded.stop()
        part.unlink(missing_ok=True)  # It may be a link.
        recorded.export_chrome_trace(str(part))

    def close(self) -> None:
        """Stop recording after an error, and drop steps that were not written."""
        if self._profile is not None:
            self._profile.stop()
            self._profile = None


def counters_of(
    metrics: Iterable[Mapping[str, Any]], layers: Iterable[Mapping[str, Any]]
) -> Counters:
    """Return the counter tracks of a run: imbalance and replicas, of all layers and of each."""
    tracks: dict[int, dict[str, dict[str, float]]] = {}
    for line in metrics:
        tracks[line["step"]] = {
            "imbalance": {when: line[f"imbalance_{when}"] for when in ("before", "after")},
            "replicas": {"a layer": line["replicas"]},
        }
    for line in layers:
        names = [f"layer {number}" for number in line["layer"]]
        tracks.setdefault(line["step"], {}).update(
            {
                f"{what.replace('_', ' ')}, by layer": dict(zip(names, line[what], strict=True))
                for what in ("imbalance_before", "imbalance_after", "replicas")
            }
        )
    return tracks


def merge_traces(parts: Mapping[int, Path], counters: Counters, merged: Path) -> None:
    """Merge the traces that torch's profiler exported by rank into one, JSON compressed by gzip.

    One part is in memory at a time. A counter track belongs to the first of the ranks and begins
    with that rank's range `step N`.
    """
    with (
        written_whole(merged) as unfinished,
        # Level 1: a trace has hundreds of megabytes, and the ranks wait.
        gzip.open(unfinished, "xt", compresslevel=1) as file,
    ):
        file.write('{"displayTimeUnit": "ms", "traceEvents": [')
        separator, base = "\n", None
        for rank, part in parts.items():
            trace = json.loads(part.read_bytes())
            own_base = trace.get("baseTimeNanoseconds", 0)
            is_first, base = base is None, own_base if base is None else base
            events = list(_events_of(rank, trace, (own_base - base) / 1e3))
            events += _counter_events(rank, events, counters) if is_first else []
            for event in events:
                file.write(separator + json.dumps(event))
                separator = ",\n"
        file.write("\n]}\n")


def _events_of(rank: int, trace: Mapping[str, Any], later_us: float) -> Iterator[dict[str, Any]]:
    yield _named(rank, 0, "process_name", name=f"rank {rank}")
    yield _named(rank, 0, "process_labels", labels=trace.get("host_name", ""))
    yield _named(rank, 0, "process_sort_index", sort_index=rank)
    events = trace["traceEvents"]
    gpus = {
        event["pid"]
        for event in events
        if event["name"] == "process_labels" and event["args"]["labels"].startswith("GPU")
    }
    hosts: dict[tuple[Any, Any], int] = {}
    for event in events:
        pid, tid = event.get("pid"), event.get("tid")
        if not isinstance(pid, int) or event["name"].startswith("process_"):
            continue  # An event of the profiler itself, or one of those above.
        if pid not in gpus:
            tid = hosts.setdefault((pid, tid), _HOST_THREADS + len(hosts))
        moved = {**event, "pid": rank, "tid": tid, "ts": event["ts"] + later_us}
        if "id" in event:  # The id of an arrow between events; ranks must not share ids.
            moved["id"] = (rank << 32) + event["id"]
        yield moved


def _counter_events(
    rank: int, events: Collection[Mapping[str, Any]], counters: Counters
) -> list[dict[str, Any]]:
    began = {
        event["name"]: event["ts"] for event in events if event.get("cat") == "user_annotation"
    }
    return [
        {"ph": "C", "pid": rank, "tid": 0, "ts": ts, "name": track, "args": dict(series)}
        for step, tracks in counters.items()
        if (ts := began.get(f"step {step}")) is not None
        for track, series in tracks.items()
    ]


def _named(pid: int, tid: int, what: str, **values: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "ts": 0, "name": what, "args": values}
