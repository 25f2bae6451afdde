"""Litmus tests of a flag behind bulk stores, and of what is broken on purpose.

    python -m tests.gpu.first_run.litmus [--gpus N] [--rounds N] [--json FILE]

Status 0 if no round of the right variant had a wrong word, and rounds of the broken one had.
Between GPUs where there are several, otherwise within the memory of one (`litmus.cu`).
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

from tests.gpu.first_run.environment import ROOT

SOURCE = Path(__file__).with_name("litmus.cu")
ROUNDS = 1_000_000
"""Of all sizes and both variants of noise together."""

SIZES = (16, 4 << 10, 64 << 10, 1 << 20)
"""Bytes behind a flag."""

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
    found = problems(rows)
    sys.stderr.write("".join(f"{problem}\n" for problem in found))
    sys.exit(bool(found))


def compile_command(architecture: str) -> list[str]:
    """Return how the program is built, but for where it goes."""
    return [
        *("nvcc", "-std=c++17", "-O2", f"-arch={architecture}", "--Werror=all-warnings"),
        *(f"-I{ROOT / 'csrc' / folder}" for folder in ("include", "cuda")),
        str(SOURCE),
    ]


def variants(gpus: int, *, rounds: int) -> list[dict[str, Any]]:
    """Return what is run: ways, sizes, right and broken, quiet and busy.

    Args:
        gpus: GPUs to use.
        rounds: Of each way and of right and broken, split over sizes, noise and pairs.
    """
    last = gpus - 1
    ways = {"direct": (0, -1, last), "relay": (0, last // 2 + (gpus > 2), last)}
    each = max(rounds // (len(SIZES) * 2 * PAIRS), 1)
    return [
        {
            "way": way,
            "devices": devices,
            "bytes": num_bytes,
            "rounds": each,
            "variant": variant,
            "noise": noise,
        }
        for way, devices in ways.items()
        for variant in ("RIGHT", "BROKEN")
        for num_bytes in SIZES
        for noise in ("QUIET", "BUSY")
    ]


def run(program: Path, row: dict[str, Any]) -> dict[str, int]:
    """Run one variant; return how many rounds had a wrong word and how many pairs gave up."""
    words = [*row["devices"], row["bytes"], row["rounds"], PAIRS, row["variant"], row["noise"]]
    done = subprocess.run(
        [str(program), *map(str, words)], check=True, capture_output=True, text=True
    )
    found: dict[str, int] = json.loads(done.stdout)
    return found


def problems(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return what the rows show that should not be, a line each."""
    found = []
    for way in dict.fromkeys(row["way"] for row in rows):
        of_way = [row for row in rows if row["way"] == way]
        wrong = {
            variant: sum(row["wrong rounds"] for row in of_way if row["variant"] == variant)
            for variant in ("RIGHT", "BROKEN")
        }
        if wrong["RIGHT"]:
            found.append(f"{way}: {wrong['RIGHT']} rounds had a flag before its bytes")
        if not wrong["BROKEN"]:
            found.append(f"{way}: nothing went wrong when broken on purpose: the test is blind")
        if any(row["late"] for row in of_way):
            found.append(f"{way}: a round did not come")
    return found


if __name__ == "__main__":
    main()
