"""What rank 0 writes into a run directory: `config.yaml`, `metrics.jsonl`, and W&B's files."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from omegaconf import OmegaConf

from megatron_ext.config import COST_UNITS, ConfigError, TrainConfig
from megatron_ext.files.json_files import json_text
from megatron_ext.files.locks import FolderInUseError, held
from megatron_ext.files.whole import write_whole

logger = logging.getLogger(__name__)

CONFIG_FILE, METRICS_FILE = "config.yaml", "metrics.jsonl"


class RunLog:
    """Writes one line a step; a context manager.

    Lines that a killed run wrote after its last checkpoint are dropped. Costs that the run measured
    are in the lines of its steps. They are also comments at the end of the config, so another run
    from this config measures its own costs. What W&B fails at is a warning, after which it is
    written no more.

    Args:
        config: The run; the resolved config is written beside the metrics.
        start_step: The step of the checkpoint that the run continues from, 0 for a new run.
    """

    def __init__(self, config: TrainConfig, *, start_step: int) -> None:
        run_dir = Path(config.run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        self._config_file = run_dir / CONFIG_FILE
        self._config = OmegaConf.to_yaml(OmegaConf.structured(config))
        write_whole(self._config_file, [self._config])
        kept = [metrics for metrics in read_metrics(run_dir) if metrics["step"] <= start_step]
        _warn_of_gaps(run_dir, [metrics["step"] for metrics in kept], start_step)
        write_whole(run_dir / METRICS_FILE, map(_line, kept))
        # Without a buffer: what a full disk did not take is known to the byte.
        self._file = (run_dir / METRICS_FILE).open("ab", buffering=0)
        self._unwritten = b""
        self._told_costs = False
        self._wandb = None
        if config.logging.wandb != "off":
            with self._wandb_may_fail():
                self._wandb = _start_wandb(config, run_dir)

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._write_out()
        self._file.close()
        if self._wandb is not None:
            with self._wandb_may_fail():
                self._wandb.finish(exit_code=1 if error else 0)

    def write(self, metrics: dict[str, Any]) -> None:
        """Write the metrics of a step, whose number is the metric `step`.

        What cannot be written now, as on a full disk, is a warning and is written later.
        """
        self._unwritten += _line(metrics).encode()
        self._write_out()
        if not self._told_costs:
            self._tell_costs(metrics)
            self._told_costs = True
        if self._wandb is not None:
            with self._wandb_may_fail():
                self._wandb.log(metrics, step=metrics["step"])

    def _write_out(self) -> None:
        """Write what is not yet written, be it the rest of a line of which a disk took a part."""
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
        except OSError as error:
            num_lines = self._unwritten.count(b"\n")
            logger.warning(
                "warning: %s lacks %d lines, kept for later: %s",
                self._config_file.with_name(METRICS_FILE),
                num_lines,
                error,
            )

    def _tell_costs(self, metrics: dict[str, Any]) -> None:
        told = [
            f"# measured: balance.{name} = {metrics[name]:.4g} {COST_UNITS[name]}\n"
            for name in COST_UNITS
            if name in metrics
        ]
        if told:
            write_whole(self._config_file, [self._config, *told])

    @contextmanager
    def _wandb_may_fail(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # Whatever it is: the steps of the training are worth more.
            self._wandb = None
            logger.warning("warning: W&B is written no more: %s", error)


@contextmanager
def hold_run_dir(config: TrainConfig) -> Iterator[None]:
    """Keep other runs out of the run's directory until the block, or this process, ends.

    Raises:
        ConfigError: Another run is in it, or it cannot be written.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(held(Path(config.run_dir)))
        except (FolderInUseError, OSError) as error:
            raise ConfigError([f"run_dir ({config.run_dir}): {error}"]) from None
        yield


def _line(metrics: Mapping[str, Any]) -> str:
    return json_text(metrics) + "\n"


def _warn_of_gaps(run_dir: Path, steps: Sequence[int], start_step: int) -> None:
    """Say which steps have no line though the run had made them."""
    # A run that started from another run's checkpoint has no lines of the steps before.
    own = any(run_dir.glob("checkpoints/step_*"))
    first = min(steps, default=1 if own else start_step + 1)
    missing = sorted(set(range(first, start_step + 1)) - set(steps))
    if missing:
        logger.warning(
            "warning: %s has no lines of the steps %s: they were lost before this run continued",
            run_dir / METRICS_FILE,
            _ranges(missing),
        )


def _ranges(numbers: Sequence[int]) -> str:
    """Write increasing numbers shortly.

    >>> _ranges([3, 7, 8, 9])
    '3, 7-9'
    """
    known = set(numbers)
    starts = [one for one in numbers if one - 1 not in known]
    ends = [one for one in numbers if one + 1 not in known]
    pairs = zip(starts, ends, strict=True)
    return ", ".join(str(start) if start == end else f"{start}-{end}" for start, end in pairs)


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return a run's metrics, one object a step; an unfinished last line is dropped.

    Null stands for what was no finite number; here it is NaN.

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
    return {name: math.nan if value is None else value for name, value in metrics.items()}


def _start_wandb(config: TrainConfig, run_dir: Path) -> Any:
    import wandb

    # One W&B run per run directory, so that a continued run continues its curves.
    id_file = run_dir / "wandb_id"
    if not id_file.exists():
        write_whole(id_file, [uuid.uuid4().hex])
    return wandb.init(
        id=id_file.read_text(),
        resume="allow",
        project=config.logging.wandb_project,
        name=config.logging.wandb_name or run_dir.name,
        dir=str(run_dir),
        mode=config.logging.wandb,  # type: ignore[arg-type]
        config=dataclasses.asdict(config),
    )
