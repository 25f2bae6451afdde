"""Runs of one model compared: a table, a summary for programs, a picture.

Times and throughput are medians over the steps after `WARMUP_STEPS`, so that a moment in which the
machine did something else does not count; imbalances and replicas are means over all steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

Metrics = Sequence[Mapping[str, Any]]
"""Lines of a run's `metrics.jsonl`."""

WARMUP_STEPS = 5
"""The first steps allocate, and load code: they are left out of timings."""


def summarize(metrics: Metrics) -> dict[str, Any]:
    """Return what a run came to.

    Returns:
        `imbalance_before`, `imbalance_after`, `step_ms`, `tokens_per_s`, `final_loss`, `replicas`
        (per layer and microbatch) and `losses` (of every step).
    """
    timed = metrics[WARMUP_STEPS:] or metrics
    return {
        "imbalance_before": fmean(step["imbalance_before"] for step in metrics),
        "imbalance_after": fmean(step["imbalance_after"] for step in metrics),
        "step_ms": median(step["step_ms"] for step in timed),
        "tokens_per_s": median(step["tokens_per_s"] for step in timed),
        "final_loss": metrics[-1]["loss"],
        "replicas": fmean(step["replicas"] for step in metrics),
        "losses": [step["loss"] for step in metrics],
    }


def largest_loss_difference(losses: Sequence[float], others: Sequence[float], steps: int) -> float:
    """Return the largest relative difference of two loss curves over the first `steps` steps.

    >>> largest_loss_difference([4.0, 2.0, 1.0], [4.0, 2.1, 9.0], steps=2)
    0.05
    """
    pairs = list(zip(losses[:steps], others[:steps], strict=True))
    return round(max(abs(other - loss) / loss for loss, other in pairs), 12)


def table(summaries: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the runs as a Markdown table; `vs none` and `vs ideal` are ratios of tokens/s."""
    header = (
        *("run", "imbalance before", "after", "step ms", "tokens/s"),
        *("vs none", "vs ideal", "final loss", "replicas per layer"),
    )
    rows = [
        (
            name,
            f"{run['imbalance_before']:.2f}",
            f"{run['imbalance_after']:.2f}",
            f"{run['step_ms']:.0f}",
            f"{run['tokens_per_s']:.0f}",
            f"{run['tokens_per_s'] / summaries['none']['tokens_per_s']:.2f}",
            f"{run['tokens_per_s'] / summaries['ideal']['tokens_per_s']:.2f}",
            f"{run['final_loss']:.4f}",
            f"{run['replicas']:.1f}",
        )
        for name, run in summaries.items()
    ]
    return markdown_table(header, rows)


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


def draw(runs: Mapping[str, Metrics], file: Path) -> None:
    """Write a PNG of imbalance and step time over the steps of each run."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, sharex=True, figsize=(8, 6), layout="constrained")
    for name, metrics in runs.items():
        steps = [step["step"] for step in metrics]
        above.plot(steps, [step["imbalance_after"] for step in metrics], label=name)
        below.plot(steps, [step["step_ms"] for step in metrics], label=name)
    above.set_ylabel("imbalance (busiest rank / mean)")
    above.legend()
    # A slow first step would squeeze all others into a line.
    timed = [step["step_ms"] for metrics in runs.values() for step in metrics[WARMUP_STEPS:]]
    below.set_ylim(0, 1.3 * max(timed) if timed else None)
    below.set_ylabel("step time (ms)")
    below.set_xlabel("step")
    figure.savefig(file, dpi=120)
    plt.close(figure)
