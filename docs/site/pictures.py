"""Makes the pictures of the documents, from real plans and runs.

    python -m docs.site.pictures

They are committed, for the site is built without running anything. The screenshots need Chromium
(`tests/browser.py`); the quickstart's takes minutes.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_ext.balance.solve import solve

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "pictures"

CHAIN = (6, 7, 0, 5, 11, 10, 0, 9)
"""Assignments of each of 8 experts, two a rank: ranks 0 and 2 have too many, ranks 1 and 3 room."""

EXAMPLE = ((6, 1, 1, 0), (4, 2, 1, 1))
"""The load of README's example and of the walkthrough: choices of each rank, by expert."""

# Of C. Okabe and K. Ito: told apart by all readers.
COLOURS = ("#56b4e9", "#e69f00", "#009e73", "#cc79a7")
INK, PAPER, MUTED = "#1d2129", "#ffffff", "#5d6673"


@dataclass(frozen=True)
class Move:
    """Assignments of an expert that a replica takes from its home rank."""

    expert: int
    home: int
    host: int
    count: int


def planned_moves(counts: Sequence[int], ranks: int) -> list[Move]:
    """Plan a load with one slot a rank, and return its moves, the chain that begins it first."""
    load = torch.zeros(ranks, len(counts), dtype=torch.int64)
    load[0] = torch.tensor(counts)
    plan = solve(load, ep_size=ranks, slots=1, tolerance=0.0)
    mains = len(counts) // ranks
    moves = [
        Move(expert, expert // mains, host, int(plan.quota[expert, host]))
        for host, held in enumerate(plan.experts_in_slots.tolist())
        for expert in held
        if expert >= 0
    ]
    home_loads = [sum(counts[rank * mains : (rank + 1) * mains]) for rank in range(ranks)]
    ordered = [max(moves, key=lambda move: home_loads[move.home])]
    while further := [move for move in moves if move.home == ordered[-1].host]:
        ordered += further
        if len(ordered) > len(moves):
            raise ValueError("the chain is a circle")
    return ordered + [move for move in moves if move not in ordered]


def chain_svg() -> str:
    """Draw the ranks before, and after each move."""
    ranks, mains = len(CHAIN) // 2, 2
    moves = planned_moves(CHAIN, ranks)
    # What every rank computes: (expert, count), replicas last.
    held = [[(e, CHAIN[e]) for e in range(r * mains, (r + 1) * mains)] for r in range(ranks)]
    mean = sum(CHAIN) // ranks
    panels = [_panel(0, "experts at home", held, mean, None)]
    for number, move in enumerate(moves, 1):
        held[move.home] = [
            (e, n - move.count if e == move.expert else n) for e, n in held[move.home]
        ]
        held[move.host] = [*held[move.host], (move.expert, move.count)]
        title = f"{number}. {move.count} of expert {move.expert} to rank {move.host}"
        panels.append(_panel(number, title, held, mean, move))
    width, height = 250 * len(panels) + 20, 330
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img"'
        f' font-family="sans-serif" font-size="13" fill="{INK}">\n'
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z"/></marker></defs>\n'
        f'<rect width="{width}" height="{height}" rx="8" fill="{PAPER}"/>\n'
        + "\n".join(panels)
        + "\n</svg>\n"
    )


def _panel(
    place: int,
    title: str,
    held: Sequence[Sequence[tuple[int, int]]],
    mean: int,
    move: Move | None,
) -> str:
    left, ground, unit, step = 20 + 250 * place, 280, 10, 56
    parts = [f'<text x="{left}" y="28" font-weight="600">{title}</text>']
    for rank, of_rank in enumerate(held):
        x, y = left + step * rank, float(ground)
        for expert, count in of_rank:
            if not count:
                continue
            y -= unit * count
            home = expert // 2
            dashed = ' stroke-dasharray="4 2"' if home != rank else ""
            parts.append(
                f'<rect x="{x}" y="{y:g}" width="44" height="{unit * count}" '
                f'fill="{COLOURS[home]}" stroke="{INK}"{dashed}/>'
            )
            if count > 1:
                parts.append(
                    f'<text x="{x + 22}" y="{y + unit * count / 2 + 4:g}" text-anchor="middle" '
                    f'font-size="11">e{expert}: {count}</text>'
                )
        total = sum(count for _, count in of_rank)
        parts.append(
            f'<text x="{x + 22}" y="{y - 5:g}" text-anchor="middle" font-weight="600" '
            f'stroke="{PAPER}" stroke-width="3" paint-order="stroke">{total}</text>'
            f'<text x="{x + 22}" y="{ground + 18}" text-anchor="middle">rank {rank}</text>'
        )
    line = ground - unit * mean
    parts.append(
        f'<path d="M{left - 8} {line}H{left + 4 * step - 4}" stroke="{INK}" '
        f'stroke-dasharray="2 3" fill="none"/>'
    )
    if move is not None:
        start, end = (left + step * rank + 22 for rank in (move.home, move.host))
        parts.append(
            f'<path d="M{start} {ground + 24}V{ground + 34}H{end}V{ground + 25}" fill="none" '
            f'stroke="{INK}" stroke-width="1.5" marker-end="url(#tip)"/>'
        )
    else:
        parts.append(f'<text x="{left}" y="{ground + 38}" fill="{MUTED}">dotted: the mean</text>')
    return "\n".join(parts)


