"""Weights & Biases: a run for each run directory, sections of metrics, pictures, artifacts.

It never asks and does not keep a training waiting: without a login, or a server that answers at the
start, it writes offline. `wandb sync` uploads later what was written offline.
"""

from __future__ import annotations

import dataclasses
import logging
import uuid
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from megatron_ext.arguments import one_line
from megatron_ext.files.opening import is_regular, names_in, read_regular
from megatron_ext.files.run_dir import TRACE_FOLDER
from megatron_ext.files.whole import write_whole
from megatron_ext.telemetry.names import METRICS, SECTIONS, section_of, shown
from megatron_ext.telemetry.profile import PROFILE_FILE
from megatron_ext.trainer.config import LoggingConfig, TrainConfig
from megatron_ext.trainer.sinks import pictures
from megatron_ext.trainer.sinks.panels import STEP

logger = logging.getLogger(__name__)

_INIT_S, _FINISH_S = 30.0, 300.0
"""Seconds that the server gets to begin a run, and to take what is left of it at the end."""
_MOST_ID_BYTES = 1000


class WandbSink:
    """Writes metrics by the names of `telemetry/names.py`, histograms and heat maps of loads.

    At the end, the trace and the profile of the run become artifacts.
    """

    def __init__(self, config: TrainConfig, *, start_step: int, facts: Mapping[str, Any]) -> None:
        run_dir = Path(config.run_dir)
        # One W&B run per run directory, so that a continued run continues its curves.
        id_file = run_dir / "wandb_id"
        if not is_regular(id_file):
            write_whole(id_file, [uuid.uuid4().hex])
        self._logging = config.logging
        self._run_dir = run_dir
        self._run = _start(
            config,
            run_dir,
            id=read_regular(id_file, most_bytes=_MOST_ID_BYTES).decode(),
            resume="allow",
            name=config.logging.wandb_name or run_dir.name,
            config=dataclasses.asdict(config) | {"facts": facts},
        )
        # W&B drops steps below the last that it has, as of a run that goes on from a checkpoint
        # before it. So its own steps only count on, and STEP is the axis of all curves.
        self._lead = max(0, self._run.starting_step - start_step - 1)
        self._run.define_metric(STEP)
        for section in (*SECTIONS, "moe"):
            self._run.define_metric(f"{section}/*", step_metric=STEP)
        for name in METRICS:
            shown_as = f"{section_of(name)}/{name}"
            self._run.define_metric(shown_as, step_metric=STEP, summary="min,max,mean,last")

    @staticmethod
    def is_wanted(logging: LoggingConfig) -> bool:
        """See `Sink`."""
        return logging.wandb != "off"

    def write(self, metrics: Mapping[str, Any], layers: Mapping[str, Any]) -> None:
        """See `Sink`."""
        import wandb

        step, options = metrics["step"], self._logging
        values: dict[str, Any] = {STEP: step}
        values |= shown(metrics, layers, tier=options.tier, max_keys=options.max_keys)
        for name, loads in pictures.relative_loads(layers).items():
            values[name] = wandb.Histogram(loads.ravel().tolist())
        for name, image in pictures.heat_maps(layers).items():
            values[name] = wandb.Image(image)
        self._run.log(values, step=step + self._lead)

    def close(self, *, failed: bool) -> None:
        """See `Sink`."""
        _keep(self._run, "trace", self._run_dir / TRACE_FOLDER)
        _keep(self._run, "profile", self._run_dir, PROFILE_FILE)
        self._run.finish(exit_code=1 if failed else 0)


def keep_comparison(config: TrainConfig, folder: Path) -> None:
    """Keep the files in a folder of runs as an artifact, if `config`, one of them, asks for W&B."""
    if not WandbSink.is_wanted(config.logging):
        return
    try:
        run = _start(config, folder, name=f"{folder.name}: comparison", job_type="comparison")
        _keep(run, "comparison", folder)
        run.finish()
    except Exception as error:  # The comparison is on the disk.
        logger.warning("warning: W&B has no comparison of the runs: %s", error)


def _start(training: TrainConfig, folder: Path, **about: Any) -> Any:
    import wandb

    options = training.logging
    start = partial(
        wandb.init,
        project=options.wandb_project,
        group=options.wandb_group or None,
        tags=[*options.wandb_tags, training.balance.strategy],
        dir=str(folder),
        # The runs of a quickstart are in one process.
        settings=wandb.Settings(
            reinit="create_new", init_timeout=_INIT_S, finish_timeout=_FINISH_S
        ),
        **about,
    )
    if options.wandb == "online":
        why = "has no login here (`wandb login`)"
        try:
            if wandb.login(prompt=False):
                return start(mode="online")
        except wandb.Error as error:  # As on machines that reach no other network.
            why = f"does not take the run ({one_line(error)})"
        logger.warning(
            "warning: W&B %s, so it is written to %s only: `wandb sync` uploads it",
            why,
            folder / "wandb",
        )
    return start(mode="offline")


def _keep(run: Any, kind: str, folder: Path, only: str | None = None) -> None:
    """Keep the files in a folder, or only the one of a name, as an artifact of a run.

    A link is left out: what it leads to is not the run's, and would be sent to the server.
    """
    import wandb

    names = names_in(folder) if only is None else [only]
    if not (files := [folder / name for name in names if is_regular(folder / name)]):
        return
    artifact = wandb.Artifact(f"{kind}-{run.id}", type=kind)
    for file in files:
        artifact.add_file(str(file))
    run.log_artifact(artifact)
