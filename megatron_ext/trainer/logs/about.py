"""Where and with what a run trains: for its directory, and for whoever compares runs."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from datetime import UTC, datetime
from typing import Any

_PACKAGES = ("megatron-ext", "megatron-core", "torch", "transformer-engine")


def about_this_run() -> dict[str, Any]:
    """Return start, host, processors, versions and commit, for JSON.

    What is not installed is left out; the commit is None where the working directory has none.
    """
    import torch

    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": platform.node(),
        "cpus": len(os.sched_getaffinity(0)),
        "gpus": [torch.cuda.get_device_name(index) for index in range(num_gpus)],
        "versions": {"python": platform.python_version()} | dict(_versions()),
        "commit": _commit(),
    }


def _versions() -> list[tuple[str, str]]:
    installed = []
    for package in _PACKAGES:
        try:
            installed.append((package, importlib.metadata.version(package)))
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


def _commit() -> str | None:
    """Return the commit of the working directory, with `-dirty` where files differ from it."""
    words = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        asked = subprocess.run(words, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return asked.stdout.strip() or None
