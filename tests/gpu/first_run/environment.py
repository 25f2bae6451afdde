"""The environment of the parts: the launcher's own, and numbers of hardware queues."""

from __future__ import annotations

import re
from pathlib import Path

QUEUES = (1, 8, 32)
"""Hardware queues to the device that are tried: the launcher's, CUDA's default, the most."""

ROOT = Path(__file__).parents[3]


def launcher_environment(script: str) -> dict[str, str]:
    """Return the variables that a launch script sets where the user has not.

    >>> launcher_environment("export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}")
    {'OMP_NUM_THREADS': '4'}
    """
    return dict(re.findall(r"^export (\w+)=\$\{\1:-(\w+)\}", script, flags=re.MULTILINE))


LAUNCHER = launcher_environment((ROOT / "launch" / "train.sh").read_text())
"""What trainings run with."""


def queues(count: int) -> dict[str, str]:
    """Return the launcher's environment with another number of hardware queues."""
    return {**LAUNCHER, "CUDA_DEVICE_MAX_CONNECTIONS": str(count)}
