"""What two runs that do the same have in common: steps, without what clocks and memory say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_ext.telemetry.names import METRICS
from megatron_ext.trainer.logs.run_log import read_metrics

_MEASURED = {
    name for name, metric in METRICS.items() if metric.section == "system" or metric.unit == "ms"
}


def repeatable_steps(run_dir: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's `metrics.jsonl`, without what differs from run to run."""
    return [
        {name: value for name, value in line.items() if name not in _MEASURED}
        for line in read_metrics(run_dir)
    ]
