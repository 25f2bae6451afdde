"""What this machine, this installation and its GPUs have, for `megatron-ext doctor`."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_ext.trainer.hugging_face.bridge import INSTALL

# What to look for where megatron-ext is on the path only, and says no requirements.
_ESSENTIAL = ("torch", "megatron-core")
_SHARED_MEMORY = Path("/dev/shm")  # What CPU ranks of one machine share.
_CHANNELS = Path("/dev/nvidia-caps-imex-channels")

PACKAGES = {
    "transformers": f"{INSTALL} (for Hugging Face models, with Python 3.12)",
    "hydra-core": "pip install 'megatron-ext[train]' (for `megatron-ext train` and other commands)",
    "transformer-engine": "pip install --no-build-isolation 'megatron-ext[te]' (with a GPU)",
    "tensorboard": "pip install 'megatron-ext[tensorboard]'",
    "wandb": "pip install 'megatron-ext[wandb]'",
    "wandb-workspaces": "pip install 'megatron-ext[dashboards]' (for `megatron-ext dashboards`)",
    "hydra-submitit-launcher": "pip install 'megatron-ext[sweeps]' (for sweeps on Slurm)",
    "scipy": "pip install 'megatron-ext[lplb]' (for the strategy lplb)",
}
"""Packages that a run may want, and how to get them."""

# Not the module `apex`: the Python index has another project of that name.
_APEX = {"amp_C": "optimizer", "fused_weight_gradient_mlp_cuda": "gradient accumulation"}
"""Compiled modules of NVIDIA Apex that Megatron looks for, and what each fuses."""


def examine() -> dict[str, Any]:
    """Return a report that JSON can hold.

    `problems` in it names what must be repaired before a run can start, a sentence each, with how
    to; `features` what may be absent.
    """
    versions, problems = _versions()
    shared = shutil.disk_usage(_SHARED_MEMORY) if _SHARED_MEMORY.is_dir() else None
    torch_report = _torch_report(problems) if versions["torch"] is not None else {}
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "versions": versions,
        "cpus": len(os.sched_getaffinity(0)),
        "shared_memory": shared and {"total_bytes": shared.total, "free_bytes": shared.free},
        **torch_report,
        "features": _features(torch_report, versions),
        "problems": problems,
    }


def _versions() -> tuple[dict[str, str | None], list[str]]:
    """Return the versions of the packages that matter (None: absent), and which are wrong."""
    # A requirement of megatron-core; needed here only, so `--help` does not wait for it.
    from packaging.requirements import Requirement

    required = {name: Requirement(name) for name in _ESSENTIAL}
    try:
        own_version: str | None = importlib.metadata.version("megatron-ext")
        for line in importlib.metadata.requires("megatron-ext") or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                required[requirement.name] = requirement
    except importlib.metadata.PackageNotFoundError:
        own_version = None

    versions = {"megatron-ext": own_version}
    problems = []
    for name in sorted({*required, *PACKAGES}):
        found = None
        with suppress(importlib.metadata.PackageNotFoundError):
            found = importlib.metadata.version(name)
        versions[name] = found
        if name not in required:
            continue
        needed = required[name].specifier
        if found is None:
            problems.append(f"{name} is not installed: pip install '{name}{needed}'")
        elif not needed.contains(found, prereleases=True):
            problems.append(
                f"{name} {found} is installed, {needed} is needed: pip install '{name}{needed}'"
            )
    return versions, problems


def _torch_report(problems: list[str]) -> dict[str, Any]:
    """Return the part of the report that needs torch: devices, library, transports, strategies."""
    import torch

    from megatron_ext.balance.solve import solve
    from megatron_ext.balance.strategies import STRATEGIES
    from megatron_ext.ops import has_cuda_part, load_library
    from megatron_ext.transport import TRANSPORTS, resolve_transport

    native_said = "loads and plans"
    try:
        load_library()
        solve(torch.tensor([[3, 1], [3, 1]]), ep_size=2, slots=1)
        native_library = True
    # The loader's and torch's own complaints both are of this kind.
    except (RuntimeError, OSError) as error:
        native_library = False
        native_said = str(error)
        problems.append(native_said)
    if mismatch := cuda_mismatch():
        problems.append(mismatch)
    has_gpu = torch.cuda.is_available()
    device_type = "cuda" if has_gpu else "cpu"
    cuda_part = native_library and has_cuda_part()
    numbers = range(torch.cuda.device_count() if has_gpu else 0)
    return {
        "cuda": torch.version.cuda,
        "devices": [
            {
                "name": device.name,
                "memory_bytes": device.total_memory,
                "capability": f"{device.major}.{device.minor}",
            }
            for device in map(torch.cuda.get_device_properties, numbers)
        ],
        "native_library": native_library,
        "native_said": native_said,
        "cuda_part": cuda_part,
        "transports": [
            name for name, kind in TRANSPORTS.items() if kind.device_type in (None, device_type)
        ],
        "transport_auto": resolve_transport(
            "auto", device_type=device_type, mapped=cuda_part if has_gpu else native_library
        ),
        "strategies": list(STRATEGIES),
    }


def _features(
    report: Mapping[str, Any], versions: Mapping[str, str | None]
) -> list[dict[str, Any]]:
    """Return name, whether it is here, and what it is or how to get it.

    `report` is what `_torch_report` found, empty without torch; `versions` are None where absent.
    """
    fused = [what for module, what in _APEX.items() if importlib.util.find_spec(module)]
    apex = (
        f"Megatron fuses {' and '.join(fused)}"
        if fused
        else "nothing needs it; built from github.com/NVIDIA/apex, it gives Megatron fused kernels "
        "for optimizer, norms and gradient accumulation"
    )
    slurm = shutil.which("sbatch")
    return [
        *(_native_features(report) if report else []),
        *(
            _row(name, bool(versions[name]), versions[name] or how)
            for name, how in PACKAGES.items()
        ),
        _row("NVIDIA Apex", bool(fused), apex),
        _row("Slurm", bool(slurm), slurm or "log in to a machine that has sbatch"),
    ]


def _native_features(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    from megatron_ext.ops.from_source import missing_tool

    gpus = ", ".join(device["name"] for device in report["devices"])
    if report["cuda"] is None:
        how = nvcc = "install a torch that is built with CUDA"
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


def examine_gpus() -> dict[str, Any]:
    """Return a report that JSON can hold: what is there, and what balancing would make of it.

    `problems` in it names what keeps the kernels from running, a sentence each. Without a GPU it is
    empty, and so is `gpus`.
    """
    import torch

    from megatron_ext.ops import has_cuda_part, load_library
    from megatron_ext.transport import choose_transport
    from megatron_ext.transport.gpu_driver import Driver
    from megatron_ext.transport.gpu_probe import reach_of_devices

    numbers = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    if not numbers:
        return {"gpus": [], "problems": []}
    gpus = [_gpu(number) for number in numbers]
    problems = [gpu["lacks"] for gpu in gpus if gpu["lacks"]]
    if mismatch := cuda_mismatch():
        problems.append(mismatch)
    report: dict[str, Any] = {
        "gpus": gpus,
        "imex_channels": sorted(each.name for each in _CHANNELS.glob("channel*")),
        "queues": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"),
    }
    try:
        load_library()
        if not has_cuda_part():
            raise RuntimeError("the library of megatron_ext has no CUDA part; build it with nvcc")
        driver = Driver()
        report["fabric"] = driver.fabric_obstacle(numbers[0])
        report["obstacles"] = obstacles = reach_of_devices(driver, numbers)
        # With one EP rank on each of these GPUs.
        auto = choose_transport("auto", None, len(obstacles), "cuda", lambda kind: obstacles)
        report["auto"] = {
            "transport": auto.name,
            "nvlink_domain": auto.domain_ranks,
            "why": auto.line,
        }
    except (RuntimeError, OSError) as error:
        problems.append(str(error))
    return report | {"problems": problems}


def cuda_mismatch() -> str | None:
    """Return in one line how the CUDA of nvcc and of torch differ; None if they fit, or one lacks.

    The library has the runtime of nvcc's CUDA in it. A driver that is too old for that runtime,
    though not for torch's, fails at the first launch.
    """
    import torch

    from megatron_ext.ops.from_source import cuda_compiler

    nvcc = cuda_compiler()
    if nvcc is None:
        return None
    try:
        told = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"{nvcc} does not run: {error}"
    release = re.search(r"release (\d+)\.\d+", told.stdout)
    of_torch = str(torch.version.cuda)
    if release is not None and release[1] == of_torch.split(".")[0]:
        return None
    found = release[0].removeprefix("release ") if release else "an unknown version"
    return (
        f"{nvcc} is of CUDA {found} and torch {torch.__version__} of CUDA {of_torch}: both must "
        "have the same major version; name another nvcc in CUDACXX, or install another torch"
    )


def _gpu(number: int) -> dict[str, Any]:
    import torch

    from megatron_ext.transport.gpus import budget_of, what_it_lacks

    found = torch.cuda.get_device_properties(number)
    capability = found.major, found.minor
    budget = budget_of(capability)
    return {
        "number": number,
        "name": found.name,
        "uuid": str(found.uuid),
        "architecture": f"sm_{found.major}{found.minor}",
        "lacks": what_it_lacks(found.name, capability),
        "multiprocessors": found.multi_processor_count,
        "push_blocks": budget.push_blocks,
        "pull_blocks": budget.pull_blocks(found.multi_processor_count),
    }
