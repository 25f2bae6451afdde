"""`megatron-ext doctor`: examines this machine, its GPUs or a running training."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from megatron_ext.arguments import existing_path
from megatron_ext.cli import options
from megatron_ext.cli.output import DONE, FAILED, mib, show
from megatron_ext.files.tables import text_table


def add(commands: Any) -> None:
    """Add the command."""
    doctor = options.add_command(
        commands,
        "doctor",
        run,
        "show what this machine and installation have, and what is missing",
        "megatron-ext doctor --json\n  megatron-ext doctor --gpu\n"
        "  megatron-ext doctor --run runs/train",
    )
    doctor.add_argument(
        "--run",
        type=existing_path,
        metavar="DIR",
        dest="run_dir",
        help="say what the ranks of the training in this run directory do",
    )
    doctor.add_argument(
        "--stacks",
        action="store_true",
        help="with --run: ask the ranks of this machine for their Python stacks",
    )
    doctor.add_argument(
        "--gpu",
        action="store_true",
        help="say how the GPUs of this machine reach each other, and which transport fits them",
    )


def run(arguments: argparse.Namespace) -> int:
    """Show what is there, and fail if something is missing; or look at its GPUs or at a run."""
    if arguments.run_dir is not None:
        return _run_state(arguments)
    if arguments.stacks:
        raise ValueError("--stacks is for the ranks of --run")
    from megatron_ext.cli.examine import examine, examine_gpus

    report = examine_gpus() if arguments.gpu else examine()
    show(arguments, report, _gpu_lines if arguments.gpu else _lines)
    return FAILED if report["problems"] else DONE


def _lines(report: dict[str, Any]) -> Iterator[str]:
    yield f"python               {report['python']} on {report['system']}, {report['cpus']} CPUs"
    for name, version in report["versions"].items():
        if version:
            yield f"{name:<20} {version}"
    shared = report["shared_memory"]
    yield "shared memory        " + (
        f"{mib(shared['free_bytes'])} of {mib(shared['total_bytes'])} MiB free" if shared else "-"
    )
    if "devices" in report:
        yield from _torch_lines(report)
    yield ""
    for state, here in (("here", True), ("not here", False)):
        for each in report["features"]:
            if each["here"] == here:
                yield f"{state:<20} {each['name']}: {each['said']}"
    yield ""
    yield from (f"problem: {problem}" for problem in report["problems"])
    if not report["problems"]:
        has_program = report["versions"].get("hydra-core")
        yield "ready to train" if has_program else "ready to balance a program of your own"


def _torch_lines(report: dict[str, Any]) -> Iterator[str]:
    yield f"CUDA of torch        {report['cuda'] or '-'}"
    for device in report["devices"]:
        yield (
            f"device               {device['name']}, {mib(device['memory_bytes'])} MiB, "
            f"compute capability {device['capability']}"
        )
    if not report["devices"]:
        yield "device               CPU only"
    yield (
        f"transports           {', '.join(report['transports'])} (auto: {report['transport_auto']})"
    )
    yield f"strategies           {', '.join(report['strategies'])}"


def _gpu_lines(report: dict[str, Any]) -> Iterator[str]:
    if not report["gpus"]:
        yield "no GPU: torch sees none on this machine"
        return
    for gpu in report["gpus"]:
        yield (
            f"{_of(gpu):<20} {gpu['name']}, {gpu['architecture']}, "
            f"{gpu['multiprocessors']} multiprocessors, {gpu['uuid']}"
        )
        yield (
            f"{'':<20} moving replicas takes {gpu['push_blocks']} blocks to send weights, "
            f"{gpu['pull_blocks']} to add gradients"
        )
    if "auto" in report:
        yield from _reach_lines(report)
    channels = ", ".join(report["imex_channels"])
    yield f"IMEX channels        {channels or 'none (needed for NVLink between machines)'}"
    yield f"hardware queues      {_queues(report['queues'])}"
    if "auto" in report:
        yield f"auto                 {report['auto']['why']}"
    yield from (f"problem: {problem}" for problem in report["problems"])


def _reach_lines(report: dict[str, Any]) -> Iterator[str]:
    gpus = report["gpus"]
    for gpu, row in zip(gpus, report["obstacles"], strict=True):
        pairs = [(other, why) for other, why in zip(gpus, row, strict=True) if other is not gpu]
        reached = ", ".join(str(other["number"]) for other, why in pairs if not why)
        yield f"{_of(gpu):<20} reads memory of {f'GPU {reached}' if reached else 'no other GPU'}"
        yield from (f"{'':<20} not of {_of(other)}: {why}" for other, why in pairs if why)
    why = report["fabric"]
    yield f"fabric               {f'no handles of the fabric: {why}' if why else 'handles work'}"


def _of(gpu: dict[str, Any]) -> str:
    return f"GPU {gpu['number']}"


def _queues(limit: str | None) -> str:
    """What the number of hardware queues means for streams that wait for other ranks."""
    if limit == "1":
        return (
            "CUDA_DEVICE_MAX_CONNECTIONS=1: one for all streams, so what waits for another rank "
            "holds up what is launched behind it"
        )
    return f"CUDA_DEVICE_MAX_CONNECTIONS={limit}" if limit else "as the driver has them"


def _run_state(arguments: argparse.Namespace) -> int:
    from megatron_ext.cli.run_state import add_stacks, run_state

    if arguments.gpu:
        raise ValueError("--run looks at a training; --gpu does not")
    state = run_state(arguments.run_dir)
    if arguments.stacks:
        add_stacks(state)
    show(arguments, state, _rank_lines)
    return DONE if state["is_well"] else FAILED


def _rank_lines(state: dict[str, Any]) -> Iterator[str]:
    names = ("rank", "host", "pid", "process", "state", "step", "stage", "layer")
    yield text_table(
        (*names, "moved s ago", "beat s ago"),
        [
            ["-" if row[name] is None else str(row[name]) for name in (*names, "moved_s", "beat_s")]
            for row in state["ranks"]
        ],
    )
    for row in state["ranks"]:
        if "stacks" in row:
            yield f"\nrank {row['rank']}\n{row['stacks'].rstrip()}"
    yield ""
    yield state["verdict"]
