"""Files of a run with one line of JSON a step, which is an object with the number `step`.

A line counts only with its end, so the last line of a run that was killed may be torn. Lines that a
killed run wrote after the checkpoint that it continues from are dropped.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_ext.files.json_files import json_text
from megatron_ext.files.whole import write_whole

logger = logging.getLogger(__name__)


class StepLines:
    """Writes one line a step behind those that are there.

    Args:
        file: The file, in a folder that exists.
        start_step: Lines of later steps are dropped first.

    Raises:
        ValueError: A line that is there is not one of a step; the message names file and line.
    """

    def __init__(self, file: Path, *, start_step: int) -> None:
        write_whole(file, (_line(one) for one in read_lines(file) if one["step"] <= start_step))
        self._path = file
        # Without a buffer: what a full disk did not take is known to the byte.
        self._file = file.open("ab", buffering=0)
        self._unwritten = b""

    def write(self, values: Mapping[str, Any]) -> None:
        """Write the line of a step, whose number is the value `step`.

        What cannot be written now, as on a full disk, is a warning and is written later.
        """
        self._unwritten += _line(values).encode()
        self._write_out()

    def close(self) -> None:
        """Try once more to write what is not yet written, and close the file."""
        self._write_out()
        self._file.close()

    def _write_out(self) -> None:
        """Write what is not yet written, be it the rest of a line of which a disk took a part."""
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
        except OSError as error:
            num_lines = self._unwritten.count(b"\n")
            logger.warning(
                "warning: %s lacks %d lines, kept for later: %s", self._path, num_lines, error
            )


def read_lines(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file, none if it is not there; an unfinished last line is dropped.

    Null stands for what was no finite number; here it is NaN.

    Raises:
        ValueError: A line is not one of a step; the message names file and line.
    """
    if not file.exists():
        return
    with file.open(errors="replace", newline="\n") as lines:
        for number, line in enumerate(lines, 1):
            if line.endswith("\n"):
                yield _read_line(f"{file}, line {number}", line)


def _line(values: Mapping[str, Any]) -> str:
    return json_text(values) + "\n"


def _read_line(where: str, line: str) -> dict[str, Any]:
    try:
        values = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: no JSON ({error})") from None
    if not isinstance(values, dict) or not isinstance(values.get("step"), int):
        raise ValueError(f"{where}: not the metrics of a step")
    return {name: math.nan if value is None else value for name, value in values.items()}
