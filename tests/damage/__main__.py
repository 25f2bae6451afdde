"""Calls commands with damaged files, and says how they ended: `python -m tests.damage --help`."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from megatron_ext.files.tables import text_table
from tests.damage.tries import peak_bytes, table, tries


def main() -> int:
    """Damage files; return 1 if a command did not refuse or accept one as it should."""
    parser = argparse.ArgumentParser(prog="python -m tests.damage", description=__doc__)
    parser.add_argument("--tries", type=int, default=5000, help="damaged files (5000)")
    parser.add_argument("--seed", type=int, default=0, help="of what is damaged how (0)")
    parser.add_argument(
        "--hugging-face",
        action="store_true",
        help="what import-hf and export-hf read; needs Python 3.12 with Megatron-Bridge",
    )
    arguments = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    found = []
    damage = tries
    if arguments.hugging_face:
        from tests.damage.hub import hub_tries as damage
    with tempfile.TemporaryDirectory() as folder:
        for one in damage(Path(folder), arguments.tries, arguments.seed, limit_s=60):
            found.append(one)
            if one.is_fault:
                print(one, flush=True)
    print(text_table(*table(found)))
    slowest = max(found, key=lambda one: one.seconds)
    print(f"slowest: {slowest.seconds:.1f} s, {slowest.words}, {slowest.file}: {slowest.kind}")
    print(f"most memory of the process: {peak_bytes() / 1e9:.1f} GB")
    return 1 if any(one.is_fault for one in found) else 0


if __name__ == "__main__":
    sys.exit(main())
