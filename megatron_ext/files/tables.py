"""Tables as text, in Markdown and in HTML: first column aligned left, all others right."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:  # Else imported where a table is made: not every command makes one.
    from prettytable import PrettyTable

Cells: TypeAlias = tuple[Sequence[str], Sequence[Sequence[str]]]
"""Header and rows of a table."""


def fill(columns: Mapping[str, str], rows: Iterable[Mapping[str, Any]]) -> Cells:
    """Return a table of which each column has a header and a format of a row's values.

    >>> fill({"run": "{name}", "loss": "{loss:.1f}"}, [{"name": "none", "loss": 2.49}])
    (('run', 'loss'), [('none', '2.5')])
    """
    return tuple(columns), [tuple(form.format(**row) for form in columns.values()) for row in rows]


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return columns two blanks apart.

    >>> print(text_table(("run", "loss"), [("none", "2.5")]))
    run   loss
    none   2.5
    """
    # As rows all of them: without borders there is no header over no rows.
    table = _table([str(column) for column in range(len(header))], [header, *rows])
    table.header = table.border = False
    table.left_padding_width, table.right_padding_width = 0, 2
    return "\n".join(line.rstrip() for line in table.get_string().splitlines())


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table, whose columns are aligned as text too; no two headers are the same.

    >>> print(markdown_table(("run", "loss"), [("none", "2.5")]))
    | run  | loss |
    | :----|----: |
    | none |  2.5 |
    """
    from prettytable import TableStyle

    table = _table(header, rows)
    table.set_style(TableStyle.MARKDOWN)
    _align(table)  # Which the style has undone.
    return table.get_string()


def html_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in HTML, its cells escaped and without style; no two headers are the same."""
    return _table(header, rows).get_html_string()


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> PrettyTable:
    from prettytable import PrettyTable

    table = PrettyTable(list(header))
    table.add_rows([list(row) for row in rows])
    _align(table)
    return table


def _align(table: PrettyTable) -> None:
    table.align = "r"
    table.align[table.field_names[0]] = "l"
