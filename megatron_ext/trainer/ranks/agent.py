"""torchrun for one machine of several, which meets the others as `rendezvous.py` says.

    python -m megatron_ext.trainer.ranks.agent --nnodes 2 --rdzv-endpoint ... -m megatron_ext.train

The arguments are torchrun's, and RDZV_SECRET in the environment is the same on all machines.
Signals that ask to stop go on to the ranks, which end after their step, however long saving takes;
torchrun itself would end them after 30 seconds.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError, rendezvous_handler_registry
from torch.distributed.run import parse_args, run

from megatron_ext.arguments import WRONG_USAGE
from megatron_ext.trainer.ranks.processes import AGENT, children
from megatron_ext.trainer.ranks.rendezvous import NAME, SECRET, create_handler
from megatron_ext.trainer.ranks.signals import (
    ENDED_AT_ONCE,
    STOP_SIGNALS,
    ends_at_once,
    exit_status,
    listens,
)

_LEFT_TO_TORCHRUN = (signal.SIGHUP, signal.SIGQUIT)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run this machine's ranks.

    Args:
        arguments: torchrun's; by default those of the process.

    Raises:
        SystemExit: With status 1 if a rank or the rendezvous failed, with 2 if there is no secret,
            with 128 + its number after a signal.
    """
    if not os.environ.get(SECRET):
        sys.stderr.write(f"error: {SECRET} must be a secret that all machines of the run know\n")
        raise SystemExit(WRONG_USAGE)
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
    # It would end at a SIGHUP that nohup has this process ignore.
    left = [each.name for each in _LEFT_TO_TORCHRUN if signal.getsignal(each) is not signal.SIG_IGN]
    ours = ["--rdzv-backend", NAME, "--signals-to-handle", ",".join(left)]
    try:
        run(parse_args([*ours, *(sys.argv[1:] if arguments is None else arguments)]))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        sys.stderr.write(f"error: rank {rank} failed (exit status {failure.exitcode})\n")
        raise SystemExit(1) from None
    except RendezvousError as error:
        raise SystemExit(f"error: {error}") from None
    if noted:
        raise SystemExit(exit_status(noted[0]))


if __name__ == "__main__":
    main()
