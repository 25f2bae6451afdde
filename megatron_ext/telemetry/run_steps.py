"""Writes what balancing did in each step into a run directory, for `megatron-ext report`."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_ext.files.json_files import json_text
from megatron_ext.files.opening import check_ours
from megatron_ext.files.run_dir import CONFIG_FILE, LAYERS_FILE, METRICS_FILE
from megatron_ext.files.whole import write_whole
from megatron_ext.telemetry.step_lines import StepLines, read_lines

logger = logging.getLogger(__name__)


class RunSteps:
    """Writes the steps of a program with logs of its own into a run directory.

    A folder that cannot be written is warned of once, as no file may stop a training.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: tuple[StepLines, StepLines] | None = None
        self._is_open = False
        self._step = 0
        self._written = time.perf_counter()

    def write(
        self,
        step: int | None,
        metrics: Mapping[str, float],
        layers: Mapping[str, Any],
        balance: Mapping[str, Any],
        *,
        loss: float | None,
        tokens: int | None,
    ) -> None:
        """Write a step; its time is that since the step before."""
        now = time.perf_counter()
        seconds, self._written = now - self._written, now
        line: dict[str, Any] = {"strategy": balance["strategy"], "num_ranks": dist.get_world_size()}
        if loss is not None:
            line["loss"] = float(loss)
        if self._is_open:
            line["step_ms"] = 1000 * seconds
            if tokens is not None:
                line["tokens_per_s"] = float(tokens) / seconds
        else:
            self._open(step, balance)
        self._step = self._step + 1 if step is None else step
        if self._files is not None:
            self._files[0].write({"step": self._step, **line, **metrics})
            if layers:
                self._files[1].write({"step": self._step, **layers})

    def _open(self, step: int | None, balance: Mapping[str, Any]) -> None:
        """Open the files, for lines from this step on, or behind those that are there."""
        self._is_open = True
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            check_ours(self._folder)
            # JSON is YAML, too.
            settings = {"num_ranks": dist.get_world_size(), "balance": balance}
            write_whole(self._folder / CONFIG_FILE, [json_text(settings, indent=2), "\n"])
            lines = read_lines(self._folder / METRICS_FILE)
            last = max((line["step"] for line in lines), default=-1)
            # A program may count its steps from 0.
            self._step = start_step = max(last, 0) if step is None else step - 1
            if start_step < last:
                logger.warning(
                    "warning: steps from %d to %d in %s are dropped, as of a run that was killed",
                    start_step + 1,
                    last,
                    self._folder,
                )
            self._files = (
                StepLines(self._folder / METRICS_FILE, start_step=start_step),
                StepLines(self._folder / LAYERS_FILE, start_step=start_step),
            )
        except (OSError, ValueError) as error:
            logger.warning("warning: steps are not written to %s: %s", self._folder, error)

    def close(self) -> None:
        """Write what a full disk has kept back, and close the files."""
        for file in self._files or ():
            file.close()
