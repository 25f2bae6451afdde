"""A replay as a page: strategies side by side, in words; `replay_page.js` draws the charts."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_ext.files.tables import html_table
from megatron_ext.trainer.reports.page import Page, part, sentences, wide

_SHOWN = (
    *("imbalance_mean", "imbalance_p95", "imbalance_worst", "replicas_mean", "max_rank_sends"),
    *("remote_assignments_mean", "solve_us_p50", "solve_us_p95"),
    *("slot_bytes", "moved_bytes", "sent_bytes"),
)


def replay_page(
    report: Mapping[str, Any],
    tables: Mapping[str, tuple[Sequence[str], Sequence[Sequence[str]]]],
) -> Page:
    """Return the page of a report of `make_report`; `tables` has header and rows by title."""
    strategies = report["strategies"]
    title = f"Replay: {report['title']}"
    first, *more = tables.items()
    return Page(
        title=title,
        top=f"<h1>{html.escape(title)}</h1>{sentences(_verdict(report), [])}"
        f"{wide(html_table(*first[1]))}",
        data={
            "before": report["before"]["imbalance_mean"],
            "strategies": [
                {"name": name}
                | {key: of[key] for key in _SHOWN if key in of}
                | {
                    "layers": {
                        layer: of["layers"][layer]["imbalance_mean"] for layer in of["layers"]
                    }
                }
                for name, of in strategies.items()
            ],
        },
        bottom="".join(f"<h2>{html.escape(name)}</h2>{wide(html_table(*of))}" for name, of in more),
        script=part(__package__, "replay_page.js"),
    )


def _verdict(report: Mapping[str, Any]) -> list[str]:
    strategies, before = report["strategies"], report["before"]["imbalance_mean"]
    best = min(strategies, key=lambda name: strategies[name]["imbalance_mean"])
    of = strategies[best]
    among = f"none of {len(strategies)} strategies leaves less; " if len(strategies) > 1 else ""
    said = [
        f"{best} leaves the busiest rank {of['imbalance_mean']:.3f} x the mean load; {among}"
        f"without balancing it has {before:.3f} x.",
        f"{best} makes {of['replicas_mean']:.1f} replicas for a load and plans it in "
        f"{of['solve_us_p50']:.0f} us (median, on this machine).",
    ]
    cheapest = min(
        (name for name in strategies if strategies[name]["imbalance_mean"] < (1 + before) / 2),
        key=lambda name: strategies[name]["replicas_mean"],
        default=best,
    )
    if cheapest != best:
        fewer = strategies[cheapest]
        said.append(
            f"Of those that take away at least half of the excess, {cheapest} makes the fewest "
            f"replicas: {fewer['replicas_mean']:.1f}, at {fewer['imbalance_mean']:.3f} x the mean."
        )
    if missing := report["missing_history"]:
        said.append(f"{missing}.")
    return said
