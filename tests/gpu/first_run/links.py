"""How fast replicas move between GPUs: transport `cuda` beside `deepep`, where DeepEP is installed.

    python -m tests.gpu.first_run.links [--ranks N] [--mb MB] [--rounds N] [--json FILE]

All ranks push one random plan's replicas again and again, and pull their gradients; slots and sums
are compared. Times are medians of whole calls on the slowest rank, with what the transport copies
or adds on the stream that waits. The rate is of the bytes that the busiest rank sends.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_ext.trainer.ranks.launch import join_ranks, launch_ranks
from megatron_ext.transport import TransportOptions, make_transport
from tests.transport.test_transports import Side, in_slots, random_transfers

TRANSPORTS = ("cuda", "deepep")

LIMIT = timedelta(seconds=60)
"""Of a wait for another rank: less than the part may last, so that an error names the rank."""


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2, help="(default: 2)")
    parser.add_argument("--mb", type=int, default=88, help="of an expert (default: 88)")
    parser.add_argument("--rounds", type=int, default=30, help="(default: 30)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the rows")
    options = parser.parse_args()
    launch_ranks(
        move, options.mb << 20, options.rounds, options.json, TRANSPORTS, num_ranks=options.ranks
    )


def move(num_bytes: int, rounds: int, file: Path | None, names: tuple[str, ...]) -> None:
    """Be one rank."""
    with join_ranks(LIMIT):
        rank = dist.get_rank()
        device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
        rows = [measure(name, num_bytes, rounds, device) for name in names]
        if rank == 0:
            for row in rows:
                print(row)
            if file is not None:
                file.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


def measure(name: str, num_bytes: int, rounds: int, device: torch.device) -> dict[str, Any]:
    """Return a row of one transport; all ranks call."""
    group, num_ranks = dist.group.WORLD, dist.get_world_size()
    try:
        transport = make_transport(name, group, device, TransportOptions())
    except (RuntimeError, ValueError) as error:  # DeepEP is not installed, or not for this device
        return {"transport": name, "left out": str(error)}
    side = Side(transport, group, ((num_bytes // 4096, 1024),), torch.float32, device)
    transfers = random_transfers(random.Random(3), num_ranks)
    side.step(transfers, 0)
    plan = in_slots(transfers, num_ranks, device=device)
    mains = [[weights[0] for weights in side.weights[side.rank]]]
    side.slot_grads[0].zero_()
    totals = [[torch.zeros_like(each) for each in mains[0]]]
    push = seconds_of(lambda: transport.push(plan, mains, side.slot_weights).wait(), rounds, device)
    pull = seconds_of(
        lambda: transport.pull_add(plan, side.slot_grads, totals, [None]).wait(), rounds, device
    )
    busiest = max(Counter(each.home_rank for each in transfers).values())
    gigabytes = busiest * mains[0][0].nbytes / 1e9
    return {
        "transport": name,
        "ranks": num_ranks,
        "replicas": len(transfers),
        "busiest rank sends": busiest,
        "push ms": 1e3 * push,
        "push GB/s": gigabytes / push,
        "pull ms": 1e3 * pull,
        "pull GB/s": gigabytes / pull,
    }


def seconds_of(call: Callable[[], None], rounds: int, device: torch.device) -> float:
    """Return the median time of a call on the slowest rank; all ranks call."""
    times = []
    for _ in range(rounds + 3):
        _wait_for(device)
        dist.barrier()
        started = time.perf_counter()
        call()
        _wait_for(device)
        took = torch.tensor(time.perf_counter() - started, device=device)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        times.append(float(took))
    return statistics.median(times[3:])


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
