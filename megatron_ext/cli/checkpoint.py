"""`megatron-ext checkpoint`: shows what Megatron checkpoints hold, verifies, moves experts."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_ext.cli import hugging_face, options
from megatron_ext.cli.output import DONE, FAILED, columns, show


def add(commands: Any) -> None:
    """Add the command and those below it."""
    checkpoint = options.add_group(commands, "checkpoint", "Megatron checkpoints")
    inspect = options.add_command(
        checkpoint,
        "inspect",
        run_inspect,
        "list a checkpoint's keys and check that it holds logical experts only",
        "megatron-ext checkpoint inspect runs/quickstart/checkpoints",
    )
    verify = options.add_command(
        checkpoint,
        "verify",
        run_verify,
        "compare a checkpoint's files with their checksums, and look for foreign pickles; or with "
        "another checkpoint's tensors",
        "megatron-ext checkpoint verify runs/train",
    )
    relayout = options.add_command(
        checkpoint,
        "relayout",
        run_relayout,
        "give a checkpoint's experts the ranks that `place` found for them; it computes the same",
        "megatron-ext checkpoint relayout runs/train semantics.npz --out start/step_100",
    )
    for command in (inspect, verify, relayout):
        command.add_argument(
            "path", metavar="DIR", help="a checkpoint, or a folder of them (newest)"
        )
    verify.add_argument(
        "other",
        nargs="?",
        metavar="OTHER",
        help="another one, which has to hold the same up to the order of experts",
    )
    relayout.add_argument(
        "layout", type=Path, metavar="LAYOUT.npz", help="made by `place sem_moe` or `place eplb`"
    )
    options.add_out(relayout, "DIR", "folder to make", required=True)
    hugging_face.add(checkpoint)


def run_inspect(arguments: argparse.Namespace) -> int:
    """Show what a checkpoint holds; fail if stock Megatron could not load it."""
    from checkpoints_tools import find_problems, read_contents

    contents = read_contents(arguments.path)
    problems = find_problems(contents)
    report = asdict(contents) | {"folder": str(contents.folder), "problems": problems}
    show(arguments, report, _contents_lines)
    return FAILED if problems else DONE


def _contents_lines(report: dict[str, Any]) -> Iterator[str]:
    yield columns(
        ("key", "shape", "dtype", "shards"),
        [
            (
                entry["key"],
                "-" if entry["shape"] is None else "x".join(map(str, entry["shape"])) or "scalar",
                entry["dtype"] or "object",
                str(entry["num_shards"]),
            )
            for entry in report["entries"]
        ],
    )
    yield ""
    yield f"checkpoint   {report['folder']}"
    yield f"step         {'unknown' if report['step'] is None else report['step']}"
    yield f"parameters   {report['num_parameters']:,}"
    yield f"experts      {'none' if report['num_experts'] is None else report['num_experts']}"
    if report["problems"]:
        yield "unfit for stock Megatron:"
        yield from (f"  {problem}" for problem in report["problems"])
    else:
        yield "holds        logical experts only"


def run_verify(arguments: argparse.Namespace) -> int:
    """Show what is wrong with a checkpoint's files; fail if anything is."""
    from checkpoints_tools import compare, verify

    verdict = verify(arguments.path)
    report = asdict(verdict) | {"folder": str(verdict.folder)}
    if arguments.other is None or verdict.problems:
        show(arguments, report, _verdict_lines)
        return FAILED if verdict.problems else DONE
    other = verify(arguments.other)
    if other.problems:
        show(arguments, asdict(other) | {"folder": str(other.folder)}, _verdict_lines)
        return FAILED
    comparison = compare(verdict.folder, other.folder)
    report |= asdict(comparison) | {"other": str(other.folder)}
    show(arguments, report, _comparison_lines)
    return FAILED if comparison.differences else DONE


def _comparison_lines(report: dict[str, Any]) -> Iterator[str]:
    yield from report["differences"]
    where = f"{report['folder']} and {report['other']}"
    if report["differences"]:
        yield f"{where}: {len(report['differences'])} differences"
        return
    layers = ", ".join(map(str, report["moved_layers"]))
    order = f"; experts have another order in layers {layers}" if layers else ""
    yield f"{where}: the same {report['num_tensors']} tensors{order}"


def _verdict_lines(report: dict[str, Any]) -> Iterator[str]:
    yield from (f"{report['folder']}: {problem}" for problem in report["problems"])
    if report["problems"]:
        return
    if report["num_files"]:
        size = f"{report['num_files']} files, {report['num_bytes']:,} bytes"
        yield f"{report['folder']}: whole and unchanged ({size})"
    else:
        yield f"{report['folder']}: has no checksums; no file is missing or cut off"


def run_relayout(arguments: argparse.Namespace) -> int:
    """Write the checkpoint with its experts under other numbers."""
    from checkpoints_tools import relayout
    from megatron_ext.files.arrays import check_folders
    from megatron_ext.files.relayout import read_layout

    check_folders(arguments.out)
    layout = read_layout(arguments.layout)
    moved = relayout(arguments.path, layout, arguments.out)
    report = {"path": str(arguments.out), "layers": list(layout), "tensors": moved}
    lines = f"checkpoint  {arguments.out}", f"moved       {moved} tensors in {len(layout)} layers"
    return show(arguments, report, lambda _: lines)
