"""TensorBoard: `tensorboard/` in the run directory. Its tab Custom Scalars opens arranged."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_ext.files.json_files import json_text
from megatron_ext.telemetry.names import shown
from megatron_ext.trainer.config import LoggingConfig, TrainConfig
from megatron_ext.trainer.sinks import pictures
from megatron_ext.trainer.sinks.panels import COUNT_OF_LAYERS, panels_by_section

FOLDER = "tensorboard"

_FLUSH_S = 10
"""Seconds after which TensorBoard sees a step at the latest."""


class TensorBoardSink:
    """Writes scalars by the names of `telemetry/names.py`, histograms and heat maps of loads.

    A continued run hides what was written of the steps that it makes again.
    """

    def __init__(self, config: TrainConfig, *, start_step: int, facts: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._logging = config.logging
        folder = str(Path(config.run_dir) / FOLDER)
        self._writer = SummaryWriter(folder, purge_step=start_step + 1, flush_secs=_FLUSH_S)
        layout = {
            # TensorBoard takes names as patterns, which would match longer names, too.
            section: {
                title: ["Multiline", [f"^{re.escape(name)}$" for name in names]]
                for title, names in panels.items()
            }
            for section, panels in panels_by_section()
        }
        self._writer.add_custom_scalars(layout)
        self._writer.add_text("run", f"```json\n{json_text(facts, indent=2)}\n```", start_step)
        self._writer.add_text("layers", COUNT_OF_LAYERS, start_step)

    @staticmethod
    def is_wanted(logging: LoggingConfig) -> bool:
        """See `Sink`."""
        return logging.tensorboard

    def write(self, metrics: Mapping[str, Any], layers: Mapping[str, Any]) -> None:
        """See `Sink`."""
        step, options = metrics["step"], self._logging
        values = shown(metrics, layers, tier=options.tier, max_keys=options.max_keys)
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        for name, loads in pictures.relative_loads(layers).items():
            self._writer.add_histogram(name, loads, step)
        for name, image in pictures.heat_maps(layers).items():
            self._writer.add_image(name, image, step, dataformats="HWC")

    def close(self, *, failed: bool) -> None:
        """See `Sink`."""
        self._writer.close()
