"""Replicas move while NCCL does, with ranks that come late at random.

    python -m tests.gpu.first_run.beside [--ranks N] [--seconds S] [--json FILE]

All ranks push and pull random replicas, in the memory of one GPU a rank or of one that they share
(`one_gpu.py`), and compare every value; beside it an all-to-all and a reduce-scatter run all the
time, each of a group of its own, as in training. Before each step ranks sleep, most of them not,
some up to a second. A wait that lasts longer than `LIMIT` ends with an error that names the rank.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.trainer.ranks.launch import join_ranks
from megatron_ext.transport import TransportOptions, make_transport
from tests.gpu.one_gpu import launch
from tests.transport.test_transports import LARGE, SHAPES, Side, random_transfers

LIMIT = timedelta(seconds=60)
"""Of a wait for another rank, in a kernel or a collective: less than the part may last."""

STEPS_BETWEEN_LOOKS = 10
"""At the clock, which all ranks must read alike."""

WORDS_A_RANK = 1 << 20
"""Float32 that a rank gives every other one in a collective."""


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2, help="(default: 2)")
    parser.add_argument("--seconds", type=float, default=60.0, help="(default: 60)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the row")
    options = parser.parse_args()
    launch(move, options.seconds, options.json, num_ranks=options.ranks)


def move(seconds: float, file: Path | None) -> None:
    """Be one rank."""
    with join_ranks(LIMIT):
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        name, device = "shared_memory", torch.device("cpu")
        if torch.cuda.is_available():
            name, device = "cuda", torch.device("cuda", torch.cuda.current_device())
        sides = [
            Side(
                make_transport(name, dist.group.WORLD, device, TransportOptions()),
                dist.group.WORLD,
                shapes,
                torch.float32,
                device,
            )
            for shapes in (SHAPES, LARGE)
        ]
        # Collectives of one group run one after the other.
        beside = Collectives(*(dist.new_group(timeout=LIMIT) for _ in range(2)), device)
        plans, sleeps = random.Random(5), random.Random(rank)
        started, steps = time.monotonic(), 0
        while is_before(started + seconds, device):
            for _ in range(STEPS_BETWEEN_LOOKS):
                time.sleep(sleeps.choice((0, 0, 0, 0, 0.001, 0.01, 0.1, 1)))
                beside.start(steps)
                for side in sides:
                    side.step(random_transfers(plans, num_ranks), steps)
                beside.check(steps)
                steps += 1
        transport = type(sides[0].transport).__name__
        if rank == 0:
            row = {"ranks": num_ranks, "transport": transport, "steps": steps, "seconds": seconds}
            print(row)
            if file is not None:
                file.write_text(json.dumps({"rows": [row]}, indent=1) + "\n")


class Collectives:
    """An all-to-all and a reduce-scatter, each of a group, that run beside other work."""

    def __init__(
        self, exchanging: dist.ProcessGroup, summing: dist.ProcessGroup, device: torch.device
    ) -> None:
        self._exchanging, self._summing = exchanging, summing
        self._ranks = exchanging.size()
        self._sent = torch.empty(self._ranks, WORDS_A_RANK, device=device)
        self._received = torch.empty_like(self._sent)
        self._summed = torch.empty(WORDS_A_RANK, device=device)
        self._running: list[dist.Work] = []

    def start(self, step: int) -> None:
        """Start both; they read what is the same on no two ranks and in no two steps."""
        self._sent.fill_(self._exchanging.rank() + step % 100)
        self._running = [
            dist.all_to_all_single(
                self._received, self._sent, group=self._exchanging, async_op=True
            ),
            dist.reduce_scatter_tensor(
                self._summed, self._sent.view(-1), group=self._summing, async_op=True
            ),
        ]

    def check(self, step: int) -> None:
        """Wait for both and compare what came."""
        for work in self._running:
            work.wait()
        values = torch.arange(self._ranks, device=self._sent.device) + step % 100
        assert _all_equal(self._received, values[:, None]), f"all-to-all, step {step}"
        assert _all_equal(self._summed, values.sum()), f"reduce-scatter, step {step}"


def is_before(end: float, device: torch.device) -> bool:
    """Return whether rank 0's clock says so, to all ranks."""
    answer = torch.tensor(int(time.monotonic() < end), device=device)
    dist.broadcast(answer, 0)
    return bool(answer.item())


def _all_equal(values: Tensor, expected: Tensor) -> bool:
    return bool((values == expected).all())


if __name__ == "__main__":
    main()
