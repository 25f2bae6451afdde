"""The files that rank 0 writes into a run directory: settings, machine, lines of steps, sinks'."""

from __future__ import annotations

import importlib.metadata
import itertools
import logging
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from megatron_ext.config import COST_UNITS, ConfigError
from megatron_ext.files.json_files import json_text
from megatron_ext.files.locks import FolderInUseError, held
from megatron_ext.files.run_dir import (
    ABOUT_FILE,
    CONFIG_FILE,
    LAYERS_FILE,
    METRICS_FILE,
    TRACE_FOLDER,
)
from megatron_ext.files.whole import write_whole
from megatron_ext.telemetry.profile import PROFILE_FILE
from megatron_ext.telemetry.routes import ROUTES_FOLDER
from megatron_ext.telemetry.step_lines import StepLines, read_lines
from megatron_ext.trainer.checkpoints.choice import lost_steps
from megatron_ext.trainer.config import SCHEMA, TrainConfig
from megatron_ext.trainer.logs.rank_logs import LOGS_FOLDER
from megatron_ext.trainer.ranks.signals import Stopped
from megatron_ext.trainer.reports.run_page import FILE as REPORT_FILE
from megatron_ext.trainer.sinks import SINKS, Sink
from megatron_ext.trainer.sinks.tensorboard import FOLDER as TENSORBOARD_FOLDER
from megatron_ext.words import ranges

logger = logging.getLogger(__name__)

_FILES = (
    *(METRICS_FILE, LAYERS_FILE, CONFIG_FILE, ABOUT_FILE, TRACE_FOLDER, ROUTES_FOLDER, LOGS_FOLDER),
    *(PROFILE_FILE, REPORT_FILE, TENSORBOARD_FOLDER, "wandb", "wandb_id"),
)
"""What a run writes into its directory, but for checkpoints and what is anew in every start."""
_PACKAGES = ("megatron-ext", "megatron-core", "torch", "transformer-engine")
"""Packages whose versions are written down."""


class RunLog:
    """Writes one line a step to `metrics.jsonl` and to `layers.jsonl`; a context manager.

    Lines that a killed run wrote after its last checkpoint, `start_step` (0 for a new run), are
    dropped. Costs that the run measured are in the lines of its steps. They are also comments at
    the end of the config, so another run from this config measures its own costs. A sink, as W&B,
    that raises an error is closed with a warning. `settled`, for JSON, is what was settled when the
    model was made, for `about.json` and sinks.
    """

    def __init__(
        self, config: TrainConfig, *, start_step: int, settled: Mapping[str, Any] | None = None
    ) -> None:
        run_dir = Path(config.run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        self._config_file = run_dir / CONFIG_FILE
        self._config = f"defaults: [{SCHEMA}, _self_]\n"  # So the file is a recipe, too.
        self._config += OmegaConf.to_yaml(OmegaConf.structured(config))
        write_whole(self._config_file, [self._config])
        self._metrics = StepLines(run_dir / METRICS_FILE, start_step=start_step)
        self._layers = StepLines(run_dir / LAYERS_FILE, start_step=start_step)
        _warn_of_gaps(run_dir, start_step)
        self._has_steps = False
        self._sinks: dict[str, Sink] = {}
        facts = {**about_this_run(), **(settled or {})}
        # A run may continue with another strategy, and on another number of ranks.
        self._of_start: dict[str, Any] = {"strategy": config.balance.strategy}
        self._of_start |= {name: facts[name] for name in ("num_ranks",) if name in facts}
        write_whole(run_dir / ABOUT_FILE, [json_text(facts, indent=2), "\n"])
        for name, sink in SINKS.items():
            if sink.is_wanted(config.logging):
                with self._may_fail(name):
                    self._sinks[name] = sink(config, start_step=start_step, facts=facts)

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._metrics.close()
        self._layers.close()
        for name, sink in list(self._sinks.items()):
            with self._may_fail(name):
                # Asked to stop, it has saved, and goes on when it is started again.
                sink.close(failed=error is not None and not isinstance(error, Stopped))

    def write(self, metrics: dict[str, Any], layers: Mapping[str, Any] | None = None) -> None:
        """Write a step, whose number is the value `step`; on a full disk later, with a warning."""
        self._metrics.write({**metrics, **self._of_start})
        if layers is not None:
            self._layers.write(layers)
        costs = [
            f"# measured: balance.{name} = {metrics[name]:.4g} {COST_UNITS[name]}\n"
            for name in COST_UNITS
            if name in metrics
        ]
        if costs and not self._has_steps:
            with suppress(OSError):  # On a full disk, the lines of steps have them.
                write_whole(self._config_file, [self._config, *costs])
        self._has_steps = True
        for name, sink in list(self._sinks.items()):
            with self._may_fail(name):
                sink.write(metrics, layers or {})

    @contextmanager
    def _may_fail(self, sink: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # Of any class, because a sink must not stop the training.
            self._sinks.pop(sink, None)
            logger.warning("warning: %s is written no more: %s", sink, error)


@contextmanager
def hold_run_dir(config: TrainConfig) -> Iterator[None]:
    """Keep other runs out of the run's directory until the block, or this process, ends.

    With `overwrite`, files of an earlier run without checkpoints are moved aside.

    Raises:
        ConfigError: Another run is in it, it cannot be written, or another user has a say in it.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(held(Path(config.run_dir)))
            if config.overwrite and lost_steps(config):
                _move_aside(Path(config.run_dir))
        except (FolderInUseError, OSError) as error:
            raise ConfigError([f"run_dir ({config.run_dir}): {error}"]) from None
        yield


def _move_aside(run_dir: Path) -> None:
    """Move what an earlier run wrote into a new folder; what else is there stays."""
    places = (run_dir / f"earlier_{number}" for number in itertools.count(1))
    aside = next(place for place in places if not os.path.lexists(place))
    aside.mkdir()
    for name in _FILES:
        if (run_dir / name).exists():
            (run_dir / name).rename(aside / name)
    logger.info("%s: files of the earlier run are now in %s", run_dir, aside)


def _warn_of_gaps(run_dir: Path, start_step: int) -> None:
    """Warn of steps that have no line though the run had made them."""
    steps = [metrics["step"] for metrics in read_metrics(run_dir)]
    # A run that started from another run's checkpoint has no lines of the steps before.
    own = any(run_dir.glob("checkpoints/step_*"))
    first = min(steps, default=1 if own else start_step + 1)
    missing = sorted(set(range(first, start_step + 1)) - set(steps))
    if missing:
        logger.warning(
            "warning: %s has no lines of the steps %s: they were lost before this run continued",
            run_dir / METRICS_FILE,
            ranges(missing),
        )


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return a run's metrics, one object a step: see `read_lines`."""
    return list(read_lines(run_dir / METRICS_FILE))


def about_this_run() -> dict[str, Any]:
    """Return start, host, processors, versions and commit, for JSON.

    Packages that are not installed are left out; the commit is None without a repository.
    """
    import torch

    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": platform.node(),
        "cpus": len(os.sched_getaffinity(0)),
        "gpus": [torch.cuda.get_device_name(index) for index in range(num_gpus)],
        "versions": versions,
        "commit": _commit(),
    }


def _commit() -> str | None:
    """Return the commit of the working directory, with `-dirty` where files differ from it."""
    words = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        asked = subprocess.run(words, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return asked.stdout.strip() or None
