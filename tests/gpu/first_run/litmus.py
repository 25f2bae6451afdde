"""Litmus tests of a flag behind bulk stores and plain ones, and of what is broken on purpose.

    python -m tests.gpu.first_run.litmus [--gpus N] [--rounds N] [--json FILE]

Status 0 if no round of the right variant had a wrong word, and rounds of the broken one had.
Between GPUs where there are several, otherwise within the memory of one (`litmus.cu`), where a
broken order may never show: that one GPU sees nothing is said, and is no failure.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_ext.ops.from_source import cuda_compiler
from tests.gpu.first_run.environment import ROOT

SOURCE = Path(__file__).with_name("litmus.cu")
ROUNDS = 1_000_000
"""Of all sizes and both variants of noise together."""

SIZES = {16: 0.5, 4 << 10: 0.4, 64 << 10: 0.09, 1 << 20: 0.01}
"""Bytes behind a flag, and their part of the rounds: many bytes take long."""

PAIRS = 8
"""Writers and readers at a time; one multiprocessor each."""


def main() -> None:
    """Build, run all variants, print, and judge."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gpus", type=int, default=1, help="GPUs to use (default: 1)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"(default: {ROUNDS})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the rows")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "litmus"
        subprocess.run([*compile_command("native"), "-o", str(program)], check=True)
        rows = [
            {**row, **run(program, row)} for row in variants(options.gpus, rounds=options.rounds)
        ]
    for row in rows:
        print(row)
    if options.json:
        options.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    found, blind = problems(rows), blind_ways(rows)
    if options.gpus > 1:
        found += blind
    sys.stderr.write("".join(f"{line}\n" for line in dict.fromkeys(found + blind)))
    sys.exit(bool(found))


def compile_command(architecture: str, *sources: Path) -> list[str]:
    """Return how a program of these sources is built, by default the litmus, but for its place."""
    return [
        # The build's compiler; a torch without CUDA has none, and PATH may.
        *(
            cuda_compiler() or "nvcc",
            "-std=c++17",
            "-O2",
            f"-arch={architecture}",
            "--Werror=all-warnings",
        ),
        *(f"-I{ROOT / 'csrc' / folder}" for folder in ("include", "cuda")),
        *map(str, sources or (SOURCE,)),
    ]


def variants(gpus: int, *, rounds: int) -> list[dict[str, Any]]:
    """Return what is run: ways, sizes, orders, quiet and busy.

    Args:
        gpus: GPUs to use.
        rounds: Of each way and each order, split over sizes, noise and pairs.
    """
    last = gpus - 1
    ways = {
        "direct": ((0, -1, last), "BULK", ("RIGHT", "READ", "BROKEN")),
        "relay": ((0, last // 2 + (gpus > 2), last), "BULK", ("RIGHT", "READ", "BROKEN")),
        "plain": ((0, -1, last), "PLAIN", ("RIGHT", "BROKEN")),
    }
    return [
        {
            "way": way,
            "devices": devices,
            "bytes": num_bytes,
            "rounds": max(int(rounds * part / (2 * PAIRS)), 1),
            "variant": variant,
            "stores": stores,
            "noise": noise,
        }
        for way, (devices, stores, orders) in ways.items()
        for variant in orders
        for num_bytes, part in SIZES.items()
        for noise in ("QUIET", "BUSY")
    ]


def run(program: Path, row: dict[str, Any]) -> dict[str, int]:
    """Run one variant; return how many rounds had a wrong word and how many pairs gave up."""
    words = [*row["devices"], row["bytes"], row["rounds"], PAIRS]
    words += [row["variant"], row["stores"], row["noise"]]
    done = subprocess.run(
        [str(program), *map(str, words)], check=True, capture_output=True, text=True
    )
    found: dict[str, int] = json.loads(done.stdout)
    return found


def problems(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return what the rows show that must not be, a line each."""
    found = []
    for way in dict.fromkeys(row["way"] for row in rows):
        if wrong := _wrong(rows, way, "RIGHT"):
            found.append(f"{way}: {wrong} rounds had a flag before its bytes")
        if any(row["late"] for row in rows if row["way"] == way):
            found.append(f"{way}: a round did not come")
    return found


def blind_ways(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the ways on which the test shows nothing, a line each."""
    return [
        f"{way}: nothing went wrong when broken on purpose: the test is blind"
        for way in dict.fromkeys(row["way"] for row in rows)
        if not _wrong(rows, way, "BROKEN")
    ]


def _wrong(rows: Sequence[dict[str, Any]], way: str, variant: str) -> int:
    of_variant = [row for row in rows if (row["way"], row["variant"]) == (way, variant)]
    return sum(int(row["wrong rounds"]) for row in of_variant)


if __name__ == "__main__":
    main()
