"""The environment of the parts: the launcher's own, and numbers of hardware queues."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

QUEUES = (1, 8, 32)
"""Hardware queues to the device that are tried: the launcher's, CUDA's default, the most."""

ROOT = Path(__file__).parents[3]


def launcher_environment(path: str) -> dict[str, str]:
    """Return the variables that a launch sets where the user has not, on this machine.

    Args:
        path: Where commands are looked for: the launcher asks `nvidia-smi` for the GPU's family.
    """
    script = ROOT / "launch" / "environment.sh"
    printed = subprocess.run(
        ["bash", "-c", '. "$0"; env -0', str(script)],
        env={"PATH": path},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    variables = dict(line.split("=", 1) for line in printed.split("\0") if line)
    names = set(re.findall(r"^\s*export (\w+)=", script.read_text(), flags=re.MULTILINE))
    return {name: variables[name] for name in sorted(names & variables.keys())}


LAUNCHER = launcher_environment(os.environ["PATH"])
"""What trainings run with."""


def queues(count: int) -> dict[str, str]:
    """Return the launcher's environment with another number of hardware queues."""
    return {**LAUNCHER, "CUDA_DEVICE_MAX_CONNECTIONS": str(count)}
