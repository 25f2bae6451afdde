"""Writes and reads files of a run with one line of JSON a step: an object with the number `step`.

A line counts only with its end, so the last line of a killed run may be torn. A run that continues
from a checkpoint drops the lines of later steps.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_ext.files.json_files import json_text, parse_object
from megatron_ext.files.opening import open_own, whole_lines
from megatron_ext.files.whole import write_whole

logger = logging.getLogger(__name__)


class StepLines:
    """Adds one line a step to a file, after dropping the lines of steps after `start_step`.

    The file's folder exists.

    Raises:
        ValueError: An existing line is not the line of a step; the message names file and line.
    """

    def __init__(self, file: Path, *, start_step: int) -> None:
        write_whole(file, (_line(one) for one in read_lines(file) if one["step"] <= start_step))
        self._path = file
        # Without a buffer, `write` returns the exact number of bytes that a full disk has taken.
        self._file = os.fdopen(open_own(file, os.O_APPEND), "ab", buffering=0)
        self._unwritten = b""

    def write(self, values: Mapping[str, Any]) -> None:
        """Write the line of a step, whose number is the value `step`.

        If the disk is full, the writer warns and keeps the line for the next call.
        """
        self._unwritten += _line(values).encode()
        self._write_out()

    def close(self) -> None:
        """Try once more to write the kept lines, and close the file."""
        self._write_out()
        self._file.close()

    def _write_out(self) -> None:
        """Write the kept bytes; a full disk may have taken the first part of a line."""
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
        except OSError as error:
            num_lines = self._unwritten.count(b"\n")
            logger.warning(
                "warning: %s lacks %d lines, kept for later: %s", self._path, num_lines, error
            )


def read_lines(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file; a missing file has none, and a torn last line is dropped.

    The file has null for numbers that are not finite; the objects have NaN.

    Raises:
        ValueError: A line is not the line of a step; the message names file and line. Or it is no
            regular file.
    """
    try:
        for number, line in enumerate(whole_lines(file), 1):
            yield _read_line(f"{file}, line {number}", line.decode(errors="replace"))
    except FileNotFoundError:
        return


def _line(values: Mapping[str, Any]) -> str:
    return json_text(values) + "\n"


def _read_line(where: str, line: str) -> dict[str, Any]:
    values = parse_object(line, where)
    step = values.get("step")
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise ValueError(f"{where}: not the metrics of a step")
    return {name: math.nan if value is None else value for name, value in values.items()}
