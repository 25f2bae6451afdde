"""Writes a checkpoint's files by Megatron's plan, with threads of this process.

Megatron plans, cuts the state into items and writes each item. This file adds threads in place of
Megatron's writer processes and of the process that collects their results, so that no process
outlives a rank; checksums of the bytes; and an agreement of all ranks after each step in which a
rank may fail. All of Megatron's own collectives end before the first byte is written, so no rank
waits in a collective for a rank that failed.
"""

from __future__ import annotations

import inspect
import json
import queue
import shutil
import threading
import traceback
from collections import ChainMap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

from checkpoints_tools.folder import COMMON_FILE, RUN_FILE, Checksum, Hasher, seal
from megatron_ext.arguments import one_line
from megatron_ext.files.whole import NO_ROOM

_BYTES_AROUND = 1500
"""Bytes that `torch.save` adds to a tensor or object: an upper bound for small ones."""


@dataclass
class _Written:
    """What a rank, or one of its threads, has written, or why not."""

    results: list[Any] = field(default_factory=list)
    checksums: dict[str, Checksum] = field(default_factory=dict)
    error: str | None = None


class CheckpointWriter:
    """A checkpoint on its way into an empty folder that all ranks see.

    Made on all ranks, of Megatron's sharded state dict and what `run.json` says, and then
    `finish`ed by all. `in_background` writes beside the caller, from a copy of the state.
    """

    def __init__(
        self, state: dict[str, Any], run: dict[str, Any], folder: Path, *, in_background: bool
    ) -> None:
        self.run = run
        self._folder = folder
        sharded, self._common = save_preprocess(state)
        self._plan = _Plan("torch_dist", 1)
        self._plan.make(sharded, folder)
        self._written = _Written(error=self._lack_of_room())
        self._thread = threading.Thread(target=self._write, name="checkpoint")
        if self._written.error:
            return
        self._buckets = self._plan.buckets(copy=in_background)
        if in_background:
            self._thread.start()
        else:
            self._write()

    def is_written(self) -> bool:
        """Whether this rank has written its part. Says nothing about the others."""
        return not self._thread.is_alive()

    def finish(self) -> str | None:
        """Wait for all ranks' parts, then write what there is once. All ranks call it.

        Returns:
            Why the checkpoint could not be written, the same on all ranks; None if it was.
        """
        if self._thread.ident is not None:
            self._thread.join()
        everyone = gather(self._written)
        problem = next((one.error for one in everyone if one.error), None)
        if dist.get_rank() == 0 and problem is None:
            try:
                self._write_once(everyone)
            except (OSError, RuntimeError) as error:
                problem = describe(error, self._folder)
        return tell(problem)

    def _lack_of_room(self) -> str | None:
        """Return what is missing if the disk has no room for all ranks' parts; the same on all."""
        needed = sum(gather(self._plan.num_bytes()))
        problem = None
        if dist.get_rank() == 0:
            free = shutil.disk_usage(self._folder).free
            if free < needed:
                room = f"{self._folder.parent} has {free:,} bytes free"
                problem = f"{room}, the checkpoint needs {needed:,}"
        return tell(problem)

    def _write(self) -> None:
        written = self._written
        written.error = f"{self._folder}: rank {dist.get_rank()} did not write to the end"
        with ThreadPoolExecutor(max(1, len(self._buckets))) as pool:
            files = list(pool.map(_write_file, self._buckets))
        self._buckets = []
        for file in files:
            written.results += file.results
            written.checksums |= file.checksums
        written.error = next((file.error for file in files if file.error), None)

    def _write_once(self, everyone: list[_Written]) -> None:
        """Write the table of contents, the small files, and the checksums of all."""
        self._plan.writer.finish(self._plan.table, [one.results for one in everyone])
        # Megatron-Core 0.16 asks for it, and 0.19 reads it: each can load what the other saved.
        torch.save(self._common, self._folder / COMMON_FILE)
        save_config(CheckpointingConfig("torch_dist", 1), str(self._folder))
        (self._folder / RUN_FILE).write_text(json.dumps(self.run, indent=2) + "\n")
        seal(self._folder, dict(ChainMap(*(one.checksums for one in everyone))))


