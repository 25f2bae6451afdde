"""The ranks of one machine: started, watched, told to stop, started again.

Ranks of one machine need no network to find each other: they meet in a file without a name that
only processes of the same user can open. Nothing of a launch listens on anything but loopback,
and nothing is left of it, however it ends.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing import connection, get_context, resource_tracker
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from megatron_ext import gloo_peers
from megatron_ext.arguments import WRONG_USAGE
from megatron_ext.config import ConfigError
from megatron_ext.cpu_platform import enable_cpu_platform
from megatron_ext.files.whole import NO_ROOM
from megatron_ext.trainer.logs.rank_logs import LOG_ONLY
from megatron_ext.trainer.ranks.addresses import interface_towards
from megatron_ext.trainer.ranks.processes import (
    TORCHRUN,
    MemoryKills,
    call_with,
    die_with_launcher,
    how_it_failed,
)
from megatron_ext.trainer.ranks.signals import (
    ENDED_AT_ONCE,
    STOP_SIGNALS,
    STOPS_SOON,
    Stopped,
    can_be_told,
    ends_at_once,
    exit_status,
    nothing_to_stop,
)

logger = logging.getLogger(__name__)

LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Environment of ranks of one machine, where it is not set already: where libraries listen."""

LAST_WORDS_S = 2.0
"""Seconds that ranks have to report a rank that failed, before they are ended."""

NO_RESTART = 3
"""Exit status of ranks whose run starting again would not mend; a rank has said why."""

_FINAL = (WRONG_USAGE, NO_RESTART)

_POLL_S = 0.2
"""Seconds after which the launcher notices a signal at the latest."""

_store: str | None = None
"""In a rank that `launch_ranks` started: the file in which the ranks meet."""


@dataclass(frozen=True)
class _Failure:
    """A rank that ended and should not have."""

    rank: int
    exitcode: int
    """Exit status, or minus the signal that ended it."""


def launch_ranks(
    function: Callable[..., None], *args: Any, num_ranks: int, restarts: int = 0
) -> None:
    """Run `function(*args)` on ranks of this machine and wait for them.

    The function is of a module and begins with `join_ranks()`; its arguments must pickle. New ranks
    are started `restarts` times after a rank failed. A signal that asks to stop goes on to the
    ranks if all of them note it (`StopRequest`); else, and at a second one (`ends_at_once`), they
    are ended.

    Raises:
        SystemExit: With status 1 if a rank failed, with 2 if it was because of a setting (the rank
            has printed why), and with 128 + the signal's number if a signal ended the ranks.
    """
    call = partial(function, *args)
    kills = MemoryKills()
    with _noted_signals() as noted:
        failure = _attempt(call, num_ranks, noted)
        for restart in range(1, restarts + 1):
            if failure is None or failure.exitcode in _FINAL or noted:
                break
            when = time.strftime("%Y-%m-%d %H:%M:%S")
            why = how_it_failed(failure.rank, failure.exitcode, kills)
            logger.warning("restart %d of %d at %s: %s", restart, restarts, when, why)
            failure = _attempt(call, num_ranks, noted)
    if failure is not None:
        if failure.exitcode != NO_RESTART:
            said = how_it_failed(failure.rank, failure.exitcode, kills)
            sys.stderr.write(f"error: {said}\n")
        raise SystemExit(WRONG_USAGE if failure.exitcode == WRONG_USAGE else 1)


@contextmanager
def _noted_signals() -> Iterator[list[signal.Signals]]:
    """Note the signals that ask to stop, in their order, but those that this process ignores."""
    noted: list[signal.Signals] = []

    def note(number: int, _: FrameType | None) -> None:
        noted.append(signal.Signals(number))

    heard = [each for each in STOP_SIGNALS if signal.getsignal(each) is not signal.SIG_IGN]
    before = {each: signal.signal(each, note) for each in heard}
    try:
        yield noted
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _attempt(
    call: Callable[[], None], num_ranks: int, noted: list[signal.Signals]
) -> _Failure | None:
    # A file in memory: ranks open it by this process's number of it, as long as this process lives.
    store = os.memfd_create("megatron_ext_store", os.MFD_CLOEXEC)
    ranks: list[BaseProcess] = []
    try:
        _start(ranks, call, num_ranks, f"/proc/{os.getpid()}/fd/{store}")
        return _watch(ranks, noted)
    finally:
        for rank in ranks:
            rank.kill()
        for rank in ranks:
            rank.join()
        os.close(store)


