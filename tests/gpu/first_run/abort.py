"""All ranks leave a step while replicas move, and repeat it: it gives the same gradients.

    python -m tests.gpu.first_run.abort [--ranks N] [overrides]

The quickstart's model trains for a few steps. Then a step ends with an error on all ranks: rank 0
ends before it moves anything, and the others have begun and wait for it. After a reset the same
step, to its end, must give the gradients that it gave before. Status 0 if it does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext import reset_after_abort
from megatron_ext.balance.slots import SlotBuffers
from megatron_ext.trainer.config import TrainConfig
from megatron_ext.trainer.ranks.launch import join_ranks
from megatron_ext.trainer.ranks.watchdog import watch_over
from tests.gpu.first_run.failing_rank import STEPS, as_asked, quickstart
from tests.gpu.one_gpu import launch

LEFT_IN = ("push", "reduce_replica_grads")
"""The methods of `SlotBuffers` that a step is left in."""


class LeftError(Exception):
    """Ends a step."""


def main() -> None:
    """Train, leave and repeat."""
    as_asked(__doc__, run)


def run(num_ranks: int, overrides: Sequence[str], folder: Path) -> None:
    """Train, leave and repeat; raises SystemExit if a step gives other gradients.

    Args:
        num_ranks: Ranks of expert parallelism.
        overrides: Of the quickstart's settings.
        folder: An empty folder for the run.
    """
    launch(train_and_leave, quickstart(num_ranks, overrides, folder), num_ranks=num_ranks)


def train_and_leave(config: TrainConfig) -> None:
    """Be one rank."""
    with watch_over(config), join_ranks(config.group_timeout):
        from megatron_ext.trainer.loop import Training

        training = Training(config)
        for _ in range(STEPS):
            training.train_step()
        data = config.data
        microbatches = data.global_batch_size // (data.micro_batch_size * dist.get_world_size())
        step = [list(islice(batches, microbatches)) for batches in training._batches]
        expected = grads_of(training, step)
        assert any(grad.any() for grad in expected), "the step has gradients"
        for name in LEFT_IN:
            with mock.patch.object(SlotBuffers, name, leave(getattr(SlotBuffers, name))):
                try:
                    grads_of(training, step)
                except LeftError:
                    pass
                else:
                    raise AssertionError(f"the step was not left in {name}")
            reset_after_abort(training.chunks)
            again = grads_of(training, step)
            equal = [torch.equal(*pair) for pair in zip(again, expected, strict=True)]
            if not all(equal):
                raise AssertionError(
                    f"left in {name}: {equal.count(False)} of {len(equal)} gradients are others"
                )
            if dist.get_rank() == 0:
                print(f"left in {name}: all {len(equal)} gradients as before")


def grads_of(training: Any, step: list[list[dict[str, Tensor]]]) -> list[Tensor]:
    """Do the step but for its optimizer; return the gradients, of all parameters in order."""
    for chunk in training.chunks:
        chunk.zero_grad_buffer()
    training._forward_backward([iter(batches) for batches in step], forward_only=False)
    return [p.main_grad.clone() for chunk in training.chunks for p in chunk.parameters()]


def leave(method: Callable[..., Any]) -> Callable[..., NoReturn]:
    """Return what rank 0 leaves instead of the method, and the others behind it."""

    def instead(*args: Any, **kwargs: Any) -> NoReturn:
        if dist.get_rank() > 0:
            method(*args, **kwargs)
        raise LeftError

    return instead


if __name__ == "__main__":
    main()
