"""Lists all settings of a training run with their types, defaults and meanings.

For `megatron-ext train --settings`, and for the page of settings on the site.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import Field, fields
from typing import Any, NamedTuple, cast

from megatron_ext.arguments import field_docs
from megatron_ext.config import Section, allowed_values
from megatron_ext.trainer.config import MISSING, TrainConfig


class Setting(NamedTuple):
    """One setting."""

    name: str
    """As on the command line: `data.path`."""
    allowed: str
    """Its type, with its range or its choices, in words."""
    default: str
    """As on the command line; empty if the setting must be given."""
    meaning: str
    """What it is, with its unit."""


def sections(whole: type[Section] = TrainConfig) -> Iterator[tuple[type[Section], list[Setting]]]:
    """Walk a section and those inside, each with its own settings, in their order."""
    kinds = whole.kinds()
    for kind in kinds:
        docs, words = field_docs(kind), allowed_values(kind)
        own = []
        for each in fields(cast("Any", kind)):
            if each.default_factory not in kinds:
                name = f"{kind.NAME}.{each.name}".lstrip(".")
                own.append(Setting(name, words[each.name], _default(each), docs[each.name]))
        yield kind, own


def settings_text(width: int) -> str:
    """Return the list for a terminal of so many columns."""
    lines = []
    for kind, own in sections():
        lines += [*textwrap.wrap(f"{kind.NAME or 'The run'}: {about(kind)}", width), ""]
        for setting in own:
            given = f"={setting.default}" if setting.default else " (has no default)"
            lines.append(f"  {setting.name}{given}  ({setting.allowed})")
            indent = " " * 6
            lines += textwrap.wrap(
                setting.meaning, width, initial_indent=indent, subsequent_indent=indent
            )
        lines.append("")
    return "\n".join(lines)


def about(kind: type[Section]) -> str:
    """Return a section's docstring as one line."""
    return " ".join((kind.__doc__ or "").split())


def _default(each: Field[Any]) -> str:
    value = each.default if each.default_factory is NO_DEFAULT else each.default_factory()
    if value == MISSING:
        return ""
    # As Hydra reads it.
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value) or "''"