def _start(ranks: list[BaseProcess], call: Callable[[], None], num_ranks: int, store: str) -> None:
    # A fork has all that this process has imported, which takes seconds. CUDA does not survive it.
    context = get_context("spawn") if torch.cuda.is_available() else get_context("fork")
    # Else it starts with the first rank, and unblocks SIGINT then.
    resource_tracker.ensure_running()
    # Ranks inherit that signals wait, and what this process does with them (`_be_rank`).
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        for number in range(num_ranks):
            being_rank = partial(_be_rank, number, num_ranks, store, call)
            # Not a daemon: Megatron's checkpoint writers are processes of their own.
            rank = context.Process(target=call_with, args=(os.getpid(), pickle.dumps(being_rank)))
            rank.start()
            ranks.append(rank)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _watch(ranks: list[BaseProcess], noted: list[signal.Signals]) -> _Failure | None:
    """Wait for the ranks and pass signals on; see `_attempt`."""
    told = False
    while True:
        # Before the ends are looked at: all other ranks have ended by then.
        running = [rank for rank in ranks if rank.exitcode is None]
        if killed_by := _stop_signal(ranks, lambda stop: -stop):
            _end_at_once(killed_by)
        if failures := _failures(ranks):
            deadline = time.monotonic() + LAST_WORDS_S
            for rank in ranks:
                rank.join(max(0.0, deadline - time.monotonic()))
            # Of those that fell at the same time, one that knows why, or was killed, is the cause.
            return min(failures, key=lambda each: (each.exitcode not in _FINAL, each.exitcode))
        if not running:
            break
        if ends_at_once(noted):
            _end_at_once(noted[-1])
        if noted and not told:
            pids = [rank.pid for rank in running if rank.pid is not None]
            if not all(map(can_be_told, pids)):
                _end_at_once(noted[0])
            for pid in pids:  # Not yet reaped, so still theirs.
                os.kill(pid, noted[0])
            told = True
            sys.stderr.write(STOPS_SOON.format(noted[0].name))
        # Processes that a rank started may hold its sentinel open: so the time limit.
        connection.wait([rank.sentinel for rank in running], _POLL_S)
    if stopped_by := _stop_signal(ranks, exit_status):
        raise SystemExit(exit_status(stopped_by))
    return None


def _stop_signal(
    ranks: list[BaseProcess], exitcode: Callable[[signal.Signals], int]
) -> signal.Signals | None:
    """Return the signal that asks to stop and made a rank end with this exit code, if any did."""
    seen = {rank.exitcode for rank in ranks}
    return next((each for each in STOP_SIGNALS if exitcode(each) in seen), None)


def _failures(ranks: list[BaseProcess]) -> list[_Failure]:
    good = {None, 0, *map(exit_status, STOP_SIGNALS)}
    return [
        _Failure(number, rank.exitcode)
        for number, rank in enumerate(ranks)
        if rank.exitcode is not None and rank.exitcode not in good
    ]


def _end_at_once(stop: signal.Signals) -> NoReturn:
    """Say so, and leave; the ranks are ended on the way (`_attempt`)."""
    sys.stderr.write(ENDED_AT_ONCE.format(stop.name))
    raise SystemExit(exit_status(stop))


