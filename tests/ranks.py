"""Runs a function on several local processes that form one gloo group.

Starting a process and importing Megatron takes longer than most tests. So processes are forked from
a server that has imported it, and kept for the next call with as many ranks. Every call gets a new
process group; after a failure the processes are ended. A function that changes global state must
undo it.
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import gc
import itertools
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.multiprocessing as mp

from megatron_ext.trainer.ranks.processes import die_with


class _Rank:
    """One kept process and the pipe to it."""

    def __init__(self, rank: int, world_size: int) -> None:
        # CUDA does not survive a fork.
        context = mp.get_context("spawn" if torch.cuda.is_available() else "forkserver")
        context.set_forkserver_preload(_IMPORTED)
        self.pipe, theirs = context.Pipe()
        # A forked process has the environment of the server's start.
        arguments = (rank, world_size, dict(os.environ), theirs)
        # Not a daemon: Megatron's checkpoint writers are processes of their own.
        self.process = context.Process(target=_serve, args=arguments, daemon=False)
        self.process.start()
        theirs.close()


_IMPORTED = [
    *("tests.gpt", "megatron_ext.trainer.train"),
    "pytest",  # by every file of tests
    "torch._dynamo",  # by every optimizer
]
"""Modules that ranks find imported. Each garbage collection goes through what they import later."""

_kept: dict[int, list[_Rank]] = {}

_calls = itertools.count()

_SAY_WHERE = signal.SIGUSR2
"""Lets a rank write the stacks of its threads to stderr."""

after_call: list[Callable[[], None]] = []
"""What a rank runs after each call; for modules that keep state of a process group."""


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120.0
) -> list[Any]:
    """Run `fn(rank, *args)` on `world_size` local processes of one gloo group.

    Args:
        fn: A module-level function.
        world_size: Number of processes.
        args: Passed on to every rank; must pickle.
        timeout_s: Limit for all ranks together.

    Returns:
        What each rank returned, by rank. Must pickle.

    Raises:
        RuntimeError: A rank failed. Holds every rank's traceback, the first failure first.
        TimeoutError: Some rank still ran after `timeout_s` seconds. All ranks write to stderr where
            they are, and are killed.
    """
    deadline = time.monotonic() + timeout_s
    ranks = _kept.pop(world_size, None) or [_Rank(rank, world_size) for rank in range(world_size)]
    results: dict[int, Any] = {}
    failures: list[tuple[float, int, str]] = []
    try:
        # A file for each call: ranks meet without ports. The folder stays until all ranks are gone.
        # A rank leaves its group after its result, and without the file that would not end.
        store = f"{_stores().name}/{next(_calls)}"
        for rank in ranks:
            rank.pipe.send_bytes(pickle.dumps((store, fn, args)))
        while len(results) < world_size and not failures:
            if time.monotonic() > deadline:
                late = sorted(set(range(world_size)) - set(results))
                for rank in late:
                    os.kill(ranks[rank].process.pid, _SAY_WHERE)
                time.sleep(1.0)
                raise TimeoutError(f"ranks {late} still ran after {timeout_s} s")
            _collect(ranks, results, failures, wait_s=0.2)
        if failures:
            # Give the peers a moment to report what they saw: it often explains the first
            # failure.
            deadline = time.monotonic() + 1.0
            while len(results) + len(failures) < world_size and time.monotonic() < deadline:
                _collect(ranks, results, failures, wait_s=0.1)
            texts = [f"--- rank {rank}\n{text}" for _, rank, text in sorted(failures)]
            raise RuntimeError("\n".join(texts))
    except BaseException:
        _end(ranks)
        raise
    _kept[world_size] = ranks
    return [results[rank] for rank in range(world_size)]


@functools.cache
def _stores() -> tempfile.TemporaryDirectory[str]:
    """Return the folder of this process's calls."""
    return tempfile.TemporaryDirectory(ignore_cleanup_errors=True)


def _collect(
    ranks: list[_Rank],
    results: dict[int, Any],
    failures: list[tuple[float, int, str]],
    wait_s: float,
) -> None:
    """Move reports into `results` and `failures`; waits up to `wait_s` for the first."""
    failed = {rank for _, rank, _ in failures}
    waiting = {
        ranks[rank].pipe: rank
        for rank in range(len(ranks))
        if rank not in results and rank not in failed
    }
    for pipe in wait(list(waiting), wait_s):
        rank = waiting[pipe]  # type: ignore[index]
        try:
            when, failure, result = pickle.loads(ranks[rank].pipe.recv_bytes())
        except EOFError:
            ranks[rank].process.join()
            code = ranks[rank].process.exitcode
            failures.append((time.monotonic(), rank, f"rank {rank} died with exit code {code}"))
            continue
        if failure is None:
            results[rank] = result
        else:
            failures.append((when, rank, failure))


def _end(ranks: list[_Rank]) -> None:
    for rank in ranks:
        # With the processes that it started itself: Megatron's checkpoint writers would stay.
        with suppress(ProcessLookupError):
            os.killpg(rank.process.pid, signal.SIGKILL)
        rank.process.kill()
        rank.process.join()
        rank.pipe.close()


@atexit.register
def _end_all() -> None:
    while _kept:
        _end(_kept.popitem()[1])


def _serve(rank: int, world_size: int, environment: dict[str, str], pipe: Connection) -> None:
    """Run calls until the pipe closes. Leads a process group of its own (see `_end`)."""
    os.setsid()
    faulthandler.register(_SAY_WHERE)
    die_with(os.getppid())  # Also in the middle of a call, when nobody reads the pipe.
    os.environ.clear()
    os.environ.update(environment)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), OMP_NUM_THREADS="1"
    )
    torch.set_num_threads(1)
    gc.freeze()  # What is imported by now stays: no need to look through it after each call.
    while True:
        try:
            call = pipe.recv_bytes()
        except EOFError:
            return
        try:
            store, fn, args = pickle.loads(call)
            torch.distributed.init_process_group(
                "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size
            )
            # Plain pickle: the pipe's own would pass tensors as handles that die with this process.
            result = fn(rank, *args)
            pipe.send_bytes(pickle.dumps((time.monotonic(), None, result)))
            # All ranks leave together: one that closes its sockets early fails the others' last
            # collective.
            torch.distributed.barrier()
            torch.distributed.destroy_process_group()
            # What still refers to groups of this call keeps their threads alive.
            result = None
            for clean_up in after_call:
                clean_up()
            gc.collect()
        except BaseException:
            pipe.send_bytes(pickle.dumps((time.monotonic(), traceback.format_exc(), None)))
            # Peers may wait for this rank for ever, so leave at once; the parent ends them.
            os._exit(1)
