"""A sink: something that a run's steps are written to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from megatron_ext.trainer.config import LoggingConfig, TrainConfig


class Sink(ABC):
    """Takes the steps of one run, on rank 0. An error of a sink ends the sink, not the run.

    Args:
        config: The run.
        start_step: The step of the checkpoint that the run continues from, 0 for a new run.
        facts: Facts about the run beside its settings, for JSON.
    """

    @abstractmethod
    def __init__(self, config: TrainConfig, *, start_step: int, facts: Mapping[str, Any]) -> None:
        """Open it; what it needs is imported here."""

    @staticmethod
    @abstractmethod
    def is_wanted(logging: LoggingConfig) -> bool:
        """Whether the settings ask for it."""

    @abstractmethod
    def write(self, metrics: Mapping[str, Any], layers: Mapping[str, Any]) -> None:
        """Take a step: its lines of `metrics.jsonl` and `layers.jsonl`."""

    @abstractmethod
    def close(self, *, failed: bool) -> None:
        """End it, after the last step or after an error."""
