"""A rank fails in backward: all ranks end soon, and none has changed a weight.

    python -m tests.gpu.first_run.failing_rank [--ranks N]

The quickstart's model trains for a few steps. Then the last rank's pull of a replica's gradients
raises, while the others go on. Status 0 if everything ended within `LIMIT_S` and no rank came to
its optimizer.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar
from unittest import mock

import torch.distributed as dist

from megatron_ext.trainer.compose import load_config
from megatron_ext.trainer.config import TrainConfig
from megatron_ext.trainer.ranks.launch import join_ranks
from megatron_ext.trainer.ranks.watchdog import watch_over
from megatron_ext.trainer.train import check
from tests.gpu.one_gpu import launch
from tests.trainer import dataset

T = TypeVar("T")

STEPS = 3
"""Before the one that fails, or is left."""

LIMIT_S = 15.0
"""From the failure to the end of the last process."""

FAILED_FILE = "failed"
REACHED_FILE = "rank_{rank}_reached_its_optimizer"


def main() -> None:
    """Train and judge; what went wrong is printed, a line each."""
    found = as_asked(__doc__, problems)
    sys.stderr.write("".join(f"{problem}\n" for problem in found))
    sys.exit(bool(found))


def as_asked(doc: str, function: Callable[[int, Sequence[str], Path], T]) -> T:
    """Call a function with the ranks and overrides of the command line, and a folder with data."""
    parser = argparse.ArgumentParser(description=doc.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2, help="of expert parallelism (default: 2)")
    parser.add_argument("overrides", nargs="*", help="of the quickstart")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        overrides = [f"data.path={dataset.build(Path(folder))}", *options.overrides]
        return function(options.ranks, overrides, Path(folder))


def quickstart(num_ranks: int, overrides: Sequence[str], folder: Path) -> TrainConfig:
    """Return the quickstart's settings for a run of as many ranks in a folder, checked."""
    ours = [
        f"parallel.ep_size={num_ranks}",
        f"run_dir={folder / 'run'}",
        f"data.global_batch_size={48 * num_ranks}",  # A microbatch on each rank.
    ]
    config = load_config([*ours, *overrides], config_name="quickstart")
    check(config, num_ranks=num_ranks)
    return config


def problems(num_ranks: int, overrides: Sequence[str], folder: Path) -> list[str]:
    """Train until it fails, and return what should not be, a line each.

    Args:
        num_ranks: Ranks of expert parallelism.
        overrides: Of the quickstart's settings.
        folder: An empty folder for the run and its notes.
    """
    config = quickstart(num_ranks, overrides, folder)
    try:
        launch(train_and_fail, config, folder, num_ranks=num_ranks)
        found = ["the run ended well, though a rank failed"]
    except SystemExit:
        found = []
    ended = time.time()
    if not (folder / FAILED_FILE).is_file():
        return [*found, "the run ended before it was made to fail"]
    took = ended - (folder / FAILED_FILE).stat().st_mtime
    print(f"{num_ranks} ranks ended {took:.1f} s after one failed in backward")
    if took > LIMIT_S:
        found.append(f"the ranks ended {took:.1f} s after the failure; the limit is {LIMIT_S} s")
    reached = sorted(folder.glob(REACHED_FILE.format(rank="*")))
    return found + [f"{file.name}, in the step that failed" for file in reached]


def train_and_fail(config: TrainConfig, folder: Path) -> None:
    """Be one rank."""
    with watch_over(config), join_ranks(config.group_timeout):
        from megatron_ext.trainer.loop import Training

        training = Training(config)
        for _ in range(STEPS):
            training.train_step()
        dist.barrier()
        rank = dist.get_rank()

        def note(*_: Any, **__: Any) -> NoReturn:
            (folder / REACHED_FILE.format(rank=rank)).touch()
            raise RuntimeError("the optimizer was reached")

        def fail(*_: Any, **__: Any) -> NoReturn:
            (folder / FAILED_FILE).touch()
            raise RuntimeError("made to fail in backward")

        with mock.patch.object(training.optimizer, "step", note):
            if rank == dist.get_world_size() - 1:
                with mock.patch(
                    "megatron_ext.balance.slots.SlotBuffers.reduce_replica_grads", fail
                ):
                    training.train_step()
            else:
                training.train_step()


if __name__ == "__main__":
    main()
