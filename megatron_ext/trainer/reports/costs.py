"""What balancing costs of a step, from the metrics that say so."""

from __future__ import annotations

import math
from statistics import fmean

from megatron_ext.trainer.reports.read import Run, number
from megatron_ext.trainer.reports.summary import WARMUP_STEPS

_PARTS = {"weights": "materialize", "gradients": "reduce"}
"""What moves, and how its metrics begin."""


def cost_shares(run: Run) -> dict[str, float]:
    """Return parts of a step's time, means over the steps after the first; empty if not known.

    Returns:
        `planning`, and of weights and gradients that move `weights_exposed`, `weights_hidden` and
        so on: exposed is what a rank waits for, hidden what happens behind other work.
    """
    timed = run.metrics[WARMUP_STEPS:] or run.metrics
    shares: dict[str, list[float]] = {}
    for step in timed:
        of_step = number(step.get("step_ms")) or math.nan
        shares.setdefault("planning", []).append(number(step.get("plan_ms")) / of_step)
        for part, metric in _PARTS.items():
            exposed = number(step.get(f"{metric}_exposed_ms"))
            hidden = max(number(step.get(f"{metric}_ms")) - exposed, 0.0)
            shares.setdefault(f"{part}_exposed", []).append(exposed / of_step)
            shares.setdefault(f"{part}_hidden", []).append(hidden / of_step)
    means = {
        name: fmean(known)
        for name, values in shares.items()
        if (known := [value for value in values if not math.isnan(value)])
    }
    return means if "planning" in means else {}
