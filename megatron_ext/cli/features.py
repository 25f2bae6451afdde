"""What may be here or not, and how to get what is not, for `megatron-ext doctor`."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from typing import Any

PACKAGES = {
    "transformer-engine": "pip install 'transformer-engine[pytorch]'",
    "tensorboard": "pip install 'megatron-ext[tensorboard]'",
    "wandb": "pip install 'megatron-ext[wandb]'",
    "wandb-workspaces": "pip install 'megatron-ext[dashboards]' (for `megatron-ext dashboards`)",
    "opentelemetry-sdk": "pip install 'megatron-ext[otel]' (for logging.otel)",
    "hydra-submitit-launcher": "pip install 'megatron-ext[sweeps]' (for sweeps on Slurm)",
    "scipy": "pip install 'megatron-ext[lplb]' (for the strategy lplb)",
}
"""Packages that a run may want, and how to get them."""


def features(report: Mapping[str, Any], versions: Mapping[str, str | None]) -> list[dict[str, Any]]:
    """Return name, whether it is here, and what it is or how to get it.

    Args:
        report: What `examine` found with torch; empty without.
        versions: Versions of the packages, None where one is absent.
    """
    rows = _native_features(report) if report else []
    rows += [
        _row(name, bool(versions[name]), versions[name] or how) for name, how in PACKAGES.items()
    ]
    slurm = shutil.which("sbatch")
    return [*rows, _row("Slurm", bool(slurm), slurm or "log in to a machine that has sbatch")]


def _native_features(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    from megatron_ext.ops.build import missing_tool

    gpus = ", ".join(device["name"] for device in report["devices"])
    if report["cuda"] is None:
        how = "install a torch that is built with CUDA"
        nvcc = how
    else:
        how = "torch finds none: see whether nvidia-smi does"
        nvcc = "install CUDA's compiler nvcc, then this package again"
    missing = missing_tool()
    return [
        _row("GPU", bool(gpus), gpus or how),
        _row("native part", report["native_library"], report["native_said"]),
        _row("CUDA part", report["cuda_part"], "loads" if report["cuda_part"] else nvcc),
        _row("what builds it", missing is None, missing or "compiler, cmake, ninja"),
    ]


def _row(name: str, here: bool, said: str) -> dict[str, Any]:
    return {"name": name, "here": here, "said": said}
