"""`megatron-ext checkpoint import-hf` and `export-hf`: models of Hugging Face, both ways."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_ext.cli import options
from megatron_ext.cli.output import show


def add(checkpoint: Any) -> None:
    """Add both commands to the group `checkpoint`."""
    bring = options.add_command(
        checkpoint,
        "import-hf",
        lambda arguments: _run(arguments, "importing", arguments.source),
        "write the checkpoint of a Hugging Face model, and a recipe that trains from it",
        "megatron-ext checkpoint import-hf ~/Qwen3-30B-A3B --out runs/qwen3",
    )
    take = options.add_command(
        checkpoint,
        "export-hf",
        lambda arguments: _run(arguments, "exporting", arguments.path, arguments.like),
        "write a checkpoint's model as a Hugging Face folder",
        "megatron-ext checkpoint export-hf runs/qwen3 --like ~/Qwen3-30B-A3B --out Qwen3-mine",
    )
    bring.add_argument(
        "source", type=Path, metavar="DIR", help="folder with config.json and *.safetensors"
    )
    take.add_argument(
        "path", type=Path, metavar="DIR", help="a checkpoint, or a folder of them (newest)"
    )
    take.add_argument(
        "--like",
        type=Path,
        required=True,
        metavar="DIR",
        help="the Hugging Face folder of that model; its configuration and tokenizer are copied",
    )
    for command in (bring, take):
        options.add_out(command, "DIR", "folder to make", required=True)
        options.add_dry_run(command)


def _run(arguments: argparse.Namespace, conversion: str, *folders: Path) -> int:
    from megatron_ext.trainer.hugging_face.bridge import check_source, import_bridge

    check_source(folders[-1])

    import torch

    from megatron_ext.cpu_platform import enable_cpu_platform
    from megatron_ext.trainer.ranks.launch import quiet_megatron

    quiet_megatron()
    if not torch.cuda.is_available():
        enable_cpu_platform()
    import_bridge()
    from megatron_ext.trainer.hugging_face import convert

    with getattr(convert, conversion)(*folders, arguments.out) as prepared:
        report = {
            "path": str(prepared.out),
            "settings": prepared.settings,
            "tensors": prepared.num_tensors,
            "left_out": prepared.left_out,
            **options.write_prepared(arguments, "Writing", prepared),
        }
    if conversion == "importing":
        report["recipe"] = str(prepared.out / convert.RECIPE)
    return show(arguments, report, _lines)


def _lines(report: dict[str, Any]) -> Iterator[str]:
    if report["written"]:
        yield f"wrote       {report['path']}"
    yield f"tensors     {report['tensors']:,}, {report['bytes']:,} bytes"
    if left_out := report["left_out"]:
        more = f" and {len(left_out) - 3:,} more" if len(left_out) > 3 else ""
        yield f"left out    {', '.join(left_out[:3])}{more}: the trainer's model has no such tensor"
    if not report["written"]:
        yield options.room_line(report)
        yield from (
            f"{section}.{name}={value}"
            for section, values in report["settings"].items()
            for name, value in values.items()
        )
    elif "recipe" in report:
        folder = shlex.quote(report["path"])
        command = f"megatron-ext train --config-dir {folder} --config-name recipe data.path=..."
        yield f"to train    {command}"
