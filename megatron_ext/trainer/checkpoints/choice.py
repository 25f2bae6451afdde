"""Which checkpoint a run starts from, known from its files alone: no ranks, no Megatron."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from checkpoints_tools.folder import (
    RUN_FILE,
    find_damage,
    find_foreign_classes,
    find_other_owners,
    list_checkpoints,
    newest_of,
    read_run,
)
from megatron_ext.data.tokenizer import padded_vocab_size
from megatron_ext.files.opening import read_regular
from megatron_ext.files.run_dir import METRICS_FILE
from megatron_ext.telemetry.step_lines import read_lines
from megatron_ext.trainer.config import ModelConfig, TrainConfig

TRACKER_FILE = "latest_checkpointed_iteration.txt"
"""Beside the checkpoints of Megatron-LM and Megatron-Bridge: the iteration of the newest."""

_RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
"""What torchrun and Slurm count starts of the same run with."""
_FREE_MODEL_FIELDS = ("experts", "transformer_impl", "precision", "aux_loss")
"""Fields of the section `model` that may change between saving and loading."""


def find_checkpoint(config: TrainConfig, damaged: dict[Path, str]) -> Path | None:
    """Return the checkpoint that the run starts from: its own newest, `checkpoint.load`, or None.

    A damaged one is passed over if `checkpoint.fallback` allows it. `damaged` has those that are
    known to be damaged, and how; those that are found to be are added.

    Raises:
        ValueError: There are checkpoints, but none that may be loaded. The message is one line.
    """
    own = list_checkpoints(Path(config.run_dir))
    if not own and config.checkpoint.load is None:
        return None
    folders = own[::-1] or [_meant_by(Path(config.checkpoint.load or ""))]
    for folder in folders:
        if folder not in damaged and (problem := _damage(folder, of_run=bool(own))):
            damaged[folder] = problem
        if folder not in damaged:
            if not config.checkpoint.trust and (
                problems := find_other_owners(folder) + find_foreign_classes(folder)
            ):
                raise ValueError(distrust(folder, problems[0]))
            return folder
        if own and not config.checkpoint.fallback:
            raise ValueError(
                f"checkpoint {folder} is damaged: {damaged[folder]}; an older one is used only "
                "with checkpoint.fallback=true"
            )
    if not own:
        (load,) = folders
        raise ValueError(f"checkpoint.load ({load}) is not a complete checkpoint: {damaged[load]}")
    raise ValueError(
        f"none of the checkpoints of {config.run_dir} is whole, the newest: {own[-1]}: "
        f"{damaged[own[-1]]}; to begin anew, move {own[-1].parent} away and give overwrite=true"
    )


def lost_steps(config: TrainConfig) -> int:
    """Return how many steps in the run's directory would be lost, for want of a checkpoint.

    0 where the launcher starts a run again whose ranks have died: it goes on as it can.
    """
    if any(int(os.environ.get(name, 0)) for name in _RESTARTS) or list_checkpoints(
        Path(config.run_dir)
    ):
        return 0
    return sum(1 for _ in read_lines(Path(config.run_dir) / METRICS_FILE))


def finished_step(config: TrainConfig) -> int | None:
    """Return the step of the checkpoint that the run starts from, if it is the last or later."""
    checkpoint = find_checkpoint(config, {})
    if checkpoint is None or not (checkpoint / RUN_FILE).exists():
        return None
    step = int(read_run(checkpoint)["step"])
    return step if step >= config.steps else None


def distrust(checkpoint: Path, problem: str) -> str:
    """Return the line that refuses a checkpoint which may hold code."""
    return (
        f"checkpoint {checkpoint}: {problem}; loading it may run code that is in it, and needs "
        "checkpoint.trust=true"
    )


def model_differences(config: TrainConfig, checkpoint: Path, vocab_size: int) -> list[str]:
    """Return why the run cannot go on from the checkpoint's model or samples, one line each.

    `vocab_size` is that of the run's data, 0 if it is not known.
    """
    if not (checkpoint / RUN_FILE).exists():  # Ranks compare it with the model they made.
        return []
    # A checkpoint from before a setting existed has what is its default now.
    run = read_run(checkpoint)
    saved = asdict(ModelConfig()) | run.get("model", {})
    problems = []
    size, samples = config.data.micro_batch_size, run.get("consumed_samples", 0)
    if samples % size:
        problems.append(
            f"data.micro_batch_size ({size}) must divide {samples}, the samples before the "
            f"checkpoint {checkpoint}"
        )
    shape = model_shape(config, vocab_size)
    known = saved["vocab_size"] and shape["vocab_size"]
    if not known or _rows(saved["vocab_size"]) == _rows(shape["vocab_size"]):
        del shape["vocab_size"]
    return problems + [
        f"model.{name} ({value}) must be {saved[name]}, as in the checkpoint {checkpoint}"
        for name, value in shape.items()
        if saved[name] != value
    ]


def model_shape(config: TrainConfig, vocab_size: int) -> dict[str, Any]:
    """Return what a checkpoint's model must have in common with the run's on these data."""
    fields = asdict(config.model).items()
    shape = {name: value for name, value in fields if name not in _FREE_MODEL_FIELDS}
    return shape | {"vocab_size": config.model.vocab_size or vocab_size}


def _rows(vocab_size: Any) -> Any:
    """Return the rows of an embedding for so many tokens, if that is a number."""
    is_number = isinstance(vocab_size, int)
    return padded_vocab_size(vocab_size, tensor_parallel=1) if is_number else vocab_size


def _meant_by(load: Path) -> Path:
    """Return the checkpoint that a folder's tracker file names, or that `newest_of` finds."""
    try:
        newest = read_regular(load / TRACKER_FILE, follow=True).decode().strip()
    except (OSError, ValueError):
        with suppress(OSError):
            return newest_of(load)
        return load
    if newest == "release":
        return load / newest
    if not (newest.isascii() and newest.isdigit()):
        raise ValueError(
            f"checkpoint.load ({load}): {TRACKER_FILE} must hold an iteration, not {newest[:40]!r}"
        )
    return load / f"iter_{int(newest):07d}"


def _damage(folder: Path, *, of_run: bool) -> str | None:
    try:
        names = [path.name for path in folder.iterdir()]
    except OSError as error:
        return f"the folder cannot be read: {error.strerror}"
    if of_run and folder.is_symlink():
        return "the folder is a link"
    if of_run and RUN_FILE not in names:
        return f"{RUN_FILE} is missing"
    if any(name.startswith("mp_rank_") for name in names):
        return "it is in Megatron's older format torch, not torch_dist"
    return next(iter(find_damage(folder)), None)
