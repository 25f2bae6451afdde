"""Where a run's steps are shown, besides its own files: each a small class, and a line here.

They take the lines of `metrics.jsonl` and `layers.jsonl`, so they show the same numbers.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from megatron_ext.trainer.config import LoggingConfig, TrainConfig
from megatron_ext.trainer.sinks.tensorboard import TensorBoardSink
from megatron_ext.trainer.sinks.wandb import WandbSink


class Sink(Protocol):
    """Takes the steps of one run, on rank 0. An error of a sink ends the sink, not the run."""

    def __init__(self, config: TrainConfig, *, start_step: int, facts: Mapping[str, Any]) -> None:
        """Open it; what it needs is imported here.

        The run continues from the checkpoint of `start_step`, 0 for a new run. `facts` about it
        beside its settings are for JSON.
        """

    @staticmethod
    def is_wanted(logging: LoggingConfig) -> bool:
        """Whether the settings ask for it."""

    def write(self, metrics: Mapping[str, Any], layers: Mapping[str, Any]) -> None:
        """Take a step: its lines of `metrics.jsonl` and `layers.jsonl`."""

    def close(self, *, failed: bool) -> None:
        """End it, after the last step or after an error."""


SINKS: dict[str, type[Sink]] = {"W&B": WandbSink, "TensorBoard": TensorBoardSink}
"""By the name in messages."""
