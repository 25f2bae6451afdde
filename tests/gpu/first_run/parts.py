"""The parts of a first run on GPUs: what each shows, how, how long it may take, what it needs."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.gpu.first_run.environment import LAUNCHER, QUEUES, queues

RECIPE = "gpt_8x64e_8_h100_bf16"
"""What is trained at full size, on `RECIPE_GPUS`."""

RECIPE_GPUS = 8


TE = ("model.transformer_impl=transformer_engine", "model.experts=grouped_mm")
"""Settings of a model of Transformer Engine's layers, with its grouped experts."""

KERNELS = "balance.transport=cuda"
"""Else replicas might go through collectives, and nothing would be shown of the kernels."""

SHARED = "model.shared_expert_hidden_size=64"
"""Shared experts, beside which plans have a stream of their own."""

SOON = "timeout_s=100"
"""Else a rank would wait for another longer than a part may last, and nobody would name it."""

BETWEEN_GPUS = (
    *("doctor", "tests_planner", "tests_transport", "links", "parity_ep{most}", "recipe"),
    *("litmus", "beside_nccl_1_queues", "failing_rank", "stages", "te_parity_ep{most}"),
    *("parity_ep2_pp2_dp2", "abort", "launches", "beside_nccl_32_queues"),
    *("beside_nccl_8_queues", "parity_ep2_pp2"),
)
"""What several GPUs, `most` of them used, show first: that replicas arrive, and what balancing
brings. What they show last, one GPU shows as well."""

JSON_FILE = "{json}"

SANITIZERS = ("memcheck", "racecheck", "initcheck")
"""Tools of compute-sanitizer."""


@dataclass(frozen=True)
class Part:
    """One program of the run."""

    name: str
    shows: str
    """In a few words."""

    command: tuple[str, ...]
    """The word `JSON_FILE` stands for the file that its rows go to, if it writes any."""

    limit_s: float
    """It is ended after so many seconds."""

    gpus: int = 1
    """It is left out on a machine of fewer."""

    lacks: str = ""
    """Why this machine cannot run it; else ""."""

    environment: Mapping[str, str] = field(default_factory=lambda: LAUNCHER)
    """Variables on top of the caller's."""

    shares_gpu: bool = False
    """Its processes share a GPU; they use MPS where the machine has it."""

    def left_out(self, gpus: int) -> str:
        """Return why it does not run on a machine of so many GPUs, or ""."""
        return f"needs {self.gpus} GPUs" if self.gpus > gpus else self.lacks

    def command_for(self, file: Path) -> list[str]:
        """Return the command, with its rows going to `file`."""
        return [str(file) if word == JSON_FILE else word for word in self.command]


def parts(gpus: int) -> list[Part]:
    """Return all parts for a machine of so many GPUs: first what is worth most.

    One GPU has the order below, and several begin with `BETWEEN_GPUS`.

    Where ranks are streams of one process, each needs a hardware queue: behind another rank's
    kernel, which waits for it, a launch would never run. Ranks that are processes try all numbers.
    """
    most = max(size for size in (1, 2, 4, 8) if size <= max(gpus, 1))
    made = [
        Part("doctor", "what is there", _python("-m", "megatron_ext", "doctor", "--gpu"), 120),
        *(
            Part(
                f"tests_{name}",
                f"tests/gpu/test_{name}.py",
                _pytest(name, "not sanitizers and not processes"),
                600,
                environment=queues(32) | {"MEGATRON_EXT_REQUIRE_GPU": str(gpus)},
            )
            for name in ("planner", "transport")
        ),
        Part(
            "planner",
            "time of a plan and of a routing, by replay of a graph",
            _python("-m", "tests.gpu.first_run.planner_times", "--json", JSON_FILE),
            300,
        ),
        Part(
            "planner_profile",
            "where one solve_quota spends its time, by ncu",
            _python("-m", "tests.gpu.first_run.planner_profile", "--json", JSON_FILE),
            180,
            lacks="" if ncu() else "there is no ncu in PATH or below CUDA_HOME",
        ),
        Part(
            "transport",
            "pushes, pulls and relays beside plain copies of the same bytes",
            _python("tests/perf/transport.py", "--gpu", "--json", JSON_FILE),
            300,
            environment=queues(32),
        ),
        Part(
            "stages",
            "pushes with other stages and blocks beside a plain copy",
            _python(
                *("-m", "tests.gpu.first_run.stages", "--gpus", str(gpus)), *("--json", JSON_FILE)
            ),
            300,
            environment=queues(32),
        ),
        Part(
            "litmus",
            "a flag behind bulk stores is seen after them; what is broken on purpose fails",
            _python(
                *("-m", "tests.gpu.first_run.litmus", "--gpus", str(gpus)), *("--json", JSON_FILE)
            ),
            600,
        ),
        *(_ranks_on_one_gpu() if gpus == 1 else []),
        Part(
            "processes",
            "tests/gpu/test_transport.py, where ranks are processes that share a GPU",
            _pytest("transport", "processes"),
            600,
            environment=LAUNCHER | {"MEGATRON_EXT_REQUIRE_GPU": str(gpus)},
            shares_gpu=True,
        ),
        Part(
            "launches",
            "launches, allocations and waits of the host in a layer",
            _python("tests/perf/launches.py", "--json", JSON_FILE),
            300,
            gpus=2,
        ),
        *(
            Part(
                f"beside_nccl_{count}_queues",
                f"replicas move beside all-to-all and reduce-scatter, {count} hardware queues",
                _python(
                    *("-m", "tests.gpu.first_run.beside", "--ranks", str(most)),
                    *("--seconds", "60", "--json", JSON_FILE),
                ),
                240,
                gpus=2,
                environment=queues(count),
            )
            for count in QUEUES
        ),
        Part(
            "links",
            "replicas between GPUs by transport cuda, and by DeepEP where it is installed",
            _python(
                *("-m", "tests.gpu.first_run.links", "--ranks", str(most), "--json", JSON_FILE)
            ),
            240,
            gpus=2,
        ),
        Part(
            "failing_rank",
            "a rank fails in backward: all end soon, and no weight has changed",
            _python(
                *("-m", "tests.gpu.first_run.failing_rank", "--ranks", str(most)), KERNELS, SOON
            ),
            240,
            gpus=2,
        ),
        Part(
            "abort",
            "all ranks leave a step while replicas move, and repeat it: equal gradients",
            _python(*("-m", "tests.gpu.first_run.abort", "--ranks", str(most)), KERNELS, SOON),
            180,
            gpus=2,
        ),
        *(
            Part(
                f"parity_ep{ep}" + (f"_pp{pp}" if pp > 1 else "") + (f"_dp{dp}" if dp > 1 else ""),
                "200 steps with balancing beside 200 without",
                _python(
                    *("-m", "tests.gpu.first_run.parity", "--steps", "200", "--ep", str(ep)),
                    *("--pp", str(pp), "--dp", str(dp), "--json", JSON_FILE, KERNELS, SHARED, SOON),
                ),
                480,
                gpus=ep * pp * dp,
            )
            for ep, pp, dp in ((2, 1, 1), (4, 1, 1), (8, 1, 1), (2, 2, 1), (2, 2, 2))
        ),
        *(
            _parity(f"te_parity_ep{ep}", ep, 50, KERNELS, *TE, gpus=ep, lacks=lacks_te())
            for ep in (2, 8)
            if gpus != 1
        ),
        Part(
            "recipe",
            f"{RECIPE}: how much of ideal routing's speed it gets with balancing",
            _python(
                *("-m", "tests.gpu.first_run.recipe", "--steps", "30", "--json", JSON_FILE),
                *(KERNELS, SOON),
            ),
            1200,
            gpus=RECIPE_GPUS,
        ),
        # Last, because they take longest, and can only find what the others do not show.
        *(
            Part(
                f"sanitizers_{name}",
                f"{', '.join(SANITIZERS)} on tests/gpu/test_{name}.py",
                _pytest(name, "sanitizers"),
                600,
                environment=queues(32),
            )
            for name in ("planner", "transport")
        ),
    ]
    if gpus > 1:
        place = {name.format(most=most): number for number, name in enumerate(BETWEEN_GPUS)}
        made.sort(key=lambda part: place.get(part.name, len(place)))
    return made


