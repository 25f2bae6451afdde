"""A comparison of runs in sentences with numbers, and in sentences about what is unknown."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megatron_ext.trainer.reports.read import Run
from megatron_ext.trainer.reports.summary import WARMUP_STEPS, cost_shares

LIMIT = "ideal"
"""The strategy that forces even routing: no balancing is faster."""


def verdict(
    runs: Mapping[str, Run], summaries: Mapping[str, Mapping[str, Any]]
) -> tuple[list[str], list[str]]:
    """Return sentences about the runs, the most important first, and sentences of what is unknown.

    Others are compared with the first run; a run with ideal routing is the limit. Sentences about
    balancing are about the fastest run that is neither, or about the only run.
    """
    first, *others = runs
    limit = next((name for name in others if runs[name].strategy == LIMIT), None)
    rated = [name for name in others if name != limit and _speed(summaries, name)]
    best = max(rated, key=lambda name: _speed(summaries, name), default=first)
    of_run = [*_imbalance(best, runs[best], summaries[best]), *_costs(best, runs[best])]
    compared = _throughput(summaries, first, best, limit)
    said = of_run + compared if best == first else compared + of_run
    return said or ["Nothing can be said yet"], _unknown(runs, summaries, best, limit)


def _speed(summaries: Mapping[str, Mapping[str, Any]], name: str) -> float:
    speed = summaries[name]["tokens_per_s"]
    return 0.0 if math.isnan(speed) else speed


def _throughput(
    summaries: Mapping[str, Mapping[str, Any]], first: str, best: str, limit: str | None
) -> list[str]:
    speed, base = _speed(summaries, best), _speed(summaries, first)
    if not speed:
        return []
    if best == first:
        said = f"{best} trains {speed:,.0f} tokens/s"
    else:
        rank = "" if len(summaries) - (limit is not None) <= 2 else ", the fastest run here,"
        ratio = f"{speed / base:.2f} x as fast as {first}" if base else f"{speed:,.0f} tokens/s"
        said = f"{best}{rank} trains {ratio}"
    of_limit = _speed(summaries, limit) if limit is not None else 0.0
    if of_limit:
        said += f", at {speed / of_limit:.2f} of the limit ({limit})"
    return [f"{said}."]


def _imbalance(name: str, run: Run, summary: Mapping[str, Any]) -> list[str]:
    before, after = summary["imbalance_before"], summary["imbalance_after"]
    if math.isnan(before) or math.isnan(after):
        return []
    if before - after < 0.005:
        said = f"The busiest rank of {name} has {after:.2f} x the mean load: nothing balances it"
    else:
        said = f"{name} lowers the busiest rank's load from {before:.2f} to {after:.2f} x the mean"
    worst = run.layers.worst_layer() if run.layers is not None else None
    if worst is not None:
        said += f"; layer {worst[0]} is the worst with {worst[1]:.2f}"
    return [f"{said}."]


def _costs(name: str, run: Run) -> list[str]:
    shares = cost_shares(run)
    if not shares:
        return []
    exposed = sum(share for part, share in shares.items() if not part.endswith("_hidden"))
    return [
        f"Balancing costs {sum(shares.values()):.1%} of a step of {name}, "
        f"of which {exposed:.1%} is exposed: ranks wait for it."
    ]


def _unknown(
    runs: Mapping[str, Run],
    summaries: Mapping[str, Mapping[str, Any]],
    best: str,
    limit: str | None,
) -> list[str]:
    unknown = []
    if len(runs) == 1:
        unknown.append("how much faster it is than without balancing (no other run is beside it)")
    if limit is None and runs[best].strategy != LIMIT:
        unknown.append("how far it is from the limit (no run with ideal routing is beside it)")
    if not cost_shares(runs[best]):
        unknown.append(f"what balancing costs of a step (the metrics of {best} do not say)")
    if runs[best].layers is None:
        unknown.append(f"which layer is the worst (the steps of {best} do not name layers)")
    said = [f"Not known: {'; '.join(unknown)}."] if unknown else []
    short = [name for name, run in runs.items() if 0 < len(run.metrics) <= WARMUP_STEPS]
    if short:
        said.append(
            f"Only the first steps, which are slow, are there of {', '.join(short)}: "
            "throughput means little."
        )
    having: dict[str, list[str]] = {}
    for name, run in runs.items():
        for missing in run.missing:
            having.setdefault(missing, []).append(name)
    return said + [f"{', '.join(names)}: {missing}." for missing, names in having.items()]
