"""A command-line parser whose errors are one line each."""

from __future__ import annotations

import argparse
import ast
import difflib
import inspect
import os
import re
import sys
import textwrap
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

from megatron_ext.words import did_you_mean

WRONG_USAGE = 2
"""The exit status where a command was called wrongly."""

_MOST_ENTRIES = 10_000
"""Entries of a folder among which a near name is looked for."""

_MOST_LETTERS = 8000
"""Of a message: what it quotes may have millions."""

_CONTROLS = {
    code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"
}
"""What stands for each control character that is not of plain text."""

_KINDS = {"int": "a whole number", "float": "a number"}


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are one line: command, argument, value and rule, without the usage."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and leave with status 2."""
        message = re.sub(
            r"invalid (int|float) value: (.*)",
            lambda said: f"{said[2]} must be {_KINDS[said[1]]}",
            message,
            flags=re.DOTALL,
        )
        message = re.sub(
            r"invalid choice: '(.*)' \(choose from (.*)\)",
            lambda said: (
                said[0]
                + did_you_mean(
                    said[1], [*re.findall(r"[\w-]+", said[2]), *self._option_string_actions]
                )
            ),
            message,
        )
        sys.stderr.write(error_line(self.prog, message))
        raise SystemExit(WRONG_USAGE)


def positive(text: str) -> int:
    """Read a whole number from 1 on, for argparse."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number >= 1")
    return number


def near_path(path: str | Path) -> str:
    """Return a hint, as `did_you_mean`, for a path that does not exist.

    It is about the first part that is not there; empty where the folder above cannot be read.
    """
    path = Path(path)
    missing = next((part for part in [*reversed(path.parents), path] if not part.exists()), None)
    if missing is None:
        return ""
    try:
        known = [entry.name for entry in islice(os.scandir(missing.parent), _MOST_ENTRIES)]
    except OSError:
        return ""
    near = difflib.get_close_matches(missing.name, known, n=1)
    return f"; did you mean {missing.with_name(near[0])}?" if near else ""


def existing_path(text: str) -> Path:
    """Read the path of something to read, for argparse."""
    path = Path(text)
    if not path.exists():
        raise argparse.ArgumentTypeError(f"{text} does not exist{near_path(path)}")
    return path


def error_line(command: str, message: BaseException | str) -> str:
    r"""Return a command's message about an error, for stderr: one line with its line end.

    >>> error_line("megatron-ext plan", "loads.npz is\n  cut off")
    'megatron-ext plan: error: loads.npz is cut off\n'
    """
    return f"{command}: error: {one_line(message)}\n"


def one_line(said: BaseException | str) -> str:
    r"""Return a message as one line that a terminal takes for text; it may quote a stranger.

    Of an error without words it is the name of the error's class; of an error of the system, the
    file and the system's own words.

    >>> one_line("run\x1b[2J is\n  cut off")
    'run\\x1b[2J is cut off'
    >>> one_line(KeyError())
    'KeyError'
    >>> one_line(FileNotFoundError(2, "No such file or directory", "runs/first"))
    'runs/first: No such file or directory'
    >>> len(one_line(10_000 * "x"))
    8004
    """
    text = str(said)
    if isinstance(said, OSError) and said.filename is not None:
        text = f"{said.filename}: {said.strerror}"
    text = " ".join(text.split())
    if not text and isinstance(said, BaseException):
        return type(said).__name__
    return plain(text if len(text) <= _MOST_LETTERS else f"{text[:_MOST_LETTERS]} ...")


def plain(text: str) -> str:
    """Write out what a terminal would take for commands, but tabs and line ends."""
    return text.translate(_CONTROLS)


def field_docs(section: type[Any]) -> dict[str, str]:
    """Return what is written below each field of a class and of its bases, each as one line.

    >>> from megatron_ext.config import BalanceConfig
    >>> field_docs(BalanceConfig)["min_quota"]
    'Fewest assignments a replica must take over to be worth its transfer.'
    """
    docs: dict[str, str] = {}
    for owner in reversed(section.__mro__[:-1]):
        try:
            source = textwrap.dedent(inspect.getsource(owner))
        except (OSError, TypeError):  # A class that was made, not written.
            continue
        (written,) = ast.parse(source).body
        assert isinstance(written, ast.ClassDef)
        for field, below in zip(written.body, written.body[1:], strict=False):
            match field, below:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    docs[name] = " ".join(text.split())
    return docs