def _ranks_on_one_gpu() -> list[Part]:
    """Ranks that are processes and share the GPU: their order is shown, their times mean nothing.

    On several GPUs, parts of the same programs have a GPU for each rank.
    """
    return [
        _parity("one_gpu_parity_ep2", 2, 16, KERNELS, "model.experts=grouped_mm"),
        Part(
            "one_gpu_failing_rank",
            "a rank fails in backward: all end soon, and no weight has changed",
            _python("-m", "tests.gpu.first_run.failing_rank", "--ranks", "2", KERNELS, SOON),
            180,
            shares_gpu=True,
        ),
        Part(
            "one_gpu_abort",
            "all ranks leave a step while replicas move, and repeat it: equal gradients",
            _python("-m", "tests.gpu.first_run.abort", "--ranks", "2", KERNELS, SOON),
            180,
            shares_gpu=True,
        ),
        Part(
            "one_gpu_beside",
            "replicas move beside copies to and from the host",
            _python(
                *("-m", "tests.gpu.first_run.beside", "--ranks", "2"),
                *("--seconds", "15", "--json", JSON_FILE),
            ),
            180,
            shares_gpu=True,
        ),
        _parity("one_gpu_te_parity_ep2", 2, 16, KERNELS, *TE, lacks=lacks_te()),
        _parity(
            *("one_gpu_te_parity_ep2_recomputed", 2, 8, KERNELS, *TE),
            "parallel.recompute=selective",
            lacks=lacks_te(),
        ),
        _parity("one_gpu_parity_ep4", 4, 8, KERNELS, "model.experts=grouped_mm", SHARED),
    ]


def _parity(
    name: str, ep: int, steps: int, *overrides: str, gpus: int = 1, lacks: str = ""
) -> Part:
    """Return a short run of parity, with these settings."""
    return Part(
        name,
        f"{steps} steps with balancing beside {steps} without, EP{ep}, {', '.join(overrides)}",
        _python(
            *("-m", "tests.gpu.first_run.parity", "--steps", str(steps), "--ep", str(ep)),
            *("--json", JSON_FILE, f"run_dir=runs/first_run/{name}/${{balance.strategy}}"),
            *(SOON, *overrides),
        ),
        300,
        gpus=gpus,
        lacks=lacks,
        shares_gpu=gpus < ep,
    )


def _pytest(name: str, chosen: str) -> tuple[str, ...]:
    """Return the command of one file's tests. Failures and times are said as they come."""
    return _python(
        *("-m", "pytest", "-v", "-p", "tests.gpu.at_once", "-p", "no:cacheprovider"),
        *("--tb=short", "--timeout=60", "-k", chosen, f"tests/gpu/test_{name}.py"),
    )


def lacks_te() -> str:
    """Return that Transformer Engine is not here, or ""."""
    is_here = importlib.util.find_spec("transformer_engine") is not None
    return "" if is_here else "Transformer Engine is not installed"


def ncu() -> str | None:
    """Return Nsight Compute's program: in PATH, or beside CUDA's compiler."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("ncu") or shutil.which(f"{home}/bin/ncu")


def _python(*arguments: str) -> tuple[str, ...]:
    return (sys.executable, *arguments)
