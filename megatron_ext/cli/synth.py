"""`megatron-ext synth`: synthetic loads from a seed."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from megatron_ext.arguments import positive
from megatron_ext.cli import options
from megatron_ext.cli.output import progress, show


def add(commands: Any) -> None:
    """Add the command."""
    synth = options.add_command(
        commands,
        "synth",
        run,
        "generate loads of a kind, and show how uneven they are",
        "megatron-ext synth zipf --ranks 64 --experts 256 --imbalance 2 --out loads.npz\n"
        "  megatron-ext synth --list",
    )
    option = synth.add_argument
    option("kind", nargs="?", metavar="KIND", help="kind of load: one of --list")
    option("--list", action="store_true", help="list the kinds, their settings and defaults")
    option("--ranks", type=positive, metavar="R", help="ranks of the EP group")
    option("--experts", type=positive, metavar="E", help="logical experts")
    option("--tokens", type=positive, metavar="N", help="tokens of a rank")
    option("--top-k", type=positive, metavar="K", help="experts a token chooses")
    option("--batch", type=positive, metavar="B", help="loads to generate")
    option("--seed", type=int, metavar="N", help="equal seeds give equal loads")
    degree = synth.add_mutually_exclusive_group().add_argument
    degree("--imbalance", type=float, metavar="X", help="busiest rank / mean that is wanted")
    degree("--exponent", type=float, metavar="A", help="exponent of the law of popularity")
    option("--share", type=float, metavar="X", help="share of cold ranks, or of dead experts")
    option(
        "--without-chance",
        dest="by_chance",
        action="store_false",
        default=None,
        help="give equally popular experts equal loads, up to rounding",
    )
    options.add_out(
        synth, "LOADS.npz", "where to write them, int64 [B, R, E]", replaces="an existing LOADS.npz"
    )


def run(arguments: argparse.Namespace) -> int:
    """Generate loads, write them, and show how uneven they are; or list the kinds."""
    from megatron_ext.balance.metrics import home_loads, imbalance
    from megatron_ext.files.loads import write_loads
    from megatron_ext.lab.synthetic import LoadSpec, generate, get_kind, make_spec

    if arguments.list:
        return show(arguments, _kinds(), _kind_lines)
    if arguments.kind is not None:
        get_kind(arguments.kind)  # A wrong one is said before what is missing.
    for option in ("KIND", "--ranks", "--experts", "--out"):
        if getattr(arguments, option.strip("-").lower()) is None:
            raise ValueError(f"{option} is not given (nor --list)")
    options.check_out(arguments)
    names = [field.name for field in fields(LoadSpec)]
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    spec = make_spec(arguments.kind, **given)
    with progress("Drawing", spec.batch) as on_load:
        loads = generate(arguments.kind, spec, on_load=on_load)
    write_loads(arguments.out, loads, overwrite=arguments.overwrite)
    report = {
        "path": str(arguments.out),
        "kind": arguments.kind,
        "shape": list(loads.load.shape),
        "imbalance": [imbalance(home_loads(load)) for load in loads.load],
    }
    return show(arguments, report, _lines)


def _lines(report: dict[str, Any]) -> Iterator[str]:
    from megatron_ext.lab.synthetic import KINDS

    before = report["imbalance"]
    yield f"loads      {report['path']}"
    yield f"kind       {report['kind']}: {KINDS[report['kind']].summary}"
    yield f"shape      {' x '.join(map(str, report['shape']))} (loads, ranks, experts)"
    yield f"imbalance  {min(before):.3f} to {max(before):.3f}"


def _kinds() -> dict[str, Any]:
    from megatron_ext.lab.synthetic import KINDS

    return {
        name: {
            "summary": kind.summary,
            "settings": list(kind.settings),
            "defaults": dict(kind.defaults),
        }
        for name, kind in KINDS.items()
    }


def _kind_lines(report: dict[str, Any]) -> Iterator[str]:
    width = max(map(len, report))
    for name, kind in report.items():
        settings = ", ".join(kind["settings"]) or "-"
        # As options, so that one sees which to give.
        defaults = [
            "--without-chance" if field == "by_chance" else f"--{field} {value}"
            for field, value in kind["defaults"].items()
        ]
        yield f"{name:<{width}}  {settings:<26}  {'; '.join([kind['summary'], *defaults])}"
