"""A training run, from its settings to its ranks.

The settings come from `compose.py`. They are checked before any process group exists. Under
torchrun this process is one rank; otherwise it starts the ranks on this machine itself
(`trainer/ranks/launch.py`). What a rank does is in `trainer/loop.py`.
"""

from __future__ import annotations

import logging
import math
import os
import stat
from contextlib import ExitStack, nullcontext
from pathlib import Path

import torch

from megatron_ext.balance.solve import idle_slots
from megatron_ext.balance.strategies import get_strategy
from megatron_ext.config import ConfigError
from megatron_ext.cpu_platform import enable_cpu_platform
from megatron_ext.ops import load_library
from megatron_ext.trainer.checkpoints.choice import finished_step
from megatron_ext.trainer.config import TrainConfig
from megatron_ext.trainer.logs.rank_logs import keep_output
from megatron_ext.trainer.logs.run_log import hold_run_dir
from megatron_ext.trainer.ranks.launch import join_ranks, launch_ranks, quiet_megatron
from megatron_ext.trainer.ranks.processes import allow_open_files
from megatron_ext.trainer.ranks.shared_folder import check_shared
from megatron_ext.trainer.ranks.watchdog import watch_over
from megatron_ext.trainer.validate import expert_shards, validate

logger = logging.getLogger(__name__)


def train(config: TrainConfig, *, num_ranks: int | None = None, verbose: bool = False) -> None:
    """Check the settings and run: as one rank under torchrun, otherwise on ranks started here.

    By default these are as many as the model needs, or one per GPU. With `verbose`, tracebacks are
    on the terminal, too.

    Raises:
        ConfigError: The settings are wrong; nothing was started.
        SystemExit: As of `launch_ranks`.
    """
    if problems := config.type_problems():  # Of values that were set after the section was made.
        raise ConfigError(problems)
    is_rank = "RANK" in os.environ
    if num_ranks is None and not is_rank:
        # Those that this machine has place for, if the recipe is for more.
        here = _num_gpus() or max(2, len(os.sched_getaffinity(0)))
        num_ranks = here if config.parallel.num_ranks > here else None
    num_ranks = check(config, num_ranks=num_ranks)
    if (done := finished_step(config)) is not None:
        if int(os.environ.get("RANK", 0)) == 0:
            logger.info("%s: nothing to do: step %d of %d", config.run_dir, done, config.steps)
        return
    _check_machine(config, num_ranks)
    # What a run makes, not every user may change, wherever it is made: here or in a library.
    os.umask(os.umask(0o077) | stat.S_IWOTH)
    # Rank 0 holds it for all ranks of torchrun.
    with hold_run_dir(config) if int(os.environ.get("RANK", 0)) == 0 else nullcontext():
        if is_rank:
            run_rank(config, verbose)
        else:
            on = f" on {num_ranks} of {gpus} GPUs" if (gpus := _num_gpus()) > num_ranks else ""
            ranks = f"{num_ranks} rank{'s' * (num_ranks > 1)}{on}"
            logger.info("%s: starting %s for %d steps", config.run_dir, ranks, config.steps)
            launch_ranks(run_rank, config, verbose, num_ranks=num_ranks, restarts=config.restarts)


def check(config: TrainConfig, *, num_ranks: int | None = None, needs_data: bool = True) -> int:
    """Check settings (`validate`), warn of those without effect, and return the run's ranks."""
    quiet_megatron()
    if not torch.cuda.is_available():
        enable_cpu_platform()
    if "RANK" in os.environ:
        num_ranks = int(os.environ["WORLD_SIZE"])
    elif num_ranks is None:
        num_ranks = _num_ranks(config)
    validate(config, num_ranks=num_ranks, needs_data=needs_data)
    if int(os.environ.get("RANK", 0)) == 0:
        for said in filter(None, (_idle_slots(config), _no_prediction(config))):
            logger.warning("warning: balance.%s", said)
    return num_ranks


def _num_ranks(config: TrainConfig) -> int:
    """Return how many ranks a run has by default: a GPU each, or what the recipe needs.

    Not all GPUs get one if a batch cannot be divided among them. Sizes may still be wrong.
    """
    parallel, data = config.parallel, config.data
    per_model = max(1, parallel.pp_size * parallel.tp_size)
    step = max(
        1, parallel.pp_size * math.lcm(parallel.ep_size * expert_shards(config), parallel.tp_size)
    )
    needed = max(step, parallel.num_ranks)
    for num_ranks in range(_num_gpus() // step * step, needed, -step):
        of_microbatch = max(1, data.micro_batch_size * num_ranks // per_model)
        if data.global_batch_size % of_microbatch == 0:
            return num_ranks
    return needed


def _num_gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _check_machine(config: TrainConfig, num_ranks: int) -> None:
    """Check that a run can start here, and load the library, which may have to be built."""
    gpus, problem = _num_gpus(), ""
    if 0 < gpus < num_ranks and "RANK" not in os.environ:  # Else ranks have several machines.
        problem = (
            f"the number of ranks ({num_ranks}) must be <= {gpus}, the GPUs of this machine: "
            "CUDA_VISIBLE_DEVICES= in front of the command puts ranks on CPUs"
        )
    elif config.hardware.summary and not gpus:
        problem = (
            f"hardware.summary ({config.hardware.summary}): there is no GPU here; size=tiny "
            "makes the model small enough for ranks on CPUs"
        )
    else:
        try:
            allow_open_files(num_ranks, config.parallel.ep_size)
            load_library()
        except RuntimeError as error:
            problem = str(error)
    if problem:
        raise ConfigError([problem])


def _no_prediction(config: TrainConfig) -> str | None:
    """Return a message if a strategy predicts and there is nothing to predict; else None."""
    chunks = config.parallel.pp_size * config.parallel.vpp_size
    if not get_strategy(config.balance.strategy).predicts or config.model.num_layers > chunks:
        return None
    return (
        f"strategy ({config.balance.strategy}) predicts nothing: a layer predicts the next one of "
        "its model chunk, and all chunks have one layer"
    )


def _idle_slots(config: TrainConfig) -> str | None:
    """Return a message if ranks of a balanced model have more slots than replicas; else None."""
    balance, ep_size = config.balance, config.parallel.ep_size
    strategy = get_strategy(balance.strategy)
    # One rank has no slots.
    if strategy.kind is not strategy.planner or ep_size == 1:
        return None
    experts = config.model.num_experts
    return idle_slots(
        strategy.num_slots(balance.slots, experts // ep_size),
        num_experts=experts,
        ep_size=ep_size,
        nvlink_domain=balance.domain_ranks,
    )


def run_rank(config: TrainConfig, verbose: bool = False) -> None:
    """Train as one rank of a launch; the settings were checked."""
    quiet_megatron()
    with ExitStack() as stack:
        try:
            keep_output(Path(config.run_dir), verbose=verbose)
            stack.enter_context(watch_over(config))
        except OSError as error:
            raise SystemExit(f"error: run_dir ({config.run_dir}): {error}") from None
        stack.enter_context(join_ranks(config.group_timeout))
        check_shared(config)
        from megatron_ext.trainer.loop import Training

        Training(config).run()
