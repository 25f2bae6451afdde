"""Writes what balancing did in each step of Megatron-Bridge's own training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.core.num_microbatches_calculator import get_current_running_global_batch_size

from megatron_ext.mcore.step_metrics import StepMetrics


class BridgeCallback:
    """A callback for Bridge's `pretrain` and `finetune`: counts each step with `StepMetrics`.

        pretrain(config, forward_step, callbacks=[BridgeCallback(run_dir="runs/qwen3")])

    The metrics go to W&B and TensorBoard where Bridge's `config.logger` names these, beside
    Bridge's own. It counts unbalanced layers as well, so that an unbalanced run can be compared.
    Rank 0 writes the steps to `run_dir`, if it is given, for `megatron-ext report`.
    """

    def __init__(self, run_dir: str | Path | None = None) -> None:
        self._run_dir = run_dir
        self._metrics: StepMetrics

    def on_train_start(self, context: Any) -> None:
        """Begin to count; Bridge calls it with the model."""
        self._metrics = StepMetrics(context.model, run_dir=self._run_dir)

    def on_train_step_end(self, context: Any) -> None:
        """Write the metrics of the step that ended; all ranks call it."""
        state = context.state
        step = state.train_state.step + 1  # It counts the steps before this one.
        # Smaller than the configured one with `decrease_batch_size_if_needed`.
        batch = get_current_running_global_batch_size()
        loss = (context.loss_dict or {}).get("lm loss")
        metrics = self._metrics.take(
            step=step,
            loss=None if loss is None else float(loss),
            tokens=batch * state.cfg.model.seq_length,
        )
        if state.wandb_logger is not None:
            state.wandb_logger.log(metrics, step=step)
        if state.tensorboard_logger is not None:
            for name, value in metrics.items():
                state.tensorboard_logger.add_scalar(name, value, step)

    def on_train_end(self, context: Any) -> None:
        """Stop counting."""
        self._metrics.close()
