"""Times of a plan, and of a plan with a rank's whole routing, by replay of a captured graph.

    python -m tests.gpu.first_run.planner_times [--json FILE]

A time is the device's, of one replay; a load's is the median of `REPEATS`. Loads are those that
planners may stumble over (`tests.workloads.hard_loads`).
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_ext.balance.plan import share_plan
from megatron_ext.balance.reroute import reroute
from megatron_ext.balance.solve import solve
from tests import workloads

SIZES = ((8, 64, 2), (32, 256, 2), (64, 256, 1), (64, 256, 2), (72, 288, 2))
"""Ranks, experts, slots."""

REPEATS = 9
TOKENS, TOP_K = 8192, 8


def main() -> None:
    """Measure, print, and write the rows if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the rows")
    options = parser.parse_args()
    rows = [row for sizes in SIZES for row in measure(*sizes)]
    for row in rows:
        print(row)
    if options.json:
        options.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


def measure(ranks: int, experts: int, slots: int) -> Iterator[dict[str, Any]]:
    """Yield a row for the plan and one for the routing."""
    loads = dict(workloads.hard_loads(ranks, experts))
    routed = workloads.routing_map(TOKENS, experts, TOP_K).cuda()
    probs = (torch.rand(routed.shape, device="cuda") + 0.1) * routed
    load = next(iter(loads.values())).cuda()

    def plan() -> None:
        solve(load, ep_size=ranks, slots=slots)

    def route() -> None:
        load[0] = routed.sum(0)
        of_load = solve(load, ep_size=ranks, slots=slots)
        shares = share_plan(0, load, of_load)
        reroute(probs, routed, shares, TOP_K, of_load.layout.num_physical)

    for name, call in (("plan", plan), ("plan and routing", route)):
        replay = capture(call)
        times = {}
        for load_name, of_load in loads.items():
            load.copy_(of_load)
            times[load_name] = statistics.median(time_us(replay) for _ in range(REPEATS))
        worst = max(times, key=lambda load_name: times[load_name])
        yield {
            "what": name,
            "EP": ranks,
            "experts": experts,
            "slots": slots,
            "p50 us": float(np.percentile([*times.values()], 50)),
            "p99 us": float(np.percentile([*times.values()], 99)),
            "max us": times[worst],
            "worst load": worst,
        }


def capture(call: Callable[[], None]) -> Callable[[], None]:
    """Return a call that replays what `call` launches."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def time_us(call: Callable[[], None]) -> float:
    """Return the device's time of one call, in microseconds."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * float(start.elapsed_time(end))


if __name__ == "__main__":
    main()
