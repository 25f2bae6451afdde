"""torchrun for one machine of several, which meets the others through `rendezvous.py`.

    python -m megatron_ext.trainer.ranks.agent --nnodes 2 --rdzv-endpoint ... -m megatron_ext.train

The arguments are torchrun's, and RDZV_SECRET in the environment is the same on all machines. Other
than with torchrun itself,

- the store listens on one address, and its state is signed;
- signals that ask to stop go on to the ranks, which end after their step, however long saving
  takes; torchrun kills ranks after 30 seconds or, with newer torch, its `--shutdown-timeout`, and
  hears no signal while it waits for other machines, up to five minutes;
- ranks that end for what they would meet again, a setting or a state that is not finite, are not
  started again, and their status says so; torchrun knows only 0 and the rest;
- when ranks of one machine have failed for good, the agents of all machines end; torchrun leaves
  the others to ranks that wait for those that are gone.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, ClassVar, NoReturn

import torch
from torch.distributed.elastic.agent.server.api import DEFAULT_ROLE, RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError, rendezvous_handler_registry
from torch.distributed.launcher import api as launcher
from torch.distributed.run import parse_args, run

from megatron_ext.arguments import WRONG_USAGE
from megatron_ext.trainer.ranks.launch import NO_RESTART
from megatron_ext.trainer.ranks.processes import (
    AGENT,
    MemoryKills,
    children,
    exit_code,
    how_it_failed,
)
from megatron_ext.trainer.ranks.rendezvous import NAME, SECRET, BoundRendezvous, create_handler
from megatron_ext.trainer.ranks.signals import (
    ENDED_AT_ONCE,
    STOPS_SOON,
    can_be_told,
    ends_at_once,
    exit_status,
    heed,
)

_LEFT_TO_TORCHRUN = (signal.SIGHUP, signal.SIGQUIT)

_WAIT_AFTER_SIGNAL_S = 5.0
"""Seconds that agents of a run that was asked to stop wait for each other once their ranks have
ended. Less than half of `LOST_PATIENCE_S`, for which the others do without a store."""

_POLL_S = 0.2

_NUM_DONE = "megatron_ext.num_done"
"""In the store: the agents whose ranks have all ended well."""

_DONE = (
    "{}: all ranks of this machine have ended well, and what they had to save is saved; other "
    "machines were not waited for\n"
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run this machine's ranks, by torchrun's arguments.

    Raises:
        SystemExit: With status 1 if a rank or the rendezvous failed; with 2 if there is no secret
            or no number of ranks, or if a rank ended with 2; with 128 + its number after a signal.
    """
    if not os.environ.get(SECRET):
        _refuse(f"{SECRET} must be a secret that all machines of the run know")
    # It would end at a SIGHUP that nohup has this process ignore.
    left = [each.name for each in _LEFT_TO_TORCHRUN if signal.getsignal(each) is not signal.SIG_IGN]
    ours = ["--rdzv-backend", NAME, "--signals-to-handle", ",".join(left)]
    options = parse_args([*ours, *(sys.argv[1:] if arguments is None else arguments)])
    if not torch.cuda.is_available():
        if options.nproc_per_node == "gpu":
            _refuse("there is no GPU here: RANKS_PER_NODE must say how many ranks to start")
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun would do so, with a warning.
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    # It logs each end at length; what there is to say is said below.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    rendezvous_handler_registry.register(NAME, create_handler)
    os.environ[AGENT] = str(os.getpid())
    heed(_pass_on)
    kills = MemoryKills()
    # `run` cannot be given an agent.
    launcher.LocalElasticAgent = _Agent  # type: ignore[attr-defined]
    try:
        run(options)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        sys.stderr.write(f"error: {how_it_failed(rank, failure.exitcode, kills)}\n")
        raise SystemExit(1) from None
    except RendezvousError as error:
        raise SystemExit(f"error: {error}") from None
    if _Agent.noted:
        raise SystemExit(exit_status(_Agent.noted[0]))


