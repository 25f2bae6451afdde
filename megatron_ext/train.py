"""Entry point of a training run: `megatron-ext train`, or `torchrun -m megatron_ext.train`.

Arguments are Hydra's: `--config-dir recipes --config-name NAME` and overrides such as
`balance.slots=1`. The settings are checked before any process group exists. Under torchrun this
process is one rank; otherwise it starts the ranks on this machine itself.

A step is Megatron's: its pipeline schedule, DDP, optimizer and learning-rate schedule. A run
directory continues from its newest checkpoint, exactly: weights, optimizer, generators and the
position in the data.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hydra import compose, initialize, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor

from megatron_ext.config import ConfigError, TrainConfig, validate
from megatron_ext.cpu_platform import enable_cpu_platform

logger = logging.getLogger(__name__)

SCHEMA = "train"
"""Name under which recipes put `TrainConfig` first in their `defaults`."""

ConfigStore.instance().store(SCHEMA, TrainConfig)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train as the command line says.

    Args:
        arguments: By default those of the process.

    Raises:
        SystemExit: With status 2 and one line a problem if the settings are wrong, with 1 if a rank
            failed.
    """
    _quiet_megatron()
    options = _parser().parse_intermixed_args(arguments)
    try:
        config = load_config(options.overrides, options.config_dir, options.config_name)
        if options.print:
            sys.stdout.write(OmegaConf.to_yaml(OmegaConf.structured(config)))
            return
        train(config, num_ranks=options.ranks)
    except ConfigError as error:
        if int(os.environ.get("RANK", 0)) == 0:
            sys.stderr.write("".join(f"error: {problem}\n" for problem in error.problems))
        raise SystemExit(2) from None


def train(config: TrainConfig, *, num_ranks: int | None = None) -> None:
    """Check the settings and run: as one rank under torchrun, otherwise on ranks started here.

    Args:
        config: The run.
        num_ranks: Ranks to start. By default as many as the model needs, or one per GPU.

    Raises:
        ConfigError: The settings are wrong; nothing was started.
        SystemExit: With status 1 if a rank failed.
    """
    if not torch.cuda.is_available():
        enable_cpu_platform()
    is_rank = "RANK" in os.environ
    if is_rank:
        num_ranks = int(os.environ["WORLD_SIZE"])
    elif num_ranks is None:
        parallel = config.parallel
        needed = parallel.pp_size * max(parallel.ep_size, parallel.tp_size)
        num_ranks = max(needed, torch.cuda.device_count() if torch.cuda.is_available() else 1)
    validate(config, num_ranks=num_ranks)
    if is_rank:
        run_rank(config)
    else:
        _launch(config, num_ranks)


def load_config(
    overrides: Sequence[str] = (), config_dir: str | None = None, config_name: str | None = None
) -> TrainConfig:
    """Compose a run's settings from a recipe and overrides.

    Args:
        overrides: In Hydra's grammar, e.g. `["steps=10", "+megatron.kv_channels=64"]`.
        config_dir: Folder of the recipes; by default `recipes` in the working directory.
        config_name: The recipe; by default the bare defaults of `TrainConfig`.

    Raises:
        ConfigError: A recipe or key does not exist, or a value has the wrong type.
    """
    folder = Path(config_dir or "recipes").absolute()
    if config_dir and not folder.is_dir():
        raise ConfigError([f"--config-dir ({config_dir}) is not a folder"])
    setup = (
        initialize_config_dir(str(folder), version_base="1.3")
        if folder.is_dir()
        else initialize(None, version_base="1.3")
    )
    try:
        with setup:
            composed = compose(config_name or SCHEMA, list(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError([_hydra_problem(error)]) from None
    problems = _section_problems(composed)
    if problems:
        raise ConfigError(problems)
    config = OmegaConf.to_object(composed)
    assert isinstance(config, TrainConfig), f"recipe {config_name} does not start from {SCHEMA}"
    return config


def _section_problems(composed: DictConfig) -> list[str]:
    try:
        OmegaConf.to_object(composed.balance)
    except ValueError as error:
        return [str(error)]
    return []


def _hydra_problem(error: Exception) -> str:
    """Hydra's message and its cause, on one line."""
    parts = [str(part).split("\n")[0].rstrip(".") for part in (error, error.__cause__) if part]
    return ": ".join(dict.fromkeys(parts))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-ext train",
        description="Train an MoE model with Megatron-Core, with or without balancing.",
        epilog="example: megatron-ext train --config-name quickstart balance.slots=1 steps=20",
    )
    parser.add_argument(
        "--config-dir", "-cd", help="folder of recipes; by default ./recipes", metavar="DIR"
    )
    parser.add_argument("--config-name", "-cn", help="the recipe to start from", metavar="NAME")
    parser.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="ranks to start here; by default as many as the model needs, or one per GPU",
    )
    parser.add_argument("--print", action="store_true", help="print the composed settings and stop")
    parser.add_argument("overrides", nargs="*", help="settings, as section.name=value")
    return parser


