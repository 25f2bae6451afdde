"""Reads `layers.jsonl` of a run directory: one object a step, with all layers of all stages.

Columns have one entry for each layer of the column `layer`:

    imbalance_before, imbalance_after           mean over the step's microbatches and EP groups
    imbalance_before_max, imbalance_after_max   largest of them
    replicas                                    mean, of a microbatch
    rank_loads_before, rank_loads_after         assignments of each rank of an EP group
    expert_loads                                assignments to each expert; in some steps only

Loads are sums over the step's microbatches and EP groups. `worst` is the microbatch and layer with
the largest imbalance before: its loads, and the logical expert in each slot, or -1.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_ext.files.run_dir import LAYERS_FILE
from megatron_ext.telemetry.step_lines import read_lines


def read_layers(run_dir: Path) -> list[dict[str, Any]]:
    """Return a run's steps by layer, one object a step; an unfinished last line is dropped.

    Raises:
        ValueError: A line is not one of a step; the message names file and line.
    """
    return list(read_lines(run_dir / LAYERS_FILE))
