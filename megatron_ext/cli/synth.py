"""`megatron-ext synth`: loads from a seed."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from megatron_ext.cli.options import add_command, add_out, add_overwrite, positive
from megatron_ext.cli.output import progress, show


def add(commands: Any) -> None:
    """Add the command."""
    synth = add_command(
        commands,
        "synth",
        run,
        "generate loads of a kind: zipf, power-law, drift, domain-shift, cold-ranks, hot-rank, "
        "few-tokens, dead-experts",
        "megatron-ext synth zipf --ranks 64 --experts 256 --imbalance 2 --out loads.npz",
    )
    synth.add_argument("kind", metavar="KIND", help="one of those above")
    synth.add_argument(
        "--ranks", type=positive, required=True, metavar="R", help="ranks of the EP group"
    )
    synth.add_argument(
        "--experts", type=positive, required=True, metavar="E", help="logical experts"
    )
    synth.add_argument("--tokens", type=positive, metavar="N", help="tokens of a rank")
    synth.add_argument("--top-k", type=positive, metavar="K", help="experts a token chooses")
    synth.add_argument("--batch", type=positive, metavar="B", help="loads to generate")
    synth.add_argument("--seed", type=int, metavar="N", help="equal seeds give equal loads")
    degree = synth.add_mutually_exclusive_group()
    degree.add_argument(
        "--imbalance", type=float, metavar="X", help="busiest rank / mean that is wanted"
    )
    degree.add_argument("--exponent", type=float, metavar="A", help="of the law of popularity")
    synth.add_argument(
        "--share", type=float, metavar="X", help="of ranks that are cold, of experts that are dead"
    )
    add_out(synth, "LOADS.npz", "where to write them, int64 [B, R, E]", required=True)
    add_overwrite(synth, "an existing LOADS.npz")


def run(arguments: argparse.Namespace) -> int:
    """Generate loads, write them, and show how uneven they are."""
    from megatron_ext.arrays import check_free
    from megatron_ext.balance.metrics import home_loads, imbalance
    from megatron_ext.offline.loads import write_loads
    from megatron_ext.offline.synthetic import generate, make_spec

    check_free(arguments.out, overwrite=arguments.overwrite)
    sizes = ("ranks", "experts", "tokens", "top_k", "batch", "seed")
    names = (*sizes, "imbalance", "exponent", "share")
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
    from megatron_ext.offline.synthetic import KINDS

    before = report["imbalance"]
    yield f"loads      {report['path']}"
    yield f"kind       {report['kind']}: {KINDS[report['kind']].summary}"
    yield f"shape      {' x '.join(map(str, report['shape']))} (loads, ranks, experts)"
    yield f"imbalance  {min(before):.3f} to {max(before):.3f}"
