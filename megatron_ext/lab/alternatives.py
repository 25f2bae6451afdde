"""What other slots, strategies and tolerances would have brought to a run: some of its trace again.

Only some loads are planned, so that a page of a long run is there at once; strategies that learn
from the loads before are left out, because between these loads there are others.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_ext.balance.metrics import home_loads, imbalances
from megatron_ext.balance.strategies import PlanSettings
from megatron_ext.config import BalanceConfig
from megatron_ext.files.arrays import find_arrays
from megatron_ext.files.loads import TRACE_FIELDS, Loads, read_loads
from megatron_ext.files.run_dir import TRACE_FOLDER
from megatron_ext.lab.planning import make_planners, plan_loads
from megatron_ext.trainer.reports.read import Run

STRATEGIES = ("quota", "exact", "llep", "eplb_exact")
SLOTS = (1, 2, 4, 8)
TOLERANCES = (0.0, 0.01, 0.05, 0.1, 0.2)

_MOST_LOADS, _MOST_FILES = 48, 4
"""Of a trace, evenly spread: enough for a mean to two digits, in about a second."""


def alternatives(name: str, run: Run, run_dir: Path) -> dict[str, Any]:
    """Plan some of a run's recorded loads with other settings than the run's.

    Args:
        name: The run's name, for the page.
        run: The run, for its slots, tolerance and domain.
        run_dir: Its directory.

    Returns:
        For JSON: `slots` and `tolerances`, rows of strategy, slots, tolerance, `mean` and `worst`
        imbalance and mean `replicas`; `before`, the mean imbalance without balancing; how many
        `loads` the files that were read hold, and how many were `sampled`; and the run's own
        settings.

    Raises:
        ValueError: The trace cannot be read.
        OSError: Likewise.
    """
    defaults = BalanceConfig()
    num_slots = int(_own(run, "slots", defaults.slots)) or defaults.slots
    tolerance = float(_own(run, "tolerance", defaults.tolerance))
    domain = int(_own(run, "domain_ranks", 0)) or None
    loads, recorded = _some_loads(run_dir / TRACE_FOLDER)

    def row(strategy: str, slots: int, tolerance: float) -> dict[str, Any]:
        settings = PlanSettings(tolerance=tolerance)
        planners = make_planners(loads, strategy, settings, slots=slots, nvlink_domain=domain)
        found = [one.measured for one in plan_loads(loads, planners)]
        after = [one["imbalance_after"] for one in found]
        return {
            "strategy": strategy,
            "slots": slots,
            "tolerance": tolerance,
            "mean": sum(after) / len(after),
            "worst": max(after),
            "replicas": sum(one["replicas"] for one in found) / len(found),
        }

    return {
        "run": name,
        "loads": recorded,
        "sampled": len(loads),
        "before": float(imbalances(home_loads(loads.load)).mean()),
        "strategy": STRATEGIES[0],
        "num_slots": num_slots,
        "tolerance": tolerance,
        "slots": [row(strategy, slots, tolerance) for strategy in STRATEGIES for slots in SLOTS],
        "tolerances": [row(STRATEGIES[0], num_slots, each) for each in TOLERANCES],
    }


def _own(run: Run, setting: str, default: float) -> float:
    try:
        return float(run.settings[f"balance.{setting}"])
    except (KeyError, ValueError):  # Of another version, or not there.
        return default


def _some_loads(trace: Path) -> tuple[Loads, int]:
    """Return loads spread over the trace, and how many the files hold that were read for it."""
    files = find_arrays(trace)
    parts = [read_loads(file) for file in _spread(files, _MOST_FILES)]
    parts = [part for part in parts if part.load.shape[1:] == parts[-1].load.shape[1:]]
    load = torch.cat([part.load for part in parts])
    places = _spread(range(len(load)), _MOST_LOADS)
    trace_fields = {
        field: torch.cat([part.trace[field] for part in parts])[places]
        for field in TRACE_FIELDS
        if all(field in part.trace for part in parts)
    }
    return Loads(load[places], trace_fields), len(load)


def _spread(all_of: Sequence[Any], most: int) -> list[Any]:
    """At most so many of a sequence, evenly spread.

    >>> _spread(range(10), 4)
    [0, 3, 6, 9]
    """
    if len(all_of) <= most:
        return list(all_of)
    return [all_of[place * (len(all_of) - 1) // (most - 1)] for place in range(most)]