def balanced_svg() -> str:
    """Draw what each rank computes of the example's load, without balancing and with it."""
    load = torch.tensor(EXAMPLE)
    ranks, experts = load.shape
    mains, totals = experts // ranks, load.sum(0).tolist()
    plan = solve(load, ep_size=ranks, slots=1, tolerance=0.0)
    home = [[(e, totals[e]) for e in range(r * mains, (r + 1) * mains)] for r in range(ranks)]
    planned = [
        [(e, int(plan.quota[e, r])) for e in range(experts) if plan.quota[e, r]]
        for r in range(ranks)
    ]
    planned = [sorted(held, key=lambda one: one[0] // mains != r) for r, held in enumerate(planned)]
    busiest = [max(sum(count for _, count in held) for held in way) for way in (home, planned)]
    titles = (
        f"Without balancing: all ranks wait for rank 0, which computes {busiest[0]} choices",
        f"With balancing: rank 1 computes {dict(planned[1])[0]} choices for expert 0, with a copy",
    )
    parts = [
        _rows(30 + 150 * place, title, held, mains, most)
        for place, (title, held, most) in enumerate(
            zip(titles, (home, planned), busiest, strict=True)
        )
    ]
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 312" role="img"'
        f' font-family="sans-serif" font-size="14" fill="{INK}">\n'
        f'<rect width="720" height="312" rx="8" fill="{PAPER}"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _rows(
    top: int, title: str, held: Sequence[Sequence[tuple[int, int]]], mains: int, most: int
) -> str:
    """A bar for each rank, under a title, and a line where the busiest rank ends."""
    left, unit, height = 90, 44, 36
    parts = [f'<text x="20" y="{top}" font-weight="600">{title}</text>']
    for rank, of_rank in enumerate(held):
        x, y = float(left), top + 18 + rank * (height + 10)
        parts.append(f'<text x="20" y="{y + 23}">rank {rank}</text>')
        for expert, count in of_rank:
            is_copy = expert // mains != rank
            dashed = ' stroke-dasharray="5 3"' if is_copy else ""
            name = f"copy of e{expert}: {count}" if is_copy else f"e{expert}: {count}"
            parts.append(
                f'<rect x="{x:g}" y="{y}" width="{unit * count}" height="{height}" '
                f'fill="{COLOURS[expert]}" stroke="{INK}"{dashed}/>'
                f'<text x="{x + unit * count / 2:g}" y="{y + 23}" text-anchor="middle" '
                f'font-size="13">{name}</text>'
            )
            x += unit * count
    end, low = left + unit * most, top + 18 + len(held) * (height + 10)
    parts.append(
        f'<path d="M{end} {top + 10}V{low}" stroke="{INK}" stroke-width="1.5" '
        f'stroke-dasharray="2 3" fill="none"/>'
        f'<text x="{end + 8}" y="{low - 3}" fill="{MUTED}" font-size="13">{most}</text>'
    )
    return "\n".join(parts)


def _command(*words: str | Path, at: Path) -> None:
    subprocess.run([sys.executable, "-m", *words], cwd=at, check=True)


def whatif_png(file: Path) -> None:
    """The page of `whatif` for a trace that comes with the package."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "whatif.html"
        trace = ROOT / "recipes" / "traces" / "late_ep8.npz"
        _command("megatron_ext", "whatif", trace, "--out", page, at=ROOT)
        _screenshot(page, file, width=1000, height=900)


def quickstart_png(file: Path) -> None:
    """The page of the quickstart, of fewer steps than it has."""
    with tempfile.TemporaryDirectory() as folder:
        at = Path(folder)
        _command("megatron_ext.trainer.quickstart", "steps=40", at=at)
        page = at / "runs" / "quickstart" / "report.html"
        _screenshot(page, file, width=1200, height=1000)


def _screenshot(page: Path, file: Path, *, width: int, height: int) -> None:
    from tests import browser

    with browser.opened(page, width=width, height=height) as shown:
        shown.wait_for_selector("body[data-drawn]")
        shown.screenshot(path=file)


def main() -> None:
    """Make all pictures."""
    PICTURES.mkdir(exist_ok=True)
    (PICTURES / "chain.svg").write_text(chain_svg())
    (PICTURES / "balanced.svg").write_text(balanced_svg())
    whatif_png(PICTURES / "whatif.png")
    quickstart_png(PICTURES / "quickstart.png")


if __name__ == "__main__":
    main()
