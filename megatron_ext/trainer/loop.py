"""One rank's part of a training run.

A step is Megatron's: its pipeline schedule, DDP, optimizer and learning-rate schedule. A run
directory continues from its newest checkpoint, exactly: weights, optimizer, generators and the
position in the data.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_ext.balance.strategies import get_strategy
from megatron_ext.data.mixing import MixedDataset, microbatches
from megatron_ext.files.run_dir import LAYERS_FILE, METRICS_FILE, TRACE_FOLDER
from megatron_ext.mcore.between_steps import check_agreement
from megatron_ext.mcore.moe_layer import BalancedMoELayer
from megatron_ext.mcore.step_metrics import place_of_rank
from megatron_ext.methods.run_hook import Reader
from megatron_ext.telemetry import heartbeat
from megatron_ext.telemetry.gather import gather_step
from megatron_ext.telemetry.profile import Counters, StepProfile, counters_of
from megatron_ext.telemetry.recorder import PREDICTED, LoadRecorder, StepLoads
from megatron_ext.telemetry.routes import ROUTES_FOLDER, RouteRecorder
from megatron_ext.telemetry.step_files import StepFiles
from megatron_ext.telemetry.step_lines import read_lines
from megatron_ext.telemetry.trace import TraceWriter
from megatron_ext.trainer.checkpoints.checkpoint import Checkpoints
from megatron_ext.trainer.config import TrainConfig
from megatron_ext.trainer.data import files_of, open_data
from megatron_ext.trainer.finite import StepGuard
from megatron_ext.trainer.logs.progress import TrainingProgress
from megatron_ext.trainer.logs.run_log import RunLog
from megatron_ext.trainer.model import build
from megatron_ext.trainer.model.shape import shape_of
from megatron_ext.trainer.ranks.shared_folder import check_same
from megatron_ext.trainer.ranks.signals import Stopped, StopRequest

logger = logging.getLogger(__name__)

Batches = list[Iterator[dict[str, Tensor]]]
"""The microbatches to come, one iterator per model chunk."""


class Training:
    """Model, optimizer and data of one rank of a valid run, as of its newest checkpoint.

    Made on all ranks, after the process group.
    """

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        heartbeat.note("build")
        build.start_parallelism(config)
        manifest = open_data(config)
        check_same(f"data.path ({config.data.path})", files_of(config.data, manifest))
        self.chunks = build.build_model(config, manifest.vocab_size)
        self.optimizer = build.build_optimizer(config, self.chunks)
        self.guard = StepGuard(config, self.chunks, self.optimizer)
        self._step_tokens = config.data.global_batch_size * config.data.sequence_length
        # A backward has twice the arithmetic of a forward.
        self._token_flops = 3 * shape_of(config, "").token_flops
        self.stop = StopRequest()
        self.checkpoints = Checkpoints(config, self.chunks, self.optimizer, manifest.vocab_size)
        heartbeat.note("load")
        self.step, self.consumed_samples, self._tokens = self.checkpoints.load_newest()
        self.scheduler = build.build_scheduler(config, self.optimizer, self.step)
        layers = build.moe_layers(self.chunks)
        self._balanced = [layer for layer in layers if isinstance(layer, BalancedMoELayer)]
        self.recorder = LoadRecorder(layers, parallel_state.get_expert_model_parallel_group())
        self._place = place_of_rank(layers)
        self.layers: dict[str, Any] = {}
        """The last step's line of `layers.jsonl`, equal on all ranks."""
        heartbeat.note_layers(layers)
        self._records: list[TraceWriter | RouteRecorder] = []
        # One rank of each pipeline stage writes.
        if self._place.speaks and self._place.group == 0:
            self._records += _records(config, layers, self.chunks, self.step, manifest.vocab_size)
        profile = config.profile
        self.profile = StepProfile(
            Path(config.run_dir), first=profile.first, steps=profile.steps, ranks=profile.ranks
        )
        train_data = build.dataset(config, manifest, "train")
        further = {f"megatron.{name}": value for name, value in config.megatron.items()}
        self.checkpoints.keep_settings(train_data.order() | further)
        self._batches = self._read(train_data, self.consumed_samples, build.reader(config))
        self._validation = (
            build.dataset(config, manifest, "validation") if config.eval_every else None
        )

    def run(self) -> None:
        """Train to the last step, writing metrics and checkpoints."""
        config = self.config
        with ExitStack() as stack:
            log = display = None
            if dist.get_rank() == 0:
                log = stack.enter_context(
                    RunLog(config, start_step=self.step, settled=self.settled())
                )
                display = stack.enter_context(
                    TrainingProgress(
                        Path(config.run_dir).name,
                        start_step=self.step,
                        steps=config.steps,
                        every=config.logging.every,
                    )
                )
            stack.callback(self.close)  # Before the log ends, which may send off what was written.
            self.stop.listen()
            every = config.checkpoint.every
            while self.step < config.steps:
                with self.profile.step(self.step + 1):
                    metrics = self.train_step()
                if config.eval_every and self.step % config.eval_every == 0:
                    metrics["eval_loss"] = self.evaluate()
                if log and display:
                    log.write(metrics, self.layers)
                    display.show(metrics)
                if self.profile.is_due(self.step, is_last=bool(self.stop.agreed)):
                    self._write_profile()
                self.checkpoints.poll()
                ends = self.step == config.steps or self.stop.agreed
                if every and (self.step % every == 0 or ends):
                    self._save()
                if self.stop.agreed:
                    self.checkpoints.finish()
                    saved = self.checkpoints.saved_at(self.step)
                    raise Stopped(self.stop.agreed, self.step, saved)
            check_agreement(self.chunks)
            self.checkpoints.finish()

    def settled(self) -> dict[str, Any]:
        """Return what was settled when the model was made, for JSON."""
        known: dict[str, Any] = {"num_ranks": dist.get_world_size()}
        if self._balanced:
            layout = self._balanced[0].layout
            known["transport"] = self._balanced[0].transport
            known["nvlink_domains"] = layout.ep_size // layout.nvlink_domain
        return known

    def train_step(self) -> dict[str, Any]:
        """Do one optimizer step on the next global batch; return its line of `metrics.jsonl`.

        The line is equal on all ranks but for the times and measured costs.
        """
        started = time.perf_counter()
        heartbeat.note("forward", step=self.step + 1)
        self.scheduler.step(increment=1)
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = self._forward_backward(self._batches, forward_only=False)
        heartbeat.note("optimizer")
        made, grad_norm = self.guard.optimizer_step(self.step + 1, losses)
        torch.cuda.synchronize()
        step_s = time.perf_counter() - started

        self.step += 1
        self.consumed_samples += self.config.data.global_batch_size
        self._tokens += self._step_tokens
        loads = self.recorder.take_step()
        for record in self._records:
            record.write(self.step, loads.computed)
        gathered = gather_step(loads.computed, self._place, loads.own)
        with_experts = self.step % self.config.logging.heatmap_every == 0
        self.layers = {"step": self.step, **gathered.layers(with_experts=with_experts)}
        loss, num_losses, *votes = _sum_over_ranks(sum(losses), len(losses), *self.stop.votes())
        self.stop.decide(votes)
        self.guard.check_loss(self.step, loss / num_losses, losses, made=made)
        tokens_per_s = self._step_tokens / step_s
        return {
            "step": self.step,
            "loss": loss / num_losses,
            "grad_norm": grad_norm,
            "skipped": 0 if made else 1,
            "tokens": self._tokens,
            "lr": self.optimizer.param_groups[0]["lr"],
            "tokens_per_s": tokens_per_s,
            "step_ms": 1e3 * step_s,
            "tflops_per_gpu": tokens_per_s * self._token_flops / dist.get_world_size() / 1e12,
            **gathered.metrics(),
            **_prediction_metrics(self.config, loads),
            **_measured_costs(self._balanced),
        }

    def _save(self) -> None:
        """Save the state, unless it is not finite, or comes of plans that differed."""
        heartbeat.note("save")
        check_agreement(self.chunks)
        for record in self._records:
            record.flush()
        with build.whole_parameters(self.config, self.chunks):
            if self.guard.may_save(self.step):
                self.checkpoints.save(self.step, self.consumed_samples, self._tokens)

    def _write_profile(self) -> None:
        heartbeat.note("profile")
        run_dir = Path(self.config.run_dir)
        counters: Counters = {}
        if dist.get_rank() == 0:
            files, first = (METRICS_FILE, LAYERS_FILE), self.config.profile.first
            counters = counters_of(*(read_lines(run_dir / file, first=first) for file in files))
        if written := self.profile.write(counters):
            logger.info("profile: %s, for https://ui.perfetto.dev", written)

    def close(self) -> None:
        """Write everything not yet written, also after an error."""
        self.recorder.close()
        self.profile.close()
        for record in self._records:
            record.close()

    def evaluate(self) -> float:
        """Return the loss over the validation batches, always the same; does not touch training."""
        assert self._validation is not None, "there is a validation split only with eval_every"
        batches = self._read(self._validation, 0, microbatches)
        heartbeat.note("evaluate")
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

    def _read(self, data: MixedDataset, consumed_samples: int, reader: Reader) -> Batches:
        return [
            reader(
                data,
                consumed_samples=consumed_samples,
                data_parallel_rank=parallel_state.get_data_parallel_rank(),
                data_parallel_size=parallel_state.get_data_parallel_world_size(),
            )
            for _ in self.chunks
        ]

    def _forward_backward(self, batches: Batches, *, forward_only: bool) -> list[float]:
        """Run the pipeline schedule over one global batch, and return its microbatches' losses.

        Only the last pipeline stage has some.
        """
        data = self.config.data
        dp_size = parallel_state.get_data_parallel_world_size()
        reports = get_forward_backward_func()(
            forward_step_func=partial(_forward_step, reverse=data.reverse_samples),
            data_iterator=batches,
            model=self.chunks,
            num_microbatches=data.global_batch_size // (data.micro_batch_size * dp_size),
            seq_length=data.sequence_length,
            micro_batch_size=data.micro_batch_size,
            forward_only=forward_only,
        )
        return [float(report["loss"]) for report in reports]


