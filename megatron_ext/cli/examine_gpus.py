"""What the GPUs of this machine have for balancing, for `megatron-ext doctor --gpu`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

_CHANNELS = Path("/dev/nvidia-caps-imex-channels")
_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"


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
    report: dict[str, Any] = {
        "gpus": gpus,
        "imex_channels": sorted(each.name for each in _CHANNELS.glob("channel*")),
        "queues": os.environ.get(_QUEUES),
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
