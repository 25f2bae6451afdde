"""Writes and reads files of a run with one line of JSON a step: an object with the number `step`.

A line counts only with its end, so the last line of a killed run may be torn. A run that continues
from a checkpoint drops the lines of later steps.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_ext.files.json_files import json_text, parse_object
from megatron_ext.files.opening import open_own, whole_lines
from megatron_ext.files.whole import write_whole

logger = logging.getLogger(__name__)

_WRITTEN = re.compile(r'\{"step": (\d{1,18}), ".*\}\n', re.DOTALL)


class StepLines:
    """Adds one line a step to a file, after dropping the lines of steps after `start_step`.

    The file's folder exists.

    Raises:
        ValueError: An existing line is not the line of a step; the message names file and line.
    """

    def __init__(self, file: Path, *, start_step: int) -> None:
        write_whole(file, (line for step, line in step_texts(file) if step <= start_step))
        self._path = file
        # Without a buffer, `write` returns the exact number of bytes that a full disk has taken.
        self._file = os.fdopen(open_own(file, os.O_APPEND), "ab", buffering=0)
        self._unwritten = b""

    def write(self, values: Mapping[str, Any]) -> None:
        """Write the line of a step, whose number is the value `step`.

        If the disk is full, the writer warns and keeps the line for the next call.
        """
        self._unwritten += f"{json_text(values)}\n".encode()
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


def read_lines(file: Path, *, first: int = 0) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file, of the steps from `first` on; a missing file has none.

    The file has null for numbers that are not finite; the objects have NaN.

    Raises:
        ValueError: A line is not the line of a step; the message names file and line. Or it is no
            regular file.
    """
    for number, (step, line) in enumerate(step_texts(file), 1):
        if step >= first:
            yield _read_line(f"{file}, line {number}", line)


def step_texts(file: Path) -> Iterator[tuple[int, str]]:
    """Yield step and text of each line of a file, without a torn last line.

    A line that begins and ends as `StepLines` writes it is not parsed: a long run has gigabytes.
    """
    try:
        for number, whole in enumerate(whole_lines(file), 1):
            line = whole.decode(errors="replace")
            found = _WRITTEN.fullmatch(line)
            where = f"{file}, line {number}"
            yield int(found[1]) if found else _read_line(where, line)["step"], line
    except FileNotFoundError:
        return


def _read_line(where: str, line: str) -> dict[str, Any]:
    values = parse_object(line, where)
    step = values.get("step")
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise ValueError(f"{where}: not the metrics of a step")
    return {name: math.nan if value is None else value for name, value in values.items()}
