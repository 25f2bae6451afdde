"""What `whatif.py` tells of a trace, for more settings and fewer of the loads: for a run's page.

Only some loads are planned, so that a page of a long run is there at once; strategies that learn
from the loads before are left out, because between these loads there are others.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_ext.balance.strategies import PlanSettings
from megatron_ext.config import BalanceConfig
from megatron_ext.files.arrays import find_arrays
from megatron_ext.files.loads import TRACE_FIELDS, Loads, read_loads
from megatron_ext.files.run_dir import TRACE_FOLDER
from megatron_ext.lab.whatif import SLOTS, STRATEGY, sample, try_plans
from megatron_ext.trainer.reports.read import Run

STRATEGIES = (STRATEGY, "exact", "llep", "eplb_exact")
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
        For JSON: `slots` and `tolerances`, rows of strategy, tolerance and what `try_plans` says;
        `before`, the mean imbalance without balancing; how many `loads` the files that were read
        hold, and how many were `sampled`; and the run's own settings.

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
        planning = PlanSettings(tolerance=tolerance)
        numbers, *_ = try_plans(loads, strategy, planning, slots=slots, nvlink_domain=domain)
        return {"strategy": strategy, "tolerance": tolerance, **numbers}

    tolerances = [row(STRATEGY, num_slots, each) for each in TOLERANCES]
    return {
        "run": name,
        "loads": recorded,
        "sampled": len(loads),
        "before": tolerances[0]["imbalance_before"],
        "strategy": STRATEGY,
        "num_slots": num_slots,
        "tolerance": tolerance,
        "slots": [row(strategy, slots, tolerance) for strategy in STRATEGIES for slots in SLOTS],
        "tolerances": tolerances,
    }


def _own(run: Run, setting: str, default: float) -> float:
    try:
        value = float(run.settings[f"balance.{setting}"])
    except (KeyError, ValueError):  # Of another version, or not there.
        return default
    return value if math.isfinite(value) else default


def _some_loads(trace: Path) -> tuple[Loads, int]:
    """Return loads spread over the trace, and how many the files hold that were read for it."""
    files = find_arrays(trace)
    places = np.linspace(0, len(files) - 1, min(_MOST_FILES, len(files))).astype(int)
    parts = [read_loads(files[place]) for place in places]
    parts = [part for part in parts if part.load.shape[1:] == parts[-1].load.shape[1:]]
    load = torch.cat([part.load for part in parts])
    trace_fields = {
        field: torch.cat([part.trace[field] for part in parts])
        for field in TRACE_FIELDS
        if all(field in part.trace for part in parts)
    }
    return sample(Loads(load, trace_fields), _MOST_LOADS), len(load)
