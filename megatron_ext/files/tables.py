"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Sequence


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table, aligned as text too: the first column left, the others right.

    >>> print(markdown_table(("run", "loss"), [("none", "2.5")]))
    | run  | loss |
    | ---- | ---: |
    | none |  2.5 |
    """
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    rule = ["-" * (width - 1) + ":" for width in widths]
    rule[0] = "-" * widths[0]
    lines = []
    for first, *numbers in (header, rule, *rows):
        cells = [first.ljust(widths[0]), *map(str.rjust, numbers, widths[1:])]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
