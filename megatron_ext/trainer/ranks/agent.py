"""torchrun for one machine of several, which meets the others through `rendezvous.py`.

    python -m megatron_ext.trainer.ranks.agent --nnodes 2 --rdzv-endpoint ... -m megatron_ext.train

The arguments are torchrun's, and RDZV_SECRET in the environment is the same on all machines. Other
than with torchrun itself,

- the store listens on one address, and its state is signed;
- signals that ask to stop go on to the ranks, which end after their step, however long saving
  takes; torchrun kills ranks after 30 seconds or, with newer torch, its `--shutdown-timeout`;
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
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

import torch
from torch.distributed.elastic.agent.server.api import DEFAULT_ROLE, RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError, rendezvous_handler_registry
from torch.distributed.launcher import api as launcher
from torch.distributed.run import parse_args, run

from megatron_ext.arguments import WRONG_USAGE
from megatron_ext.trainer.ranks.launch import NO_RESTART
from megatron_ext.trainer.ranks.processes import AGENT, children
from megatron_ext.trainer.ranks.rendezvous import NAME, SECRET, BoundRendezvous, create_handler
from megatron_ext.trainer.ranks.signals import (
    ENDED_AT_ONCE,
    STOP_SIGNALS,
    ends_at_once,
    exit_status,
    listens,
)

_LEFT_TO_TORCHRUN = (signal.SIGHUP, signal.SIGQUIT)


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
    rendezvous_handler_registry.register(NAME, create_handler)
    os.environ[AGENT] = str(os.getpid())
    noted: list[signal.Signals] = []

    def pass_on(number: int, _: FrameType | None) -> None:
        noted.append(signal.Signals(number))
        ranks = children(os.getpid())
        if ends_at_once(noted) or not ranks or not all(map(listens, ranks)):
            for rank in ranks:
                os.kill(rank, signal.SIGKILL)
            sys.stderr.write(ENDED_AT_ONCE.format(noted[-1].name))
            os._exit(exit_status(noted[-1]))
        for rank in ranks:
            os.kill(rank, number)

    for each in STOP_SIGNALS:
        if signal.getsignal(each) is not signal.SIG_IGN:
            signal.signal(each, pass_on)
    # `run` cannot be given an agent.
    launcher.LocalElasticAgent = _Agent  # type: ignore[attr-defined]
    try:
        run(options)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        sys.stderr.write(f"error: rank {rank} failed (exit status {failure.exitcode})\n")
        raise SystemExit(1) from None
    except RendezvousError as error:
        raise SystemExit(f"error: {error}") from None
    if noted:
        raise SystemExit(exit_status(noted[0]))


class _Agent(LocalElasticAgent):
    """Starts ranks again only if that may help, and ends all machines' agents if it does not."""

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

    def _rendezvous_handler(self) -> BoundRendezvous:
        handler = self.get_worker_group().spec.rdzv_handler
        assert isinstance(handler, BoundRendezvous)
        return handler


def _refuse(problem: str) -> NoReturn:
    sys.stderr.write(f"error: {problem}\n")
    raise SystemExit(WRONG_USAGE)


if __name__ == "__main__":
    main()