class _Plan(TorchDistSaveShardedStrategy):
    """Megatron's plan, stopped where Megatron would write."""

    writer: Any
    """Megatron's writer, with the items of this rank."""
    table: Any
    """The table of contents without places in files, on rank 0."""

    def make(self, sharded: dict[str, Any], folder: Path) -> None:
        # Where it finds none, Megatron starts a process that keeps results; none are put here.
        filesystem_async._results_queue = queue.SimpleQueue()
        # 0.19 has a second implementation, of another package.
        newer = "async_strategy" in inspect.signature(self.async_save).parameters
        self.async_save(sharded, str(folder), **({"async_strategy": "mcore"} if newer else {}))

    def _get_save_and_finalize_callbacks(self, writer: Any, planned: Any, *_: Any) -> None:
        self.writer, self.table = writer, planned[1]

    def num_bytes(self) -> int:
        """Return how much this rank will write, about, in bytes."""
        pairs = [pair for _, _, pair in self.writer.write_buckets]
        objects = [data.getbuffer().nbytes for pair in pairs for _, data in pair[0]]
        tensors = [tensor.nbytes for pair in pairs for _, tensor in pair[1]]
        return sum(objects) + sum(tensors) + _BYTES_AROUND * (len(objects) + len(tensors))

    def buckets(self, *, copy: bool) -> list[Any]:
        """Return what goes into each file, with tensors on the CPU."""
        given = self.writer.write_buckets
        buckets: list[Any] = self.writer.preload_tensors(given, non_blocking=True)
        if not copy:
            return buckets
        return [
            (path, name, (objects, [_copied(*pair) for pair in zip(here, there, strict=True)]))
            for (path, name, (objects, here)), (_, _, (_, there)) in zip(
                buckets, given, strict=True
            )
        ]


def gather(mine: Any) -> list[Any]:
    """Return every rank's value on rank 0, nothing on the others. All ranks call it."""
    everyone = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(mine, everyone)
    return everyone or []


def tell(value: Any) -> Any:
    """Return rank 0's value on all ranks. All ranks call it."""
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def of_all(found: list[str]) -> list[str]:
    """Return what all ranks have found, by rank, on all ranks. All ranks call it."""
    everything: list[str] = tell(list(chain.from_iterable(gather(found))))
    return everything


def describe(error: BaseException, path: Path) -> str:
    """Return an error of writing in one line: the path, and the system's message.

    Torch's writer fails once more when it closes a file that it could not write, and says less.
    """
    cause = next((one for one in _chain(error) if isinstance(one, OSError)), None)
    if cause is None:
        return f"{path}: {one_line(error)}"
    said = f"{cause.filename or path}: {cause.strerror}"
    if cause.errno in NO_ROOM:
        said += f" ({shutil.disk_usage(path.parent).free:,} bytes free)"
    return said


def _chain(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


class _HashedStream:
    """Megatron's hook for what passes into a file: hands it on, and adds it to a checksum."""

    def __init__(self) -> None:
        self.hasher = Hasher()
        self._file: BinaryIO

    def transform_save_stream(self, item: Any, file: BinaryIO) -> tuple[_HashedStream, list[str]]:
        self._file = file
        return self, []  # No name of a transformation: the bytes are the same.

    def write(self, data: memoryview) -> int:
        self.hasher.add(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        """Torch closes it after each item; the file goes on."""
        self._file.flush()


def _write_file(bucket: Any) -> _Written:
    stream = _HashedStream()
    # Megatron's function reports to two queues, as it may run in a process.
    results: queue.SimpleQueue[Any] = queue.SimpleQueue()
    running: queue.Queue[None] = queue.Queue()
    running.put(None)
    filesystem_async.FileSystemWriterAsync.write_preloaded_data(
        [stream], 0, bucket, results, running, True
    )
    path, name, _ = bucket
    _, outcome = results.get()
    if not isinstance(outcome, Exception):
        return _Written(outcome, {name: stream.hasher.checksum()})
    error = describe(outcome, Path(path))
    # Its frames hold themselves, and views of buffers, over which CPython 3.12.1 crashes when it
    # collects them as garbage.
    for one in _chain(outcome):
        traceback.clear_frames(one.__traceback__)
    return _Written(error=error)


def _copied(here: Any, there: Any) -> Any:
    """Return an item with a tensor that the next step does not change."""
    item, tensor = here
    return item, tensor.clone() if tensor is there[1] else tensor
