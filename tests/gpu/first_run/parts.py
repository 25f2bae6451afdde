"""The parts of a first run on GPUs: what each shows, how, how long it may take, what it needs."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.gpu.first_run.environment import LAUNCHER, QUEUES, queues

RECIPE = "gpt_8x64e_8_h100_bf16"
"""What is trained at full size, on `RECIPE_GPUS`."""

RECIPE_GPUS = 8


JSON_FILE = "{json}"

ONE_PLAN = (
    "import torch; from megatron_ext.balance.solve import solve; "
    "solve(torch.randint(200, (64, 256), device='cuda'), ep_size=64, slots=2); "
    "torch.cuda.synchronize()"
)

WITH_ENGINE = (
    "model.transformer_impl=transformer_engine",
    "model.experts=grouped_mm",
    "model.precision=bf16",
)
"""Settings with which Transformer Engine's experts are trained, all in one product."""

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

    needs: str = ""
    """A module or a command that it is left out without."""

    environment: Mapping[str, str] = field(default_factory=lambda: LAUNCHER)
    """Variables on top of the caller's."""

    def command_for(self, file: Path) -> list[str]:
        """Return the command, with its rows going to `file`."""
        return [str(file) if word == JSON_FILE else word for word in self.command]


def parts(gpus: int) -> list[Part]:
    """Return all parts for a machine of so many GPUs: first what is worth most.

    Where ranks are streams of one process, each needs a hardware queue: behind another rank's
    kernel, which waits for it, a launch would never run. Ranks that are processes try all numbers.
    """
    most = max(size for size in (1, 2, 4, 8) if size <= max(gpus, 1))
    return [
        Part("doctor", "what is there", _python("-m", "megatron_ext", "doctor", "--gpu"), 120),
        *(
            Part(
                f"tests_{name}",
                f"tests/gpu/test_{name}.py",
                _python(
                    *("-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not sanitizers"),
                    f"tests/gpu/test_{name}.py",
                ),
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
            "planner_ncu",
            "what Nsight Compute says of one plan",
            (
                *("ncu", "--set", "full", "--kernel-name", "regex:solve_quota", "--launch-count"),
                *("1", *_python("-c", ONE_PLAN)),
            ),
            240,
            needs="ncu",
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
            _python("-m", "tests.gpu.first_run.failing_rank", "--ranks", str(most)),
            240,
            gpus=2,
        ),
        *(
            Part(
                f"parity_ep{ep}" + (f"_pp{pp}" if pp > 1 else ""),
                "200 steps with balancing beside 200 without",
                _python(
                    *("-m", "tests.gpu.first_run.parity", "--steps", "200", "--ep", str(ep)),
                    *("--pp", str(pp), "--json", JSON_FILE),
                ),
                480,
                gpus=ep * pp,
            )
            for ep, pp in ((2, 1), (4, 1), (8, 1), (2, 2))
        ),
        *(
            Part(
                f"parity_te_ep{ep}",
                "50 steps of Transformer Engine's experts, with balancing and without",
                _python(
                    *("-m", "tests.gpu.first_run.parity", "--steps", "50", "--ep", str(ep)),
                    *("--json", JSON_FILE, *WITH_ENGINE),
                ),
                480,
                gpus=ep,
                needs="transformer_engine",
            )
            for ep in (2, 8)
        ),
        Part(
            "recipe",
            f"{RECIPE} without balancing, with it, and with ideal routing",
            _python("-m", "tests.gpu.first_run.recipe", "--steps", "60", "--json", JSON_FILE),
            1200,
            gpus=RECIPE_GPUS,
        ),
        *(_one_gpu_parts() if gpus == 1 else ()),
        # Last, because they take longest, and can only find what the others do not show.
        *(
            Part(
                f"sanitizers_{name}",
                f"{', '.join(SANITIZERS)} on tests/gpu/test_{name}.py",
                _python(
                    *("-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "sanitizers"),
                    f"tests/gpu/test_{name}.py",
                ),
                600,
                environment=queues(32),
            )
            for name in ("planner", "transport")
        ),
    ]


def _one_gpu_parts() -> list[Part]:
    """Return what several ranks of one GPU can show, which take turns: order, and no times."""
    return [
        Part(
            f"one_gpu_{name}",
            f"{shows}, with all ranks on one GPU",
            _python("-m", "tests.gpu.one_gpu", f"tests.gpu.first_run.{module}", *words),
            480,
            environment=queues(32),
        )
        for name, module, shows, words in (
            (
                "parity_ep2",
                "parity",
                "50 steps with balancing beside 50 without",
                ("--ep", "2", "--steps", "50", "--json", JSON_FILE),
            ),
            (
                "parity_ep4",
                "parity",
                "50 steps with balancing beside 50 without",
                ("--ep", "4", "--steps", "50", "--json", JSON_FILE),
            ),
            ("failing_rank", "failing_rank", "a rank fails in backward", ("--ranks", "2")),
            (
                "beside",
                "beside",
                "replicas move beside collectives",
                ("--ranks", "4", "--seconds", "30", "--json", JSON_FILE),
            ),
        )
    ]


def _python(*arguments: str) -> tuple[str, ...]:
    return (sys.executable, *arguments)
