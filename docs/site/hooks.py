"""Hooks of MkDocs: links of the documents work on the site as they do in the repository.

Documents link to files beside `docs/`. Those of `OUTSIDE` become pages, README.md the first one;
links between all of them are turned into links between pages. A link to another file is left as it
is, and MkDocs, in strict mode, refuses it.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "repository/CONTRIBUTING.md",
    "CHANGELOG.md": "repository/CHANGELOG.md",
    "recipes/traces/README.md": "repository/traces.md",
}
"""Where files of the repository are among the pages."""

_INSIDE = {page: file for file, page in OUTSIDE.items()}
_LINK = re.compile(r"(?<=\]\()([^)#:\s]+)(?=[)#])")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of files outside `docs/`, and the script that lets search work from disk."""
    for file, page in OUTSIDE.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / file)))
    script = ROOT / "docs" / "site" / "iframe-worker.js"
    files.append(File.generated(config, "assets/iframe-worker.js", abs_src_path=str(script)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links between files of the repository into links between pages."""
    here = page.file.src_uri
    folder = posixpath.dirname(_INSIDE.get(here, f"docs/{here}"))

    def to_page(link: re.Match[str]) -> str:
        file = posixpath.normpath(posixpath.join(folder, link[1]))
        target = OUTSIDE.get(file, file.removeprefix("docs/"))
        if target == file:  # Neither in `docs/` nor a page: as it is.
            return link[1]
        return posixpath.relpath(target, posixpath.dirname(here) or ".")

    return _LINK.sub(to_page, markdown)
