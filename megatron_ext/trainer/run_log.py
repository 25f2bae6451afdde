"""What rank 0 writes into a run directory: `config.yaml`, `metrics.jsonl`, and W&B's files."""

from __future__ import annotations

import dataclasses
import json
import uuid
from pathlib import Path
from types import TracebackType
from typing import Any

from omegaconf import OmegaConf

from megatron_ext.config import COST_UNITS, TrainConfig

CONFIG_FILE, METRICS_FILE = "config.yaml", "metrics.jsonl"


class RunLog:
    """Writes one line a step; a context manager.

    Lines that a killed run wrote after its last checkpoint are dropped. Costs that the run measured
    are in the lines of its steps. They are also comments at the end of the config, so another run
    from this config measures its own costs.

    Args:
        config: The run; the resolved config is written beside the metrics.
        start_step: The step of the checkpoint that the run continues from, 0 for a new run.
    """

    def __init__(self, config: TrainConfig, *, start_step: int) -> None:
        run_dir = Path(config.run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / CONFIG_FILE).write_text(OmegaConf.to_yaml(OmegaConf.structured(config)))
        kept = [metrics for metrics in read_metrics(run_dir) if metrics["step"] <= start_step]
        self._file = (run_dir / METRICS_FILE).open("w")
        for metrics in kept:
            self._file.write(json.dumps(metrics) + "\n")
        self._file.flush()
        self._config_file = run_dir / CONFIG_FILE
        self._told_costs = False
        self._wandb = None if config.logging.wandb == "off" else _start_wandb(config, run_dir)

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
        if self._wandb is not None:
            self._wandb.finish(exit_code=1 if error else 0)

    def write(self, metrics: dict[str, Any]) -> None:
        """Write the metrics of a step, whose number is the metric `step`."""
        self._file.write(json.dumps(metrics) + "\n")
        self._file.flush()
        if not self._told_costs:
            self._tell_costs(metrics)
            self._told_costs = True
        if self._wandb is not None:
            self._wandb.log(metrics, step=metrics["step"])

    def _tell_costs(self, metrics: dict[str, Any]) -> None:
        with self._config_file.open("a") as file:
            for name in (each for each in COST_UNITS if each in metrics):
                file.write(f"# measured: balance.{name} = {metrics[name]:.4g} {COST_UNITS[name]}\n")


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return a run's metrics, one object a step; an unfinished last line is dropped.

    Raises:
        ValueError: A line is not the metrics of a step; the message names file and line.
    """
    file = run_dir / METRICS_FILE
    lines = file.read_text(errors="replace").split("\n")[:-1] if file.exists() else []
    return [_read_line(f"{file}, line {number}", line) for number, line in enumerate(lines, 1)]


def _read_line(where: str, line: str) -> dict[str, Any]:
    try:
        metrics = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: no JSON ({error})") from None
    if not isinstance(metrics, dict) or not isinstance(metrics.get("step"), int):
        raise ValueError(f"{where}: not the metrics of a step")
    return metrics


def _start_wandb(config: TrainConfig, run_dir: Path) -> Any:
    import wandb

    # One W&B run per run directory, so that a continued run continues its curves.
    id_file = run_dir / "wandb_id"
    if not id_file.exists():
        id_file.write_text(uuid.uuid4().hex)
    return wandb.init(
        id=id_file.read_text(),
        resume="allow",
        project=config.logging.wandb_project,
        name=config.logging.wandb_name or run_dir.name,
        dir=str(run_dir),
        mode=config.logging.wandb,  # type: ignore[arg-type]
        config=dataclasses.asdict(config),
    )