def _pass_on(stop: signal.Signals) -> None:
    """Pass a signal on to the ranks, or end with them; called in a thread, at any time."""
    _Agent.noted.append(stop)
    ranks, all_well = _ranks()
    if _Agent.ranks_are_done or (all_well and not ranks):
        _leave(_DONE.format(stop.name), exit_status(_Agent.noted[0]) if _Agent.noted[1:] else 0)
    if ends_at_once(_Agent.noted) or not ranks or not all(map(can_be_told, ranks)):
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(rank, signal.SIGKILL)
        _leave(ENDED_AT_ONCE.format(stop.name), exit_status(stop))
    for rank in ranks:
        with suppress(ProcessLookupError):
            os.kill(rank, stop)
    if not _Agent.noted[1:]:
        sys.stderr.write(STOPS_SOON.format(stop.name))
    threading.Thread(target=_leave_after_ranks, daemon=True).start()


def _leave_after_ranks() -> None:
    """End some time after the ranks, where the main thread still waits for other machines."""
    while _ranks()[0]:
        time.sleep(_POLL_S)
    time.sleep(_WAIT_AFTER_SIGNAL_S)
    ranks, all_well = _ranks()
    if not ranks:
        stop = _Agent.noted[0]
        said = _DONE if _Agent.ranks_are_done or all_well else ENDED_AT_ONCE
        _leave(said.format(stop.name), exit_status(stop))


def _ranks() -> tuple[list[int], bool]:
    """Return the ranks that run, and whether there are others, which have all ended well.

    They are others as long as the main thread has not looked at them.
    """
    codes = {rank: exit_code(rank) for rank in children(os.getpid())}
    ended = [code for code in codes.values() if code is not None]
    return [rank for rank, code in codes.items() if code is None], bool(ended) and not any(ended)


def _leave(said: str, status: int) -> NoReturn:
    """End though the main thread may wait for other machines."""
    sys.stderr.write(said)
    sys.stderr.flush()
    os._exit(status)


class _Agent(LocalElasticAgent):
    """Starts ranks again only if that may help, and ends all machines' agents if it does not.

    A process has one.
    """

    noted: ClassVar[list[signal.Signals]] = []
    """The signals that asked this machine to stop, in their order."""

    ranks_are_done: ClassVar[bool] = False
    """Whether all ranks of this machine have ended well; torch then waits for other machines."""

    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        try:
            result = super().run(role)
            if result.is_failed():
                self._rendezvous_handler().give_up()
            return result
        except SystemExit:
            self._rendezvous_handler().give_up()
            raise

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        statuses = {failure.exitcode for failure in result.failures.values()}
        if WRONG_USAGE in statuses:
            raise SystemExit(WRONG_USAGE)  # The rank has said why.
        if NO_RESTART in statuses:
            raise SystemExit(1)
        return result

    def _exit_barrier(self) -> None:
        """Wait for the agents of other machines, which need the store as long as their ranks run.

        torch's own wait is one call of C++.
        """
        _Agent.ranks_are_done = True
        began = time.monotonic()
        store: Any = self._store
        with suppress(RuntimeError):  # Where the store is gone, nobody needs it.
            store.add(_NUM_DONE, 1)
            while store.add(_NUM_DONE, 0) < self.get_worker_group().group_world_size:
                if time.monotonic() > began + self._exit_barrier_timeout:
                    break
                time.sleep(_POLL_S)

    def _rendezvous_handler(self) -> BoundRendezvous:
        handler = self.get_worker_group().spec.rdzv_handler
        assert isinstance(handler, BoundRendezvous)
        return handler


def _refuse(problem: str) -> NoReturn:
    sys.stderr.write(f"error: {problem}\n")
    raise SystemExit(WRONG_USAGE)


if __name__ == "__main__":
    main()
