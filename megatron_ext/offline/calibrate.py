"""This machine's constants for `simulate`, measured on ranks that work at the same time.

On CPUs, with as many ranks as there are cores but two at least, one thread each, as a training
here has them. Other programs may use the machine too: computation is counted in processor time, the
median of the rounds, and transfers, which wait, in the time of the fastest round. Both are the
slowest rank's. So what is measured is the machine as it is when nobody else uses it.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.functional import gelu

from megatron_ext.config import DataConfig, ModelConfig
from megatron_ext.offline.hardware import Hardware

ROUNDS = 15
"""Of each measurement; the first two are for warming up and not counted."""
_WARMUP = 2

_SQUARE = 1024
"""Side of the matrices whose product gives the peak."""
_COPIED_BYTES = 32 << 20
"""Moved at a time: more than caches hold."""
_EXPERTS = 8
"""Of a layer on a rank."""
_DEFAULTS = ModelConfig()


def calibrate(name: str, *, num_ranks: int | None = None) -> Hardware:
    """Measure this machine.

    Args:
        name: Of the hardware.
        num_ranks: Ranks that work at the same time; by default one for each core, two at least.

    Raises:
        RuntimeError: There is a GPU; they are not measured yet.
        SystemExit: With status 1 if a rank failed.
    """
    from megatron_ext.train import launch_ranks

    if torch.cuda.is_available():
        raise RuntimeError("--calibrate measures CPU ranks only, and this machine has a GPU")
    cores = len(os.sched_getaffinity(0))
    num_ranks = max(2, cores) if num_ranks is None else num_ranks
    with tempfile.TemporaryDirectory() as folder:
        launch_ranks(_measure, folder, num_ranks=num_ranks)
        measured = json.loads((Path(folder) / "measured.json").read_text())
    summary = f"{num_ranks} CPU ranks at a time on {cores} cores, one thread each"
    rate = "measured by doctor --calibrate: "
    experts = f"{_DEFAULTS.hidden_size} x {_DEFAULTS.expert_hidden_size}"
    sources = {
        "domain_ranks": "ranks of this machine that were measured",
        "memory_bytes": "physical memory / ranks",
        "peak_flops_per_s": f"{rate}float32 product of {_SQUARE} x {_SQUARE}, or the next",
        "gemm_efficiency": f"{rate}forward and backward of {_EXPERTS} experts of {experts}, / peak",
        "memory_bandwidth": f"{rate}sums of new tensors",
        "activation_bandwidth": f"{rate}GELU forward and backward",
        "token_bandwidth": f"{rate}all-to-all over gloo",
        "weight_bandwidth": f"{rate}copies into shared memory",
        "outer_bandwidth": "that of all-to-all: nothing outside was measured",
        "overlap": "ranks of a CPU copy themselves: nothing hides",
        "relay_threshold": "this package's",
        "solve_us": f"{rate}Zipf 0.8, 64 ranks, 256 experts, 2 slots, on one rank",
    }
    return Hardware(
        name=name,
        summary=summary,
        sources=sources,
        domain_ranks=num_ranks,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / num_ranks,
        outer_bandwidth=measured["token_bandwidth"],
        overlap=0.0,
        relay_threshold=_relay_threshold(),
        solve_us=measured.pop("solve_us"),
        **measured,
    )


def _relay_threshold() -> int:
    from megatron_ext.transport.one_sided import RELAY_THRESHOLD

    return RELAY_THRESHOLD


def _measure(folder: str) -> None:
    """Measure on one rank of a launch; rank 0 writes what the slowest took."""
    from megatron_ext.train import join_ranks

    with join_ranks():
        expert_rate = _expert_rate()
        peak = max(_matrix_rate(), expert_rate)
        measured = {
            "peak_flops_per_s": peak,
            "gemm_efficiency": expert_rate / peak,
            "memory_bandwidth": _memory_bandwidth(),
            "activation_bandwidth": _activation_bandwidth(),
            "token_bandwidth": _token_bandwidth(),
            "weight_bandwidth": _weight_bandwidth(Path(folder)),
        }
        if dist.get_rank() == 0:
            rounded = {name: float(f"{value:.4g}") for name, value in measured.items()}
            report = rounded | {"solve_us": _solve_us()}
            (Path(folder) / "measured.json").write_text(json.dumps(report))
        dist.barrier()


def _computing_s(work: Callable[[], object]) -> float:
    """Processor seconds of a round, in the median, while all ranks do the same."""
    times = []
    dist.barrier()
    for _ in range(ROUNDS):
        started = time.process_time()
        work()
        times.append(time.process_time() - started)
    return _slowest(statistics.median(times[_WARMUP:]))


def _transfer_s(work: Callable[[], object]) -> float:
    """Seconds of the fastest round, which all ranks begin together."""
    times = []
    for _ in range(ROUNDS):
        dist.barrier()
        started = time.perf_counter()
        work()
        times.append(_slowest(time.perf_counter() - started))
    return min(times)


def _slowest(elapsed_s: float) -> float:
    slowest = torch.tensor(elapsed_s, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def _matrix_rate() -> float:
    left, right = torch.randn(2, _SQUARE, _SQUARE)
    return 2 * _SQUARE**3 / _computing_s(lambda: left @ right)


def _expert_rate() -> float:
    """FLOPs per second of the products of a layer: all experts forward, then all backward.

    With that much in between, no expert finds its weights or tokens in a cache, as in a training.
    """
    hidden, width = _DEFAULTS.hidden_size, _DEFAULTS.expert_hidden_size
    num_tokens = DataConfig().sequence_length * DataConfig().micro_batch_size
    tokens = torch.randn(_EXPERTS, num_tokens, hidden, requires_grad=True)
    first = [torch.randn(width, hidden, requires_grad=True) for _ in range(_EXPERTS)]
    second = [torch.randn(hidden, width, requires_grad=True) for _ in range(_EXPERTS)]

    def work() -> None:
        experts = zip(tokens.unbind(), first, second, strict=True)
        outputs = torch.stack([mine @ into.T @ out.T for mine, into, out in experts])
        outputs.backward(outputs.detach())

    return 3 * 2 * _EXPERTS * num_tokens * 2 * hidden * width / _computing_s(work)


def _memory_bandwidth() -> float:
    """Bytes per second of a sum: two reads and a write."""
    one = torch.ones(_COPIED_BYTES // 4)
    return 3 * _COPIED_BYTES / _computing_s(lambda: one + one)


def _activation_bandwidth() -> float:
    """Bytes per second of GELU, of which forward is a third of the bytes, as the model has it."""
    inside = torch.randn(_COPIED_BYTES // 4, requires_grad=True)

    def work() -> None:
        output = gelu(inside)
        output.backward(output.detach())

    return 3 * 2 * _COPIED_BYTES / _computing_s(work)


def _token_bandwidth() -> float:
    """Bytes per second that a rank sends to others."""
    ranks = dist.get_world_size()
    sent = torch.ones(ranks, _COPIED_BYTES // 4 // ranks)
    received = torch.empty_like(sent)
    num_bytes = _COPIED_BYTES * (ranks - 1) / ranks
    return num_bytes / _transfer_s(lambda: dist.all_to_all_single(received, sent))


def _weight_bandwidth(folder: Path) -> float:
    """Bytes per second that a rank copies into memory that a neighbour reads."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    size = _COPIED_BYTES // 4
    shared = Path("/dev/shm") if Path("/dev/shm").is_dir() else folder
    names = [shared / f"{folder.name}.{each}" for each in range(ranks)]
    mine = torch.from_file(str(names[rank]), shared=True, size=size).fill_(0)
    dist.barrier()
    try:
        theirs = torch.from_file(str(names[(rank + 1) % ranks]), shared=True, size=size)
        weights = torch.ones(size)
        elapsed_s = _transfer_s(lambda: theirs.copy_(weights))
    finally:
        names[rank].unlink()
    assert mine[-1] == 1, "what a neighbour copies here arrives here"
    return _COPIED_BYTES / elapsed_s


def _solve_us() -> dict[str, float]:
    """Microseconds of a plan for 64 ranks and 256 experts, of strategies that need no more."""
    from megatron_ext.balance.solve import solve
    from megatron_ext.balance.strategies import STRATEGIES

    generator = np.random.default_rng(0)
    popularity = np.arange(1, 257) ** -0.8
    generator.shuffle(popularity)
    load = torch.from_numpy(
        generator.multinomial(8192 * 8, popularity / popularity.sum(), size=64).astype(np.int64)
    )
    times_us = {}
    for name, strategy in STRATEGIES.items():
        if strategy.solve is None or name in ("none", "time") or strategy.package:
            continue
        times = []
        for _ in range(ROUNDS):
            started = time.process_time()
            solve(load, ep_size=64, strategy=name)
            times.append(time.process_time() - started)
        times_us[name] = float(f"{1e6 * statistics.median(times[_WARMUP:]):.4g}")
    return times_us
