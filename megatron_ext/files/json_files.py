"""JSON that every reader takes, with null for numbers that it cannot write; and JSON of anybody."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_ext.files.opening import NotRegularError, read_regular

_MOST_NODES = 1 << 22
"""Values of a text: in memory, each can be a hundred times as large."""


def read_json(path: Path, *, follow: bool = False) -> dict[str, Any]:
    """Read a JSON file that holds an object; for `follow` see `look_at`.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It cannot be read, or holds something else; the message is one line with path
            and fault.
    """
    try:
        text = read_regular(path, follow=follow).decode()
    except (FileNotFoundError, NotRegularError):
        raise
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no readable JSON: {error}") from None
    return parse_object(text, str(path))


def parse_object(text: str, where: str) -> dict[str, Any]:
    """Return the object that a text in JSON holds.

    A name that is there twice is an error, and so is a whole number beyond 64 bits. Messages say
    `where` the text is from: its file, with the line in a longer file.

    Raises:
        ValueError: It is no JSON, or no object, or holds more than any file that is read.
    """
    try:
        if sum(map(text.count, "[{,")) > _MOST_NODES:
            raise ValueError(f"more than {_MOST_NODES} values")
        value = json.loads(text, object_pairs_hook=_object, parse_int=_int)
        if not isinstance(value, dict):
            raise ValueError("no object")
    # A RecursionError is Python's answer to brackets without end.
    except (ValueError, RecursionError) as error:
        said = "it is empty" if not text.strip() else error
        raise ValueError(f"{where} is no readable JSON: {said}") from None
    return value


def _int(digits: str) -> int:
    if len(digits) > 18 and not -(2**63) <= int(digits) < 2**63:
        raise ValueError(f"{digits[:20]}... is beyond 64 bits")
    return int(digits)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(x for x in names if names.count(x) > 1)!r} is there twice")
    return made


def json_text(value: Any, *, indent: int | None = None) -> str:
    """Return a value as JSON, with null for what is no finite number.

    >>> json_text({"step": 3, "loss": float("nan")})
    '{"step": 3, "loss": null}'
    """
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    """Put None for numbers that JSON cannot write, as the loss of a run that diverged."""
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