def _be_rank(rank: int, num_ranks: int, store: str, call: Callable[[], None]) -> None:
    global _store
    _store = store
    for each in STOP_SIGNALS:
        if signal.getsignal(each) is not signal.SIG_IGN:
            signal.signal(each, signal.SIG_DFL)
    # A terminal sends Ctrl-C to all processes of a command. The launcher deals with it, so it waits
    # until the rank notes it (`StopRequest.listen`).
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {*STOP_SIGNALS} - {signal.SIGINT})
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(num_ranks),
        LOCAL_WORLD_SIZE=str(num_ranks),
    )
    for name, value in LOOPBACK.items():
        os.environ.setdefault(name, value)
    call()


@contextmanager
def join_ranks(timeout: timedelta | None = None) -> Iterator[None]:
    """Make this process a rank of its launch; ranks other than 0 log warnings only.

    Collectives wait for other ranks for `timeout`; by default torch.distributed's limit.

    Raises:
        SystemExit: With status 1 if the rank failed, which it has logged; with 2 if it was because
            of a setting; as `Stopped` if the run was asked to stop.
    """
    quiet_megatron()
    die_with_launcher()
    try:
        _join(timeout)
        try:
            yield
        except Stopped as stopped:
            if dist.get_rank() == 0:
                logger.info("%s", stopped.said)
            if TORCHRUN in os.environ:
                # It takes any other status for a failure, and may start the ranks again.
                stopped.code = 0
            dist.destroy_process_group()
            nothing_to_stop()
            raise
        dist.destroy_process_group()
        nothing_to_stop()
    except Exception as error:
        logger.exception("rank %s failed", os.environ["RANK"], extra=LOG_ONLY)
        is_full = isinstance(error, OSError) and error.errno in NO_ROOM
        status = WRONG_USAGE if isinstance(error, ConfigError) else NO_RESTART if is_full else 1
        raise SystemExit(status) from error


def end_all(problem: str, status: int = NO_RESTART) -> NoReturn:
    """End the run on all ranks, which all call, after rank 0 has said why."""
    if dist.get_rank() == 0:
        logger.error("error: %s", problem)
    dist.barrier()  # A rank that ends early would have the launcher end the one that speaks.
    raise SystemExit(status)


def _join(timeout: timedelta | None) -> None:
    if torch.cuda.is_available():
        # Slurm and Kubernetes may show each rank one GPU only.
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    else:
        enable_cpu_platform()
        # The ranks of a machine share its cores; torchrun may have set how.
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    gloo_peers.watch()
    _init_process_group(timeout)
    if dist.get_rank() != 0:
        logging.getLogger("megatron_ext").setLevel(logging.WARNING)
    restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    if restart and os.environ["LOCAL_RANK"] == "0":
        # Where a rank had failed: each agent counts its own, and has given the cause.
        logger.warning("restart %d of %s", restart, os.environ["TORCHELASTIC_MAX_RESTARTS"])


def _init_process_group(timeout: timedelta | None) -> None:
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if _store is None:  # Another program started this rank, and set the environment.
        _choose_interface()
        dist.init_process_group(backend, timeout=timeout)
        return
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        backend,
        timeout=timeout,
        store=dist.FileStore(_store, num_ranks),  # type: ignore[attr-defined]
        rank=rank,
        world_size=num_ranks,
    )


def _choose_interface() -> None:
    """Have gloo reach other machines by the interface that leads to the first, if none is set.

    Else it takes an address of this machine's own name, which on many is one of loopback.
    """
    master, ranks_here = os.environ.get("MASTER_ADDR"), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if not master or ranks_here == int(os.environ["WORLD_SIZE"]):
        return
    if "GLOO_SOCKET_IFNAME" not in os.environ and (
        interface := interface_towards(master, int(os.environ["MASTER_PORT"]))
    ):
        os.environ["GLOO_SOCKET_IFNAME"] = interface


def quiet_megatron() -> None:
    """Silence Megatron's advice about optional packages, which would bury the run's own lines."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("megatron_ext").setLevel(logging.INFO)
    logging.getLogger("megatron").setLevel(logging.ERROR)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    for category in (UserWarning, DeprecationWarning, FutureWarning):
        warnings.filterwarnings("ignore", category=category)