def _records(
    config: TrainConfig, layers: list[Any], chunks: list[Any], start_step: int, vocab_size: int
) -> Iterator[TraceWriter | RouteRecorder]:
    """Yield what writes loads and choices of this rank's pipeline stage."""
    options = config.logging
    if not options.trace_steps:
        return

    def files(folder: str) -> StepFiles:
        return StepFiles(
            Path(config.run_dir) / folder,
            steps_per_file=options.trace_steps,
            pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
            pp_size=config.parallel.pp_size,
        )

    yield TraceWriter(files(TRACE_FOLDER), start_step=start_step)
    if options.route_samples and layers:
        layers_of_stage = config.model.num_layers // config.parallel.pp_size
        yield RouteRecorder(
            files(ROUTES_FOLDER),
            chunks=chunks,
            layers=layers,
            samples=options.route_samples,
            start_step=start_step,
            vocab_size=vocab_size,
            bytes_per_token=torch.int64.itemsize
            + layers_of_stage * config.model.topk * torch.int16.itemsize,
        )


def _forward_step(
    batches: Iterator[dict[str, Tensor]],
    model: Any,
    return_schedule_plan: bool = False,
    *,
    reverse: bool,
) -> tuple[Any, Any]:
    """Run a microbatch; for Megatron's combined schedule, return its plan of the microbatch."""
    heartbeat.note("data")
    batch = {name: tensor.cuda(non_blocking=True) for name, tensor in next(batches).items()}
    heartbeat.note("forward" if model.training else "evaluate")
    if reverse:
        batch = {name: tensor.flip(0) for name, tensor in batch.items()}
    run = model.build_schedule_plan if return_schedule_plan else model
    output = run(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return output, partial(_mean_loss, batch["loss_mask"])


def _mean_loss(loss_mask: Tensor, losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = (losses.float() * loss_mask).sum() / loss_mask.sum()
    # A copy: Megatron's schedule divides the loss by the number of microbatches in place.
    return loss, {"loss": loss.detach().clone()}


def _prediction_metrics(config: TrainConfig, loads: StepLoads) -> dict[str, float]:
    """Return means over all ranks' predicted forwards, and each layer's accuracy of choices."""
    if not get_strategy(config.balance.strategy).predicts:
        return {}
    layers, names = range(1, config.model.num_layers + 1), ("forwards", *PREDICTED)
    mine = [loads.predicted_by_layer.get(layer, {}) for layer in layers]
    sums = iter(_sum_over_ranks(*(of.get(name, 0) for of in mine for name in names)))
    by_layer = {layer: {name: next(sums) for name in names} for layer in layers}
    total = {name: sum(of[name] for of in by_layer.values()) for name in names}
    if not total["forwards"]:
        return {}
    means = {name: total[name] / total["forwards"] for name in PREDICTED}
    return means | {
        f"choice_accuracy_layer_{layer}": of["choice_accuracy"] / of["forwards"]
        for layer, of in by_layer.items()
        if of["forwards"]
    }


def _measured_costs(layers: list[BalancedMoELayer]) -> dict[str, float]:
    """Return the costs that this rank's EP group measured to choose plans by, if it did."""
    balancers = (layer.balancer for layer in layers if layer.is_started)
    return next((balancer.measured for balancer in balancers if balancer.measured), {})


def _sum_over_ranks(*values: float) -> list[float]:
    total = torch.tensor(values, dtype=torch.float64, device="cuda")
    dist.all_reduce(total)
    return total.tolist()
