"""Reads what was written for W&B and TensorBoard, without a server."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

_LATE_S = 30
"""How long W&B's process may take to write the end of a run."""


def wandb_records(folder: Path) -> list[Any]:
    """What W&B's only run there wrote, in order: `Record` of W&B."""
    from google.protobuf.message import DecodeError
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    late = time.monotonic() + _LATE_S
    while True:
        # A process of W&B's own writes the file, and may be behind the run that has finished, or in
        # the middle of a record.
        records = []
        with suppress(DecodeError):
            for each in _blocks(path):
                records.append(Record.FromString(each))
        if any(each.HasField("exit") for each in records) or time.monotonic() > late:
            return records
        time.sleep(0.1)


def written_for_wandb(folder: Path, name: str) -> list[float]:
    """A value of every iteration, from W&B's only run there."""
    items = [item for each in wandb_records(folder) for item in each.history.item]
    return [float(item.value_json) for item in items if [name] in (item.nested_key, [item.key])]


def written_for_tensorboard(folder: Path, name: str) -> list[float]:
    """A value of every iteration, from TensorBoard's only run there."""
    return [event.value for event in tensorboard_events(folder).Scalars(name)]


def tensorboard_events(folder: Path) -> Any:
    """TensorBoard's own reader of a run, which would leave out most histograms and pictures."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder), {"histograms": 0, "images": 0}).Reload()


def _blocks(path: Path) -> Iterator[bytes]:
    """Records of a log of LevelDB: in blocks, behind 7 bytes that name W&B."""
    data, position, record = path.read_bytes(), 7, b""
    while position + 7 <= len(data):
        if (left := 32768 - position % 32768) < 7:
            position += left
            continue
        length, kind = struct.unpack_from("<HB", data, position + 4)  # behind a checksum
        position += 7
        record += data[position : position + length]
        position += length
        if kind in (_WHOLE, _LAST):
            yield record
            record = b""


_WHOLE, _LAST = 1, 4
"""Kinds of a record's parts."""
