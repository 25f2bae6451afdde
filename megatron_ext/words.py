"""Words that messages of several rooms have in common."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a hint for the end of a message about an unknown name; empty if no name is near.

    >>> did_you_mean("quotaa", ["none", "quota"])
    '; did you mean quota?'
    >>> did_you_mean("magic", ["none", "quota"])
    ''
    """
    near = difflib.get_close_matches(str(name), list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def counted(number: int, what: str) -> str:
    """Return a number of things.

    >>> counted(1, "slot"), counted(2, "slot"), counted(2, "microbatch")
    ('1 slot', '2 slots', '2 microbatches')
    """
    plural = "es" if what.endswith("ch") else "s"
    return f"{number} {what}{plural if number != 1 else ''}"


def ranges(numbers: Sequence[int]) -> str:
    """Write increasing numbers shortly.

    >>> ranges([3, 7, 8, 9])
    '3, 7-9'
    """
    known = set(numbers)
    starts = [one for one in numbers if one - 1 not in known]
    ends = [one for one in numbers if one + 1 not in known]
    pairs = zip(starts, ends, strict=True)
    return ", ".join(str(start) if start == end else f"{start}-{end}" for start, end in pairs)
