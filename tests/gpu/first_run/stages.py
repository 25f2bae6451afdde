"""How fast a push is with other stages, loads ahead and blocks, beside a plain copy.

    python -m tests.gpu.first_run.stages [--gpus N] [--json FILE]

The numbers are constants of csrc/cuda/push_peers.cu; here it is compiled with others
(`stages.cu`). Between GPUs where there are several, otherwise within the memory of one.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import repeat
from pathlib import Path
from typing import Any

from tests.gpu.first_run.environment import ROOT
from tests.gpu.first_run.litmus import compile_command

SOURCE = Path(__file__).with_name("stages.cu")
KERNELS = ROOT / "csrc" / "cuda"

STAGES = ((4, 3), (8, 3), (8, 5), (12, 4), (16, 6))
"""Tiles of a block, and how many of them are loaded ahead."""

BLOCKS = (8, 16, 32, 64, 132)
BYTES = 44 << 20
"""Of an expert of 7168 x 2048 x 3 in FP8."""

ROUNDS = 50


def main() -> None:
    """Build, run all, print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gpus", type=int, default=1, help="GPUs to use (default: 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the rows")
    options = parser.parse_args()
    rows = []
    with ExitStack() as held, ThreadPoolExecutor() as pool:
        folders = [Path(held.enter_context(tempfile.TemporaryDirectory())) for _ in STAGES]
        programs = pool.map(build, folders, *zip(*STAGES, strict=True), repeat("native"))
        for (stages, ahead), program in zip(STAGES, [*programs], strict=True):
            for blocks in BLOCKS:
                words = [program, 0, options.gpus - 1, BYTES, ROUNDS, blocks]
                done = subprocess.run(map(str, words), check=True, capture_output=True, text=True)
                found: dict[str, Any] = json.loads(done.stdout)
                rows.append({"stages": stages, "ahead": ahead, "blocks": blocks, **found})
                print(rows[-1], flush=True)
    if options.json:
        options.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


def build(folder: Path, stages: int, ahead: int, architecture: str) -> Path:
    """Return the program with these numbers."""
    push = (KERNELS / "push_peers.cu").read_text()
    for name, value in (("kStages", stages), ("kAhead", ahead)):
        push, count = re.subn(
            rf"constexpr int {name} = \d+;", f"constexpr int {name} = {value};", push
        )
        assert count == 1, f"push_peers.cu has no {name}"
    (folder / "push_peers.cu").write_text(push)
    program = folder / "stages"
    sources = [SOURCE, folder / "push_peers.cu", KERNELS / "wait_peers.cu"]
    subprocess.run([*compile_command(architecture, *sources), "-o", str(program)], check=True)
    return program


if __name__ == "__main__":
    main()
