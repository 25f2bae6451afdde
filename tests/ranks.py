"""Runs a function on several local processes that form one gloo group; used by every multi-process test."""

from __future__ import annotations

import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing as mp


def _child(
    fn: Callable[..., Any], rank: int, world_size: int, args: tuple[Any, ...], store: str, reports: Any
) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), OMP_NUM_THREADS="1"
    )
    torch.set_num_threads(1)
    try:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size
        )
        # Pickled by value: the queue itself would pass tensors as handles that die with this process.
        result = pickle.dumps(fn(rank, *args))
    except BaseException:
        reports.put((rank, time.monotonic(), traceback.format_exc(), None))
        # Peers may wait for this rank for ever, so leave at once; the parent ends them.
        reports.close()
        reports.join_thread()
        os._exit(1)
    reports.put((rank, time.monotonic(), None, result))
    # All ranks leave together: a rank that closes its sockets early fails the others' last collective.
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120.0
) -> list[Any]:
    """Run `fn(rank, *args)` on `world_size` local processes of one gloo group.

    Args:
        fn: A module-level function (the processes are spawned).
        world_size: Number of processes.
        args: Passed on to every rank; must pickle.
        timeout_s: Limit for all ranks together.

    Returns:
        What each rank returned, by rank. Must pickle.

    Raises:
        RuntimeError: A rank failed. Holds every rank's traceback, the first failure first.
        TimeoutError: Some rank still ran after `timeout_s` seconds. All ranks are killed.
    """
    context = mp.get_context("spawn")
    reports = context.Queue()
    deadline = time.monotonic() + timeout_s
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(
                target=_child, args=(fn, rank, world_size, args, f"{folder}/store", reports), daemon=False
            )
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        results: dict[int, Any] = {}
        failures: list[tuple[float, int, str]] = []
        try:
            while len(results) < world_size and not failures:
                if time.monotonic() > deadline:
                    late = sorted(set(range(world_size)) - set(results))
                    raise TimeoutError(f"ranks {late} still ran after {timeout_s} s")
                _collect(reports, results, failures, wait_s=0.2)
                for rank, process in enumerate(processes):
                    # A child's report can still be in the pipe when it is already dead: look once more.
                    if process.exitcode not in (None, 0) and rank not in results:
                        _collect(reports, results, failures, wait_s=0.5)
                        if not any(rank == failed for _, failed, _ in failures):
                            text = f"rank {rank} died with exit code {process.exitcode}"
                            failures.append((time.monotonic(), rank, text))
            if failures:
                # Give the peers a moment to report what they saw: it often explains the first failure.
                _collect(reports, results, failures, wait_s=1.0)
                texts = [f"--- rank {rank}\n{text}" for _, rank, text in sorted(failures)]
                raise RuntimeError("\n".join(texts))
            for process in processes:
                process.join(max(0.0, deadline - time.monotonic()))
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
    return [results[rank] for rank in range(world_size)]


def _collect(
    reports: Any, results: dict[int, Any], failures: list[tuple[float, int, str]], wait_s: float
) -> None:
    """Move waiting reports into `results` and `failures`; waits up to `wait_s` for the first."""
    import queue

    timeout_s = wait_s
    while True:
        try:
            rank, when, failure, result = reports.get(timeout=timeout_s)
        except queue.Empty:
            return
        timeout_s = 0.05
        if failure is None:
            results[rank] = pickle.loads(result)
        else:
            failures.append((when, rank, failure))
