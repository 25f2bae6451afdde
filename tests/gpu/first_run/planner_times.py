"""Times of a plan, and of a plan with a rank's whole routing, by replay of a captured graph.

    python -m tests.gpu.first_run.planner_times [--json FILE]

A time is the device's, of one replay; a load's is the median of `REPEATS`. Loads are those that
planners may stumble over (`tests.workloads.hard_loads`). `warm` replays follow each other. Before a
`cold` one, as between two layers of a model, a large product runs on all multiprocessors, and more
is written than the L2 cache holds. Each kernel of a routing has a row of its own.
"""

from __future__ import annotations

import argparse
import itertools
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

COLD_BYTES = 128 << 20
"""More than the L2 cache of any GPU so far."""

HELD_CYCLES = 200_000
"""The device is held up so long, 0.1 ms, before what is timed: the host must not be timed, too."""

REPEATS = 9
TOKENS, TOP_K = 8192, 8


def main() -> None:
    """Measure, print, and write the rows if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the rows")
    options = parser.parse_args()
    rows = [row for sizes in SIZES for row in measure(*sizes)] + kernels(*SIZES[-2])
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
        load[0], marks = torch.ops.megatron_ext.count_load(routed)
        of_load = solve(load, ep_size=ranks, slots=slots)
        shares = share_plan(0, load, of_load)
        reroute(probs, routed, shares, TOP_K, of_load.layout.num_physical, marks=marks)

    replays = {"plan": capture(plan), "plan and routing": capture(route)}
    for name, before in itertools.product(replays, (None, cool_down())):
        times = {}
        for load_name, of_load in loads.items():
            load.copy_(of_load)
            times[load_name] = statistics.median(
                time_us(replays[name], before) for _ in range(REPEATS)
            )
        worst = max(times, key=lambda load_name: times[load_name])
        yield {
            "what": name,
            "caches": "warm" if before is None else "cold",
            "EP": ranks,
            "experts": experts,
            "slots": slots,
            "p50 us": float(np.percentile([*times.values()], 50)),
            "p99 us": float(np.percentile([*times.values()], 99)),
            "max us": times[worst],
            "worst load": worst,
        }


def kernels(ranks: int, experts: int, slots: int) -> list[dict[str, Any]]:
    """Return a row for each kernel of one plan and routing, in their order."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    load = next(iter(dict(workloads.hard_loads(ranks, experts)).values())).cuda()
    routed = workloads.routing_map(TOKENS, experts, TOP_K).cuda()
    probs = (torch.rand(routed.shape, device="cuda") + 0.1) * routed

    def route() -> None:
        load[0], marks = torch.ops.megatron_ext.count_load(routed)
        plan = solve(load, ep_size=ranks, slots=slots)
        shares = share_plan(0, load, plan)
        reroute(probs, routed, shares, TOP_K, plan.layout.num_physical, marks=marks)

    route()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        route()
        torch.cuda.synchronize()
    found = [event for event in profiled.events() if event.device_type == DeviceType.CUDA]
    found.sort(key=lambda event: event.time_range.start)
    of_layer = {"EP": ranks, "experts": experts, "slots": slots}
    return [
        {"what": f"kernel {event.name[:60]}", **of_layer, "p50 us": event.time_range.elapsed_us()}
        for event in found
    ]


def cool_down() -> Callable[[], None]:
    """Return a call that leaves nothing of the planner in caches of code and data."""
    written = torch.empty(COLD_BYTES, dtype=torch.uint8, device="cuda")
    factor = torch.rand(4096, 4096, device="cuda", dtype=torch.bfloat16)

    def call() -> None:
        factor @ factor
        written.zero_()

    return call


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


def time_us(call: Callable[[], None], before: Callable[[], None] | None = None) -> float:
    """Return the device's time of one call, in microseconds; `before` runs in front of it."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if before is not None:
        before()
    torch.cuda._sleep(HELD_CYCLES)
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * float(start.elapsed_time(end))


if __name__ == "__main__":
    main()
