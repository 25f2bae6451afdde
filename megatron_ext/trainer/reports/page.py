"""Pages of HTML that need no other file and no network: text, data, and charts that Plotly draws.

Text is HTML that its maker escaped. Data reach the scripts as JSON in which no tag can begin.
"""

from __future__ import annotations

import html
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from megatron_ext.files.json_files import json_text

# No content of a page can make the browser ask another server.
_CONTENT_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; connect-src 'none'; base-uri 'none'; form-action 'none'"
)


@dataclass(frozen=True, kw_only=True)
class Page:
    """A page's content."""

    title: str
    """As text."""
    top: str
    """HTML above the charts."""
    data: Mapping[str, Any]
    """What the script draws, for JSON."""
    bottom: str
    """HTML below the charts."""
    script: str
    """JavaScript that defines `draw(data, main)`; what it can use is in `page.js`."""


def page_html(page: Page) -> str:
    """Return the page as one file."""
    # Nothing in the data ends the script that holds it.
    data = json_text(page.data).replace("<", "\\u003c")
    # The library itself; the Python around it is not needed, and takes a while to import.
    found = importlib.util.find_spec("plotly")
    assert found is not None
    assert found.origin is not None
    plotly = (Path(found.origin).parent / "package_data" / "plotly.min.js").read_text("utf-8")
    text = "\n".join(
        (
            '<!DOCTYPE html>\n<html lang="en">\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_CONTENT_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<link rel="icon" href="data:,">',
            f"<title>{html.escape(page.title)}</title>",
            f"<style>\n{part(__package__, 'page.css')}</style>",
            f'<header id="top">{page.top}</header>',
            '<main></main>\n<div id="bottom">',
            f"{page.bottom}</div>",
            f'<script type="application/json" id="data">{data}</script>',
            # After the text, which can be read without it.
            f"<script>{plotly}</script>",
            f"<script>{part(__package__, 'page.js')}{page.script}</script>\n</html>\n",
        )
    )
    # JSON can hold half a character, and no file can.
    return text.encode("utf-8", "replace").decode("utf-8")


def part(package: str, name: str) -> str:
    """Return a file that is beside a package's modules."""
    return (files(package) / name).read_text("utf-8")


def sentences(verdict: Sequence[str], unknown: Sequence[str]) -> str:
    """Return the first sentences of a page as HTML: the verdict, the rest, and what is unknown."""
    kinds = ["verdict", *["more"] * (len(verdict) - 1), *["unknown"] * len(unknown)]
    said = zip(kinds, [*verdict, *unknown], strict=True)
    # No line begins with a percent sign.
    text = "".join(f'<p class="{kind}">{html.escape(one)}</p>' for kind, one in said)
    return text.replace(" %", "&nbsp;%")


def wide(table: str) -> str:
    """Return a table that scrolls by itself where the screen is narrow."""
    return f'<div class="wide" tabindex="0">{table}</div>'
