"""A comparison of runs in sentences with numbers, and in sentences about what is unknown."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from megatron_ext.trainer.reports.layers import ALIKE
from megatron_ext.trainer.reports.read import Run, number
from megatron_ext.trainer.reports.speed import MIN_STEPS, WARMUP_STEPS, Interval, speed, speed_ratio
from megatron_ext.trainer.reports.summary import cost_shares, summarize_read

LIMIT = "ideal"
"""The strategy that forces even routing: no balancing is faster."""

_UNCHANGED = {"none": ": nothing balances it", LIMIT: ": even routing is forced"}
"""By strategy, why loads are those of experts at home."""


class Compared(NamedTuple):
    """Runs in numbers, those of `summarize_read`, and sentences about them and what is unknown."""

    summaries: Mapping[str, Mapping[str, Any]]
    said: Sequence[str]
    unknown: Sequence[str]


def compare(runs: Mapping[str, Run]) -> Compared:
    """Return the runs in numbers, and in sentences, the most important first.

    Others are compared with the first run; a run with ideal routing is the limit. Sentences about
    balancing are about the fastest run that is neither, or about the only run.
    """
    summaries = summarize_read(runs)
    first, *others = runs
    limit = next((name for name in others if runs[name].strategy == LIMIT), None)
    rated = [name for name in others if name != limit]
    ratios = {
        name: Interval(**ratio)
        for name in rated
        if (ratio := summaries[name]["vs"][first]) is not None
    }
    best = max(ratios, key=lambda name: ratios[name].value, default=next(iter(rated), first))
    of_run = [*_imbalance(best, runs[best], summaries[best]), *_costs(best, runs[best])]
    if ratios:
        said = [_compared(runs, first, best, ratios, limit), *of_run]
    else:
        said = [*of_run, *_alone(best, runs, limit)]
    said = said or ["Nothing can be said yet"]
    return Compared(summaries, said, _unknown(runs, best, rated, bool(ratios)))


def _compared(
    runs: Mapping[str, Run],
    first: str,
    best: str,
    ratios: Mapping[str, Interval],
    limit: str | None,
) -> str:
    """Return how fast the fastest run is beside the first, and which others are as fast."""
    ratio = ratios[best]
    alike = [
        name
        for name in ratios
        if name != best and not _is_clear(speed_ratio(runs[best].metrics, runs[name].metrics))
    ]
    fastest = ", the fastest here," if len(ratios) > 1 and not alike else ""
    said = (
        f"run {best}{fastest} trains {ratio.value:.2f} x as fast as run {first} ({_range(ratio)})"
    )
    if ratio.is_clear:
        said = said[0].upper() + said[1:]
    else:
        said = f"No difference in speed beyond noise: {said}"
    if limit is not None and ratio.is_clear:
        said += _of_limit(runs, best, limit)
    if alike:
        said += f"; no difference beyond noise to {_named(alike)}"
    return f"{said}."


def _is_clear(ratio: Interval | None) -> bool:
    return ratio is not None and ratio.is_clear


def _range(of: Interval, form: str = ".2f") -> str:
    return f"95 % interval {of.low:{form}} to {of.high:{form}}"


def _of_limit(runs: Mapping[str, Run], best: str, limit: str) -> str:
    ratio = speed_ratio(runs[best].metrics, runs[limit].metrics)
    if ratio is None:
        return ""
    return f", at {ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f}) of the limit, run {limit}"


def _named(names: Sequence[str]) -> str:
    """Name at most three runs.

    >>> _named(["a", "b"]), _named(["a", "b", "c", "d"])
    ('run a, run b', '4 other runs')
    """
    return (
        ", ".join(f"run {name}" for name in names) if len(names) < 4 else f"{len(names)} other runs"
    )


def _alone(name: str, runs: Mapping[str, Run], limit: str | None) -> list[str]:
    """Return how fast a run is that is compared with no run, except the limit."""
    of = speed(runs[name].metrics)
    if of is None:
        return []
    said = f"Run {name} trains {of.value:,.0f} tokens/s ({_range(of, ',.0f')})"
    return [f"{said}{'' if limit is None else _of_limit(runs, name, limit)}."]


def _imbalance(name: str, run: Run, summary: Mapping[str, Any]) -> list[str]:
    before, after = summary["imbalance_before"], summary["imbalance_after"]
    if math.isnan(before) or math.isnan(after):
        return []
    if abs(before - after) < ALIKE:
        why = _UNCHANGED.get(run.strategy or "", ", as if experts stayed at home")
        said = f"The busiest rank of run {name} has {after:.2f} x the mean load{why}"
    else:
        moves = "lowers" if after < before else "raises"
        changed = f"from {before:.2f} to {after:.2f} x the mean"
        said = f"Run {name} {moves} the busiest rank's load {changed}"
    worst = run.layers.worst_layer() if run.layers is not None else None
    if worst is not None:
        said += f"; layer {worst[0]} is the worst with {worst[1]:.2f}"
    return [f"{said}."]


def _costs(name: str, run: Run) -> list[str]:
    """Return what ranks wait for; what is hidden costs no time, and is not added to it."""
    shares = cost_shares(run)
    if not shares:
        return []
    hidden = sum(share for part, share in shares.items() if part.endswith("_hidden"))
    waited = sum(shares.values()) - hidden
    return [
        f"Ranks of run {name} wait {100 * waited:.1f} % of a step for balancing; at most another "
        f"{100 * hidden:.1f} % runs behind other work."
    ]


def _unknown(
    runs: Mapping[str, Run], best: str, rated: Sequence[str], is_compared: bool
) -> list[str]:
    run, said = runs[best], []
    enough = f"{MIN_STEPS} steps after the first {WARMUP_STEPS}"
    knows_speed = any(number(step.get("tokens_per_s")) > 0 for step in run.metrics)
    if not rated and knows_speed and speed(run.metrics) is None:
        said.append(f"How fast run {best} trains is said from {enough} on.")
    elif rated and not is_compared:
        said.append(f"Which run is the fastest is said when two runs share {enough}.")
    if not rated and run.strategy != LIMIT:
        other = "quota" if run.strategy == "none" else "none"
        said.append(f"Add a run with strategy {other} to see what balancing brings.")
    if all(each.strategy != LIMIT for each in runs.values()):
        said.append(f"Add a run with strategy {LIMIT} to see how far from the limit this is.")
    if not cost_shares(run) and len(run.metrics) >= MIN_STEPS + WARMUP_STEPS:
        said.append(f"The metrics of run {best} do not say what ranks wait for.")
    if run.layers is None:
        said.append(f"The steps of run {best} do not name layers.")
    having: dict[str, list[str]] = {}
    for name, each in runs.items():
        for missing in each.missing:
            having.setdefault(missing, []).append(name)
    return said + [f"{', '.join(names)}: {missing}." for missing, names in having.items()]
