"""What Nsight Compute says of one solve_quota, the planner's kernel.

    python -m tests.gpu.first_run.planner_profile [--json FILE]

The load is a hard one, at the sizes of the single kernels' rows (`planner_times.py`). The whole
report is beside FILE, as `FILE.ncu-rep`, for ncu-ui.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.gpu.first_run.environment import ROOT
from tests.gpu.first_run.parts import ncu

SOLVES = """
from tests import workloads
from megatron_ext.balance.solve import solve
from tests.gpu.first_run.planner_times import SIZES

ranks, experts, slots = SIZES[-2]
load = next(iter(dict(workloads.hard_loads(ranks, experts)).values())).cuda()
for _ in range(3):
    solve(load, ep_size=ranks, slots=slots)
load.cpu()
"""
COUNTED = "regex:solve_quota"


def main() -> None:
    """Profile the last of a few solves, print all that was measured, and write it if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the rows")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(f"{options.json or Path(folder) / 'solve_quota'}.ncu-rep")
        rows = profile(ncu() or "ncu", report)
    for row in rows:
        print(row)
    if not rows:
        sys.exit("ncu measured nothing: it may lack the permission to read counters")
    if options.json:
        options.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


def profile(program: str, report: Path) -> list[dict[str, str]]:
    """Write ncu's report and return a row for each of its metrics."""
    counted = ["--set", "full", "--kernel-name", COUNTED, "--launch-skip", "2"]
    subprocess.run(
        [program, *counted, "--force-overwrite", "--export", report, sys.executable, "-c", SOLVES],
        cwd=ROOT,
        check=True,
    )
    told = subprocess.run(
        [program, "--import", report, "--page", "details", "--csv"],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return [
        {"what": line["Metric Name"], "value": line["Metric Value"], "unit": line["Metric Unit"]}
        for line in csv.DictReader(told.stdout.splitlines())
        if line.get("Metric Name")
    ]


if __name__ == "__main__":
    main()
