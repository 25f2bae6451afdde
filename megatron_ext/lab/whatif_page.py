"""The answer of `whatif.py` as a page."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

from megatron_ext.files.tables import html_table
from megatron_ext.lab.whatif import LEGEND, answers, layer_cells, of_what, tried_cells
from megatron_ext.trainer.reports.page import Page, page_html, part, sentences, wide


def page(report: Mapping[str, Any]) -> str:
    """Return the answer as a page of HTML that needs no other file."""
    tables = (("Slots", tried_cells(report)), ("Layers", layer_cells(report)))
    below = [f"<h2>{title}</h2>{wide(html_table(*cells))}" for title, cells in tables]
    if report["left_out"]:
        items = "".join(f"<li>{html.escape(each)}</li>" for each in report["left_out"])
        below.append(f"<h2>What the times leave out</h2><ul>{items}</ul>")
    title = "What balancing would bring"
    return page_html(
        Page(
            title=title,
            top="".join(
                (
                    f"<h1>{title}</h1>",
                    sentences([report["verdict"], f"Of {of_what(report)}. {LEGEND}"], []),
                    wide(html_table(("question", "answer"), answers(report))),
                )
            ),
            data={key: report[key] for key in ("slots", "layers", "tried")},
            bottom="".join(below),
            script=part("megatron_ext.lab", "whatif_page.js"),
        )
    )