def _quiet_megatron() -> None:
    """Keep Megatron's advice about optional packages from burying the run's own lines."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("megatron_ext").setLevel(logging.INFO)
    logging.getLogger("megatron").setLevel(logging.ERROR)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=UserWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", category=FutureWarning)


def _launch(config: TrainConfig, num_ranks: int) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if not torch.cuda.is_available():
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    launch = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=f"megatron_ext_{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        monitor_interval=0.2,
    )
    try:
        elastic_launch(launch, run_rank)(config)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        sys.stderr.write(f"error: rank {rank} failed (exit status {failure.exitcode})\n")
        raise SystemExit(1) from None


def run_rank(config: TrainConfig) -> None:
    """Train as one rank of a torchrun launch; its settings were checked."""
    _quiet_megatron()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl")
    else:
        enable_cpu_platform()
        # The ranks of a machine share its cores.
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
        dist.init_process_group("gloo")
    if dist.get_rank() != 0:
        logging.getLogger("megatron_ext").setLevel(logging.WARNING)
    try:
        Training(config).run()
    except Exception:
        # Said here, by the rank itself; the launcher only adds who fell.
        logger.exception("rank %d failed", dist.get_rank())
        raise SystemExit(1) from None
    dist.destroy_process_group()


class Training:
    """One rank's model, optimizer and data, from the newest checkpoint on.

    Made after the process group.
    """

    def __init__(self, config: TrainConfig) -> None:
        from megatron.core import parallel_state

        from megatron_ext.data import Manifest
        from megatron_ext.mcore import build, checkpoint
        from megatron_ext.telemetry.recorder import LoadRecorder

        self.config = config
        build.start_parallelism(config)
        manifest = Manifest.load(config.data.path)
        self.chunks = build.build_model(config, manifest.vocab_size)
        self.optimizer = build.build_optimizer(config, self.chunks)
        self.step = 0
        start = checkpoint.find_checkpoint(config)
        if start:
            self.step = checkpoint.load_checkpoint(start, self.chunks, self.optimizer)["step"]
            logger.info("continuing from %s", start)
        self.scheduler = build.build_scheduler(config, self.optimizer, self.step)
        self.recorder = LoadRecorder(
            build.moe_layers(self.chunks), parallel_state.get_expert_model_parallel_group()
        )
        self._train_data = build.dataset(config, manifest, "train")
        self._eval_data = (
            build.dataset(config, manifest, "validation") if config.eval_every else None
        )
        data = config.data
        self._dp_rank = parallel_state.get_data_parallel_rank()
        self._dp_size = parallel_state.get_data_parallel_world_size()
        self._num_microbatches = data.global_batch_size // (data.micro_batch_size * self._dp_size)

    def run(self) -> None:
        """Train to the last step, writing metrics and checkpoints."""
        from megatron_ext.mcore import build, checkpoint
        from megatron_ext.telemetry.progress import TrainingProgress
        from megatron_ext.telemetry.run_log import RunLog

        config = self.config
        batches = self._batches(self._train_data, self.step * config.data.global_batch_size)
        with ExitStack() as stack:
            log = display = None
            if dist.get_rank() == 0:
                log = stack.enter_context(RunLog(config, start_step=self.step))
                display = stack.enter_context(
                    TrainingProgress(
                        Path(config.run_dir).name,
                        start_step=self.step,
                        steps=config.steps,
                        every=config.logging.every,
                    )
                )
            while self.step < config.steps:
                metrics = self.train_step(batches)
                if _is_due(self.step, config.eval_every):
                    metrics["eval_loss"] = self.evaluate()
                if log and display:
                    log.write(metrics)
                    display.show(metrics)
                if _is_due(self.step, config.checkpoint.every):
                    with build.whole_parameters(config, self.chunks):
                        checkpoint.save_checkpoint(config, self.chunks, self.optimizer, self.step)

    def train_step(self, batches: list[Iterator[dict[str, Tensor]]]) -> dict[str, Any]:
        """Do one optimizer step.

        Args:
            batches: The microbatches to come, one iterator per model chunk.

        Returns:
            The step's line of `metrics.jsonl`, equal on all ranks but for the times.
        """
        started = time.perf_counter()
        self.scheduler.step(increment=1)
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = self._forward_backward(batches, forward_only=False)
        _, grad_norm, _ = self.optimizer.step()
        torch.cuda.synchronize()
        step_s = time.perf_counter() - started

        self.step += 1
        loads = self.recorder.take_step()
        loss, num_losses, before, after, replicas, forwards = _sum_over_ranks(
            sum(losses),
            len(losses),
            loads.imbalance_before,
            loads.imbalance_after,
            loads.replicas,
            loads.forwards,
        )
        data = self.config.data
        return {
            "step": self.step,
            "loss": loss / num_losses,
            "grad_norm": float(grad_norm),
            "lr": self.optimizer.param_groups[0]["lr"],
            "tokens_per_s": data.global_batch_size * data.sequence_length / step_s,
            "step_ms": 1e3 * step_s,
            "imbalance_before": before / forwards,
            "imbalance_after": after / forwards,
            "replicas": replicas / forwards,
        }

    def evaluate(self) -> float:
        """Return the loss over always the same validation batches; does not touch the training."""
        from megatron_ext.mcore import build

        assert self._eval_data is not None, "evaluation without eval_every"
        batches = self._batches(self._eval_data, 0)
        losses: list[float] = []
        for chunk in self.chunks:
            chunk.eval()
        with torch.no_grad(), build.whole_parameters(self.config, self.chunks):
            for _ in range(self.config.eval_steps):
                losses += self._forward_backward(batches, forward_only=True)
        for chunk in self.chunks:
            chunk.train()
        loss, num_losses = _sum_over_ranks(sum(losses), len(losses))
        return loss / num_losses

    def _batches(self, data: Any, consumed_samples: int) -> list[Iterator[dict[str, Tensor]]]:
        from megatron_ext.data import microbatches

        return [
            microbatches(
                data,
                consumed_samples=consumed_samples,
                data_parallel_rank=self._dp_rank,
                data_parallel_size=self._dp_size,
            )
            for _ in self.chunks
        ]

    def _forward_backward(
        self, batches: list[Iterator[dict[str, Tensor]]], *, forward_only: bool
    ) -> list[float]:
        """Run the pipeline schedule over one global batch.

        Returns:
            The loss of each of this rank's microbatches; empty but on the last pipeline stage.
        """
        from megatron.core.pipeline_parallel import get_forward_backward_func

        data = self.config.data
        reports = get_forward_backward_func()(
            forward_step_func=partial(_forward_step, reverse=data.reverse_samples),
            data_iterator=batches,
            model=self.chunks,
            num_microbatches=self._num_microbatches,
            seq_length=data.sequence_length,
            micro_batch_size=data.micro_batch_size,
            forward_only=forward_only,
        )
        return [float(report["loss"]) for report in reports]


def _forward_step(
    batches: Iterator[dict[str, Tensor]], model: Any, *, reverse: bool
) -> tuple[Tensor, Any]:
    batch = {name: tensor.cuda(non_blocking=True) for name, tensor in next(batches).items()}
    if reverse:
        batch = {name: tensor.flip(0) for name, tensor in batch.items()}
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return output, partial(_mean_loss, batch["loss_mask"])


def _mean_loss(loss_mask: Tensor, losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = (losses.float() * loss_mask).sum() / loss_mask.sum()
    # A copy: Megatron's schedule divides the loss by the number of microbatches in place.
    return loss, {"loss": loss.detach().clone()}


def _sum_over_ranks(*values: float) -> list[float]:
    total = torch.tensor(values, dtype=torch.float64, device="cuda")
    dist.all_reduce(total)
    return total.tolist()


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


if __name__ == "__main__":
    main()
