"""Tables as text, in Markdown and in HTML: first column aligned left, all others right."""

from __future__ import annotations

from collections.abc import Sequence

from prettytable import PrettyTable, TableStyle


def text_table(*rows: Sequence[str]) -> str:
    """Return columns two blanks apart; the first row is the header.

    >>> print(text_table(("run", "loss"), ("none", "2.5")))
    run   loss
    none   2.5
    """
    # As rows all of them: without borders there is no header over no rows.
    table = _table([str(column) for column in range(len(rows[0]))], rows)
    table.header = table.border = False
    table.left_padding_width, table.right_padding_width = 0, 2
    return "\n".join(line.rstrip() for line in table.get_string().splitlines())


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table, whose columns are aligned as text too.

    Raises:
        ValueError: Two columns have the same header.

    >>> print(markdown_table(("run", "loss"), [("none", "2.5")]))
    | run  | loss |
    | :----|----: |
    | none |  2.5 |
    """
    table = _table(header, rows)
    table.set_style(TableStyle.MARKDOWN)
    _align(table)  # Which the style has undone.
    return table.get_string()


def html_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in HTML, its cells escaped and without style.

    Raises:
        ValueError: Two columns have the same header.
    """
    return _table(header, rows).get_html_string()


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> PrettyTable:
    table = PrettyTable(list(header))
    table.add_rows([list(row) for row in rows])
    _align(table)
    return table


def _align(table: PrettyTable) -> None:
    table.align = "r"
    table.align[table.field_names[0]] = "l"
