"""`megatron-ext checkpoint`: shows what Megatron checkpoints hold, verifies, moves experts."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from megatron_ext.arguments import existing_path
from megatron_ext.cli import hugging_face, options
from megatron_ext.cli.output import DONE, FAILED, show
from megatron_ext.files.tables import text_table


def add(commands: Any) -> None:
    """Add the command and those below it."""
    checkpoint = options.add_group(commands, "checkpoint", "Megatron checkpoints")
    shows = options.add_command(
        checkpoint,
        "show",
        run_show,
        "show what a checkpoint holds: keys, shape of the model, how it was saved; and check that "
        "it holds logical experts only",
        "megatron-ext checkpoint show runs/quickstart/checkpoints",
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
        "reorder the experts of a checkpoint as `place` says; results do not change",
        "megatron-ext checkpoint relayout runs/train semantics.npz --out start/step_100",
    )
    for command in (shows, verify, relayout):
        command.add_argument(
            "path",
            type=existing_path,
            metavar="DIR",
            help="a checkpoint, or a folder of them (newest)",
        )
    shows.add_argument(
        "--norms",
        action="store_true",
        help="read all experts, too, and show their norms (of each expert with --json)",
    )
    verify.add_argument(
        "other",
        type=existing_path,
        nargs="?",
        metavar="OTHER",
        help="another one, which has to hold the same up to the order of experts",
    )
    relayout.add_argument(
        "layout",
        type=existing_path,
        metavar="LAYOUT.npz",
        help="made by `place sem_moe` or `place eplb`",
    )
    options.add_out(relayout, "DIR", "folder to make", required=True)
    options.add_dry_run(relayout)
    hugging_face.add(checkpoint)


def run_show(arguments: argparse.Namespace) -> int:
    """Show what a checkpoint holds; fail if stock Megatron could not load it."""
    from checkpoints_tools import expert_norms, find_problems, read_contents

    contents = read_contents(arguments.path)
    problems = find_problems(contents)
    report = asdict(contents) | {
        "folder": str(contents.folder),
        "model_shape": contents.model_shape(),
        "dtypes": contents.dtypes(),
        "has_optimizer": contents.has_optimizer(),
        "problems": problems,
    }
    if arguments.norms:
        report["expert_norms"] = expert_norms(contents.folder)
    show(arguments, report, _contents_lines)
    return FAILED if problems else DONE


_SIZES = {"num_ranks": "ranks", "ep_size": "EP", "tp_size": "TP", "pp_size": "PP"}
_SHAPE = {
    "num_layers": "layers",
    "num_moe_layers": "with experts",
    "hidden_size": "hidden",
    "expert_hidden_size": "in an expert",
    "vocab_size": "vocabulary",
}


def _contents_lines(report: dict[str, Any]) -> Iterator[str]:
    yield text_table(
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
    if "expert_norms" in report:
        yield from _norm_lines(report["expert_norms"])
    yield f"checkpoint   {report['folder']}"
    yield f"step         {'unknown' if report['step'] is None else report['step']}"
    yield f"saved on     {_named(report['saved_on'], _SIZES)}"
    yield f"model        {_named(report['model_shape'], _SHAPE)}"
    yield f"parameters   {report['num_parameters']:,}, {', '.join(report['dtypes'])}"
    yield f"experts      {'none' if report['num_experts'] is None else report['num_experts']}"
    yield f"optimizer    {'its state is there' if report['has_optimizer'] else 'no state'}"
    if report["problems"]:
        yield "unfit for stock Megatron:"
        yield from (f"  {problem}" for problem in report["problems"])
    else:
        yield "holds        logical experts only"


def _named(sizes: dict[str, int], names: dict[str, str]) -> str:
    said = [f"{name} {sizes[each]:,}" for each, name in names.items() if each in sizes]
    return ", ".join(said) or "unknown"


def _norm_lines(norms: dict[int, list[float]]) -> Iterator[str]:
    """Yield the norms of a layer's experts: the mean, and which expert has least and most."""
    rows = []
    for layer, of_experts in norms.items():
        least, most = (of_experts.index(wanted(of_experts)) for wanted in (min, max))
        ends = (f"{of_experts[expert]:.4g} (expert {expert})" for expert in (least, most))
        rows.append((str(layer), f"{sum(of_experts) / len(of_experts):.4g}", *ends))
    yield text_table(("norms in layer", "mean", "least", "most"), rows)
    yield ""


def run_verify(arguments: argparse.Namespace) -> int:
    """Show what is wrong with a checkpoint's files; fail if anything is."""
    from checkpoints_tools import compare, verify

    reports = []
    for path in filter(None, (arguments.path, arguments.other)):
        verdict = verify(path)
        reports.append(asdict(verdict) | {"folder": str(verdict.folder)})
        if verdict.problems:
            show(arguments, reports[-1], _verdict_lines)
            return FAILED
    report, *others = reports
    if not others:
        return show(arguments, report, _verdict_lines)
    comparison = compare(report["folder"], others[0]["folder"])
    show(arguments, report | asdict(comparison) | {"other": others[0]["folder"]}, _comparison_lines)
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
        yield (
            f"{report['folder']}: of another program, without checksums: no file is missing or cut "
            "off, and changed bytes would not be noticed"
        )


def run_relayout(arguments: argparse.Namespace) -> int:
    """Write the checkpoint with its experts under other numbers, or say what would be written."""
    from checkpoints_tools import prepare_relayout
    from megatron_ext.files.arrays import check_folders
    from megatron_ext.files.relayout import read_layout

    check_folders(arguments.out)
    layout = read_layout(arguments.layout)
    prepared = prepare_relayout(arguments.path, layout, arguments.out)
    report = {
        "path": str(arguments.out),
        "layers": list(layout),
        "tensors": prepared.num_tensors,
        **options.write_prepared(arguments, "Copying", prepared),
    }
    return show(arguments, report, _relayout_lines)


def _relayout_lines(report: dict[str, Any]) -> Iterator[str]:
    yield f"checkpoint  {report['path']}"
    moved = "moved      " if report["written"] else "would move "
    yield f"{moved} {report['tensors']} tensors in {len(report['layers'])} layers"
    if not report["written"]:
        yield options.room_line(report)
